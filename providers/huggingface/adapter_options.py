"""Which adapter a request asks for on a model, and whether an earlier one can be continued as that. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig
from post_training.catalog.lora_files import check_continued, lora_config, read_lora_config, target_names
from providers.huggingface.families import Facts
from providers.huggingface.targets import ATTENTION

_OF_A_REQUEST = ("use_dora", "use_rslora", "lora_dropout")


def adapter_config(facts: Facts, lora: LoraFinetuningConfig) -> dict[str, Any]:
    """The `adapter_config.json` of the adapter asked for.

    Raises:
        InvalidField: naming the option that the model or this provider cannot honour.
    """
    if lora.quantize_base:
        raise InvalidField(
            "quantize_base is not offered by this provider: it trains against the base as it is stored; leave it out",
            param="algorithm_config.quantize_base",
        )
    targets = facts.layers.targets(lora.lora_attn_modules, mlp=lora.apply_lora_to_mlp, output=lora.apply_lora_to_output)
    return lora_config(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=targets,
        dropout=lora.lora_dropout or 0.0,
        rslora=bool(lora.use_rslora),
        dora=bool(lora.use_dora),
        transposed=facts.transposed,
    )


def settings_of_adapter(adapter_dir: Path, facts: Facts) -> LoraFinetuningConfig:
    """The request under which an adapter would be continued; whether it can be is `check_adapter`'s to say.

    Raises:
        ModelInvalid: a file of the adapter is missing or damaged.
        InvalidField: its rank, alpha or layers are none that a request could name.
    """
    stored = read_lora_config(adapter_dir)
    names = target_names(stored)
    left = set(names) if isinstance(names, list) else {str(names)}
    taken = {role: _take(left, facts.layers.patterns(role)) for role in (*ATTENTION, "qkv", "mlp", "output")}
    of_attention = [name for name in ATTENTION if taken[name] or (taken["qkv"] and name != "output_proj")]
    try:
        return LoraFinetuningConfig.model_validate(
            {
                "lora_attn_modules": [*of_attention, *sorted(left)],
                "apply_lora_to_mlp": taken["mlp"],
                "apply_lora_to_output": taken["output"],
                "rank": stored.get("r"),
                "alpha": stored.get("lora_alpha"),
                **{name: stored.get(name) for name in _OF_A_REQUEST},
            }
        )
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InvalidField(f"the adapter's {field} is none that can be continued here", param="model") from error


def check_adapter(adapter_dir: Path, wanted: dict[str, Any]) -> None:
    """Refuse to go on from an adapter that differs from the one asked for. Raises as `check_continued`."""
    check_continued(read_lora_config(adapter_dir), wanted)


def _take(names: set[str], patterns: set[str]) -> bool:
    """Whether `names` hold all of `patterns`, which are then taken out."""
    if not patterns or not patterns <= names:
        return False
    names -= patterns
    return True

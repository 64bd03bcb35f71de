"""What a PEFT `adapter_config.json` says of an adapter made here, and whether a given one fits a request. No torch.

Phi-3 in Hugging Face's form holds q, k, v in one matrix and gate, up in another. Adapters of the parts are exported as
one adapter of the whole: A stacked, B block-diagonal, rank times the number of parts and alpha so that the scaling and
the product B A stay what they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig
from post_training.catalog.lora_files import check_continued, lora_config, read_lora_config, target_names
from providers.torchtune.architecture import Architecture

PEFT_NAMES = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "output": "lm_head",
}
"""Hugging Face's name by torchtune's name of a layer that can have an adapter."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")}
"""torchtune's names of the parts, in row order, by Phi-3's name of the whole."""


@dataclass(frozen=True)
class AdapterShape:
    """Which layers have an adapter, how large it is and of which kind.

    Attributes:
        modules: torchtune's names, in `PEFT_NAMES` order.
        dora, rslora, dropout: as in `post_training.training.model.LoraSettings`.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    dora: bool = False
    rslora: bool = False
    dropout: float = 0.0

    @classmethod
    def of_request(cls, lora: LoraFinetuningConfig) -> AdapterShape:
        return cls(
            lora.rank,
            lora.alpha,
            module_names(lora.lora_attn_modules, lora.apply_lora_to_mlp, lora.apply_lora_to_output),
            dora=bool(lora.use_dora),
            rslora=bool(lora.use_rslora),
            dropout=lora.lora_dropout or 0.0,
        )


def module_names(attn_modules: Iterable[str], mlp: bool, output: bool) -> tuple[str, ...]:
    """torchtune's names of the adapted layers, in `PEFT_NAMES` order."""
    wanted = {*attn_modules, *(("w1", "w2", "w3") if mlp else ()), *(("output",) if output else ())}
    return tuple(name for name in PEFT_NAMES if name in wanted)


def fused_parts(architecture: Architecture, shape: AdapterShape) -> dict[str, tuple[str, ...]]:
    """The adapted parts, by name of the fused layer; empty for models without fused layers."""
    if not architecture.fused:
        return {}
    parts = {whole: tuple(p for p in names if p in shape.modules) for whole, names in FUSED.items()}
    return {whole: names for whole, names in parts.items() if names}


def adapter_config(architecture: Architecture, shape: AdapterShape) -> dict[str, Any]:
    """The whole content of `adapter_config.json`; `base_model_name_or_path` is left to who writes the file."""
    fused = fused_parts(architecture, shape)
    inside = {name for names in fused.values() for name in names}
    targets = [*fused, *(PEFT_NAMES[name] for name in shape.modules if name not in inside)]
    many = {whole: len(names) for whole, names in fused.items() if len(names) > 1}
    return lora_config(
        rank=shape.rank,
        alpha=shape.alpha,
        targets=targets,
        dropout=shape.dropout,
        rslora=shape.rslora,
        dora=shape.dora,
        rank_pattern={name: n * shape.rank for name, n in many.items()},
        alpha_pattern={name: _fused_alpha(shape, n) for name, n in many.items()},
    )


def settings_of_adapter(adapter_dir: Path, architecture: Architecture) -> LoraFinetuningConfig:
    """The request under which an adapter made here would be continued; whether it can be is `check_adapter`'s to say.

    Raises:
        ModelInvalid: a file of the adapter is missing or damaged.
        InvalidField: its rank, alpha or layers are none that a request could name.
    """
    stored = read_lora_config(adapter_dir)
    ours = {theirs: name for name, theirs in PEFT_NAMES.items()}
    fused = FUSED if architecture.fused else {}
    found = target_names(stored) or []
    names = [part for name in found for part in fused.get(name, (ours.get(name, name),))]
    if strange := sorted({name for name in names if name.endswith("_proj")} - PEFT_NAMES.keys()):
        raise InvalidField(f"the adapter's layer {strange[0]} is none that can be continued here", param="model")
    try:
        return LoraFinetuningConfig.model_validate(
            {
                "lora_attn_modules": [name for name in names if name.endswith("_proj")],
                "apply_lora_to_mlp": "w1" in names,
                "apply_lora_to_output": "output" in names,
                "rank": stored.get("r"),
                "alpha": stored.get("lora_alpha"),
                "use_dora": stored.get("use_dora"),
                "use_rslora": stored.get("use_rslora"),
                "lora_dropout": stored.get("lora_dropout"),
            }
        )
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InvalidField(f"the adapter's {field} is none that can be continued here", param="model") from error


def check_adapter(adapter_dir: Path, architecture: Architecture, shape: AdapterShape) -> None:
    """Refuse to go on from an adapter that differs from the one asked for; dropout alone may.

    Raises:
        ModelInvalid: a file of the adapter is missing or damaged.
        InvalidField: naming the field of the request that differs, with both values.
    """
    check_continued(read_lora_config(adapter_dir), adapter_config(architecture, shape))


def _fused_alpha(shape: AdapterShape, parts: int) -> float:
    """The alpha that gives a rank of `parts` x rank the scaling of the parts."""
    return shape.alpha * (math.sqrt(parts) if shape.rslora else parts)

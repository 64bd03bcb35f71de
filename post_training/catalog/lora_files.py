"""A PEFT LoRA adapter's `adapter_config.json`: what one made here says, and whether a given one can be continued.

The same for all providers, so that an adapter of one goes on in another. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from apis.errors import InvalidField, ModelInvalid
from post_training.catalog.model_files import read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_MUST_BE_PLAIN = (
    "lora_bias",
    "modules_to_save",
    "layers_to_transform",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
)


def lora_config(
    *,
    rank: int,
    alpha: float,
    targets: Iterable[str],
    dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    transposed: bool = False,
) -> dict[str, Any]:
    """The whole content of `adapter_config.json`; `base_model_name_or_path` is left to who writes the file.

    Args:
        targets: PEFT's `target_modules`.
        rank_pattern, alpha_pattern: for layers that differ from `rank` and `alpha`.
        transposed: whether the base holds its weights as [in, out].
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": whole(alpha),
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": {name: whole(value) for name, value in (alpha_pattern or {}).items()},
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "use_rslora": rslora,
        "use_dora": dora,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def read_lora_config(adapter_dir: Path) -> dict[str, Any]:
    """The content of an adapter's `adapter_config.json`. Raises ModelInvalid where a file is missing or damaged."""
    if not (adapter_dir / ADAPTER_WEIGHTS).is_file():
        raise ModelInvalid(f"the adapter has no {ADAPTER_WEIGHTS}; save it as safetensors")
    try:
        return read_json(adapter_dir / ADAPTER_CONFIG)
    except ModelInvalid:
        raise ModelInvalid(f"the adapter's {ADAPTER_CONFIG} is missing or damaged") from None


def check_continued(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on from an adapter that differs from the one asked for; dropout alone may.

    Args:
        stored: the adapter's config.
        wanted: what `lora_config` says of the adapter asked for.

    Raises:
        InvalidField: naming the field of the request that differs, with both values.
    """
    if stored.get("peft_type") != "LORA":
        raise InvalidField(f"the adapter's peft_type is {stored.get('peft_type')!r}, not LORA", param="model")
    odd = [key for key in _MUST_BE_PLAIN if stored.get(key)]
    if bool(stored.get("fan_in_fan_out")) != wanted["fan_in_fan_out"]:
        odd.append("fan_in_fan_out")
    if odd:
        raise InvalidField(f"the adapter uses {odd[0]}, which cannot be continued here", param="model")
    if stored.get("bias", "none") != "none":
        raise InvalidField("the adapter trains biases, which cannot be continued here", param="model")
    for key in ("use_dora", "use_rslora"):
        _compare(key, bool(stored.get(key)), wanted[key])
    _compare("rank", stored.get("r"), wanted["r"])
    _compare("alpha", stored.get("lora_alpha"), wanted["lora_alpha"])
    _compare("lora_attn_modules", target_names(stored), wanted["target_modules"])
    for key in ("rank_pattern", "alpha_pattern"):
        _compare("rank" if key == "rank_pattern" else "alpha", stored.get(key) or {}, wanted[key], key)


def target_names(stored: Mapping[str, Any]) -> Any:
    """The adapter's `target_modules`, sorted where they are a list of names, else as they are."""
    value = stored.get("target_modules")
    return sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value


def whole(value: float) -> float | int:
    """An integer where it is one, as readers other than PEFT expect alpha."""
    return int(value) if float(value).is_integer() else value


def _compare(field: str, stored: Any, wanted: Any, key: str | None = None) -> None:
    if stored != wanted:
        raise InvalidField(
            f"the model is an adapter whose {key or field} is {stored}, the request asks for {wanted}; "
            "an adapter is continued with its own kind, rank, alpha and layers",
            param=f"algorithm_config.{field}",
        )

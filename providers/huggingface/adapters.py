"""LoRA and DoRA adapters of PEFT's on a transformers model: put in, filled, and named as their files name them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from apis.errors import ModelInvalid, UnsupportedModel
from post_training.catalog.lora_files import ADAPTER_WEIGHTS

_NAME = "default"
_A, _B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_MAGNITUDE = f".lora_magnitude_vector.{_NAME}.weight"
# Of a feed-forward part, the matrix that leads out comes before the second that leads in, whatever the order of the
# modules: the first adapters are then drawn the same by every provider here.
_DRAWN = {"gate_proj": 0, "down_proj": 1, "up_proj": 2}


def add_adapters(network: PreTrainedModel, config: dict[str, Any]) -> PeftModel:
    """Put adapters into the layers of `network` that `config` names, and freeze everything else.

    Args:
        config: the content of `adapter_config.json`.

    Raises:
        UnsupportedModel: PEFT cannot adapt a layer.
    """
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config["r"],
        lora_alpha=config["lora_alpha"],
        lora_dropout=config["lora_dropout"],
        target_modules=config["target_modules"],
        use_rslora=config["use_rslora"],
        use_dora=config["use_dora"],
        fan_in_fan_out=config["fan_in_fan_out"],
    )
    try:
        # DoRA compares lengths of rows, which 8 bits of mantissa do not hold.
        adapted = get_peft_model(network, lora, autocast_adapter_dtype=config["use_dora"])
    except ValueError as error:
        raise UnsupportedModel(f"PEFT cannot adapt this model: {error}") from error
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return adapted


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is trained."""
    return name.endswith((_A, _B, _MAGNITUDE))


@torch.no_grad()
def fill_fresh(adapted: PeftModel, seed: int) -> None:
    """A Kaiming-uniform, B zero (LoRA, https://arxiv.org/abs/2106.09685), the same for one seed on every device.

    Magnitudes stay the lengths of the base's rows, as PEFT sets them.

    Raises:
        UnsupportedModel: DoRA is asked for on a weight with a row of zeros, which has no direction.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    parameters = dict(adapted.named_parameters())
    for module in _draw_order(name.removesuffix(_A) for name in parameters if name.endswith(_A)):
        a = parameters[module + _A]
        drawn = nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator)
        a.copy_(drawn)
        parameters[module + _B].zero_()
    for name, parameter in parameters.items():
        if name.endswith(_MAGNITUDE) and not parameter.all():
            raise UnsupportedModel(
                f"use_dora: row {int(parameter.argmin())} of {name.removesuffix(_MAGNITUDE)} is zero and has no "
                "direction to keep; train without use_dora, or leave that layer out"
            )


@torch.no_grad()
def fill_from(adapted: PeftModel, adapter_dir: Path) -> None:
    """Take an adapter's weights.

    Raises:
        ModelInvalid: a tensor is missing, unexpected or mis-shaped, or the file cannot be read.
    """
    stored = _load(adapter_dir)
    for name, parameter in adapted.named_parameters():
        if not is_adapter(name):
            continue
        key = saved_name(name)
        tensor = stored.pop(key, None)
        if tensor is None:
            raise ModelInvalid(f"the adapter lacks {key}")
        if tensor.shape != parameter.shape:
            raise ModelInvalid(f"the adapter's {key} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
        parameter.copy_(tensor)
    if stored:
        raise ModelInvalid(f"the adapter holds {min(stored)}, which this request does not train")


def saved_name(name: str) -> str:
    """A parameter's key in `adapter_model.safetensors`."""
    if name.endswith(_MAGNITUDE):
        return name.removesuffix(_MAGNITUDE) + ".lora_magnitude_vector"
    return name.replace(f".{_NAME}.weight", ".weight")


def _draw_order(modules: Iterable[str]) -> list[str]:
    """The model's order, but for `_DRAWN`."""
    parents: dict[str, int] = {}
    keyed: list[tuple[int, int, int, str]] = []
    for index, module in enumerate(modules):
        parent, _, leaf = module.rpartition(".")
        keyed.append((parents.setdefault(parent, index), _DRAWN.get(leaf, 0), index, module))
    return [module for *_, module in sorted(keyed)]


def _load(adapter_dir: Path) -> dict[str, Tensor]:
    try:
        return cast(dict[str, Tensor], load_file(adapter_dir / ADAPTER_WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"the adapter's {ADAPTER_WEIGHTS} cannot be read ({type(error).__name__})") from None

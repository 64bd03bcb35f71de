"""Which adapter options a model can honour, told before anything runs. No torch here."""

from __future__ import annotations

from typing import get_args

from apis.errors import InvalidField
from apis.post_training.models import AttentionModule, LoraFinetuningConfig
from providers.torchtune.adapter_config import FUSED, AdapterShape, fused_parts
from providers.torchtune.architecture import Architecture

_ATTENTION = get_args(AttentionModule)
NF4_BLOCK = 64
"""Weights that share one scale."""


def check_lora(architecture: Architecture, lora: LoraFinetuningConfig) -> None:
    """Refuse LoRA options that this provider or the model cannot honour.

    Raises:
        InvalidField: naming the option.
    """
    if strange := [name for name in lora.lora_attn_modules if name not in _ATTENTION]:
        raise _option(
            "lora_attn_modules",
            f"torchtune's layers of attention are {', '.join(_ATTENTION)}, and none is called {strange[0]!r}; choose "
            "of those, or a provider that takes the model's own names",
        )
    check_shape(architecture, AdapterShape.of_request(lora), quantized=bool(lora.quantize_base))


def check_shape(architecture: Architecture, shape: AdapterShape, *, quantized: bool = False) -> None:
    """The same for an adapter's shape; `quantized`: whether the base is to be held in NF4.

    Raises:
        InvalidField: naming the option.
    """
    if not shape.modules:
        raise _option(
            "lora_attn_modules", "no layer gets an adapter; name an attention module or set apply_lora_to_mlp"
        )
    if "output" in shape.modules and architecture.tied:
        # A merge would change the embedding as well.
        raise _option(
            "apply_lora_to_output", "this model's output layer is its embedding (tied), which cannot be adapted alone"
        )
    if shape.dora:
        _check_dora(architecture, shape, quantized)
    if quantized:
        _check_nf4(architecture)


def _check_dora(architecture: Architecture, shape: AdapterShape, quantized: bool) -> None:
    if quantized:
        raise _option(
            "use_dora", "with quantize_base it would learn row lengths of the 4-bit base, not of yours; choose one"
        )
    for whole, parts in fused_parts(architecture, shape).items():
        missing = [name for name in FUSED[whole] if name not in parts]
        if missing:
            raise _option(
                "use_dora",
                f"this model holds {', '.join(FUSED[whole])} in one matrix, {whole}, whose rows get a length each: "
                f"name {', '.join(missing)} in lora_attn_modules too, or none of them",
            )


def _check_nf4(a: Architecture) -> None:
    rows = {"q_proj": a.num_heads * a.head_dim, "k_proj": a.num_kv_heads * a.head_dim, "mlp": a.intermediate_dim}
    for name, count in rows.items():
        if count * a.embed_dim % NF4_BLOCK:
            raise _option(
                "quantize_base",
                f"NF4 takes weights in blocks of {NF4_BLOCK}, and the {count} x {a.embed_dim} weights of {name} do not "
                "come out even, on any device; leave it out",
            )


def _option(name: str, message: str) -> InvalidField:
    return InvalidField(f"{name}: {message}", param=f"algorithm_config.{name}")

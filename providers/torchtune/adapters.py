"""The linear layers that training changes: torchtune's LoRA, DoRA beside it, and a base held in four bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apis.errors import UnsupportedModel
from providers.torchtune import shim
from providers.torchtune.adapter_config import AdapterShape
from providers.torchtune.lora_options import NF4_BLOCK

NF4_SCALER_BLOCK = 256
"""Blocks whose scales are quantized together, at most."""

_SUFFIXES = (".lora_a.weight", ".lora_b.weight", ".magnitude")


class DoRALinear(shim.LoRALinear):
    """y = m / |W + s B A| * (W + s B A) x + bias, |.| and m by output row (Liu et al. 2024, arXiv:2402.09353).

    As in the paper (section 4.3) and in PEFT, no gradient flows through the lengths |.|. Dropout acts on x in all that
    is not W x itself, as in PEFT. (torchtune's own DoRALinear scales the bias as well, which no exported adapter does.)

    Attributes:
        magnitude: m, [out], fp32 whatever the network's type: in bf16, m would be off by up to 0.4 % from the start.
        row_squares: squared lengths of W's rows, [out] fp32; set by `remember_rows`.
    """

    weight: Tensor
    bias: Tensor | None
    row_squares: Tensor

    def __init__(self, in_dim: int, out_dim: int, rank: int, alpha: float, dropout: float, use_bias: bool) -> None:
        super().__init__(in_dim, out_dim, rank, alpha, dropout=dropout, use_bias=use_bias)
        self.scaling = alpha / rank
        self.magnitude = nn.Parameter(torch.empty(out_dim, dtype=torch.float32))

    def remember_rows(self) -> None:
        """To be called once the base weight is there."""
        self.register_buffer("row_squares", row_squares(self.weight), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        base = F.linear(x, self.weight, self.bias)
        if isinstance(self.dropout, nn.Identity) or not self.training:
            dropped, turned = x, base if self.bias is None else base - self.bias
        else:
            dropped = self.dropout(x)
            turned = F.linear(dropped, self.weight)
        update = self.scaling * self.lora_b(self.lora_a(dropped))
        scale = self.magnitude / self.row_lengths()
        return base + (scale - 1).to(x.dtype) * turned + scale.to(x.dtype) * update

    @torch.no_grad()
    def row_lengths(self) -> Tensor:
        """|W + s B A| by row, [out] fp32, without making [out, in]: |w + s u|^2 = |w|^2 + 2 s w.u + s^2 |u|^2."""
        a, b = self.lora_a.weight.float(), self.lora_b.weight.float()
        mixed = F.linear(self.lora_a.weight, self.weight).float().T  # W A^T, [out, rank]
        crossed = (mixed * b).sum(1)
        own = ((b @ (a @ a.T)) * b).sum(1)
        return (self.row_squares + 2 * self.scaling * crossed + self.scaling**2 * own).sqrt()


def row_squares(weight: Tensor) -> Tensor:
    """Squared length of each row of [out, in]: [out] fp32."""
    return weight.float().square().sum(1)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is trained."""
    return name.endswith(_SUFFIXES)


def add_adapters(module: shim.TransformerDecoder, shape: AdapterShape) -> None:
    """Put an adapted layer in the place of each linear layer that `shape` names."""
    kind: Any = DoRALinear if shape.dora else shim.LoRALinear
    # torchtune's layers scale by alpha / rank.
    alpha = shape.alpha * (math.sqrt(shape.rank) if shape.rslora else 1)
    for name, linear in _linear_layers(module):
        if name.rpartition(".")[2] in shape.modules:
            size, use_bias = (linear.in_features, linear.out_features), linear.bias is not None
            adapted = kind(*size, shape.rank, alpha, dropout=shape.dropout, use_bias=use_bias)
            module.set_submodule(name, adapted)


def fresh_adapter(sizes: dict[str, torch.Size], base: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A Kaiming-uniform, B zero (LoRA, https://arxiv.org/abs/2106.09685), the same for one seed on every device.

    Magnitudes are the lengths of the base's rows, so that a fresh adapter changes nothing.

    Args:
        sizes: shape of every adapter parameter by name.
        base: the base's weights by torchtune's name.

    Raises:
        UnsupportedModel: DoRA is asked for on a weight with a row of zeros, which has no direction.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    fresh = {name: torch.zeros(size) for name, size in sizes.items()}
    for name, tensor in fresh.items():
        if name.endswith(".lora_a.weight"):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        elif name.endswith(".magnitude"):
            weight = name.removesuffix("magnitude") + "weight"
            tensor.copy_(row_squares(base[weight]).sqrt())
            if not tensor.all():
                raise UnsupportedModel(
                    f"use_dora: row {int(tensor.argmin())} of {weight} is zero and has no direction to keep; "
                    "train without use_dora, or leave that layer out"
                )
    return fresh


def quantize_base(module: shim.TransformerDecoder) -> None:
    """Hold the linear weights of all layers in NF4 (Dettmers et al. 2023, arXiv:2305.14314), scales in 8 bits.

    Embedding, norms and output layer stay as they are, as in torchtune's QLoRA.
    """
    layers = cast(nn.Module, module.layers)
    for name, linear in list(layers.named_modules()):
        is_base = isinstance(linear, shim.LoRALinear | nn.Linear) and not is_adapter(f"{name}.weight")
        if is_base:
            linear.weight = nn.Parameter(_nf4(cast(Tensor, linear.weight).detach()), requires_grad=False)


def _nf4(weight: Tensor) -> Tensor:
    # The largest group of scales that comes out even; torchao's 256 does not for many small models.
    return shim.to_nf4(weight, NF4_BLOCK, math.gcd(weight.numel() // NF4_BLOCK, NF4_SCALER_BLOCK))


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, layer) for name, layer in list(module.named_modules()) if isinstance(layer, nn.Linear))

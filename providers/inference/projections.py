"""Products of weight matrices with one vector, with the adapter that is on, as transformers and PEFT compute them.

While one stream is decoded, a token reads every weight once and uses it once, so the time goes into reading memory and
into starting operations.

* `torch.mv` instead of `F.linear` on a [1, in] input: the same sums, 1.2 to 2.3 times as fast in bf16 on most of
  SmolLM2's shapes, equal in fp32. (oneDNN's product with a weight packed beforehand is as fast, but that is a
  second copy of it.)
* Projections with the same input are one product: 4 instead of 7 per layer. Their weights become rows of one matrix, of
  which the model's own parameters are views, so the base is in memory once. Each product ends at a barrier of all
  threads; beside other busy processes this made a token 1.2 (fp32) to 1.3 times (bf16) as fast.
* Adapters stay apart, as A and B in their own precision: s B A x costs 2 r (in + out) operations where W x costs
  2 in out, and merging would round the sum W + s BA to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn


class UnsupportedModelError(Exception):
    """The model has something that is not computed here; transformers' own forward pass serves it."""


@dataclass(frozen=True)
class Dora:
    """DoRA's part of an adapter: f = magnitude / |W + s BA| and f - 1, both [rows], and the bias, not scaled by f."""

    factor: Tensor
    factor_minus_one: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to the rows `start:end` of a product: s B A x, with A [rank, in] and B [rows, rank]."""

    start: int
    end: int
    a: Tensor
    b: Tensor
    scaling: float
    dora: Dora | None

    def add_to(self, product: Tensor, x: Tensor) -> None:
        """Add to `product` [out] in place, rounding once; x [in] is in the adapter's precision.

        With DoRA (Liu et al., 2024): f (Wx + s BAx) + bias = (Wx + bias) + ((f - 1) Wx + f s BAx).
        """
        rows = product[self.start : self.end]
        added = torch.mv(self.b, torch.mv(self.a, x))
        if self.dora is None:
            rows.add_(added.mul_(self.scaling))
            return
        unbiased = rows if self.dora.bias is None else rows - self.dora.bias
        rows.add_((self.dora.factor_minus_one * unbiased).add_(added.mul_(self.dora.factor).mul_(self.scaling)))


class Projection:
    """W x + bias and the adapters' shares, W [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, low_ranks: Sequence[LowRank]) -> None:
        self._weight, self._bias, self._low_ranks = weight, bias, tuple(low_ranks)
        self.result = weight.new_empty(len(weight))
        """[out], overwritten by each call: views of it can be made once."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [in] to `result`, both in the weight's dtype."""
        if self._bias is None:
            torch.mv(self._weight, x, out=self.result)
        else:
            torch.addmv(self._bias, self._weight, x, out=self.result)
        if self._low_ranks:
            precise = x.to(self._low_ranks[0].a.dtype)
            for low_rank in self._low_ranks:
                low_rank.add_to(self.result, precise)
        return self.result


def share_storage(*linears: nn.Module) -> None:
    """Make the weights, and the biases where all have one, rows of one matrix, in this order; their values stay.

    Nothing happens where one of `linears` is not `nn.Linear`.
    """
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    if len(plain) < len(linears):
        return
    _stack([linear.weight for linear in plain])
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if len(biases) == len(linears):
        _stack(biases)


def _stack(parameters: Sequence[Tensor]) -> None:
    rows = torch.cat([parameter.detach() for parameter in parameters]).split([len(p) for p in parameters])
    for parameter, own in zip(parameters, rows, strict=True):
        parameter.data = own


def projection(*modules: nn.Module) -> Projection:
    """The product of one vector with all of `modules`, one below the other, with the adapters that are on.

    Raises:
        UnsupportedModelError: a module is neither `nn.Linear` nor PEFT's LoRA or DoRA on one, or several do not share
            their storage.
    """
    linears = [_linear(module) for module in modules]
    low_ranks: list[LowRank] = []
    start = 0
    for module, linear in zip(modules, linears, strict=True):
        low_ranks += _low_ranks(module, start)
        start += linear.out_features
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        raise UnsupportedModelError("a bias on some of the projections with one input")
    return Projection(_joined([linear.weight for linear in linears]), _joined(biases) if biases else None, low_ranks)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """The matrix or vector whose rows `parameters` are, without a copy."""
    first, end = parameters[0].detach(), parameters[0].data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != end:
            raise UnsupportedModelError("projections with one input whose weights lie apart")
        end += parameter.nbytes
    return first.as_strided((sum(len(p) for p in parameters), *first.shape[1:]), first.stride())


def _linear(module: nn.Module) -> nn.Linear:
    # Types are compared exactly: a subclass, such as a quantized layer, may compute something else.
    linear = module.base_layer if type(module) is LoraLinear else module
    if type(linear) is not nn.Linear:
        raise UnsupportedModelError(f"a layer of type {type(linear).__name__}")
    return linear


def _low_ranks(module: nn.Module, start: int) -> list[LowRank]:
    if type(module) is not LoraLinear or module.disable_adapters:
        return []
    if module.merged or module.fan_in_fan_out:
        raise UnsupportedModelError("a merged or transposed adapter")
    return [_low_rank(module, name, start) for name in module.active_adapters if name in module.lora_A]


def _low_rank(module: Any, name: str, start: int) -> LowRank:
    a, b = module.lora_A[name], module.lora_B[name]
    if module.lora_bias[name] or type(a) is not nn.Linear or type(b) is not nn.Linear:
        raise UnsupportedModelError("an adapter with a bias, or not of two matrices")
    end = start + b.out_features
    return LowRank(start, end, a.weight.detach(), b.weight.detach(), module.scaling[name], _dora(module, name))


def _dora(module: Any, name: str) -> Dora | None:
    variant = module.lora_variant.get(name)
    if variant is None:
        return None
    if type(variant) is not DoraLinearVariant:
        raise UnsupportedModelError(f"an adapter of the variant {type(variant).__name__}")
    base, a, b = module.base_layer, module.lora_A[name].weight.detach(), module.lora_B[name].weight.detach()
    lengths = torch.linalg.norm(base.weight.detach().to(a.dtype) + module.scaling[name] * (b @ a), dim=1)
    factor = module.lora_magnitude_vector[name].weight.detach() / lengths
    return Dora(factor, factor - 1, None if base.bias is None else base.bias.detach())

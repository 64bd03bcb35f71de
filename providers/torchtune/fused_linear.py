"""Linear layers that read the same input, and their LoRA adapters, as one matrix product each way.

y = x W^T + s (x A^T) B^T. Autograd on torchtune's modules keeps x, x A^T and the unscaled update, and makes two passes
over y; here only x and x A^T [T, r] are kept. q, k, v share one product, as do gate and up: their weights lie in one
matrix, of which each module's weight is a view, A is stacked and B block-diagonal. The base gets no gradient, so a
backward pass costs one product with W where a full one would cost two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from providers.torchtune import shim

FusibleLinear = nn.Linear | shim.LoRALinear


class PlainProjection:
    """Linear layers that only their own modules compute rightly (DoRA, a quantized base), side by side."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, sum of out]."""
        return torch.cat([layer(x[None])[0] for layer in self._layers], -1)


@dataclass(frozen=True)
class _Adapter:
    """Where one layer's adapter lies in the joined matrices: its outputs, its ranks, and the order of its outputs."""

    a: nn.Parameter
    b: nn.Parameter
    rows: slice
    ranks: slice
    order: Tensor | None


class FusedProjection:
    """One product for several layers of equal input.

    Args:
        orders: for each layer, in which order its outputs are to come, [its out] int64; None: as they are.

    Attributes:
        weight: [out, in], the layers' weights one below the other. A layer's own is a view of it from now on; one whose
            outputs are reordered has no weight any more.
        bias: [out] or None.
        a: [R, in], every A times its scaling, in the products' type; R is the sum of ranks.
        b: [out, R], every B in its place, zero elsewhere.
    """

    def __init__(self, layers: Sequence[FusibleLinear], orders: Sequence[Tensor | None]) -> None:
        device = cast(Tensor, layers[0].weight).device
        orders = [order if order is None else order.to(device) for order in orders]
        weights = [_ordered(cast(Tensor, layer.weight).detach(), o) for layer, o in zip(layers, orders, strict=True)]
        self.weight = torch.cat(weights)
        self.bias = _joined_bias(layers, orders)
        self._adapters: list[_Adapter] = []
        self._dropout: nn.Module | None = None
        self._scaling = 1.0
        start = rank = 0
        for layer, order in zip(layers, orders, strict=True):
            rows = slice(start, start := start + len(cast(Tensor, layer.weight)))
            kept = self.weight[rows] if order is None else self.weight.new_empty(0)
            layer.weight = nn.Parameter(kept, requires_grad=False)
            if isinstance(layer, shim.LoRALinear):
                self._add(layer, rows, slice(rank, rank := rank + layer.rank), order)
        self.a = self.weight.new_empty(rank, self.weight.shape[1])
        self.b = self.weight.new_zeros(start, rank)

    def _add(self, layer: shim.LoRALinear, rows: slice, ranks: slice, order: Tensor | None) -> None:
        a, b = cast(nn.Parameter, layer.lora_a.weight), cast(nn.Parameter, layer.lora_b.weight)
        self._adapters.append(_Adapter(a, b, rows, ranks, order))
        self._dropout = layer.dropout if isinstance(layer.dropout, nn.Dropout) else None
        self._scaling = layer.alpha / layer.rank

    @property
    def parameters(self) -> list[nn.Parameter]:
        """fp32 A and B of each adapted layer, in order: what autograd knows and the optimizer changes."""
        return [parameter for each in self._adapters for parameter in (each.a, each.b)]

    def copies(self) -> list[tuple[Tensor, nn.Parameter, float, Tensor | None]]:
        """(where, parameter, factor, order of its rows) of everything in `a` and `b` that follows a parameter."""
        return [
            copy
            for each in self._adapters
            for copy in (
                (self.a[each.ranks], each.a, self._scaling, None),
                (self.b[each.rows, each.ranks], each.b, 1.0, each.order),
            )
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if not self._adapters:
            return F.linear(x, self.weight, self.bias)
        return cast(Tensor, _LoraProduct.apply(x, self, *self.parameters))

    def lowered(self, x: Tensor, noise: Sequence[Tensor]) -> Tensor:
        """s x A^T, [T, R], of inputs thinned by `noise`, one [T, in] for each adapted layer, or none."""
        if not noise:
            return x @ self.a.T
        thinned = zip(noise, self._adapters, strict=True)
        return torch.cat([(x * mask) @ self.a[each.ranks].T for mask, each in thinned], -1)

    def noise(self, x: Tensor) -> list[Tensor]:
        """0 where dropout leaves an input out, else 1 / (1 - p), drawn as the layers themselves would; none in eval."""
        if self._dropout is None or not self._dropout.training:
            return []
        return [self._dropout(torch.ones_like(x[None]))[0] for _ in self._adapters]

    def input_gradient(self, dy: Tensor, noise: Sequence[Tensor], wanted: bool = True) -> tuple[Tensor | None, Tensor]:
        """Gradient to x [T, in], where wanted, and to u = s x A^T, [T, R]: y = x W^T + u B^T, so du = dy B."""
        d_low = dy @ self.b
        if not wanted:
            return None, d_low
        dx = dy @ self.weight
        if not noise:
            return dx.addmm_(d_low, self.a), d_low
        for mask, each in zip(noise, self._adapters, strict=True):
            dx += (d_low[:, each.ranks] @ self.a[each.ranks]) * mask
        return dx, d_low

    def adapter_gradients(
        self, x: Tensor, dy: Tensor, low: Tensor, d_low: Tensor, noise: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients to every A and B, in fp32: dA = s du^T x and dB = dy^T u. `low`: u, `d_low`: du."""
        whole_a = None if noise else d_low.T @ x
        whole_b = dy.T @ low
        grads: list[Tensor] = []
        for index, each in enumerate(self._adapters):
            d_a = d_low[:, each.ranks].T @ (x * noise[index]) if whole_a is None else whole_a[each.ranks]
            d_b = whole_b[each.rows, each.ranks].float()
            if each.order is not None:
                d_b = torch.empty_like(d_b).index_copy_(0, each.order, d_b)
            grads += [d_a.float() * self._scaling, d_b]
        return grads

    def product(self, x: Tensor, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """y [T, out] and u [T, R]."""
        low = self.lowered(x, noise)
        y = F.linear(x, self.weight, self.bias)
        return y.addmm_(low, self.b.T), low


class _LoraProduct(torch.autograd.Function):
    """`FusedProjection` for autograd. Takes the adapters so that they get gradients; `a` and `b` hold their values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: FusedProjection, *_adapters: Tensor) -> Tensor:
        noise = projection.noise(x)
        y, low = projection.product(x, noise)
        ctx.projection = projection
        ctx.save_for_backward(x, low, *noise)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, low, *noise = ctx.saved_tensors
        dx, d_low = ctx.projection.input_gradient(dy, noise, ctx.needs_input_grad[0])
        return dx, None, *ctx.projection.adapter_gradients(x, dy, low, d_low, noise)


def is_fusible(layer: nn.Module) -> bool:
    """Whether `FusedProjection` computes what this layer does: a plain weight, with or without a LoRA adapter."""
    return type(layer) in (nn.Linear, shim.LoRALinear) and type(cast(nn.Linear, layer).weight.data) is Tensor


def projection(
    layers: Sequence[nn.Module], orders: Sequence[Tensor | None] | None = None
) -> FusedProjection | PlainProjection:
    """The fastest form that these layers allow; `orders` as `FusedProjection` has them, which no other form heeds."""
    if all(is_fusible(layer) for layer in layers):
        return FusedProjection(cast(Sequence[FusibleLinear], layers), orders or [None] * len(layers))
    return PlainProjection(layers)


def _ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows[order]


def _joined_bias(layers: Sequence[FusibleLinear], orders: Sequence[Tensor | None]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([_ordered(_bias(layer), order) for layer, order in zip(layers, orders, strict=True)])


def _bias(layer: FusibleLinear) -> Tensor:
    weight = cast(Tensor, layer.weight)
    return weight.new_zeros(len(weight)) if layer.bias is None else cast(Tensor, layer.bias).detach()

"""The element-wise parts of a Llama-like layer, forward and backward, in fp32 between bf16 products.

A backward pass recomputes what costs one pass over memory, from the sum that a norm reads and the gate and up products,
rather than have it kept. T is tokens, D the width, F the inner width, K the key heads, G the query heads of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from post_training.training.kernels import Kernel

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715
"""Of the tanh form of GELU (https://arxiv.org/abs/1606.08415)."""


@dataclass(frozen=True)
class Heads:
    """How a layer's q, k and v lie in one row: `kv * group` query heads, `kv` key heads, `kv` value heads of `dim`.

    Attributes:
        pairs: rotary embedding turns neighbouring numbers (torchtune's Llama), not halves of a head (Hugging Face's).
    """

    kv: int
    group: int
    dim: int
    pairs: bool

    @property
    def query(self) -> int:
        return self.kv * self.group


@Kernel
def norm(h: Tensor, scale: Tensor, eps: float) -> Tensor:
    """RMSNorm (https://arxiv.org/abs/1910.07467) of [T, D] in fp32, in the type of `h`; `scale` [D] fp32."""
    return _normed(h, scale, eps)


@Kernel
def add_norm(h: Tensor, y: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum h + y, [T, D], and its norm."""
    total = h + y
    return total, _normed(total, scale, eps)


@Kernel
def norm_backward(d_normed: Tensor, h: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Gradient of `norm` to its input h."""
    return _norm_gradient(d_normed, h, scale, eps).to(h.dtype)


@Kernel
def add_norm_backward(d_total: Tensor, d_normed: Tensor, total: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Gradient of `add_norm` to h, which is that to y as well."""
    return (d_total.float() + _norm_gradient(d_normed, total, scale, eps)).to(total.dtype)


def _normed(h: Tensor, scale: Tensor, eps: float) -> Tensor:
    x = h.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale).to(h.dtype)


def _norm_gradient(d_normed: Tensor, h: Tensor, scale: Tensor, eps: float) -> Tensor:
    # y = x r s with r = (mean(x^2) + eps)^-1/2, so dx = r (g - n mean(g n)) with g = dy s and n = x r.
    x = h.float()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    n, g = x * r, d_normed.float() * scale
    return r * (g - n * (g * n).mean(-1, keepdim=True))


@Kernel
def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F]: [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


@Kernel
def silu_gate_backward(d_out: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `silu_gate` to its input, and its output again."""
    gate, up = gate_up.float().chunk(2, -1)
    share, d = torch.sigmoid(gate), d_out.float()
    active = gate * share
    d_gate = d * up * (share + active * (1 - share))
    return torch.cat((d_gate, d * active), -1).to(gate_up.dtype), (active * up).to(gate_up.dtype)


@Kernel
def gelu_gate(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [T, 2F], GELU in its tanh form: [T, F]."""
    gate, up = gate_up.float().chunk(2, -1)
    return (0.5 * gate * (1 + _gelu_tanh(gate)) * up).to(gate_up.dtype)


@Kernel
def gelu_gate_backward(d_out: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `gelu_gate` to its input, and its output again."""
    gate, up = gate_up.float().chunk(2, -1)
    t, d = _gelu_tanh(gate), d_out.float()
    slope = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBE * gate.square())
    active = 0.5 * gate * (1 + t)
    d_gate = d * up * 0.5 * (1 + t + gate * (1 - t.square()) * slope)
    return torch.cat((d_gate, d * active), -1).to(gate_up.dtype), (active * up).to(gate_up.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBE * x * x * x))


@Kernel
def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, order: Tensor, key_order: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k by their positions and lay the heads out for products.

    Args:
        qkv: [T, (K G + 2 K) dim].
        cos, sin: [T, dim / 2] fp32.
        order, key_order: [T K G] and [T K], which (token, head) comes where, as token * heads + head.

    Returns:
        q [T K G, dim], k and v [T K, dim], one row a head of a token.
    """
    width = heads.kv * heads.dim
    q, k, v = qkv.split((heads.query * heads.dim, width, width), -1)
    q = _turn(q.unflatten(-1, (-1, heads.dim)), cos, sin, heads.pairs).flatten(0, 1)
    k = _turn(k.unflatten(-1, (-1, heads.dim)), cos, sin, heads.pairs).flatten(0, 1)
    return q[order], k[key_order], v.unflatten(-1, (-1, heads.dim)).flatten(0, 1)[key_order]


@Kernel
def merge_heads(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: Tensor, key_inverse: Tensor, heads: Heads
) -> Tensor:
    """The backward of `split_heads`: gradients of its results to that of `qkv`.

    Args:
        inverse, key_inverse: [T, K G] and [T, K], where in its orders each head of a token is.
    """
    d_q = _turn(q[inverse], cos, -sin, heads.pairs).flatten(1)
    d_k = _turn(k[key_inverse], cos, -sin, heads.pairs).flatten(1)
    return torch.cat((d_q, d_k, v[key_inverse].flatten(1)), -1)


@Kernel
def turn_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    """Rotate q and k by their positions where they are; arguments as `split_heads` has them. By -sin, its backward."""
    width = heads.kv * heads.dim
    q, k, v = qkv.split((heads.query * heads.dim, width, width), -1)
    q, k = (_turn(x.unflatten(-1, (-1, heads.dim)), cos, sin, heads.pairs).flatten(1) for x in (q, k))
    return torch.cat((q, k, v), -1)


@Kernel
def gather_heads(x: Tensor, order: Tensor, heads: Heads) -> Tensor:
    """[T, K G dim] to rows in an order, [T K G, dim]."""
    return x.view(-1, heads.dim)[order]


@Kernel
def scatter_heads(x: Tensor, inverse: Tensor) -> Tensor:
    """The inverse of `gather_heads`; `inverse` as `merge_heads` has it."""
    return x[inverse].flatten(1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """Rotary embedding (https://arxiv.org/abs/2104.09864) of [T, heads, dim]; turning by -sin is its backward."""
    c, s = cos[:, None], sin[:, None]
    if pairs:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = x.float().chunk(2, -1)
        turned = torch.cat((first * c - second * s, second * c + first * s), -1)
    return turned.to(x.dtype)


@Kernel
def causal_softmax(scores: Tensor, at: Tensor, keys_at: Tensor, scale: float) -> Tensor:
    """Softmax of scale * scores, [B, M, N], over the keys that are no further than each query.

    Args:
        at, keys_at: [M] and [N] fp32, positions of queries and keys. (Whole numbers up to 2^24 are exact, and a CPU
            compares them 16 at a time.)
    """
    x = torch.where(keys_at[None] <= at[:, None], scores.float() * scale, -math.inf)
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return (e * (1 / e.sum(-1, keepdim=True))).to(scores.dtype)


@Kernel
def softmax_backward(d_shares: Tensor, shares: Tensor, scale: float) -> Tensor:
    """Gradient to the scores, [B, M, N]; where a share is 0 because it may not be seen, so is its gradient."""
    p, d = shares.float(), d_shares.float()
    return (p * (d - (p * d).sum(-1, keepdim=True)) * scale).to(shares.dtype)


class Kernels:
    """The functions above in the form that a model uses; `gate` is by its activation."""

    def __init__(self, compiled: bool, gelu: bool) -> None:
        self.norm, self.norm_backward = norm.form(compiled), norm_backward.form(compiled)
        self.add_norm, self.add_norm_backward = add_norm.form(compiled), add_norm_backward.form(compiled)
        self.gate = (gelu_gate if gelu else silu_gate).form(compiled)
        self.gate_backward = (gelu_gate_backward if gelu else silu_gate_backward).form(compiled)
        self.split_heads, self.merge_heads = split_heads.form(compiled), merge_heads.form(compiled)
        self.turn_heads = turn_heads.form(compiled)
        self.gather_heads, self.scatter_heads = gather_heads.form(compiled), scatter_heads.form(compiled)
        self.causal_softmax = causal_softmax.form(compiled)
        self.softmax_backward = softmax_backward.form(compiled)

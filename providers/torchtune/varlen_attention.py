"""Causal attention within each segment on a CUDA device: one kernel for all segments of a batch.

FlashAttention (https://arxiv.org/abs/2307.08691) takes segments of any lengths one after the other, with the positions
between which they lie; no mask and no shares of attention are ever in memory. PyTorch has it as `varlen_attn`, for
16-bit types only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from post_training.training.model import Segments
from providers.torchtune.fused_kernels import Heads, Kernels

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older PyTorch, which trains all the same
    varlen_attn = cast(Any, None)


def varlen_attention(
    batch: Segments, cos: Tensor, sin: Tensor, heads: Heads, kernels: Kernels
) -> Callable[[Tensor], Tensor]:
    """Rotary embedding and attention of one batch: a function of [T, (K G + 2 K) dim] to [T, K G dim].

    Args:
        cos, sin: by position, [context, dim / 2] fp32.
    """
    angles = cos[batch.positions], sin[batch.positions]
    edges = torch.tensor((0, *batch.lengths), device=batch.tokens.device).cumsum(0).to(torch.int32)
    longest = max(batch.lengths)

    def attend(qkv: Tensor) -> Tensor:
        turned = cast(Tensor, _TurnedHeads.apply(qkv, *angles, heads, kernels)).unflatten(-1, (-1, heads.dim))
        q, k, v = turned.split((heads.query, heads.kv, heads.kv), 1)
        # Causal: as far back as the segment goes, and no key after the query.
        window, grouped = (-1, 0), heads.group > 1
        out = varlen_attn(q, k, v, edges, edges, longest, longest, window_size=window, enable_gqa=grouped)
        return cast(Tensor, out).flatten(1)

    return attend


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, kernels: Kernels) -> Tensor:
        ctx.angles, ctx.heads, ctx.kernels = (cos, sin), heads, kernels
        return kernels.turn_heads(qkv, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.angles
        return ctx.kernels.turn_heads(gradients[0].contiguous(), cos, -sin, ctx.heads), None, None, None, None


def varlen_fault(heads: Heads, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `varlen_attention` cannot be used for these heads, found by trying both directions; None where it can."""
    if device.type != "cuda":
        return "the device is no CUDA device"
    if varlen_attn is None:
        return "this PyTorch has no varlen_attn"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel computes 16-bit types, not {dtype}"
    batch = Segments(*(torch.tensor([0, 1, 0, 1, 2], device=device) for _ in range(2)), lengths=(2, 3))
    angles = torch.ones(3, heads.dim // 2, device=device), torch.zeros(3, heads.dim // 2, device=device)
    width = (heads.query + 2 * heads.kv) * heads.dim
    try:
        qkv = torch.ones(5, width, dtype=dtype, device=device, requires_grad=True)
        attend = varlen_attention(batch, *angles, heads, Kernels(compiled=False, gelu=False))
        attend(qkv).float().sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None

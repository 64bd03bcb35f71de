"""Causal attention within each segment, as products over exactly the pairs of positions that see each other.

PyTorch's CPU kernel for scaled dot-product attention is slow in bf16 and slower in its backward pass, and a mask over
the whole stream would compute what it hides. Here a segment is cut into blocks of queries; each block meets the keys
up to its last position: two products and one softmax. Only q, k and v are kept, and short blocks' shares; the shares of
long blocks, whose number grows with the square of the length, are computed again on the way back, as FlashAttention
does (https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from post_training.training.kernels import varying
from post_training.training.model import Segments
from providers.torchtune.fused_kernels import Heads, Kernels

QUERY_BLOCK = 256
"""Queries of one block: of a segment of n blocks, (n + 1) / 2n of the square of all pairs is computed."""

KEPT_KEYS = 256
"""Shares of blocks that see at most so many keys are kept: 2 x heads x 256 bytes a token at most."""


@dataclass(frozen=True)
class Block:
    """Queries `rows`, of all heads of a group, that see `keys`; `kept`: their shares are kept for the backward pass."""

    rows: slice
    keys: slice
    queries: int
    kept: bool

    @property
    def width(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Layout:
    """What all layers need to know of one batch.

    Attributes:
        at: [T] fp32, each token's position.
        cos, sin: [T, dim / 2] fp32, of that position.
        order: [T G] int64; see `split_heads`. Queries of one block lie together, by head, then by token.
        inverse: [T, G] int64, where in that order a token's query heads are.
    """

    at: Tensor
    cos: Tensor
    sin: Tensor
    order: Tensor
    inverse: Tensor
    blocks: tuple[Block, ...]
    heads: Heads

    @classmethod
    def of(cls, segments: Segments, cos: Tensor, sin: Tensor, heads: Heads) -> Layout:
        """`cos` and `sin` by position, [context, dim / 2]."""
        device, group = segments.tokens.device, heads.group
        blocks: list[Block] = []
        orders: list[Tensor] = []
        for first, start, stop in _query_blocks(segments.lengths):
            tokens = torch.arange(start, stop)
            orders.append((tokens[None] * group + torch.arange(group)[:, None]).flatten())
            rows, keys = slice(start * group, stop * group), slice(first, stop)
            blocks.append(Block(rows, keys, stop - start, kept=stop - first <= KEPT_KEYS))
        order = torch.cat(orders)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        at = segments.positions
        inverse = inverse.view(-1, group)
        return cls(at.float(), cos[at], sin[at], order.to(device), inverse.to(device), tuple(blocks), heads)


def _query_blocks(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(start of the segment, start, stop) of each block of queries; those of one segment are of about one size."""
    first = 0
    for length in lengths:
        count = -(-length // QUERY_BLOCK)
        edges = [first + length * index // count for index in range(count + 1)]
        for start, stop in pairwise(edges):
            yield first, start, stop
        first += length


def segment_attention(qkv: Tensor, layout: Layout, kernels: Kernels) -> Tensor:
    """Rotary embedding and attention of [T, (K G + 2 K) dim]: [T, K G dim]."""
    return cast(Tensor, _SegmentAttention.apply(qkv, layout, kernels))


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, kernels: Kernels) -> Tensor:
        q, k, v = kernels.split_heads(qkv, layout.cos, layout.sin, layout.order, layout.heads)
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for block in layout.blocks:
            shares = _shares(q, k, block, layout, kernels)
            out[:, block.rows] = torch.bmm(shares, v[:, block.keys])
            if block.kept:
                kept.append(shares)
        ctx.layout, ctx.kernels = layout, kernels
        ctx.save_for_backward(q, k, v, *kept)
        return kernels.ungroup(out, layout.inverse, layout.heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        layout: Layout = ctx.layout
        kernels: Kernels = ctx.kernels
        q, k, v, *kept = ctx.saved_tensors
        d_out = kernels.regroup(gradients[0], layout.order, layout.heads)
        d_q = torch.empty_like(q)
        # Blocks of one segment add to the same keys: in fp32, or bf16 would lose what many blocks add.
        d_k, d_v = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
        stored = iter(kept)
        for block in layout.blocks:
            shares = next(stored) if block.kept else _shares(q, k, block, layout, kernels)
            d = d_out[:, block.rows]
            d_v[:, block.keys] += torch.bmm(shares.transpose(1, 2), d)
            d_shares = torch.bmm(d, v[:, block.keys].transpose(1, 2))
            by_head = (layout.heads.query, block.queries, block.width)
            d_scores = kernels.softmax_backward(d_shares.view(by_head), shares.view(by_head), _scale(layout.heads))
            d_scores = d_scores.view(shares.shape)
            d_q[:, block.rows] = torch.bmm(d_scores, k[:, block.keys])
            d_k[:, block.keys] += torch.bmm(d_scores.transpose(1, 2), q[:, block.rows])
        return kernels.merge_heads(d_q, d_k, d_v, layout.cos, layout.sin, layout.inverse, layout.heads), None, None


def compile_attention(kernels: Kernels, heads: Heads, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
    """Run every kernel of this file once at a typical size.

    Each argument is a tensor of its own: of one tensor given twice the compiler would take that to be so always.
    """

    def made(*shape: int, of: torch.dtype = dtype, varies: tuple[int, ...] = (0,)) -> Tensor:
        return varying(torch.zeros(shape, dtype=of, device=device), *varies)

    fp32, group, dim, scale = torch.float32, heads.group, heads.dim, _scale(heads)

    def angles() -> tuple[Tensor, Tensor]:
        return made(tokens, dim // 2, of=fp32), made(tokens, dim // 2, of=fp32)

    order, inverse = made(tokens * group, of=torch.int64), made(tokens, group, of=torch.int64)
    out, grouped = made(tokens, heads.query * dim), made(heads.kv, tokens * group, dim, varies=(1,))
    d_k, d_v = (made(heads.kv, tokens, dim, of=fp32, varies=(1,)) for _ in range(2))
    kernels.split_heads(made(tokens, (heads.query + 2 * heads.kv) * dim), *angles(), order, heads)
    kernels.merge_heads(grouped, d_k, d_v, *angles(), inverse, heads)
    kernels.ungroup(grouped, inverse, heads)
    kernels.regroup(out, order, heads)
    scores, shares = (made(heads.query, QUERY_BLOCK // 2, QUERY_BLOCK, varies=(1, 2)) for _ in range(2))
    at, keys_at = made(QUERY_BLOCK // 2, of=fp32), made(QUERY_BLOCK, of=fp32)
    kernels.causal_softmax(scores, at, keys_at, scale)
    kernels.softmax_backward(scores, shares, scale)


def _shares(q: Tensor, k: Tensor, block: Block, layout: Layout, kernels: Kernels) -> Tensor:
    """Attention of a block's queries over its keys, [K, G M, N]."""
    scores = torch.bmm(q[:, block.rows], k[:, block.keys].transpose(1, 2))
    by_head = scores.view(layout.heads.query, block.queries, block.width)
    keys_at = layout.at[block.keys]
    return kernels.causal_softmax(by_head, keys_at[-block.queries :], keys_at, _scale(layout.heads)).view(scores.shape)


def _scale(heads: Heads) -> float:
    return heads.dim**-0.5

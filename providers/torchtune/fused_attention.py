"""Causal attention within each segment, as products over exactly the pairs of positions that see each other.

PyTorch's CPU kernel for scaled dot-product attention is slow in bf16 and slower in its backward pass, and a mask over
the whole stream would compute what it hides. Here a segment is cut into blocks of queries; each block meets the keys
up to its last position: two products and one softmax. Only q, k and v are kept, and short blocks' shares; the shares of
long blocks, whose number grows with the square of the length, are computed again on the way back, as FlashAttention
does (https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from post_training.training.kernels import varying
from post_training.training.model import Segments
from providers.torchtune.fused_kernels import Heads, Kernels

QUERY_BLOCK = 256
"""Most queries of one block: of a segment of n blocks, (n + 1) / 2n of the square of all pairs is computed."""

BLOCK_STEP = 16
"""Blocks have a multiple of so many queries, see `Padding`."""

KEPT_KEYS = 256
"""Shares of blocks that see at most so many keys are kept: 2 x heads x 256 bytes a token at most."""


@dataclass(frozen=True)
class Block:
    """Queries `start` to `stop` of a segment; `kept`: their shares are kept for the backward pass."""

    start: int
    stop: int
    kept: bool


@dataclass(frozen=True)
class Segment:
    """A segment's rows, `start` to `stop`, in the order of heads; its tokens and, after them, what fills up a block."""

    start: int
    stop: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, start: int, length: int, step: int) -> Segment:
        count = -(-length // QUERY_BLOCK)
        size = round_up(-(-length // count), step)
        edges = pairwise(size * index for index in range(count + 1))
        blocks = tuple(Block(a, b, kept=b <= KEPT_KEYS) for a, b in edges)
        return cls(start, start + size * count, blocks)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True)
class Padding:
    """Tokens after the last segment, so that products come in few sizes.

    oneDNN compiles code for every new size of a product, some 60 of them for each batch of new lengths, and keeps a
    thousand: of SmolLM2 on two cores that took a tenth of the time and 600 MB. So the stream is filled up to one of
    sixteen sizes an octave, with a segment of its own, and a block of queries to a multiple of `BLOCK_STEP` with copies
    of the last such token. Nothing reads these: no loss, no query of a real segment. All their gradients are zero.

    Attributes:
        tokens: at least 1, or 0 for none, and then blocks are not filled up either.
    """

    tokens: int

    @classmethod
    def of(cls, tokens: int) -> Padding:
        step = max(16, 2 ** (tokens.bit_length() - 5))
        return cls(round_up(tokens + 1, step) - tokens)

    def apply(self, batch: Segments) -> Segments:
        if not self.tokens:
            return batch
        # All at position 0: there may be more of them than the model has positions.
        nothing = batch.tokens.new_zeros(self.tokens)
        tokens, positions = torch.cat((batch.tokens, nothing)), torch.cat((batch.positions, nothing))
        return Segments(tokens, positions, (*batch.lengths, self.tokens))


@dataclass(frozen=True)
class Layout:
    """What all layers need to know of one batch.

    Attributes:
        at: fp32 position of every row, beyond all others where the row is none of the segment's.
        cos, sin: [T, dim / 2] fp32, of each token's position.
        order, inverse: of queries, [rows K G] and [T, K G] int64; see `split_heads`. The rows of a block lie together,
            by head, then by token.
        key_order, key_inverse: of keys and values, [rows K] and [T, K]. The rows of a segment lie together.
    """

    segments: tuple[Segment, ...]
    at: Tensor
    cos: Tensor
    sin: Tensor
    order: Tensor
    inverse: Tensor
    key_order: Tensor
    key_inverse: Tensor
    heads: Heads

    @classmethod
    def of(cls, batch: Segments, cos: Tensor, sin: Tensor, heads: Heads, padded: bool) -> Layout:
        """`cos` and `sin` by position, [context, dim / 2]; `padded`: the last token is padding."""
        segments: list[Segment] = []
        tokens: list[Tensor] = []  # of each row
        first = start = 0
        for length in batch.lengths:
            segment = Segment.of(start, length, BLOCK_STEP if padded else 1)
            rows = torch.arange(first, first + segment.stop - start)
            tokens.append(torch.where(rows < first + length, rows, -1))
            segments.append(segment)
            first, start = first + length, segment.stop
        token = torch.cat(tokens)
        real = token >= 0
        at = torch.full(token.shape, _NOWHERE)
        at[real] = batch.positions.cpu()[token[real]].float()
        token[~real] = first - 1
        spans = [(s.start + b.start, s.start + b.stop) for s in segments for b in s.blocks]
        orders = (
            *_orders(spans, token, real, heads.query),
            *_orders([(s.start, s.stop) for s in segments], token, real, heads.kv),
        )
        where = batch.positions
        order, inverse, key_order, key_inverse = (each.to(where.device) for each in orders)
        angles = cos[where], sin[where]
        return cls(tuple(segments), at.to(where.device), *angles, order, inverse, key_order, key_inverse, heads)

    def queries(self, rows: Tensor, segment: Segment, block: Block) -> Tensor:
        """A block's rows of [rows K G, dim], as [K, G M, dim]: a view."""
        heads, first = self.heads, segment.start
        of_block = rows[(first + block.start) * heads.query : (first + block.stop) * heads.query]
        return of_block.view(heads.kv, -1, heads.dim)

    def keys(self, rows: Tensor, segment: Segment) -> Tensor:
        """A segment's rows of [rows K, dim], as [K, L, dim]: a view."""
        kv = self.heads.kv
        return rows[segment.start * kv : segment.stop * kv].view(kv, -1, self.heads.dim)


_NOWHERE = 2.0**30


def _orders(spans: Sequence[tuple[int, int]], token: Tensor, real: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(token, head) as token * heads + head, span by span, by head, then by row; and where that of each token is.

    Args:
        spans: of rows.
        token: each row's.
        real: whether the row is the token's own.
    """
    head = torch.arange(heads)[:, None]
    order = torch.cat([(token[None, start:stop] * heads + head).flatten() for start, stop in spans])
    own = torch.cat([real[None, start:stop].expand(heads, -1).flatten() for start, stop in spans])
    inverse = torch.empty(int(real.sum()) * heads, dtype=torch.int64)
    inverse[order[own]] = torch.arange(len(order))[own]
    return order, inverse.view(-1, heads)


def segment_attention(qkv: Tensor, layout: Layout, kernels: Kernels) -> Tensor:
    """Rotary embedding and attention of [T, (K G + 2 K) dim]: [T, K G dim]."""
    return cast(Tensor, _SegmentAttention.apply(qkv, layout, kernels))


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, kernels: Kernels) -> Tensor:
        q, k, v = kernels.split_heads(qkv, layout.cos, layout.sin, layout.order, layout.key_order, layout.heads)
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for segment in layout.segments:
            keys, values = layout.keys(k, segment), layout.keys(v, segment)
            for block in segment.blocks:
                shares = _shares(q, keys, segment, block, layout, kernels)
                torch.bmm(shares, values[:, : block.stop], out=layout.queries(out, segment, block))
                if block.kept:
                    kept.append(shares)
        ctx.layout, ctx.kernels = layout, kernels
        ctx.save_for_backward(q, k, v, *kept)
        return kernels.scatter_heads(out, layout.inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        layout: Layout = ctx.layout
        kernels: Kernels = ctx.kernels
        q, k, v, *kept = ctx.saved_tensors
        d_out = kernels.gather_heads(gradients[0], layout.order, layout.heads)
        d_q, d_k, d_v = (torch.empty_like(each) for each in (q, k, v))
        stored = iter(kept)
        for segment in layout.segments:
            keys, values = layout.keys(k, segment), layout.keys(v, segment)
            d_keys, d_values = _Sum(layout.keys(d_k, segment), segment), _Sum(layout.keys(d_v, segment), segment)
            for block in segment.blocks:
                shares = next(stored) if block.kept else _shares(q, keys, segment, block, layout, kernels)
                d = layout.queries(d_out, segment, block)
                d_values.add(shares.transpose(1, 2), d)
                d_shares = torch.bmm(d, values[:, : block.stop].transpose(1, 2))
                d_scores = kernels.softmax_backward(d_shares, shares, _scale(layout.heads))
                torch.bmm(d_scores, keys[:, : block.stop], out=layout.queries(d_q, segment, block))
                d_keys.add(d_scores.transpose(1, 2), layout.queries(q, segment, block))
            d_keys.store()
            d_values.store()
        orders = (layout.inverse, layout.key_inverse)
        return kernels.merge_heads(d_q, d_k, d_v, layout.cos, layout.sin, *orders, layout.heads), None, None


class _Sum:
    """What the blocks of a segment add to the gradients of its keys or values, `out` [K, L, dim].

    One block writes there itself; what several add is summed in fp32, or bf16 would lose some of it.
    """

    def __init__(self, out: Tensor, segment: Segment) -> None:
        self._out = out
        self._sum = None if len(segment.blocks) == 1 else torch.zeros_like(out, dtype=torch.float32)

    def add(self, left: Tensor, right: Tensor) -> None:
        """left @ right, [K, N, dim], to the first N keys."""
        if self._sum is None:
            torch.bmm(left, right, out=self._out)
        else:
            self._sum[:, : left.shape[1]] += torch.bmm(left, right)

    def store(self) -> None:
        if self._sum is not None:
            self._out.copy_(self._sum)


def compile_attention(kernels: Kernels, heads: Heads, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
    """Run every kernel of this file, and of `varlen_attention` where it may be used, once at a typical size.

    Each argument is a tensor of its own: of one tensor given twice the compiler would take that to be so always.
    """

    def made(*shape: int, of: torch.dtype = dtype, varies: tuple[int, ...] = (0,)) -> Tensor:
        return varying(torch.zeros(shape, dtype=of, device=device), *varies)

    fp32, int64, scale, dim = torch.float32, torch.int64, _scale(heads), heads.dim

    def angles() -> tuple[Tensor, Tensor]:
        return made(tokens, dim // 2, of=fp32), made(tokens, dim // 2, of=fp32)

    order, key_order = made(tokens * heads.query, of=int64), made(tokens * heads.kv, of=int64)
    inverse, key_inverse = made(tokens, heads.query, of=int64), made(tokens, heads.kv, of=int64)
    q, d_q = (made(tokens * heads.query, dim) for _ in range(2))
    d_k, d_v = (made(tokens * heads.kv, dim) for _ in range(2))
    width = (heads.query + 2 * heads.kv) * dim
    kernels.split_heads(made(tokens, width), *angles(), order, key_order, heads)
    if device.type == "cuda":
        kernels.turn_heads(made(tokens, width), *angles(), heads)
    kernels.merge_heads(d_q, d_k, d_v, *angles(), inverse, key_inverse, heads)
    kernels.scatter_heads(q, inverse)
    kernels.gather_heads(made(tokens, heads.query * dim), order, heads)
    scores = made(heads.query, QUERY_BLOCK // 2, QUERY_BLOCK, varies=(1, 2))
    at, keys_at = made(QUERY_BLOCK // 2, of=fp32), made(QUERY_BLOCK, of=fp32)
    kernels.causal_softmax(scores, at, keys_at, scale)
    rows = heads.group * QUERY_BLOCK // 2
    d_shares, shares = (made(heads.kv, rows, QUERY_BLOCK, varies=(1, 2)) for _ in range(2))
    kernels.softmax_backward(d_shares, shares, scale)


def _shares(q: Tensor, keys: Tensor, segment: Segment, block: Block, layout: Layout, kernels: Kernels) -> Tensor:
    """Attention of a block's queries over the segment's keys [K, L, dim] up to its last, [K, G M, N]."""
    scores = torch.bmm(layout.queries(q, segment, block), keys[:, : block.stop].transpose(1, 2))
    keys_at = layout.at[segment.start : segment.start + block.stop]
    by_head = scores.view(layout.heads.query, -1, block.stop)
    return kernels.causal_softmax(by_head, keys_at[block.start :], keys_at, _scale(layout.heads)).view(scores.shape)


def _scale(heads: Heads) -> float:
    return heads.dim**-0.5

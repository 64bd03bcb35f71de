"""Rows to flat batches: the order of an epoch, which rows make an optimizer step, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from post_training.data.types import FlatBatch, TokenizedRow


def flatten(rows: Sequence[TokenizedRow]) -> FlatBatch:
    """Concatenate rows, at least one, without padding; targets and weights move one position to the left."""
    lengths = tuple(len(row.tokens) for row in rows)
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    weights = np.concatenate([row.weights for row in rows]).astype(np.float32)
    lasts = np.cumsum(lengths) - 1
    targets = np.roll(tokens, -1)
    weights = np.roll(weights, -1)
    targets[lasts] = 0
    weights[lasts] = 0
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return FlatBatch(tokens, positions, targets, weights, lengths, tuple(row.row for row in rows))


def epoch_order(n: int, shuffle: bool, seed: int, epoch: int) -> NDArray[np.int64]:
    """[n] row indices in the order of this epoch: a permutation drawn from (seed, epoch), or 0 to n - 1."""
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n).astype(np.int64)


def steps(
    lengths: Sequence[int],
    *,
    order: Iterable[int],
    batch_size: int,
    accumulation: int = 1,
    packed: bool = False,
    max_seq_len: int | None = None,
    max_steps: int | None = None,
) -> list[list[int]]:
    """The row indices that each optimizer step of an epoch takes, in order.

    A step holds `batch_size * accumulation` rows, or packs where `packed`; the last one holds what is left, however
    little. So every row is taken exactly once, unless `max_steps` ends the epoch earlier.

    Args:
        lengths: tokens of each row.
        order: row indices, as `epoch_order` gives them.
        packed: fill packs with whole rows, in order, up to `max_seq_len` tokens; a longer row is its own pack.
    """
    packs = list(_groups([int(i) for i in order], lengths, max_seq_len if packed else None))
    size = batch_size * accumulation
    planned = [[i for pack in packs[k : k + size] for i in pack] for k in range(0, len(packs), size)]
    return planned[:max_steps]


def micro_batches(rows: Iterable[TokenizedRow], micro_batch_tokens: int) -> Iterator[FlatBatch]:
    """Split rows, in order, into flat batches of at most `micro_batch_tokens`; a longer row is a batch by itself."""
    kept = list(rows)
    for group in _groups(range(len(kept)), [len(row.tokens) for row in kept], micro_batch_tokens):
        yield flatten([kept[i] for i in group])


def _groups(order: Iterable[int], lengths: Sequence[int], budget: int | None) -> Iterator[list[int]]:
    """Runs of `order` that sum to at most `budget` tokens; single rows where there is no budget."""
    group: list[int] = []
    used = 0
    for i in order:
        if group and (budget is None or used + lengths[i] > budget):
            yield group
            group, used = [], 0
        group.append(i)
        used += lengths[i]
    if group:
        yield group

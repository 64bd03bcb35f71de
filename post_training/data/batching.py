"""Rows to flat batches: the order of an epoch, which rows make an optimizer step, and its micro-batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

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
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n).astype(np.int64, copy=False)


class EpochPlan(Sequence[NDArray[np.int64]]):
    """The row indices that each optimizer step of an epoch takes: parts of one array. A slice is a plan, too.

    Args:
        order: [n] row indices.
        begins, ends: [steps] where each step's part of `order` begins and ends.
    """

    def __init__(self, order: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._order = order
        self._begins = begins
        self._ends = ends

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, index: slice) -> EpochPlan: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.int64] | EpochPlan:
        if isinstance(index, slice):
            return EpochPlan(self._order, self._begins[index], self._ends[index])
        return self._order[self._begins[index] : self._ends[index]]

    def sizes(self, lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """[steps] tokens of each step, by the tokens of each row."""
        ends = np.concatenate([[0], np.cumsum(lengths[self._order], dtype=np.int64)])
        return ends[self._ends] - ends[self._begins]

    def tolist(self) -> list[list[int]]:
        return [step.tolist() for step in self]


def steps(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    *,
    order: Sequence[int] | NDArray[np.integer[Any]],
    batch_size: int,
    accumulation: int = 1,
    packed: bool = False,
    max_seq_len: int | None = None,
    max_steps: int | None = None,
) -> EpochPlan:
    """The row indices that each optimizer step of an epoch takes, in order.

    A step holds `batch_size * accumulation` rows, or packs where `packed`; the last one holds what is left, however
    little. So every row is taken exactly once, unless `max_steps` ends the epoch earlier.

    Args:
        lengths: tokens of each row.
        order: row indices, as `epoch_order` gives them.
        packed: fill packs with whole rows, in order, up to `max_seq_len` tokens; a longer row is its own pack.
    """
    indices, size = np.asarray(order, dtype=np.int64), batch_size * accumulation
    if packed and max_seq_len is not None:
        begins = _pack_begins(np.asarray(lengths, dtype=np.int64)[indices], max_seq_len)[::size]
    else:
        begins = np.arange(0, len(indices), size, dtype=np.int64)
    ends = np.append(begins[1:], np.int64(len(indices)))[: len(begins)]
    return EpochPlan(indices, begins, ends)[:max_steps]


def micro_batches(rows: Iterable[TokenizedRow], micro_batch_tokens: int) -> Iterator[FlatBatch]:
    """Split rows, in order, into flat batches of at most `micro_batch_tokens`; a longer row is a batch by itself.

    Rows are taken as the batches are asked for.
    """
    group: list[TokenizedRow] = []
    used = 0
    for row in rows:
        if group and used + len(row.tokens) > micro_batch_tokens:
            yield flatten(group)
            group, used = [], 0
        group.append(row)
        used += len(row.tokens)
    if group:
        yield flatten(group)


def _pack_begins(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """[packs] where each pack of at most `budget` tokens begins, by the tokens of each row in order."""
    begins = array("q")
    used = 0
    for i, length in enumerate(lengths.data):
        if not begins or used + length > budget:
            begins.append(i)
            used = 0
        used += length
    return np.array(begins, dtype=np.int64)

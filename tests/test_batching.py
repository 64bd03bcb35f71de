"""Flat batches: nothing lost, nothing doubled, nothing predicted across rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training.data.batching import epoch_order, flatten, micro_batches, steps
from post_training.data.types import TokenizedRow


def row(number: int, tokens: list[int], weights: list[float]) -> TokenizedRow:
    return TokenizedRow(number, np.array(tokens, dtype=np.int32), np.array(weights, dtype=np.float32))


@st.composite
def row_lists(draw: st.DrawFn) -> list[TokenizedRow]:
    rows = []
    for number in range(draw(st.integers(1, 12))):
        tokens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
        weights = [
            0.0,
            *draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(tokens) - 1, max_size=len(tokens) - 1)),
        ]
        rows.append(row(number, tokens, weights))
    return rows


def test_two_rows_flatten_to_these_arrays():
    batch = flatten([row(4, [11, 12, 13], [0, 0, 1]), row(2, [21, 22], [0, 1])])
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.targets.tolist() == [12, 13, 0, 22, 0]
    assert batch.weights.tolist() == [0, 1, 0, 1, 0]
    assert batch.lengths == (3, 2)
    assert batch.rows == (4, 2)
    assert (batch.tokens.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int64, np.int64, np.float32)
    assert (batch.supervised, batch.weight_sum) == (2, 2.0)


@given(row_lists())
def test_each_position_predicts_the_next_token_of_its_own_row(rows: list[TokenizedRow]):
    batch = flatten(rows)
    start = 0
    for source, length in zip(rows, batch.lengths, strict=True):
        end = start + length
        assert batch.tokens[start:end].tolist() == source.tokens.tolist()
        assert batch.positions[start:end].tolist() == list(range(length))
        assert batch.targets[start : end - 1].tolist() == source.tokens[1:].tolist()
        assert batch.weights[start : end - 1].tolist() == source.weights[1:].tolist()
        assert batch.weights[end - 1] == 0
        assert batch.targets[end - 1] == 0
        start = end
    assert start == len(batch.tokens) == len(batch.weights)
    assert batch.supervised == sum(source.supervised for source in rows)


@given(row_lists(), st.integers(1, 30))
def test_micro_batches_keep_every_row_whole_and_in_order_within_the_budget(rows: list[TokenizedRow], budget: int):
    batches = list(micro_batches(rows, budget))
    assert [number for batch in batches for number in batch.rows] == [source.row for source in rows]
    assert all(len(batch.tokens) <= budget or len(batch.rows) == 1 for batch in batches)
    # Greedy: no batch could have taken the next one's first row, too.
    assert all(len(a.tokens) + b.lengths[0] > budget for a, b in itertools.pairwise(batches))
    assert sum(batch.supervised for batch in batches) == sum(source.supervised for source in rows)


def test_no_rows_make_no_micro_batches():
    assert list(micro_batches([], 10)) == []


@given(st.integers(0, 50), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_an_epoch_visits_every_row_once_in_an_order_of_its_own(n: int, seed: int, epoch: int):
    order = epoch_order(n, True, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == epoch_order(n, True, seed, epoch).tolist()
    assert epoch_order(n, False, seed, epoch).tolist() == list(range(n))


def test_epochs_and_seeds_change_the_order():
    orders = {tuple(epoch_order(100, True, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_steps_hold_whole_batches_and_the_last_one_what_is_left():
    down = [6, 5, 4, 3, 2, 1, 0]
    assert steps([1] * 7, order=down, batch_size=2, accumulation=2).tolist() == [[6, 5, 4, 3], [2, 1, 0]]
    assert steps([1], order=[0], batch_size=8, accumulation=4).tolist() == [[0]]
    assert steps([1] * 5, order=range(5), batch_size=2, max_steps=2).tolist() == [[0, 1], [2, 3]]
    assert steps([], order=[], batch_size=2).tolist() == []


def test_packs_take_whole_rows_up_to_the_sequence_length():
    lengths = [4, 4, 3, 9, 12, 1, 1]
    # packs of at most 10 tokens: [0, 1], [2], [3], [4], [5, 6]
    planned = steps(lengths, order=range(7), batch_size=2, packed=True, max_seq_len=10)
    assert planned.tolist() == [[0, 1, 2], [3, 4], [5, 6]]
    accumulated = steps(lengths, order=range(7), batch_size=2, accumulation=2, packed=True, max_seq_len=10)
    assert accumulated.tolist() == [[0, 1, 2, 3, 4], [5, 6]]


@given(
    lengths=st.lists(st.integers(1, 20), max_size=30),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    packed=st.booleans(),
)
def test_every_row_is_in_exactly_one_step_of_an_epoch(
    lengths: list[int], seed: int, batch_size: int, accumulation: int, packed: bool
):
    order = epoch_order(len(lengths), True, seed, 0)
    planned = steps(
        lengths, order=order, batch_size=batch_size, accumulation=accumulation, packed=packed, max_seq_len=16
    )
    assert [i for step in planned for i in step] == order.tolist()
    if not packed:
        assert all(len(step) == batch_size * accumulation for step in planned[:-1])
    limited = steps(
        lengths,
        order=order,
        batch_size=batch_size,
        accumulation=accumulation,
        packed=packed,
        max_seq_len=16,
        max_steps=1,
    )
    assert limited.tolist() == planned.tolist()[:1]


@pytest.mark.parametrize("packed", [False, True])
def test_a_data_set_smaller_than_a_batch_still_makes_a_step(packed: bool):
    planned = steps([5, 5, 5], order=range(3), batch_size=64, accumulation=8, packed=packed, max_seq_len=100)
    assert planned.tolist() == [[0, 1, 2]]


def naive_steps(
    lengths: list[int], order: list[int], rows: int, max_seq_len: int | None, max_steps: int | None
) -> list[list[int]]:
    """By the rule itself, list by list."""
    packs: list[list[int]] = []
    for i in order:
        fits = packs and max_seq_len is not None and sum(lengths[k] for k in packs[-1]) + lengths[i] <= max_seq_len
        packs = [*packs[:-1], [*packs[-1], i]] if fits else [*packs, [i]]
    planned = []
    while packs:
        planned.append([i for pack in packs[:rows] for i in pack])
        packs = packs[rows:]
    return planned if max_steps is None else planned[:max_steps]


@given(
    lengths=st.lists(st.integers(1, 20), max_size=40),
    seed=st.integers(0, 99),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    max_seq_len=st.none() | st.integers(1, 30),
    max_steps=st.none() | st.integers(0, 8),
    cut=st.slices(20),
)
def test_a_plan_is_what_the_rule_says_list_by_list_and_so_is_each_part_of_it(
    lengths: list[int],
    seed: int,
    batch_size: int,
    accumulation: int,
    max_seq_len: int | None,
    max_steps: int | None,
    cut: slice,
):
    order = epoch_order(len(lengths), True, seed, 0)
    planned = steps(
        np.array(lengths, dtype=np.int32),
        order=order,
        batch_size=batch_size,
        accumulation=accumulation,
        packed=max_seq_len is not None,
        max_seq_len=max_seq_len,
        max_steps=max_steps,
    )
    expected = naive_steps(lengths, order.tolist(), batch_size * accumulation, max_seq_len, max_steps)
    assert (len(planned), planned.tolist()) == (len(expected), expected)
    assert planned[cut].tolist() == expected[cut]
    assert [planned[-1 - k].tolist() for k in range(len(planned))] == expected[::-1]
    sizes = planned[cut].sizes(np.array(lengths, dtype=np.int32))
    assert sizes.tolist() == [sum(lengths[i] for i in step) for step in expected[cut]]


def test_micro_batches_take_rows_only_as_they_are_asked_for():
    taken: list[int] = []

    def source():
        for number in range(100):
            taken.append(number)
            yield row(number, [1, 2, 3], [0, 1, 1])

    batches = micro_batches(source(), 6)
    assert (next(batches).rows, len(taken)) == ((0, 1), 3)

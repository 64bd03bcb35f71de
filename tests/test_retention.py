"""Which checkpoints may be removed: never the newest, one that is announced, or one after an epoch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.checkpoints.retention import SavedCheckpoint, best_step, removable


def saved(step: int, *, announced: bool = False, train: float | None = None, validation: float | None = None):
    metrics = None if train is None else {"epoch": 0, "train_loss": train, "validation_loss": validation}
    return SavedCheckpoint(step, announced, metrics)


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, {1, 2, 3}), (1, {1, 2, 3}), (2, {1, 2}), (4, set()), (9, set())]
)
def test_the_newest_ones_up_to_the_limit_stay(limit: int | None, expected: set[int]) -> None:
    assert removable([saved(3), saved(1), saved(4), saved(2)], limit) == expected


def test_announced_ones_stay_and_do_not_count() -> None:
    history = [saved(n, announced=n % 4 == 0, train=1.0 if n % 4 == 0 else None) for n in range(1, 10)]
    assert removable(history, 2) == {1, 2, 3, 5, 6}


def test_one_after_an_epoch_stays_although_it_is_old_and_not_yet_announced() -> None:
    history = [saved(1), saved(2, train=0.1), saved(3), saved(4, train=0.9), saved(5), saved(6)]
    assert removable(history, 1) == {1, 3, 5}


def test_validation_loss_counts_before_training_loss_and_nan_never() -> None:
    assert (
        best_step([saved(1, train=0.1), saved(2, train=0.9, validation=2.0), saved(3, train=0.5, validation=1.0)]) == 3
    )
    assert best_step([saved(1, train=0.1, validation=math.nan), saved(2, train=0.9, validation=7.0)]) == 2
    assert best_step([saved(1, train=math.nan), saved(2, train=math.inf)]) == 2
    assert best_step([saved(1, train=math.nan), saved(2)]) is None
    assert best_step([saved(5, train=0.5), saved(3, train=0.5)]) == 3
    assert best_step([]) is None
    assert removable([], 1) == frozenset()


LOSSES = st.one_of(st.floats(0, 10), st.sampled_from([math.nan, math.inf, 1.0, 2.0]))


@st.composite
def histories(draw: st.DrawFn) -> list[SavedCheckpoint]:
    steps = draw(st.lists(st.integers(1, 200), unique=True, max_size=25))
    found = []
    for step in steps:
        metrics: dict[str, Any] | None = None
        if draw(st.booleans()):
            metrics = {"train_loss": draw(LOSSES), "validation_loss": draw(st.none() | LOSSES)}
        found.append(SavedCheckpoint(step, draw(st.booleans()), metrics))
    return found


@settings(max_examples=1000, deadline=None)
@given(histories(), st.none() | st.integers(1, 12))
def test_over_random_histories_newest_announced_and_those_after_epochs_stay_and_the_limit_holds(
    history: list[SavedCheckpoint], limit: int | None
) -> None:
    gone = removable(history, limit)
    kept = [checkpoint for checkpoint in history if checkpoint.step not in gone]
    assert gone <= {checkpoint.step for checkpoint in history}
    assert all(not c.announced and c.metrics is None for c in history if c.step in gone)
    if history:
        assert max(c.step for c in history) not in gone
    for name in ("validation_loss", "train_loss"):
        losses = [(c.metrics[name], c.step) for c in history if c.metrics and c.metrics[name] is not None]
        numbers = [(loss, step) for loss, step in losses if loss == loss]
        if numbers:
            lowest = min(loss for loss, _ in numbers)
            assert any(loss == lowest and step not in gone for loss, step in numbers)
            break
    inside = sorted(c.step for c in history if not c.announced and c.metrics is None)
    assert set(inside[-(limit or 1) :]).isdisjoint(gone)
    assert sum(not c.announced and c.metrics is None for c in kept) <= (limit or 1)
    # Nothing more goes at a second look.
    assert removable(kept, limit) == frozenset()

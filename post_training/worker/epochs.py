"""Which rows an epoch trains on, in which steps, and when to save inside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from post_training.data.batching import epoch_order, steps
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec
from post_training.worker.setup import max_seq_len

SAVE_SECONDS = 300.0
"""Time between checkpoints inside an epoch where the request gives no number of steps."""
SAVING_SHARE = 0.03
"""At most this part of the time goes into such checkpoints."""


def plan_epoch(spec: JobSpec, rows: Sequence[TokenizedRow], epoch: int) -> list[list[int]]:
    """The row indices of each optimizer step of an epoch."""
    data = spec.training_config.data_config
    assert data is not None  # no job is accepted without
    return steps(
        [len(row.tokens) for row in rows],
        order=epoch_order(len(rows), data.shuffle, spec.seed, epoch),
        batch_size=data.batch_size,
        accumulation=spec.training_config.gradient_accumulation_steps,
        packed=bool(data.packed),
        max_seq_len=max_seq_len(spec),
        max_steps=spec.training_config.max_steps_per_epoch,
    )


def count_steps(spec: JobSpec, rows: Sequence[TokenizedRow]) -> int:
    """Optimizer steps of the whole job."""
    config = spec.training_config
    if config.data_config is not None and config.data_config.packed:
        # How rows fill packs depends on their order, which differs from epoch to epoch.
        return sum(len(plan_epoch(spec, rows, epoch)) for epoch in range(config.n_epochs))
    return config.n_epochs * len(plan_epoch(spec, rows, 0))


def validation_rows(spec: JobSpec, rows: Sequence[TokenizedRow]) -> Sequence[TokenizedRow]:
    """All rows, or those of the first `max_validation_steps` batches."""
    config = spec.training_config
    if config.max_validation_steps is None or config.data_config is None:
        return rows
    return rows[: config.max_validation_steps * config.data_config.batch_size]


class SaveTimer:
    """When the next checkpoint inside an epoch is due.

    Args:
        every_n_steps: at each multiple of this; None: by time.
        monotonic: seconds.
    """

    def __init__(self, every_n_steps: int | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every = every_n_steps
        self._monotonic = monotonic
        self._interval = SAVE_SECONDS
        self._since = monotonic()

    def due(self, step: int) -> bool:
        """Whether to save after this step (global, from 1)."""
        if self._every is not None:
            return step % self._every == 0
        return self._monotonic() - self._since >= self._interval

    def saved(self, seconds: float) -> None:
        """Wait again after a save that took so long; a slow one is followed by a longer wait."""
        self._interval = max(SAVE_SECONDS, seconds / SAVING_SHARE)
        self.restart()

    def restart(self) -> None:
        """Wait again as long as before."""
        self._since = self._monotonic()

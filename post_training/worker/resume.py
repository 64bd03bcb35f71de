"""Where a job goes on: its place in the data, and the newest checkpoint that can be trusted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from apis.errors import ModelInvalid
from apis.post_training.models import JobProgress
from post_training.checkpoints.layout import TRAINING_STATE, check_files
from post_training.checkpoints.state import load_training_state
from post_training.jobs.tables import CheckpointRow
from post_training.training.trainer import StepResult
from post_training.worker.keeping import discard, unproven
from post_training.worker.lease import Lease
from post_training.worker.progress import LossSoFar

logger = logging.getLogger(__name__)


@dataclass
class Cursor(LossSoFar):
    """A job's place in its data, and the sums over the steps of the epoch that are done.

    Attributes:
        epoch: the epoch to go on with; the number of epochs where all are done.
        position: optimizer steps of that epoch that are done.
    """

    epoch: int = 0
    position: int = 0

    def advance(self, result: StepResult) -> None:
        """Count one step of the epoch."""
        self.position += 1
        self.count(result)

    def next_epoch(self) -> Cursor:
        return Cursor(epoch=self.epoch + 1, skipped_in_a_row=self.skipped_in_a_row)


CURSOR, PROGRESS = "cursor", "progress"
"""What a training state holds beside the trainer's own values."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from: its row, and what its training state holds."""

    checkpoint: CheckpointRow
    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def cursor(self) -> Cursor:
        stored = self.meta.get(CURSOR)
        # Checkpoints of Postgrad 0.1 were made after an epoch only and do not say more.
        return Cursor(epoch=self.checkpoint.epoch + 1) if stored is None else Cursor(**stored)

    @property
    def progress(self) -> JobProgress:
        return JobProgress.model_validate(self.meta[PROGRESS])


def find_resume_point(lease: Lease, home: Path) -> ResumePoint | None:
    """The newest recorded checkpoint whose files are what was written; None where the job starts from the beginning.

    A damaged one is passed over with a line in the log and, unless it is announced, removed. One after an epoch that is
    still to be announced takes all later ones with it, so that it is made again. Raises LeaseLost.
    """
    _drop_what_cannot_be_announced(lease, home)
    for row in _newest_first(lease):
        directory = home / row.path
        try:
            check_files(directory)
            return ResumePoint(row, *load_training_state(directory / TRAINING_STATE))
        except ModelInvalid as error:
            _tell(lease, row, error)
        if row.announced_at is None:
            discard(lease, home, [row.step])
    return None


def _drop_what_cannot_be_announced(lease: Lease, home: Path) -> None:
    rows = lease.store.all_checkpoints(lease.job_uuid)
    for row in unproven(rows):
        try:
            check_files(home / row.path)
        except ModelInvalid as error:
            _tell(lease, row, error)
            discard(lease, home, [each.step for each in rows if each.step >= row.step and each.announced_at is None])
            return


def _tell(lease: Lease, row: CheckpointRow, error: ModelInvalid) -> None:
    logger.warning("the checkpoint of step %d cannot be used: %s", row.step, error.message)
    lease.update(message=f"passed over a damaged checkpoint: {error.message}")


def _newest_first(lease: Lease) -> Sequence[CheckpointRow]:
    return lease.store.all_checkpoints(lease.job_uuid)[::-1]

"""Which of a job's checkpoints stay on disk. Rows go first, so that a crash in between leaves only a stray directory,
which the next clean-up removes. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from post_training.checkpoints.layout import checkpoints_root, clean_partial, remove_tree
from post_training.checkpoints.retention import SavedCheckpoint, removable
from post_training.checkpoints.space import release_reserve
from post_training.jobs.tables import CheckpointRow
from post_training.worker.lease import Lease


def unproven(rows: Sequence[CheckpointRow]) -> list[CheckpointRow]:
    """The checkpoints after an epoch that are not announced yet: at most one, unless processes died. In their order."""
    return [row for row in rows if row.metrics is not None and row.announced_at is None]


def release_room(lease: Lease, home: Path) -> None:
    """Let the end of an attempt be stored, however full the disk is: see `hold_reserve`."""
    release_reserve(checkpoints_root(home, lease.job_uuid))


def clean(lease: Lease, home: Path) -> None:
    """Remove every directory that the store does not know. Raises LeaseLost, and then touches nothing."""
    lease.confirm()
    clean_partial(checkpoints_root(home, lease.job_uuid), lease.store.recorded_steps(lease.job_uuid))


def discard(lease: Lease, home: Path, steps: Collection[int]) -> None:
    """Remove checkpoints that are not announced: rows, then files. Raises LeaseLost."""
    if not steps:
        return
    lease.forget_checkpoints(steps)
    for step in steps:
        remove_tree(checkpoints_root(home, lease.job_uuid) / str(step))


def discard_unannounced(lease: Lease, home: Path) -> None:
    """Remove every checkpoint that no user can see, and whatever else the store does not know. Raises LeaseLost."""
    rows = lease.store.all_checkpoints(lease.job_uuid)
    discard(lease, home, [row.step for row in rows if row.announced_at is None])
    clean(lease, home)


def apply_retention(lease: Lease, home: Path, limit: int | None) -> None:
    """Remove what `removable` says. Raises LeaseLost."""
    rows = lease.store.all_checkpoints(lease.job_uuid)
    saved = [SavedCheckpoint(row.step, row.announced_at is not None, row.metrics) for row in rows]
    discard(lease, home, removable(saved, limit))

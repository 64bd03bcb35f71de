"""From a recorded checkpoint to a model that users see: verified by another process, then announced, in order of steps.

Training goes on while a checkpoint is verified. Nobody relies on one that is not announced but the job itself, which
would resume from it, verified or not; and a job is not completed before all of its epochs' checkpoints are announced.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sqlalchemy.orm import Session

from apis.common import check_identifier
from apis.post_training.models import JobProgress
from post_training.catalog.models import ModelCatalog, checkpoint_identifier
from post_training.checkpoints.layout import TRAINING_STATE, check_files
from post_training.checkpoints.state import load_meta
from post_training.checkpoints.verification import Verifier, VerifyReport
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.training.interruption import Interrupted
from post_training.worker.keeping import apply_retention, unproven
from post_training.worker.lease import Lease
from post_training.worker.setup import lora_settings

logger = logging.getLogger(__name__)

AHEAD_SECONDS = 30.0
"""So long before a checkpoint is due the verifying process is started: what it imports takes seconds."""
IDLE_SECONDS = 300.0
"""With more time than this to the next one it is ended meanwhile, for its memory."""
_LOOK_SECONDS = 0.1


class Announcer:
    """Verifies one job's checkpoints, one at a time, and announces each once it is verified.

    A context: at its end nothing verifies any more. A checkpoint that is pending then is announced by a later attempt.
    """

    def __init__(self, lease: Lease, spec: JobSpec, home: Path) -> None:
        self._lease = lease
        self._spec = spec
        self._home = home
        base_dir, lora = Path(spec.model.base_dir), lora_settings(spec.algorithm_config)
        self._verifier = Verifier(base_dir, spec.worker.model_module, asdict(lora), full=spec.trains_all)
        self._pending: tuple[CheckpointRow, Future[VerifyReport]] | None = None

    def __enter__(self) -> Announcer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pending = None
        self._verifier.close()

    def expect(self, seconds: float) -> None:
        """The next checkpoint is due in about so many seconds."""
        if seconds < AHEAD_SECONDS and self._pending is None:
            with suppress(OSError):  # it is tried again when it is needed
                self._verifier.prepare()
        elif seconds > IDLE_SECONDS and self._pending is None and self._verifier.started:
            self._verifier.rest()

    def begin(self, row: CheckpointRow, *, training: bool) -> None:
        """Begin to verify a recorded checkpoint; none may be pending.

        Args:
            training: whether training goes on meanwhile, on the same CPU; it then leaves this one thread.

        Raises:
            LeaseLost.
            InvalidField: the model id is too long.
        """
        assert self._pending is None
        message = f"checkpoint {checkpoint_id(self._spec, row)} written, verifying"
        self._lease.update(message=message)
        threads = 1 if training else torch.get_num_threads()
        self._pending = row, self._verifier.begin(self._home / row.path, threads)

    def settle(self) -> None:
        """Announce the pending checkpoint where it has been verified. Called between steps.

        Raises:
            CheckpointUnverified, OutOfMemory: as `Verifier.begin`; what was written does not compute what was trained.
            Conflict: its model id is taken.
            LeaseLost.
        """
        if self._pending is None or not self._pending[1].done():
            return
        (row, outcome), self._pending = self._pending, None
        self._announce(row, _measured(self._home / row.path, outcome.result()))
        apply_retention(self._lease, self._home, self._spec.training_config.save_total_limit)

    def wait(self, progress: JobProgress) -> None:
        """Wait until nothing is pending. Raises as `settle`, and Interrupted where told to stop meanwhile."""
        if self._pending is not None and not self._pending[1].done():
            progress.phase = "verify"
            self._lease.update(progress=progress)
        while self._pending is not None:
            if self._lease.should_stop():
                raise Interrupted
            self.settle()
            if self._pending is not None:
                wait([self._pending[1]], _LOOK_SECONDS)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is pending."""
        return self._pending is not None

    def must_wait(self) -> bool:
        """Whether memory is too short to verify beside training."""
        return not self._verifier.fits_beside_training()

    def _announce(self, row: CheckpointRow, verification: dict[str, Any]) -> None:
        if row.announced_at is not None:
            return
        self._lease.announce(
            row.step,
            checkpoint_id(self._spec, row),
            verification,
            lambda session, checkpoint: _register(session, self._lease, self._home, self._spec, checkpoint),
        )


def rescue(lease: Lease, spec: JobSpec, home: Path) -> None:
    """Announce what a job that is about to fail has saved and not announced, so that its work stays usable.

    These are the checkpoint of an epoch that was still being verified, and the newest one.

    Raises as `Announcer.wait`, and ModelInvalid where files are damaged; nothing where there is none that is new.
    """
    rows = lease.store.all_checkpoints(lease.job_uuid)
    # Inside an epoch there is an adapter, but no whole model.
    newest = [row for row in rows[-1:] if row.announced_at is None and row.metrics is None and not spec.trains_all]
    progress = JobProgress.model_validate(lease.store.get(lease.job_uuid).progress or {})
    with Announcer(lease, spec, home) as announcer:
        for row in [*unproven(rows), *newest]:
            check_files(home / row.path)
            announcer.begin(row, training=False)
            announcer.wait(progress)


def checkpoint_id(spec: JobSpec, row: CheckpointRow) -> str:
    """The model id of a checkpoint: `<model>-sft-<job>-<epoch>` after an epoch, `…-step<N>` inside one, `…-<name>` of a
    session.

    Raises:
        InvalidField: it would be longer than an id may be.
    """
    if row.name is not None:
        return session_id(spec, row.name)
    if row.metrics is not None:
        return checkpoint_identifier(spec.model.identifier, spec.job_uuid, row.epoch)
    return check_identifier(inside_id(spec, row.step), param="job_uuid")


def session_id(spec: JobSpec, name: str) -> str:
    """The model id of a session's checkpoint. Raises InvalidField where it is longer than an id may be."""
    return check_identifier(f"{spec.model.identifier}-sft-{spec.job_uuid}-{name}", param="name")


def inside_id(spec: JobSpec, step: int) -> str:
    """The name of a checkpoint inside an epoch, however long."""
    return f"{spec.model.identifier}-sft-{spec.job_uuid}-step{step}"


def _measured(directory: Path, report: VerifyReport) -> dict[str, Any]:
    """What was measured, and what the merge did."""
    meta = load_meta(directory / TRAINING_STATE)
    return report.model_dump() | ({"merge": meta["merge"]} if "merge" in meta else {})


def _register(session: Session, lease: Lease, home: Path, spec: JobSpec, row: CheckpointRow) -> None:
    assert row.identifier is not None  # it was just announced under it
    ModelCatalog(lease.store.database, home).add_checkpoint(
        session,
        identifier=row.identifier,
        job_uuid=row.job_uuid,
        model=spec.model.identifier,
        base_identifier=spec.model.base_identifier,
        epoch=row.epoch,
        step=row.step,
        directory=home / row.path,
        base_dir=Path(spec.model.base_dir),
        details={"verification": row.verification, "training_metrics": row.metrics},
    )

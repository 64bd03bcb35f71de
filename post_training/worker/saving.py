"""Checkpoints, from the trainer's memory to the disk and the store, and from there to an announced model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session
from torch import Tensor

from apis.common import check_identifier
from apis.post_training.models import JobProgress, PostTrainingMetric
from post_training.catalog.models import ModelCatalog, checkpoint_identifier
from post_training.checkpoints.export import merge, write_adapter
from post_training.checkpoints.layout import TRAINING_STATE, CheckpointWriter, Manifest, check_files
from post_training.checkpoints.model_card import Run, write_card
from post_training.checkpoints.space import CheckpointSize, FreeBytes, check_save, free_bytes
from post_training.checkpoints.state import load_training_state, save_training_state
from post_training.checkpoints.verify import verify_checkpoint
from post_training.jobs.database import now
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.training.interruption import Interrupted
from post_training.training.trainer import Trainer
from post_training.worker.keeping import apply_retention
from post_training.worker.lease import Lease
from post_training.worker.resume import Cursor, state_meta
from post_training.worker.setup import lora_settings

logger = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("postgrad", "torch", "torchtune", "transformers", "peft", "safetensors")
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of.

    Attributes:
        epoch: the one that `trainer` is in or has just ended.
        cursor: where a resumed run goes on.
        rng: states of the random generators there, as `rng_tensors` has them.
        metric: of the epoch that has ended; None inside one.
    """

    trainer: Trainer
    epoch: int
    cursor: Cursor
    progress: JobProgress
    rng: dict[str, Tensor]
    metric: PostTrainingMetric | None = None


class Saver:
    """Saves one job.

    Args:
        size: what its checkpoints take on disk.
        free: bytes that are free there.

    Attributes:
        newest: the step of the newest checkpoint that was saved or gone on from, 0 without one.
    """

    def __init__(
        self, lease: Lease, spec: JobSpec, home: Path, size: CheckpointSize, free: FreeBytes = free_bytes
    ) -> None:
        self._lease = lease
        self._spec = spec
        self._home = home
        self._size = size
        self._free = free
        self.newest = 0

    def save_inside(self, snapshot: Snapshot) -> None:
        """Write and record a checkpoint to resume from; it is not verified and nobody sees it.

        Raises:
            DiskFull, LeaseLost.
            ModelInvalid: a weight is not finite.
        """
        self._save(snapshot, self._size.inside, merged=False)
        self.prune()

    def save_epoch(self, snapshot: Snapshot) -> None:
        """Write and record the checkpoint of an epoch, have a separate process verify it, then announce it.

        Raises:
            CheckpointUnverified: what was written does not compute what was trained.
            Interrupted: told to stop while it was verified; what was written stays, to be announced later.
            DiskFull, LeaseLost, ModelInvalid.
        """
        self._save(snapshot, self._size.after, merged="merged" in self._spec.worker.export)
        self.announce(self._row(snapshot.trainer.step), snapshot.progress)

    def announce(self, row: CheckpointRow, progress: JobProgress) -> None:
        """Have a recorded checkpoint verified and announce it. Raises as `save_epoch`."""
        progress.phase = "verify"
        message = f"checkpoint {checkpoint_id(self._spec, row)} written, verifying"
        self._lease.update(progress=progress, message=message)
        announce(self._lease, self._spec, self._home, row)
        self.prune()

    def prune(self) -> None:
        apply_retention(self._lease, self._home, self._spec.training_config.save_total_limit)

    def _save(self, snapshot: Snapshot, needed: int, *, merged: bool) -> None:
        step = snapshot.trainer.step
        check_save(self._home, needed, step, self._free)
        self._lease.confirm()
        report = self._lease.store.get(self._lease.job_uuid).report
        directory = write_checkpoint(self._spec, self._home, snapshot, merged, lambda: self._make_way(step), report)
        path = directory.relative_to(self._home).as_posix()
        self._lease.record_checkpoint(lambda: _new_row(self._spec, snapshot, step, path))
        self.newest = step

    def _make_way(self, step: int) -> None:
        """Prove the lease, and that no row relies on a directory of this step.

        There may be one: an attempt that was stopped after an epoch's last step saved that step. A damaged checkpoint
        that is announced keeps its row, and gets the same bytes again.
        """
        self._lease.confirm()
        if step in self._lease.store.recorded_steps(self._lease.job_uuid):
            self._lease.forget_checkpoints([step])

    def _row(self, step: int) -> CheckpointRow:
        rows = self._lease.store.all_checkpoints(self._lease.job_uuid)
        return next(row for row in rows if row.step == step)


def announce(lease: Lease, spec: JobSpec, home: Path, row: CheckpointRow) -> None:
    """Verify a recorded checkpoint in a process of its own, then make it a model of its job.

    Raises:
        CheckpointUnverified, OutOfMemory: see `verify_checkpoint`.
        Interrupted: told to stop before it was verified.
        InvalidField, Conflict: the model id is too long, or taken.
        LeaseLost
    """
    identifier = checkpoint_id(spec, row)
    verification = _unless_stopped(lease, lambda: _verify(spec, home / row.path))
    if row.announced_at is None:
        lease.announce(
            row.step,
            identifier,
            verification,
            lambda session, checkpoint: _register(session, lease, home, spec, checkpoint),
        )


def rescue(lease: Lease, spec: JobSpec, home: Path) -> None:
    """Announce the newest checkpoint of a job that is about to fail, so that its work stays usable.

    Raises as `announce`, and ModelInvalid where its files are damaged; nothing where there is none that is new.
    """
    rows = lease.store.all_checkpoints(lease.job_uuid)
    if not rows or rows[-1].announced_at is not None:
        return
    newest = rows[-1]
    check_files(home / newest.path)
    lease.update(message=f"verifying checkpoint {checkpoint_id(spec, newest)}, the last before the failure")
    announce(lease, spec, home, newest)


def checkpoint_id(spec: JobSpec, row: CheckpointRow) -> str:
    """The model id of a checkpoint: `<model>-sft-<job>-<epoch>` after an epoch, `…-step<N>` inside one.

    Raises:
        InvalidField: it would be longer than an id may be.
    """
    if row.metrics is not None:
        return checkpoint_identifier(spec.model.identifier, spec.job_uuid, row.epoch)
    return check_identifier(_inside_id(spec, row.step), param="job_uuid")


def _inside_id(spec: JobSpec, step: int) -> str:
    return f"{spec.model.identifier}-sft-{spec.job_uuid}-step{step}"


def write_checkpoint(
    spec: JobSpec,
    home: Path,
    snapshot: Snapshot,
    merged: bool,
    confirm: Callable[[], None] = lambda: None,
    report: Mapping[str, Any] | None = None,
) -> Path:
    """Write a complete checkpoint directory and return it; after an epoch it has model cards.

    Args:
        confirm: see `CheckpointWriter.commit`.
        report: the job's, for the cards.

    Raises:
        DiskFull
        ModelInvalid: a weight is not finite.
    """
    trainer, base_dir = snapshot.trainer, Path(spec.model.base_dir)
    tensors, meta = trainer.state()
    adapter, config = trainer.model.peft_adapter(trainer.masters.snapshot())
    meta |= state_meta(snapshot.cursor, snapshot.progress)
    with CheckpointWriter(home, spec.job_uuid, trainer.step) as writer:
        write_adapter(writer.adapter, adapter, config, spec.model.base_identifier, base_dir)
        if merged:
            meta["merge"] = asdict(merge(base_dir, writer.adapter, writer.merged, spec.worker.merged_dtype))
        save_training_state(writer.training_state, {**tensors, **snapshot.rng}, meta)
        if snapshot.metric is not None:
            _write_cards(writer, merged, _card_run(spec, snapshot, report or {}, meta.get("merge")))
        return writer.commit(_manifest(spec, snapshot), confirm)


def _write_cards(writer: CheckpointWriter, merged: bool, run: Run) -> None:
    write_card(writer.adapter, "adapter", run)
    if merged:
        write_card(writer.merged, "merged", run)


def _card_run(spec: JobSpec, snapshot: Snapshot, report: Mapping[str, Any], merge: Mapping[str, Any] | None) -> Run:
    assert snapshot.metric is not None  # inside an epoch there is no card
    return Run(
        spec=spec,
        identifier=_identifier(spec, snapshot),
        step=snapshot.trainer.step,
        epoch=snapshot.epoch,
        metrics=snapshot.metric.model_dump(),
        report=report,
        merge=merge,
        versions=_versions(),
    )


def _identifier(spec: JobSpec, snapshot: Snapshot) -> str:
    if snapshot.metric is None:
        return _inside_id(spec, snapshot.trainer.step)
    return checkpoint_identifier(spec.model.identifier, spec.job_uuid, snapshot.epoch)


def _manifest(spec: JobSpec, snapshot: Snapshot) -> Manifest:
    step, metric = snapshot.trainer.step, snapshot.metric
    return Manifest(
        identifier=_identifier(spec, snapshot),
        job_uuid=spec.job_uuid,
        model=spec.model.identifier,
        base_model=spec.model.base_identifier,
        epoch=snapshot.epoch,
        step=step,
        created_at=now(),
        metrics=None if metric is None else metric.model_dump(),
        versions=_versions(),
    )


def _new_row(spec: JobSpec, snapshot: Snapshot, step: int, path: str) -> CheckpointRow:
    return CheckpointRow(
        job_uuid=spec.job_uuid,
        epoch=snapshot.epoch,
        step=step,
        path=path,
        created_at=now(),
        metrics=None if snapshot.metric is None else snapshot.metric.model_dump(),
    )


def _verify(spec: JobSpec, directory: Path) -> dict[str, Any]:
    """What was measured, and what the merge did."""
    report = verify_checkpoint(
        directory,
        Path(spec.model.base_dir),
        spec.worker.model_module,
        asdict(lora_settings(spec.algorithm_config)),
        threads=spec.worker.threads,
    )
    _, meta = load_training_state(directory / TRAINING_STATE)
    return report.model_dump() | ({"merge": meta["merge"]} if "merge" in meta else {})


def _unless_stopped(lease: Lease, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a thread and leave it behind when the lease says stop: then this process ends, and its children."""
    outcome: Future[dict[str, Any]] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="verification", daemon=True).start()
    while not outcome.done():
        if lease.should_stop():
            raise Interrupted
        wait([outcome], _LOOK_SECONDS)
    return outcome.result()


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


def _versions() -> dict[str, str]:
    found = {}
    for name in _RECORDED_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

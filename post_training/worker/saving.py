"""Checkpoints, from the trainer's memory to the disk and the store; `announcing.py` takes them on from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from apis.post_training.models import JobProgress, PostTrainingMetric
from post_training.catalog.models import checkpoint_identifier
from post_training.checkpoints.export import merge, write_adapter, write_whole
from post_training.checkpoints.layout import CheckpointWriter, Manifest
from post_training.checkpoints.model_card import Run, write_card
from post_training.checkpoints.space import CheckpointSize, FreeBytes, check_save, free_bytes
from post_training.checkpoints.state import save_training_state
from post_training.jobs.database import now
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.training.model import TrainsAll
from post_training.training.trainer import Trainer
from post_training.worker.announcing import Announcer, inside_id, session_id
from post_training.worker.keeping import apply_retention
from post_training.worker.lease import Lease
from post_training.worker.resume import CURSOR, PROGRESS, Cursor

_RECORDED_VERSIONS = ("postgrad", "torch", "torchtune", "transformers", "peft", "safetensors")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of.

    Attributes:
        epoch: the one that `trainer` is in or has just ended; 0 in a session.
        number: what its directory is called, which grows from checkpoint to checkpoint of a job: the optimizer step or,
            in a session, the number of the client's newest call.
        place: where a resumed run goes on, that JSON can hold; a job's is `Cursor`'s fields.
        rng: states of the random generators there, as `rng_tensors` has them.
        metric: of a checkpoint that is to be announced; None of one that is only there to resume from.
        name: a session's client's.
    """

    trainer: Trainer
    epoch: int
    number: int
    place: dict[str, Any]
    progress: JobProgress
    rng: dict[str, Tensor]
    metric: PostTrainingMetric | None = None
    name: str | None = None

    @classmethod
    def of_job(
        cls,
        trainer: Trainer,
        epoch: int,
        cursor: Cursor,
        progress: JobProgress,
        rng: dict[str, Tensor],
        metric: PostTrainingMetric | None = None,
    ) -> Snapshot:
        """Of a whole job, which goes on at `cursor`."""
        return cls(trainer, epoch, trainer.step, asdict(cursor), progress, rng, metric)


class Saver:
    """Saves one job.

    Args:
        size: what its checkpoints take on disk.
        announcer: what verifies and announces them.
        free: bytes that are free there.

    Attributes:
        announcer: as given.
        newest: the step of the newest checkpoint that was saved or gone on from, 0 without one.
    """

    def __init__(
        self,
        lease: Lease,
        spec: JobSpec,
        home: Path,
        size: CheckpointSize,
        announcer: Announcer,
        free: FreeBytes = free_bytes,
    ) -> None:
        self._lease = lease
        self._spec = spec
        self._home = home
        self._size = size
        self._free = free
        self.announcer = announcer
        self.newest = 0

    def save_inside(self, snapshot: Snapshot) -> None:
        """Write and record a checkpoint to resume from; it is not verified and nobody sees it.

        Raises:
            DiskFull, LeaseLost.
            ModelInvalid: a weight is not finite.
        """
        self._save(snapshot, self._size.inside, merged=False)
        self.prune()

    def save_epoch(self, snapshot: Snapshot, *, last: bool) -> None:
        """Write and record the checkpoint of an epoch and have it verified, to be announced by `announcer`.

        Args:
            last: no step follows, so that the verification may have the whole machine.

        Raises:
            CheckpointUnverified: the epoch before wrote what does not compute what was trained.
            Interrupted: told to stop while that was verified; what was written stays, to be announced later.
            DiskFull, LeaseLost, ModelInvalid, and as `Announcer.settle`.
        """
        self.announcer.wait(snapshot.progress)
        self.announce(self.save_named(snapshot), snapshot.progress, last=last)

    def save_named(self, snapshot: Snapshot) -> CheckpointRow:
        """Write and record a checkpoint that is to be announced, and return its row.

        Raises:
            DiskFull, LeaseLost, ModelInvalid.
        """
        whole = self._spec.trains_all or "merged" in self._spec.worker.export
        self._save(snapshot, self._size.after, merged=whole)
        return self._row(snapshot.number)

    def announce(self, row: CheckpointRow, progress: JobProgress, *, last: bool) -> None:
        """Have a recorded checkpoint verified and announced: meanwhile, where memory allows. Raises as `save_epoch`."""
        alone = last or self.announcer.must_wait()
        self.announcer.begin(row, training=not alone)
        if alone:
            self.announcer.wait(progress)

    def prune(self) -> None:
        apply_retention(self._lease, self._home, self._spec.training_config.save_total_limit)

    def _save(self, snapshot: Snapshot, needed: int, *, merged: bool) -> None:
        step = snapshot.number
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
        merged: whether with the whole model, which is all there is where every weight was trained.
        confirm: see `CheckpointWriter.commit`.
        report: the job's, for the cards.

    Raises:
        DiskFull
        ModelInvalid: a weight is not finite.
    """
    trainer, base_dir = snapshot.trainer, Path(spec.model.base_dir)
    tensors, meta = trainer.state()
    meta |= {CURSOR: snapshot.place, PROGRESS: snapshot.progress.model_dump()}
    with CheckpointWriter(home, spec.job_uuid, snapshot.number) as writer:
        if spec.trains_all:
            _write_all_weights(writer, spec, trainer, whole=merged)
        else:
            adapter, config = trainer.model.peft_adapter(trainer.masters.snapshot())
            write_adapter(writer.adapter, adapter, config, spec.model.base_identifier, base_dir)
        if merged and not spec.trains_all:
            meta["merge"] = asdict(merge(base_dir, writer.adapter, writer.merged, spec.worker.merged_dtype))
        save_training_state(writer.training_state, {**tensors, **snapshot.rng}, meta)
        if snapshot.metric is not None:
            _write_cards(writer, merged, _card_run(spec, snapshot, report or {}, meta.get("merge")))
        return writer.commit(_manifest(spec, snapshot), confirm)


def _write_all_weights(writer: CheckpointWriter, spec: JobSpec, trainer: Trainer, *, whole: bool) -> None:
    """The model of which every weight is trained; inside an epoch the training state holds all there is to resume."""
    if whole:
        assert isinstance(trainer.model, TrainsAll)  # its provider accepted the job
        tensors = trainer.model.whole_model(trainer.masters.snapshot())
        write_whole(writer.merged, tensors, Path(spec.model.base_dir), spec.worker.merged_dtype)


def _write_cards(writer: CheckpointWriter, merged: bool, run: Run) -> None:
    if not run.spec.trains_all:
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
    if snapshot.name is not None:
        return session_id(spec, snapshot.name)
    if snapshot.metric is None:
        return inside_id(spec, snapshot.number)
    return checkpoint_identifier(spec.model.identifier, spec.job_uuid, snapshot.epoch)


def _manifest(spec: JobSpec, snapshot: Snapshot) -> Manifest:
    metric = snapshot.metric
    return Manifest(
        identifier=_identifier(spec, snapshot),
        job_uuid=spec.job_uuid,
        model=spec.model.identifier,
        base_model=spec.model.base_identifier,
        epoch=snapshot.epoch,
        step=snapshot.number,
        created_at=now(),
        metrics=None if metric is None else metric.model_dump(),
        versions=_versions(),
    )


def _new_row(spec: JobSpec, snapshot: Snapshot, step: int, path: str) -> CheckpointRow:
    return CheckpointRow(
        job_uuid=spec.job_uuid,
        name=snapshot.name,
        epoch=snapshot.epoch,
        step=step,
        path=path,
        created_at=now(),
        metrics=_metrics(snapshot),
    )


def _metrics(snapshot: Snapshot) -> dict[str, Any] | None:
    if snapshot.metric is None:
        return None
    # A session's row is numbered by calls, which may be more than updates.
    return snapshot.metric.model_dump() | ({"global_steps": snapshot.trainer.step} if snapshot.name else {})


def _versions() -> dict[str, str]:
    found = {}
    for name in _RECORDED_VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""A job: epochs of steps, a validation and a verified checkpoint after each, every number stored as it comes."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apis.errors import NothingTrained, PostgradError
from apis.post_training.models import JobStatus, PostTrainingMetric
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.space import CheckpointSize, FreeBytes, check_start, free_bytes
from post_training.checkpoints.state import restore_rng, rng_tensors
from post_training.data.batching import micro_batches
from post_training.data.job_rows import JobRows
from post_training.data.planning import plan_epoch, validation_rows
from post_training.data.preflight import TokenizedDataset
from post_training.estimates import estimates
from post_training.training.interruption import Interrupted
from post_training.training.trainer import StepResult, Trainer
from post_training.worker.announcing import Announcer
from post_training.worker.epochs import SaveTimer, stops_early
from post_training.worker.keeping import discard_unannounced, release_room, unproven
from post_training.worker.lease import Lease
from post_training.worker.loading import checkpoint_size, load, trainer_of
from post_training.worker.progress import ProgressReport, describe_validation, finite, not_finite, peak_bytes
from post_training.worker.resume import Cursor, find_resume_point
from post_training.worker.saving import Saver, Snapshot

logger = logging.getLogger(__name__)


def run_job(
    lease: Lease, data: JobRows, home: Path, *, device: str | None = None, free: FreeBytes = free_bytes
) -> None:
    """Run the job to its end, from its newest checkpoint where it has one, and store it as completed.

    Args:
        data: as `read_rows` read it.
        device: PyTorch's name of the one to run on; None: what an earlier attempt used, else what the spec says.
        free: bytes that are free on the file system of a path.

    Raises:
        Interrupted: the lease said stop. On a stop by the server the newest step was saved.
        PostgradError: why the job failed.
    """
    JobLoop(lease, data, home, device, free).run()


class JobLoop:
    def __init__(self, lease: Lease, data: JobRows, home: Path, device: str | None, free: FreeBytes) -> None:
        self._lease = lease
        self._data = data
        self._spec = data.spec
        self._home = home
        self._device = device
        self._free = free
        self._report = ProgressReport(lease)
        self._cursor = Cursor()
        self._timer = SaveTimer(self._spec.training_config.save_every_n_steps)
        self._rng: dict[str, Tensor] = {}

    def run(self) -> None:
        started = time.monotonic()
        trainer = self._load(self._data.report)
        with Announcer(self._lease, self._spec, self._home) as announcer:
            self._train(trainer, self._saver(trainer, announcer))
        if self._report.progress.supervised_tokens_seen == 0:
            raise NothingTrained("no optimizer step was made: no step had a supervised token and a finite gradient")
        self._lease.update(message=f"trained {trainer.step} steps in {time.monotonic() - started:.1f} s")
        self._complete()

    def _train(self, trainer: Trainer, saver: Saver) -> None:
        self._resume(trainer, saver)
        try:
            while self._cursor.epoch < self._spec.n_epochs and not self._stopped_early():
                self._run_epoch(trainer, saver)
            saver.announcer.wait(self._report.progress)
        except Interrupted:
            if self._lease.stop_reason == "stopped":
                self._save_before_stop(trainer, saver)
            raise

    # -- before the first step -----------------------------------------------------------------------------------

    def _load(self, report: dict[str, Any]) -> Trainer:
        self._report.phase("load_model")
        self._check_space(checkpoint_size(self._spec))
        total: int = report["total_steps"]
        loaded = load(self._lease, self._spec, self._device, report["tokens_per_epoch"] * report["n_epochs"])
        self._report.progress.total_steps = total
        costs = estimates(self._lease.store.database, self._spec, report, loaded.device.partition(":")[0])
        self._lease.update(
            progress=self._report.progress,
            resources=loaded.resources,
            report={**costs, **loaded.facts},
            message=f"{loaded.message}, {total} steps in all",
        )
        return trainer_of(self._lease, self._spec, loaded.model, total)

    def _saver(self, trainer: Trainer, announcer: Announcer) -> Saver:
        size = checkpoint_size(self._spec, trainer)
        self._check_space(size)
        return Saver(self._lease, self._spec, self._home, size, announcer, self._free)

    def _check_space(self, size: CheckpointSize) -> None:
        """Raises DiskFull unless the checkpoints that are still to come have room."""
        config = self._spec.training_config
        rows = self._lease.store.all_checkpoints(self._lease.job_uuid)
        after = sum(row.metrics is not None for row in rows)
        # Those that are kept, and one that is written before the oldest of them goes.
        most_inside = (config.save_total_limit or 1) + 1
        check_start(
            self._home,
            size,
            after=max(0, self._spec.n_epochs - after),
            inside=max(1, most_inside - (len(rows) - after)),
            free=self._free,
        )

    def _resume(self, trainer: Trainer, saver: Saver) -> None:
        """Continue from the newest usable checkpoint; announce what an earlier attempt did not come to announce."""
        torch.manual_seed(self._spec.seed)  # the first attempt's; a later one takes the checkpoint's states
        self._rng = rng_tensors()
        self._timer.restart()
        found = find_resume_point(self._lease, self._home)
        if found is None:
            return
        trainer.load_state(found.tensors, found.meta)
        restore_rng(found.tensors)
        self._rng = rng_tensors()
        self._cursor = found.cursor
        self._report.progress = found.progress
        saver.newest = trainer.step
        where = f"epoch {self._cursor.epoch}, {self._cursor.position} steps of it done"
        message = f"resumed from the checkpoint of step {trainer.step}: {where}"
        self._lease.update(progress=self._report.progress, message=message)
        for row in unproven(self._lease.store.all_checkpoints(self._lease.job_uuid)):
            saver.announcer.wait(self._report.progress)
            saver.announce(row, self._report.progress, last=self._cursor.epoch >= self._spec.n_epochs)

    # -- an epoch ------------------------------------------------------------------------------------------------

    def _run_epoch(self, trainer: Trainer, saver: Saver) -> None:
        data, cursor = self._data, self._cursor
        self._report.progress.epoch = cursor.epoch
        self._report.phase("train")
        plan = plan_epoch(self._spec, data.training.rows, cursor.epoch)
        for indices in plan[cursor.position :]:
            rows = [data.training.rows[index] for index in indices]
            result = trainer.train_step(list(micro_batches(rows, self._spec.worker.micro_batch_tokens)))
            self._finish_step(trainer, result)
            saver.announcer.settle()
            saver.announcer.expect(self._report.seconds_for(len(plan) - cursor.position))
            if cursor.position < len(plan) and self._timer.due(trainer.step):
                self._save_inside(trainer, saver)
        if cursor.weight == 0.0:
            raise not_finite(f"every step of epoch {cursor.epoch}")
        metric = PostTrainingMetric(epoch=cursor.epoch, train_loss=cursor.loss / cursor.weight)
        if data.validation is not None:
            self._validate(trainer, data.validation, metric)
        self._save_epoch(trainer, saver, metric)

    def _stopped_early(self) -> bool:
        """Told from the epochs' stored losses, so that a resumed job stops where an undisturbed one does."""
        losses = self._validation_losses()
        patience = self._spec.training_config.early_stopping_patience
        if not stops_early(losses, patience):
            return False
        self._lease.update(
            report={"stopped_early_after_epoch": len(losses) - 1},
            message=f"stopped early: the validation loss has not improved for {patience} epochs",
        )
        return True

    def _validation_losses(self) -> list[float | None]:
        """One for each epoch that has ended, whether or not its checkpoint is verified yet."""
        rows = self._lease.store.all_checkpoints(self._lease.job_uuid)
        return [row.metrics.get("validation_loss") for row in rows if row.metrics is not None]

    def _finish_step(self, trainer: Trainer, result: StepResult) -> None:
        self._cursor.advance(result)
        self._rng = rng_tensors()  # a step that is interrupted may have drawn from the generators
        self._report.step(result, self._cursor.epoch, trainer.model.device)
        self._cursor.check(result.step)

    def _validate(self, trainer: Trainer, data: TokenizedDataset, metric: PostTrainingMetric) -> None:
        self._report.phase("validation")
        rows = validation_rows(self._spec, data.rows)
        result = trainer.validate(micro_batches(rows, self._spec.worker.micro_batch_tokens))
        metric.validation_loss, metric.perplexity = finite(result.loss), finite(result.perplexity)
        metric.token_accuracy = finite(result.token_accuracy)
        self._lease.update(message=describe_validation(metric.epoch, result))

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_epoch(self, trainer: Trainer, saver: Saver, metric: PostTrainingMetric) -> None:
        self._report.phase("checkpoint")
        cursor, rng = self._cursor.next_epoch(), rng_tensors()
        snapshot = Snapshot.of_job(trainer, metric.epoch, cursor, self._report.progress, rng, metric)
        saver.save_epoch(snapshot, last=self._is_last(metric))
        self._cursor, self._rng = cursor, rng
        self._timer.restart()
        self._lease.update(resources={"peak_memory_bytes": peak_bytes()})

    def _is_last(self, metric: PostTrainingMetric) -> bool:
        """Whether no epoch follows the one with this result, which is not stored yet."""
        losses = [*self._validation_losses()[: metric.epoch], metric.validation_loss]
        stops = stops_early(losses, self._spec.training_config.early_stopping_patience)
        return stops or metric.epoch + 1 >= self._spec.n_epochs

    def _save_inside(self, trainer: Trainer, saver: Saver) -> None:
        self._report.phase("checkpoint")
        began = time.monotonic()
        saver.save_inside(self._snapshot(trainer))
        seconds = time.monotonic() - began
        self._timer.saved(seconds)
        self._lease.update(message=f"saved step {trainer.step} in {seconds:.1f} s")
        self._report.phase("train")

    def _save_before_stop(self, trainer: Trainer, saver: Saver) -> None:
        """Save the newest step before the job goes back to the queue. Without it the job goes on from an older one."""
        if trainer.step == saver.newest:
            return
        try:
            saver.save_inside(self._snapshot(trainer))
        except (PostgradError, OSError) as error:
            if self._lease.stop_reason == "lost":
                raise
            logger.warning("step %d could not be saved before the stop: %s", trainer.step, error)

    def _snapshot(self, trainer: Trainer) -> Snapshot:
        return Snapshot.of_job(trainer, self._cursor.epoch, self._cursor, self._report.progress, self._rng)

    def _complete(self) -> None:
        """End the job as completed and, in the same transaction, let `<model>-sft-<epoch>` resolve to it."""
        release_room(self._lease, self._home)
        discard_unannounced(self._lease, self._home)
        catalog = ModelCatalog(self._lease.store.database, self._home)
        job_uuid = self._lease.job_uuid
        self._lease.finish(
            JobStatus.completed, "all epochs done", also=lambda session: catalog.mark_job_completed(session, job_uuid)
        )

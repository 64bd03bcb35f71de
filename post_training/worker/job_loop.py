"""A job: epochs of steps, a validation and a verified checkpoint after each, every number stored as it comes."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apis.errors import DataInvalid, NonFiniteLoss, NothingTrained
from apis.post_training.models import JobProgress, PostTrainingMetric
from post_training.checkpoints.layout import TRAINING_STATE
from post_training.checkpoints.state import load_training_state, masters_of, restore_rng
from post_training.data.batching import epoch_order, micro_batches, steps
from post_training.data.preflight import TokenizedDataset
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec
from post_training.training.interruption import Interrupted
from post_training.training.trainer import StepResult, Trainer, ValidationResult
from post_training.worker import setup
from post_training.worker.lease import Lease
from post_training.worker.saving import mark_completed, save_checkpoint

MAX_SKIPPED_IN_A_ROW = 10
"""Non-finite steps are skipped one by one; this many in a row mean the run has diverged."""
SPEED_WINDOW_STEPS = 20


def run_job(lease: Lease, spec: JobSpec, home: Path) -> None:
    """Run the job to its end and store it as completed.

    Raises:
        Interrupted: the lease said stop.
        PostgradError: why the job failed.
    """
    JobLoop(lease, spec, home).run()


class JobLoop:
    def __init__(self, lease: Lease, spec: JobSpec, home: Path) -> None:
        self._lease = lease
        self._spec = spec
        self._home = home
        self._progress = JobProgress()
        self._earlier = lease.store.get(lease.job_uuid)
        self._recent: list[tuple[float, int]] = []
        self._skipped_in_a_row = 0

    def run(self) -> None:
        started = time.monotonic()
        rows, validation = self._tokenize()
        trainer = self._load(rows)
        first_epoch = self._resume(trainer)
        for epoch in range(first_epoch, self._spec.training_config.n_epochs):
            self._run_epoch(trainer, rows, validation, epoch)
        if self._progress.supervised_tokens_seen == 0:
            raise NothingTrained("no optimizer step was made: no step had a supervised token and a finite gradient")
        self._lease.update(message=f"trained {trainer.step} steps in {time.monotonic() - started:.1f} s")
        mark_completed(self._lease, self._home)

    # -- before the first step -----------------------------------------------------------------------------------

    def _tokenize(self) -> tuple[TokenizedDataset, TokenizedDataset | None]:
        self._phase("tokenize")
        training = self._read(self._spec.dataset, "dataset_id")
        validation = self._read(self._spec.validation, "validation_dataset_id") if self._spec.validation else None
        self._report_data("dataset", training)
        if validation is not None:
            self._report_data("validation_dataset", validation)
        self._lease.update(report={"max_seq_len": setup.max_seq_len(self._spec)})
        return training, validation

    def _read(self, reference: DatasetRef, field: str) -> TokenizedDataset:
        """Raises DataInvalid, naming the data set."""
        try:
            return setup.tokenize(self._spec, reference)
        except DataInvalid as error:
            raise DataInvalid(
                f"data set {reference.dataset_id!r}, {error.message}", param=f"training_config.data_config.{field}"
            ) from error

    def _report_data(self, name: str, data: TokenizedDataset) -> None:
        """Store what was read. Raises DataInvalid where an earlier attempt of this job read something else."""
        digest = setup.fingerprint(data.rows)
        before = self._earlier.report or {}
        if before.get(name, {}).get("fingerprint", digest) != digest:
            raise DataInvalid(f"the rows of {name} have changed since the job began; submit it again under another id")
        report = {name: {**data.report, "fingerprint": digest}}
        self._lease.update(report=report, message=f"tokenized {len(data.rows)} rows of {name}")

    def _load(self, data: TokenizedDataset) -> Trainer:
        self._phase("load_model")
        config = self._spec.training_config
        # What the first attempt ran with: another number of threads could change the last bit of a sum.
        first = self._earlier.resources or {}
        device = setup.choose_device(first.get("device", self._spec.worker.device))
        threads = setup.set_threads(first.get("threads", self._spec.worker.threads))
        model = setup.load_model(self._spec, device)
        total = self._count_steps(data.rows)
        optim = setup.optim_settings(config.optimizer_config, total, config.max_grad_norm)
        trainable = sum(parameter.numel() for parameter in model.adapter_parameters().values())
        self._progress.total_steps = total
        self._lease.update(
            progress=self._progress,
            resources={"device": device, "threads": threads, "dtype": config.dtype or "bf16"},
            report={
                "seed": self._spec.seed,
                "total_steps": total,
                "warmup_steps": optim.warmup_steps,
                "trainable_parameters": trainable,
            },
            message=f"loaded {self._spec.model.identifier}: {trainable:,} trainable parameters, {total} steps in all",
        )
        trainer = Trainer(model, optim, should_stop=self._lease.should_stop)
        self._take_exact_adapter(trainer)
        return trainer

    def _take_exact_adapter(self, trainer: Trainer) -> None:
        """Go on from a checkpoint of ours with its fp32 masters: what a bf16 model loaded of them is rounded."""
        if self._spec.model.adapter_dir is None:
            return
        state = Path(self._spec.model.adapter_dir).parent / TRAINING_STATE
        if state.is_dir():
            trainer.masters.load(masters_of(load_training_state(state)[0]))

    def _resume(self, trainer: Trainer) -> int:
        """Continue from the newest checkpoint of an earlier attempt; returns the first epoch to run."""
        found = self._lease.store.checkpoints(self._lease.job_uuid)
        if not found:
            return 0
        newest = found[-1]
        tensors, meta = load_training_state(self._home / newest.path / TRAINING_STATE)
        trainer.load_state(tensors, meta)
        restore_rng(tensors)
        self._progress = JobProgress.model_validate(meta["progress"])
        self._lease.update(message=f"resumed after epoch {newest.epoch}, step {newest.step}")
        return newest.epoch + 1

    def _count_steps(self, rows: Sequence[TokenizedRow]) -> int:
        config = self._spec.training_config
        if config.data_config is not None and config.data_config.packed:
            # How rows fill packs depends on their order, which differs from epoch to epoch.
            return sum(len(self._plan(rows, epoch)) for epoch in range(config.n_epochs))
        return config.n_epochs * len(self._plan(rows, 0))

    def _plan(self, rows: Sequence[TokenizedRow], epoch: int) -> list[list[int]]:
        """The row indices of each optimizer step of an epoch."""
        data = self._spec.training_config.data_config
        assert data is not None  # no job is accepted without
        return steps(
            [len(row.tokens) for row in rows],
            order=epoch_order(len(rows), data.shuffle, self._spec.seed, epoch),
            batch_size=data.batch_size,
            accumulation=self._spec.training_config.gradient_accumulation_steps,
            packed=bool(data.packed),
            max_seq_len=setup.max_seq_len(self._spec),
            max_steps=self._spec.training_config.max_steps_per_epoch,
        )

    # -- an epoch ------------------------------------------------------------------------------------------------

    def _run_epoch(
        self, trainer: Trainer, data: TokenizedDataset, validation: TokenizedDataset | None, epoch: int
    ) -> None:
        loss = weight = 0.0
        self._progress.epoch = epoch
        self._phase("train")
        for indices in self._plan(data.rows, epoch):
            rows = [data.rows[index] for index in indices]
            result = trainer.train_step(list(micro_batches(rows, self._spec.worker.micro_batch_tokens)))
            self._record(result)
            if not result.skipped:
                loss, weight = loss + result.loss * result.weight, weight + result.weight
        if weight == 0.0:
            raise NothingTrained(f"epoch {epoch} made no optimizer step with a finite loss and gradient")
        metric = PostTrainingMetric(epoch=epoch, train_loss=loss / weight)
        if validation is not None:
            self._validate(trainer, validation, metric)
        self._save(trainer, epoch, metric)

    def _record(self, result: StepResult) -> None:
        progress = self._progress
        progress.step = result.step
        progress.lr = result.lr
        progress.tokens_seen += result.tokens
        if result.skipped:
            self._count_skipped(result)
        else:
            self._skipped_in_a_row = 0
            progress.loss = result.loss
            progress.supervised_tokens_seen += result.supervised_tokens
        self._estimate(result)
        self._lease.update(progress=progress, message=_describe(result, progress), data=_numbers(result))
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteLoss(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a loss or gradient that is not finite, the last at step "
                f"{result.step}; lower optimizer_config.lr or look at the data"
            )

    def _count_skipped(self, result: StepResult) -> None:
        self._progress.skipped_steps += 1
        # A step without supervised tokens is no sign of divergence.
        self._skipped_in_a_row += 1 if result.supervised_tokens else 0

    def _estimate(self, result: StepResult) -> None:
        """Speed over the newest steps, so that a slow first one does not colour the whole run."""
        self._recent = [*self._recent, (result.seconds, result.tokens)][-SPEED_WINDOW_STEPS:]
        seconds = sum(s for s, _ in self._recent)
        self._progress.tokens_per_second = sum(t for _, t in self._recent) / seconds
        if self._progress.total_steps is not None:
            left = self._progress.total_steps - result.step
            self._progress.seconds_left = left * seconds / len(self._recent)

    def _validate(self, trainer: Trainer, data: TokenizedDataset, metric: PostTrainingMetric) -> None:
        self._phase("validation")
        result = trainer.validate(micro_batches(self._validation_rows(data), self._spec.worker.micro_batch_tokens))
        metric.validation_loss, metric.perplexity = _finite(result.loss), _finite(result.perplexity)
        self._lease.update(message=_describe_validation(metric.epoch, result))

    def _validation_rows(self, data: TokenizedDataset) -> Sequence[TokenizedRow]:
        """All rows, or those of the first `max_validation_steps` batches."""
        config = self._spec.training_config
        if config.max_validation_steps is None or config.data_config is None:
            return data.rows
        return data.rows[: config.max_validation_steps * config.data_config.batch_size]

    def _save(self, trainer: Trainer, epoch: int, metric: PostTrainingMetric) -> None:
        self._phase("checkpoint")
        if self._lease.should_stop():
            raise Interrupted
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        save_checkpoint(self._lease, self._spec, self._home, trainer, epoch, metric, self._progress)
        self._lease.update(resources={"peak_memory_bytes": peak})

    def _phase(self, name: str) -> None:
        if self._lease.should_stop():
            raise Interrupted
        self._progress.phase = name
        self._lease.update(progress=self._progress)


def _finite(value: float) -> float | None:
    """JSON has no NaN; a validation set without a supervised token has no loss."""
    return value if math.isfinite(value) else None


def _describe(result: StepResult, progress: JobProgress) -> str:
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    if result.skipped:
        why = "loss or gradient not finite" if result.supervised_tokens else "no supervised token"
        return f"step {result.step}{total} skipped: {why}"
    return (
        f"step {result.step}{total} loss {result.loss:.4f} lr {result.lr:.3g} grad norm {result.grad_norm:.3g} "
        f"{result.tokens / result.seconds:.0f} tokens/s"
    )


def _numbers(result: StepResult) -> dict[str, Any]:
    return {
        "step": result.step,
        "loss": _finite(result.loss),
        "lr": result.lr,
        "grad_norm": _finite(result.grad_norm),
        "tokens": result.tokens,
        "supervised_tokens": result.supervised_tokens,
        "seconds": result.seconds,
        "skipped": result.skipped,
    }


def _describe_validation(epoch: int, result: ValidationResult) -> str:
    return (
        f"validation after epoch {epoch}: loss {result.loss:.4f} perplexity {result.perplexity:.3f} "
        f"token accuracy {result.token_accuracy:.3f} over {result.supervised_tokens} tokens"
    )

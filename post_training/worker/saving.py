"""A checkpoint from the trainer's memory to an announced model: write, verify, record."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from apis.post_training.models import JobProgress, JobStatus, PostTrainingMetric
from post_training.catalog.models import ModelCatalog, checkpoint_identifier
from post_training.checkpoints.export import merge, write_adapter
from post_training.checkpoints.layout import CheckpointWriter, Manifest
from post_training.checkpoints.state import rng_tensors, save_training_state
from post_training.checkpoints.verify import verify_checkpoint
from post_training.jobs.database import now
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.training.trainer import Trainer
from post_training.worker.lease import Lease
from post_training.worker.setup import lora_settings

_RECORDED_VERSIONS = ("postgrad", "torch", "torchtune", "transformers", "peft", "safetensors")


def save_checkpoint(
    lease: Lease,
    spec: JobSpec,
    home: Path,
    trainer: Trainer,
    epoch: int,
    metric: PostTrainingMetric,
    progress: JobProgress,
) -> None:
    """Write the checkpoint of an epoch, have a separate process verify it, then announce it.

    Raises:
        CheckpointUnverified: what was written does not compute what was trained; what is not announced goes when the
            attempt ends.
        DiskFull, LeaseLost.
    """
    identifier = checkpoint_identifier(spec.model.identifier, spec.job_uuid, epoch)
    directory, merged = _write(spec, home, trainer, epoch, metric, progress, identifier)
    progress.phase = "verify"
    lease.update(progress=progress, message=f"checkpoint {identifier} written, verifying")
    verification = {**_verify(spec, directory), **merged}

    def row() -> CheckpointRow:
        return CheckpointRow(
            job_uuid=spec.job_uuid,
            identifier=identifier,
            epoch=epoch,
            step=trainer.step,
            path=directory.relative_to(home).as_posix(),
            created_at=now(),
            metrics=metric.model_dump(),
            verification=verification,
        )

    lease.announce(row, lambda session: _register(session, lease, home, spec, row()))


def _verify(spec: JobSpec, directory: Path) -> dict[str, Any]:
    report = verify_checkpoint(
        directory,
        Path(spec.model.base_dir),
        spec.worker.model_module,
        asdict(lora_settings(spec.algorithm_config)),
        threads=spec.worker.threads,
    )
    return report.model_dump()


def mark_completed(lease: Lease, home: Path) -> None:
    """End the job as completed and, in the same transaction, let `<model>-sft-<epoch>` resolve to it."""
    catalog = ModelCatalog(lease.store.database, home)
    lease.finish(
        JobStatus.completed, "all epochs done", also=lambda session: catalog.mark_job_completed(session, lease.job_uuid)
    )


def _write(
    spec: JobSpec,
    home: Path,
    trainer: Trainer,
    epoch: int,
    metric: PostTrainingMetric,
    progress: JobProgress,
    identifier: str,
) -> tuple[Path, dict[str, Any]]:
    base_dir = Path(spec.model.base_dir)
    tensors, meta = trainer.state()
    adapter, config = trainer.model.peft_adapter(trainer.masters.snapshot())
    merged: dict[str, Any] = {}
    with CheckpointWriter(home, spec.job_uuid, trainer.step) as writer:
        write_adapter(writer.adapter, adapter, config, spec.model.base_identifier, base_dir)
        if "merged" in spec.worker.export:
            merged = {"merge": asdict(merge(base_dir, writer.adapter, writer.merged, spec.worker.merged_dtype))}
        state = {**meta, "epoch": epoch, "progress": progress.model_dump()}
        save_training_state(writer.training_state, {**tensors, **rng_tensors()}, state)
        manifest = Manifest(
            identifier=identifier,
            job_uuid=spec.job_uuid,
            model=spec.model.identifier,
            base_model=spec.model.base_identifier,
            epoch=epoch,
            step=trainer.step,
            created_at=now(),
            metrics=metric.model_dump(),
            versions=_versions(),
        )
        return writer.commit(manifest), merged


def _register(session: Session, lease: Lease, home: Path, spec: JobSpec, row: CheckpointRow) -> None:
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

"""Rows of the job store as the API tells them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from apis.post_training.models import (
    Checkpoint,
    JobEvent,
    JobEventKind,
    JobStatus,
    PostTrainingMetric,
    StepMetric,
)
from post_training.jobs.tables import CheckpointRow, EventRow, JobRow


def checkpoint_of(row: CheckpointRow) -> Checkpoint:
    """An announced checkpoint."""
    assert row.identifier is not None  # announced ones have one
    return Checkpoint(
        identifier=row.identifier,
        created_at=row.created_at,
        epoch=row.epoch,
        step=row.step,
        post_training_job_id=row.job_uuid,
        path=row.path,
        training_metrics=PostTrainingMetric.model_validate(row.metrics) if row.metrics else None,
    )


def event_of(row: EventRow) -> JobEvent:
    kind = JobEventKind(row.kind)
    return JobEvent(id=row.id, at=row.at, kind=kind, message=row.message, step=row.step, data=row.data)


def end_of(job: JobRow, last_id: int) -> JobEvent:
    """What a stream says last about a job that has ended.

    Args:
        last_id: of the last event before it.
    """
    data: dict[str, Any] = {"job_uuid": job.job_uuid, "status": job.status, "error": job.error}
    at = job.completed_at or job.moved_at
    return JobEvent(id=last_id, at=at, kind=JobEventKind.end, message=JobStatus(job.status).value, data=data)


def metric_of(row: EventRow) -> StepMetric:
    return StepMetric.model_validate({"at": row.at, **(row.data or {}), "step": row.step})


def log_line(at: datetime, message: str) -> str:
    """A line of a job's log: its time in UTC, then the message."""
    return f"{at:%Y-%m-%d %H:%M:%S} {message}"

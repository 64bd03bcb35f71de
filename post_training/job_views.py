"""Rows of the job store as the API tells them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from apis.post_training.models import (
    Checkpoint,
    JobError,
    JobEvent,
    JobEventKind,
    JobProgress,
    JobStatus,
    JobSummary,
    ListPostTrainingJobsResponse,
    PostTrainingJobStatusResponse,
    PostTrainingMetric,
    StepMetric,
)
from post_training.checkpoints.retention import SavedCheckpoint, best_step
from post_training.jobs.leases import max_attempts_of
from post_training.jobs.listing import JobPage
from post_training.jobs.tables import CheckpointRow, EventRow, JobRow
from post_training.jobs.waiting import Waiting


def list_of(page: JobPage, *, paged: bool) -> ListPostTrainingJobsResponse:
    """A list of jobs. `paged`: it was asked for as a page, and says whether there are more."""
    data = [
        JobSummary(job_uuid=job.job_uuid, status=job.status, model=job.model, created_at=job.scheduled_at)
        for job in page.jobs
    ]
    if not paged:
        return ListPostTrainingJobsResponse(data=data)
    return ListPostTrainingJobsResponse(data=data, has_more=page.next is not None, next=page.next)


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
        verification=row.verification,
    )


def status_of(
    job: JobRow, checkpoints: Sequence[CheckpointRow], waiting: Waiting, max_attempts: int
) -> PostTrainingJobStatusResponse:
    """All that is told of a job.

    Args:
        checkpoints: announced ones.
        max_attempts: of a job that does not say its own.
    """
    return PostTrainingJobStatusResponse(
        job_uuid=job.job_uuid,
        status=JobStatus(job.status),
        scheduled_at=job.scheduled_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        resources_allocated=job.resources,
        checkpoints=[checkpoint_of(row) for row in checkpoints],
        best_checkpoint=best_of(checkpoints),
        model=job.model,
        provider_id=job.provider_id,
        attempt=job.attempt,
        max_attempts=max_attempts_of(job, max_attempts),
        lost_attempts=job.lost_attempts,
        queue_position=waiting.position,
        waiting_reason=waiting.reason,
        progress=JobProgress.model_validate(job.progress) if job.progress else None,
        error=JobError.model_validate(job.error) if job.error else None,
        report=job.report,
    )


def best_of(rows: Sequence[CheckpointRow]) -> str | None:
    """The model id of the best of a job's announced checkpoints; None where none has a loss."""
    best = best_step([SavedCheckpoint(row.step, True, row.metrics) for row in rows])
    return next((row.identifier for row in rows if row.step == best), None)


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

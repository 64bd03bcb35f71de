"""The moves of a job between its states, within a caller's transaction. Nothing else changes a job's status."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from apis.errors import JobNotFound
from apis.post_training.models import JobError, JobStatus
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import check_transition
from post_training.jobs.step_events import pack_step
from post_training.jobs.tables import CheckpointRow, EventKind, EventRow, JobRow, LeaseRow, TransitionRow
from post_training.owners import own

_UNANNOUNCED = CheckpointRow.announced_at.is_(None)


def find_job(session: Session, job_uuid: str) -> JobRow:
    """Raises JobNotFound, also where the job is not the caller's."""
    job = session.scalar(select(JobRow).where(JobRow.job_uuid == job_uuid, own(JobRow.owned_by)))
    if job is None:
        raise _not_found(job_uuid)
    return job


def find_sequence(session: Session, job_uuid: str) -> int:
    """A job's number, without the rest of its row, which may be large. Raises JobNotFound as `find_job`."""
    sequence = session.scalar(select(JobRow.sequence).where(JobRow.job_uuid == job_uuid, own(JobRow.owned_by)))
    if sequence is None:
        raise _not_found(job_uuid)
    return sequence


def _not_found(job_uuid: str) -> JobNotFound:
    return JobNotFound(f"no job {job_uuid!r}; `postgrad post_training list` shows all", param="job_uuid")


def move(session: Session, job: JobRow, new: JobStatus, reason: str, at: datetime) -> None:
    """Move a job and record it. A cancelled one keeps no checkpoint that is only there to resume from.

    Args:
        at: now. A time before the job's last move (the clock was set back) is taken as that, so that the times of a job
            are in order.

    Raises:
        IllegalTransition
    """
    old = JobStatus(job.status)
    check_transition(old, new)
    job.status = new
    job.moved_at = max(at, job.moved_at)
    job.paused = False
    if new is JobStatus.in_progress:
        job.started_at = job.started_at or job.moved_at
    if new.terminal:
        job.completed_at = job.moved_at
    if new is JobStatus.cancelled:
        session.execute(delete(CheckpointRow).where(CheckpointRow.job_uuid == job.job_uuid, _UNANNOUNCED))
    record_move(session, job, old, reason)


def record_move(session: Session, job: JobRow, old: JobStatus | None, reason: str) -> None:
    """Store that the job came from `old` (None: it is new) into the state it has."""
    session.add(
        TransitionRow(
            job_uuid=job.job_uuid, old=old, new=job.status, at=job.moved_at, attempt=job.attempt, reason=_text(reason)
        )
    )
    data = {"status": job.status, "attempt": job.attempt, "reason": reason}
    add_event(session, job, job.moved_at, f"{job.status}: {reason}", EventKind.status, data=data)


def end_attempt(
    session: Session, job: JobRow, lease: LeaseRow, new: JobStatus, reason: str, at: datetime, error: JobError | None
) -> None:
    """End an attempt and its lease. A job that would go back to the queue but is to be cancelled is cancelled."""
    if new is JobStatus.scheduled and job.cancel_requested_at is not None:
        new, reason, error = JobStatus.cancelled, "cancelled while running", None
    if new is JobStatus.scheduled and not (job.resources or {}).get("device"):
        # Nothing ran there yet, so nothing ties the job to that kind of device.
        job.device_kind = JobSpec.model_validate(job.spec).device_kind
    job.error = error.model_dump() if error else None
    session.delete(lease)
    move(session, job, new, reason, at)


def add_event(
    session: Session,
    job: JobRow,
    at: datetime,
    message: str,
    kind: EventKind = EventKind.log,
    *,
    data: dict[str, object] | None = None,
) -> None:
    session.add(EventRow(job_sequence=job.sequence, at=at, kind=kind, text=_text(message), content=data))


def add_step(
    session: Session, job: JobRow, at: datetime, message: str, step: int, data: dict[str, Any], total_steps: int | None
) -> None:
    """Store what a job tells of an optimizer step."""
    row = EventRow(job_sequence=job.sequence, at=at, kind=EventKind.step, step=step)
    row.packed = pack_step(message, data, total_steps) if data.get("step") == step else None
    if row.packed is None:
        row.text, row.content = _text(message), data
    session.add(row)


def _text(message: str) -> str:
    # PostgreSQL's text holds no NUL, which a message may quote from somebody's data.
    return message.replace("\0", "\\0")

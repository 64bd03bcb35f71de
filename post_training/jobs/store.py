"""The one place where jobs are read and changed. Every method is one short transaction.

A worker proves with its owner token that a job is still its own; every write it makes raises LeaseLost otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, literal, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from apis.errors import Conflict, JobNotFound, QueueFull
from apis.post_training.models import JobError, JobProgress, JobStatus
from post_training.jobs.database import Database, now
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import LeaseLost, check_transition
from post_training.jobs.tables import CheckpointRow, EventRow, JobRow, TransitionRow


class JobStore:
    """Jobs, their transitions, events and checkpoints.

    Rows that methods return are detached snapshots.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime] = now) -> None:
        self.database = database
        self._clock = clock

    # -- asked by the service ------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, body_hash: str, *, max_queued: int) -> bool:
        """Commit a new job.

        Returns:
            False if the same job was there already (same id, same body).

        Raises:
            Conflict: the id belongs to another body.
            QueueFull: `max_queued` jobs wait already.
        """
        try:
            with self.database.session() as session:
                if self._same_job(session, spec.job_uuid, body_hash):
                    return False
                _check_checkpoint_ids(session, spec)
                self._check_room(session, max_queued)
                job = JobRow(
                    job_uuid=spec.job_uuid,
                    body_hash=body_hash,
                    provider_id=spec.provider_id,
                    model=spec.model.identifier,
                    spec=spec.model_dump(mode="json"),
                    status=JobStatus.scheduled,
                    scheduled_at=self._clock(),
                )
                session.add(job)
                session.flush()
                self._record(session, job, None, JobStatus.scheduled, "submitted")
            return True
        except IntegrityError:
            # Two transactions inserted the same id at once (possible where the store lets writers overlap).
            if not self.find_submitted(spec.job_uuid, body_hash):
                raise
            return False

    def find_submitted(self, job_uuid: str, body_hash: str) -> bool:
        """Whether this very job was accepted before. Raises Conflict where the id belongs to another body."""
        with self.database.reading() as session:
            return self._same_job(session, job_uuid, body_hash)

    def get(self, job_uuid: str) -> JobRow:
        """Raises JobNotFound."""
        with self.database.reading() as session:
            return _job(session, job_uuid)

    def all(self) -> Sequence[JobRow]:
        """Every job, oldest first."""
        with self.database.reading() as session:
            return session.scalars(select(JobRow).order_by(JobRow.sequence)).all()

    def checkpoints(self, job_uuid: str) -> Sequence[CheckpointRow]:
        """Announced checkpoints by step."""
        with self.database.reading() as session:
            query = select(CheckpointRow).where(CheckpointRow.job_uuid == job_uuid).order_by(CheckpointRow.step)
            return session.scalars(query).all()

    def announced_steps(self, job_uuid: str) -> frozenset[int]:
        return frozenset(row.step for row in self.checkpoints(job_uuid))

    def events(self, job_uuid: str, after: int, limit: int = 1000) -> Sequence[EventRow]:
        """Events with an id greater than `after`, in order. Raises JobNotFound."""
        with self.database.reading() as session:
            _job(session, job_uuid)
            query = select(EventRow).where(EventRow.job_uuid == job_uuid, EventRow.id > after)
            return session.scalars(query.order_by(EventRow.id).limit(limit)).all()

    def transitions(self, job_uuid: str) -> Sequence[TransitionRow]:
        with self.database.reading() as session:
            query = select(TransitionRow).where(TransitionRow.job_uuid == job_uuid).order_by(TransitionRow.id)
            return session.scalars(query).all()

    def queue_position(self, job: JobRow) -> int | None:
        """How many jobs are ahead in the queue, or None if it does not wait."""
        if job.status != JobStatus.scheduled:
            return None
        with self.database.reading() as session:
            query = select(func.count()).where(
                JobRow.status == JobStatus.scheduled,
                JobRow.provider_id == job.provider_id,
                JobRow.sequence < job.sequence,
            )
            return session.scalar(query) or 0

    def request_cancel(self, job_uuid: str) -> None:
        """Cancel a waiting job now, ask a running one to stop, leave a finished one alone. Raises JobNotFound."""
        with self.database.session() as session:
            job = _job(session, job_uuid, lock=True)
            if job.status == JobStatus.scheduled:
                self._move(session, job, JobStatus.cancelled, "cancelled while waiting")
            elif job.status == JobStatus.in_progress and job.cancel_requested_at is None:
                job.cancel_requested_at = self._clock()
                session.add(EventRow(job_uuid=job_uuid, at=self._clock(), message="cancel requested"))

    # -- asked by the scheduler ----------------------------------------------------------------------------------

    def claim(self, provider_id: str) -> JobRow | None:
        """Take the oldest waiting job of a provider: in_progress, a new attempt, a new owner token."""
        with self.database.session() as session:
            query = (
                select(JobRow)
                .where(JobRow.status == JobStatus.scheduled, JobRow.provider_id == provider_id)
                .order_by(JobRow.sequence)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            job = session.scalar(query)
            if job is None:
                return None
            job.attempt += 1
            job.owner = secrets.token_hex(16)
            job.heartbeat_at = self._clock()
            job.started_at = job.started_at or self._clock()
            job.progress = None  # an earlier attempt's; this one says where it goes on
            self._move(session, job, JobStatus.in_progress, f"attempt {job.attempt} claimed")
            return job

    def running(self, provider_id: str) -> Sequence[JobRow]:
        with self.database.reading() as session:
            query = select(JobRow).where(JobRow.status == JobStatus.in_progress, JobRow.provider_id == provider_id)
            return session.scalars(query).all()

    def stale(self, provider_id: str, lease_seconds: float) -> Sequence[JobRow]:
        """Running jobs whose worker has not been heard of for `lease_seconds`."""
        limit = self._clock() - timedelta(seconds=lease_seconds)
        return [job for job in self.running(provider_id) if job.heartbeat_at is None or job.heartbeat_at < limit]

    def end(self, job_uuid: str, owner: str | None, status: JobStatus, reason: str, error: JobError | None) -> bool:
        """End an attempt from outside its worker, if `owner` still holds it.

        Returns:
            Whether it did; False when the worker ended the job first or another one owns it now.
        """
        try:
            with self.database.session() as session:
                self._finish(session, _owned(session, job_uuid, owner), status, reason, error)
            return True
        except LeaseLost:
            return False

    # -- asked by the worker -------------------------------------------------------------------------------------

    def heartbeat(self, job_uuid: str, owner: str) -> bool:
        """Say that the worker lives. Returns whether it should stop. Raises LeaseLost."""
        with self.database.session() as session:
            job = _owned(session, job_uuid, owner)
            job.heartbeat_at = self._clock()
            return job.cancel_requested_at is not None

    def update(
        self,
        job_uuid: str,
        owner: str,
        *,
        progress: JobProgress | None = None,
        report: dict[str, Any] | None = None,
        resources: dict[str, Any] | None = None,
        message: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Store what is given and leave the rest; `message` and `data` become one event. Raises LeaseLost."""
        with self.database.session() as session:
            job = _owned(session, job_uuid, owner)
            job.heartbeat_at = self._clock()
            if progress is not None:
                job.progress = progress.model_dump(mode="json")
            if report is not None:
                job.report = {**(job.report or {}), **report}
            if resources is not None:
                job.resources = {**(job.resources or {}), **resources}
            if message is not None:
                session.add(EventRow(job_uuid=job_uuid, at=self._clock(), message=message, data=data))

    def announce_checkpoint(self, owner: str, checkpoint: CheckpointRow, register: Callable[[Session], None]) -> None:
        """Record a verified checkpoint and, in the same transaction, whatever `register` adds. Raises LeaseLost."""
        with self.database.session() as session:
            _owned(session, checkpoint.job_uuid, owner)
            session.add(checkpoint)
            message = f"checkpoint {checkpoint.identifier} verified"
            session.add(EventRow(job_uuid=checkpoint.job_uuid, at=self._clock(), message=message))
            register(session)

    def finish(
        self,
        job_uuid: str,
        owner: str,
        status: JobStatus,
        reason: str,
        *,
        error: JobError | None = None,
        also: Callable[[Session], None] | None = None,
    ) -> None:
        """End the attempt with a result, and `also` do something in the same transaction. Raises LeaseLost."""
        with self.database.session() as session:
            self._finish(session, _owned(session, job_uuid, owner), status, reason, error)
            if also is not None:
                also(session)

    # -- within a transaction ------------------------------------------------------------------------------------

    def _same_job(self, session: Session, job_uuid: str, body_hash: str) -> bool:
        found = session.scalar(select(JobRow).where(JobRow.job_uuid == job_uuid))
        if found is None:
            return False
        if found.body_hash != body_hash:
            raise Conflict(
                f"job {job_uuid!r} already exists with another request; choose another job_uuid", param="job_uuid"
            )
        return True

    def _check_room(self, session: Session, max_queued: int) -> None:
        waiting = session.scalar(select(func.count()).where(JobRow.status == JobStatus.scheduled)) or 0
        if waiting >= max_queued:
            raise QueueFull(f"{waiting} jobs wait already, the limit is {max_queued}; try again later")

    def _finish(self, session: Session, job: JobRow, status: JobStatus, reason: str, error: JobError | None) -> None:
        if status is JobStatus.scheduled and job.cancel_requested_at is not None:
            status, reason = JobStatus.cancelled, "cancelled while running"
        job.error = error.model_dump() if error else None
        job.owner = None
        self._move(session, job, status, reason)

    def _move(self, session: Session, job: JobRow, new: JobStatus, reason: str) -> None:
        old = JobStatus(job.status)
        check_transition(old, new)
        job.status = new
        if new.terminal:
            job.completed_at = self._clock()
        self._record(session, job, old, new, reason)

    def _record(self, session: Session, job: JobRow, old: JobStatus | None, new: JobStatus, reason: str) -> None:
        at = self._clock()
        session.add(TransitionRow(job_uuid=job.job_uuid, old=old, new=new, at=at, attempt=job.attempt, reason=reason))
        session.add(EventRow(job_uuid=job.job_uuid, at=at, message=f"{new}: {reason}"))


def _job(session: Session, job_uuid: str, *, lock: bool = False) -> JobRow:
    """`lock` keeps other writers off the row until the transaction ends (on SQLite a writer is alone anyway)."""
    query = select(JobRow).where(JobRow.job_uuid == job_uuid)
    job = session.scalar(query.with_for_update() if lock else query)
    if job is None:
        raise JobNotFound(f"no job {job_uuid!r}; `postgrad post_training list` shows all", param="job_uuid")
    return job


def _check_checkpoint_ids(session: Session, spec: JobSpec) -> None:
    """Refuse a job whose checkpoints would be called as another's: model `m-sft-a` with job `b`, `m` with `a-sft-b`."""
    model, job_uuid = spec.model.identifier, spec.job_uuid
    prefix = literal(model + "-sft-" + job_uuid)
    query = select(JobRow.job_uuid).where(JobRow.model + "-sft-" + JobRow.job_uuid == prefix)
    if (other := session.scalar(query.limit(1))) is not None:
        raise Conflict(
            f"checkpoints of {model!r} in job {job_uuid!r} would be called as those of job {other!r}; "
            "choose another job_uuid",
            param="job_uuid",
        )


def _owned(session: Session, job_uuid: str, owner: str | None) -> JobRow:
    job = _job(session, job_uuid, lock=True)
    if owner is None or job.owner != owner or job.status != JobStatus.in_progress:
        raise LeaseLost(f"job {job_uuid!r} is no longer this worker's")
    return job

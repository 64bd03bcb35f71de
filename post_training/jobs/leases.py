"""Leases: who runs which job on which slot, and everything that may only be written by whoever does.

A claim makes an owner token. Every write of a worker carries it and raises LeaseLost once the lease is gone or
another's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from apis.errors import JobFailure, PostgradError, WorkerDied
from apis.post_training.models import JobError, JobProgress, JobStatus
from post_training.jobs.database import Database, now
from post_training.jobs.devices import Slot
from post_training.jobs.moves import add_event, add_step, end_attempt, find_job, move
from post_training.jobs.queue import oldest_waiting
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import LeaseLost
from post_training.jobs.tables import CheckpointRow, EventKind, JobRow, LeaseRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """A job that was just taken: its spec, the token of the lease, where it runs."""

    job_uuid: str
    owner: str
    slot: Slot
    spec: JobSpec


@dataclass(frozen=True)
class HeldLease:
    """A lease as a scheduler sees it."""

    job_uuid: str
    owner: str
    host: str
    slot: str
    pid: int | None
    process_started: str | None
    beats: int
    cancel_requested: bool


Outcome = tuple[JobStatus, str, JobError | None]
"""How an attempt ends: the job's new status, the reason, the error of a failed one."""


class Leases:
    """The leases of one store. Every method is one short transaction."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] = now) -> None:
        self._database = database
        self._clock = clock

    # -- a scheduler's -------------------------------------------------------------------------------------------

    def held(self) -> Sequence[HeldLease]:
        """All leases there are."""
        with self._database.reading() as session:
            query = select(LeaseRow, JobRow.cancel_requested_at).join(JobRow, JobRow.job_uuid == LeaseRow.job_uuid)
            return [_held(lease, cancel is not None) for lease, cancel in session.execute(query)]

    def claim(self, host: str, slots: Sequence[Slot], provider_ids: Collection[str]) -> Claim | None:
        """Take the oldest waiting job that one of the free `slots` can run.

        A job that can't run now keeps none behind it waiting. None where there is no such job or slot.
        """
        with self._database.reading() as session:
            # Asked several times a second: without a job for these slots no writer's lock is taken.
            if oldest_waiting(session, provider_ids, {slot.kind for slot in slots}) is None:
                return None
        with self._database.session() as session:
            taken = set(session.scalars(select(LeaseRow.slot).where(LeaseRow.host == host)))
            free = [slot for slot in slots if slot.name not in taken]
            kinds = {slot.kind for slot in free}
            while (sequence := oldest_waiting(session, provider_ids, kinds)) is not None:
                job = session.get_one(JobRow, sequence)
                spec = self._readable(session, job)
                if spec is not None:
                    slot = next(slot for slot in free if job.device_kind in (None, slot.kind))
                    return self._take(session, job, spec, host, slot)
            return None

    def _readable(self, session: Session, job: JobRow) -> JobSpec | None:
        """A job's spec; None where it cannot be read, and then the job fails rather than hold up all behind it."""
        try:
            return JobSpec.model_validate(job.spec)
        except ValidationError as fault:
            error = JobFailure(
                "the stored job cannot be read by this version of Postgrad, most likely because a newer one accepted "
                "it: run that version, or submit the job again under another id"
            )
            logger.error("job %s: its stored spec cannot be read: %s", job.job_uuid, fault.errors()[0]["msg"])
            job.error = JobError(code=error.code, message=error.message).model_dump()
            move(session, job, JobStatus.failed, error.message, self._clock())
            session.flush()
            return None

    def _take(self, session: Session, job: JobRow, spec: JobSpec, host: str, slot: Slot) -> Claim:
        at = self._clock()
        job.attempt += 1
        job.device_kind = slot.kind
        job.progress = None  # an earlier attempt's; this one says where it goes on
        owner = secrets.token_hex(16)
        session.add(LeaseRow(job_uuid=job.job_uuid, owner=owner, host=host, slot=slot.name, beats=0, claimed_at=at))
        move(session, job, JobStatus.in_progress, f"attempt {job.attempt} claimed on {slot.name}", at)
        return Claim(job.job_uuid, owner, slot, spec)

    def give_back(self, job_uuid: str, owner: str, reason: str) -> bool:
        """Back to the queue, through no fault of the job. False where the lease had ended already."""
        return self._end(job_uuid, owner, lambda _session, _job: (JobStatus.scheduled, reason, None))

    def cancelled(self, job_uuid: str, owner: str, reason: str) -> bool:
        """End an attempt that did not follow a cancel. False where the lease had ended already."""
        return self._end(job_uuid, owner, lambda _session, _job: (JobStatus.cancelled, reason, None))

    def failed(self, job_uuid: str, owner: str, error: PostgradError) -> bool:
        """Fail a job from outside its worker. False where the lease had ended already."""
        told = JobError(code=error.code, message=error.message, param=error.param)
        return self._end(
            job_uuid, owner, lambda _session, _job: (JobStatus.failed, f"{error.code}: {error.message}", told)
        )

    def lost(self, job_uuid: str, owner: str, reason: str, max_attempts: int) -> bool:
        """End an attempt that has no result: back to the queue, or failed after too many of them.

        Args:
            max_attempts: of a job that does not say its own.

        Returns:
            False where the lease had ended already.
        """

        def outcome(session: Session, job: JobRow) -> Outcome:
            job.lost_attempts += 1
            limit = max_attempts_of(job, max_attempts)
            if job.lost_attempts < limit or job.cancel_requested_at is not None:
                return JobStatus.scheduled, reason, None
            return JobStatus.failed, reason, _worker_died(session, job, reason, limit)

        return self._end(job_uuid, owner, outcome)

    def _end(self, job_uuid: str, owner: str, outcome: Callable[[Session, JobRow], Outcome]) -> bool:
        try:
            with self._database.session() as session:
                job, lease = _owned(session, job_uuid, owner)
                new, reason, error = outcome(session, job)
                end_attempt(session, job, lease, new, reason, self._clock(), error)
            return True
        except LeaseLost:
            return False

    # -- a worker's: each raises LeaseLost -----------------------------------------------------------------------

    def started(self, job_uuid: str, owner: str, pid: int, process_started: str | None) -> None:
        """Say which process the worker is."""
        with self._database.session() as session:
            _job, lease = _owned(session, job_uuid, owner)
            lease.pid, lease.process_started = pid, process_started

    def look(self, job_uuid: str, owner: str) -> bool:
        """Whether the job is to be cancelled. Writes nothing."""
        with self._database.reading() as session:
            return _owned(session, job_uuid, owner)[0].cancel_requested_at is not None

    def beat(self, job_uuid: str, owner: str) -> bool:
        """Say that the worker lives. Returns whether the job is to be cancelled."""
        with self._database.session() as session:
            job, lease = _owned(session, job_uuid, owner)
            lease.beats += 1
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
        step: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Store what is given and leave the rest. A `message` becomes an event; with `step`, that step's numbers."""
        with self._database.session() as session:
            job, lease = _owned(session, job_uuid, owner)
            lease.beats += 1
            if progress is not None:
                job.progress = progress.model_dump(mode="json")
            if report is not None:
                job.report = {**(job.report or {}), **report}
            if resources is not None:
                job.resources = {**(job.resources or {}), **resources}
            if message is not None and step is None:
                add_event(session, job, self._at(job), message, data=data)
            elif message is not None and step is not None:
                add_step(session, job, self._at(job), message, step, data or {}, progress and progress.total_steps)

    def record_checkpoint(self, owner: str, checkpoint: CheckpointRow) -> None:
        """Record a complete directory that is not announced. The same again is a no-op."""
        with self._database.session() as session:
            job, _lease = _owned(session, checkpoint.job_uuid, owner)
            if _checkpoint(session, checkpoint.job_uuid, checkpoint.step) is None:
                session.add(checkpoint)
                job.lost_attempts = 0

    def announce(
        self,
        job_uuid: str,
        owner: str,
        step: int,
        identifier: str,
        verification: dict[str, Any] | None,
        register: Callable[[Session, CheckpointRow], None],
    ) -> None:
        """Make a recorded checkpoint a model and, in the same transaction, whatever `register` adds."""
        with self._database.session() as session:
            job, _lease = _owned(session, job_uuid, owner)
            checkpoint = _checkpoint(session, job_uuid, step)
            if checkpoint is None:
                raise LeaseLost(f"the checkpoint of step {step} was removed by someone else")
            checkpoint.identifier, checkpoint.verification = identifier, verification
            checkpoint.announced_at = at = self._at(job)
            data: dict[str, object] = {"identifier": identifier, "epoch": checkpoint.epoch, "step": step}
            add_event(session, job, at, f"checkpoint {identifier} verified", EventKind.checkpoint, data=data)
            register(session, checkpoint)

    def forget_checkpoints(self, job_uuid: str, owner: str, steps: Collection[int]) -> None:
        """Drop the rows of checkpoints that were never announced; their directories may go afterwards."""
        with self._database.session() as session:
            _owned(session, job_uuid, owner)
            session.execute(
                delete(CheckpointRow).where(
                    CheckpointRow.job_uuid == job_uuid,
                    CheckpointRow.step.in_(steps),
                    CheckpointRow.announced_at.is_(None),
                )
            )

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
        """End the attempt with a result, and `also` do something in the same transaction."""
        with self._database.session() as session:
            job, lease = _owned(session, job_uuid, owner)
            end_attempt(session, job, lease, status, reason, self._clock(), error)
            if also is not None:
                also(session)

    def _at(self, job: JobRow) -> datetime:
        return max(self._clock(), job.moved_at)


def max_attempts_of(job: JobRow, default: int) -> int:
    """The limit a job says itself, else `default`."""
    own = job.spec["training_config"].get("max_attempts")
    return own if isinstance(own, int) else default


def _worker_died(session: Session, job: JobRow, reason: str, attempts: int) -> JobError:
    many = "one attempt" if attempts == 1 else f"{attempts} attempts in a row"
    query = select(CheckpointRow).where(CheckpointRow.job_uuid == job.job_uuid, CheckpointRow.announced_at.is_(None))
    left = session.scalars(query.order_by(CheckpointRow.step.desc()).limit(1)).first()
    # Nobody verified it, so it is no model; but it may be days of work.
    kept = f"; its checkpoint of step {left.step} is kept under {left.path} in the state folder" if left else ""
    message = f"{reason}; {many} ended without a new checkpoint{kept}: look at the job's log, then submit it again"
    error = WorkerDied(f"{message} under another id")
    return JobError(code=error.code, message=error.message)


def _owned(session: Session, job_uuid: str, owner: str) -> tuple[JobRow, LeaseRow]:
    lease = session.get(LeaseRow, job_uuid)
    if lease is None or lease.owner != owner:
        raise LeaseLost(f"job {job_uuid!r} is no longer this worker's")
    return find_job(session, job_uuid), lease


def _checkpoint(session: Session, job_uuid: str, step: int) -> CheckpointRow | None:
    query = select(CheckpointRow).where(CheckpointRow.job_uuid == job_uuid, CheckpointRow.step == step)
    return session.scalar(query)


def _held(lease: LeaseRow, cancel_requested: bool) -> HeldLease:
    return HeldLease(
        lease.job_uuid,
        lease.owner,
        lease.host,
        lease.slot,
        lease.pid,
        lease.process_started,
        lease.beats,
        cancel_requested,
    )

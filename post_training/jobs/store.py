"""Jobs as those see them who ask for them: submit, look, cancel, delete. Every method is one short transaction.

What a scheduler and a worker write is in `leases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime

from sqlalchemy import func, select, true
from sqlalchemy.orm import Session

from apis.errors import Conflict, QueueFull
from apis.post_training.models import JobStatus, ListOrder
from post_training.jobs.database import Database, now
from post_training.jobs.listing import JobHead, JobPage, read_page
from post_training.jobs.moves import add_event, find_job, find_sequence, move, record_move
from post_training.jobs.queue import count_ahead, count_waiting
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow, EventRow, JobRow, TransitionRow
from post_training.owners import current_caller, is_own, own

_SFT = "-sft-"


class JobStore:
    """Jobs, their transitions, events and checkpoints.

    Rows that methods return are detached snapshots.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime] = now) -> None:
        self.database = database
        self.clock = clock

    # -- asking for a job ----------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec, body_hash: str, *, max_queued: int) -> bool:
        """Commit a new job.

        Returns:
            False if the same job was there already (same id, same body).

        Raises:
            Conflict: the id belongs to another body.
            QueueFull: `max_queued` jobs wait already.
        """
        with self.database.session() as session:
            if _same_job(session, spec.job_uuid, body_hash):
                return False
            _check_checkpoint_ids(session, spec)
            _check_room(session, max_queued)
            at = self.clock()
            job = JobRow(
                job_uuid=spec.job_uuid,
                body_hash=body_hash,
                provider_id=spec.provider_id,
                model=spec.model.identifier,
                owned_by=current_caller().owner,
                is_session=spec.session is not None,
                spec=spec.model_dump(mode="json"),
                status=JobStatus.scheduled,
                device_kind=spec.device_kind,
                attempt=0,
                lost_attempts=0,
                scheduled_at=at,
                moved_at=at,
            )
            session.add(job)
            session.flush()
            record_move(session, job, None, "submitted")
        return True

    def check_new(self, spec: JobSpec) -> None:
        """Raises Conflict where `submit` would because of other jobs; the room in the queue is not looked at."""
        with self.database.reading() as session:
            _check_checkpoint_ids(session, spec)

    def find_submitted(self, job_uuid: str, body_hash: str) -> bool:
        """Whether this very job was accepted before. Raises Conflict where the id belongs to another body."""
        with self.database.reading() as session:
            return _same_job(session, job_uuid, body_hash)

    def request_cancel(self, job_uuid: str) -> bool:
        """Cancel a waiting job now, ask a running one to stop, leave a finished one alone.

        Returns:
            Whether the job was cancelled by this call; its partial files may go then.

        Raises:
            JobNotFound
        """
        with self.database.session() as session:
            job = find_job(session, job_uuid)
            if job.status == JobStatus.scheduled:
                move(session, job, JobStatus.cancelled, "cancelled while waiting", self.clock())
            elif job.status == JobStatus.in_progress and job.cancel_requested_at is None:
                job.cancel_requested_at = at = max(self.clock(), job.moved_at)
                add_event(session, job, at, "cancel requested")
                return False
            return job.status == JobStatus.cancelled

    def request_completion(self, job_uuid: str) -> None:
        """Ask a session to end with success. A session that waits does so once it has a device again.

        Raises:
            JobNotFound
            Conflict: it has ended otherwise.
        """
        with self.database.session() as session:
            job = find_job(session, job_uuid)
            status = JobStatus(job.status)
            if status.terminal and status is not JobStatus.completed:
                raise Conflict(f"session {job_uuid!r} is {status} and cannot be completed", param="job_id")
            if status.terminal:
                return
            job.paused = False
            if job.completion_requested_at is None:
                job.completion_requested_at = at = max(self.clock(), job.moved_at)
                add_event(session, job, at, "completion requested")

    def resume(self, job_uuid: str) -> None:
        """Let a paused session wait for a device again; any other that has not ended is left alone.

        Raises:
            JobNotFound
            Conflict: it has ended.
        """
        with self.database.session() as session:
            job = find_job(session, job_uuid)
            if JobStatus(job.status).terminal:
                raise Conflict(f"session {job_uuid!r} is {job.status}: open another one", param="job_id")
            if job.paused:
                job.paused = False
                add_event(session, job, max(self.clock(), job.moved_at), "resumed by its client")

    def sessions(self) -> Sequence[JobRow]:
        """The caller's sessions, oldest first."""
        with self.database.reading() as session:
            query = select(JobRow).where(JobRow.is_session == true(), own(JobRow.owned_by)).order_by(JobRow.sequence)
            return session.scalars(query).all()

    def durable_steps(self) -> dict[str, int]:
        """The newest checkpoint's step of each of the caller's sessions that has one."""
        newest = select(CheckpointRow.job_uuid, func.max(CheckpointRow.step)).join(
            JobRow, JobRow.job_uuid == CheckpointRow.job_uuid
        )
        newest = newest.where(JobRow.is_session == true(), own(JobRow.owned_by)).group_by(CheckpointRow.job_uuid)
        with self.database.reading() as session:
            return {row[0]: row[1] for row in session.execute(newest)}

    def delete(self, job_uuid: str, also: Callable[[Session], None]) -> None:
        """Forget a job that has ended, and `also` do something in the same transaction.

        Raises:
            JobNotFound
            Conflict: it has not ended, or an unfinished job goes on from one of its checkpoints.
        """
        with self.database.session() as session:
            job = find_job(session, job_uuid)
            if not JobStatus(job.status).terminal:
                raise Conflict(f"job {job_uuid!r} is {job.status}: cancel it before deleting it", param="job_uuid")
            _refuse_needed(session, job_uuid)
            also(session)
            session.delete(job)

    # -- looking -------------------------------------------------------------------------------------------------

    def get(self, job_uuid: str) -> JobRow:
        """Raises JobNotFound."""
        with self.database.reading() as session:
            return find_job(session, job_uuid)

    def summaries(self) -> Sequence[JobHead]:
        """Every job of the caller's, oldest first."""
        return self.page().jobs

    def page(
        self,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> JobPage:
        """As `read_page`. Raises InvalidField."""
        with self.database.reading() as session:
            return read_page(session, limit=limit, after=after, order=order, status=status)

    def with_status(self, status: JobStatus) -> Sequence[str]:
        """The ids of all jobs that are so, oldest first."""
        with self.database.reading() as session:
            query = select(JobRow.job_uuid).where(JobRow.status == status).order_by(JobRow.sequence)
            return session.scalars(query).all()

    def checkpoints(self, job_uuid: str) -> Sequence[CheckpointRow]:
        """Announced checkpoints by step."""
        return [row for row in self.all_checkpoints(job_uuid) if row.announced_at is not None]

    def all_checkpoints(self, job_uuid: str) -> Sequence[CheckpointRow]:
        """Complete checkpoints by step, those included that are only there to resume from."""
        with self.database.reading() as session:
            query = select(CheckpointRow).where(CheckpointRow.job_uuid == job_uuid).order_by(CheckpointRow.step)
            return session.scalars(query).all()

    def recorded_steps(self, job_uuid: str) -> frozenset[int]:
        """The steps of all complete checkpoints."""
        return frozenset(row.step for row in self.all_checkpoints(job_uuid))

    def events(self, job_uuid: str, after: int, limit: int = 1000) -> Sequence[EventRow]:
        """Events with an id greater than `after`, in order. Raises JobNotFound."""
        with self.database.reading() as session:
            told = select(EventRow).where(EventRow.job_sequence == find_sequence(session, job_uuid))
            return session.scalars(told.where(EventRow.id > after).order_by(EventRow.id).limit(limit)).all()

    def newest_event(self, job_uuid: str) -> int:
        """The id of the newest event, read from indexes alone: for those who ask several times a second.

        Raises:
            JobNotFound
        """
        with self.database.reading() as session:
            told = EventRow.job_sequence == find_sequence(session, job_uuid)
            return session.scalar(select(func.max(EventRow.id)).where(told)) or 0

    def last_events(self, job_uuid: str, limit: int) -> Sequence[EventRow]:
        """The newest events, in order. Raises JobNotFound."""
        with self.database.reading() as session:
            told = select(EventRow).where(EventRow.job_sequence == find_sequence(session, job_uuid))
            return session.scalars(told.order_by(EventRow.id.desc()).limit(limit)).all()[::-1]

    def metrics(self, job_uuid: str, after_step: int, limit: int) -> Sequence[EventRow]:
        """What was last told of each step greater than `after_step`, by step. Raises JobNotFound."""
        with self.database.reading() as session:
            newest = (
                select(func.max(EventRow.id))
                .where(EventRow.job_sequence == find_sequence(session, job_uuid), EventRow.step > after_step)
                .group_by(EventRow.step)
                .order_by(EventRow.step)
                .limit(limit)
            )
            return session.scalars(select(EventRow).where(EventRow.id.in_(newest)).order_by(EventRow.step)).all()

    def transitions(self, job_uuid: str) -> Sequence[TransitionRow]:
        with self.database.reading() as session:
            query = select(TransitionRow).where(TransitionRow.job_uuid == job_uuid).order_by(TransitionRow.id)
            return session.scalars(query).all()

    def jobs_ahead(self, job: JobRow, provider_ids: Collection[str], kinds: Collection[str]) -> int:
        """How many waiting jobs come first to a device that `job` could run on.

        Args:
            provider_ids, kinds: whose jobs are run, and on which kinds of device; others take nobody's place.
        """
        mine = kinds if job.device_kind is None else [job.device_kind]
        with self.database.reading() as session:
            return count_ahead(session, job.sequence, provider_ids, mine)


def _same_job(session: Session, job_uuid: str, body_hash: str) -> bool:
    found = session.execute(select(JobRow.body_hash, JobRow.owned_by).where(JobRow.job_uuid == job_uuid)).one_or_none()
    if found is None:
        return False
    if not is_own(found.owned_by):
        raise Conflict(f"the id {job_uuid!r} is taken; choose another job_uuid", param="job_uuid")
    if found.body_hash != body_hash:
        raise Conflict(
            f"job {job_uuid!r} already exists with another request; choose another job_uuid", param="job_uuid"
        )
    return True


def _check_checkpoint_ids(session: Session, spec: JobSpec) -> None:
    """Refuse a job whose checkpoints would be called as another's: model `m-sft-a` with job `b`, `m` with `a-sft-b`."""
    model, job_uuid = spec.model.identifier, spec.job_uuid
    models = {job: name for name, job in _readings(f"{model}{_SFT}{job_uuid}")}
    # Each reading names one job, so few are looked up by id, however many there are.
    query = select(JobRow.job_uuid, JobRow.model, JobRow.owned_by).where(JobRow.job_uuid.in_(models))
    for other, others_model, owner in session.execute(query):
        if models[other] == others_model:
            whose = f"job {other!r}" if is_own(owner) else "another job"
            raise Conflict(
                f"checkpoints of {model!r} in job {job_uuid!r} would be called as those of {whose}; "
                "choose another job_uuid",
                param="job_uuid",
            )


def _readings(name: str) -> Iterator[tuple[str, str]]:
    """Every model and job whose checkpoints' ids begin with `name`: it is split at each place where it can be."""
    at = name.find(_SFT)
    while at >= 0:
        yield name[:at], name[at + len(_SFT) :]
        at = name.find(_SFT, at + 1)


def _check_room(session: Session, max_queued: int) -> None:
    waiting = count_waiting(session)
    if waiting >= max_queued:
        raise QueueFull(f"{waiting} jobs wait already and the limit is {max_queued}; submit again later")


def _refuse_needed(session: Session, job_uuid: str) -> None:
    ours = select(CheckpointRow.identifier).where(CheckpointRow.job_uuid == job_uuid)
    unfinished = JobRow.status.in_([JobStatus.scheduled, JobStatus.in_progress])
    query = select(JobRow.job_uuid, JobRow.owned_by).where(unfinished, JobRow.model.in_(ours)).limit(1)
    needing = session.execute(query).one_or_none()
    if needing is not None:
        which = f"job {needing.job_uuid!r}" if is_own(needing.owned_by) else "another job"
        raise Conflict(
            f"{which} goes on from a checkpoint of job {job_uuid!r}: wait for it or cancel it first",
            param="job_uuid",
        )

"""Which jobs this stack has sent to the other server, and whose they are: the provider's own table in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, String, UniqueConstraint, delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from apis.common import MAX_INTEGER
from apis.errors import Conflict, InvalidField, JobNotFound
from apis.post_training.models import ListOrder, PostTrainingJobStatusResponse
from post_training.jobs.database import Database, UtcDateTime, now
from post_training.owners import MAX_OWNER_LENGTH, current_caller, is_own, own

# No id has this character, so no id is taken for a place.
_PLACE = "~"


class _Tables(DeclarativeBase):
    pass


class RemoteJobRow(_Tables):
    """A job that the other server has accepted.

    Attributes:
        remote_uuid: its id there, which is another where that server chooses ids itself.
        ended: its status, whole, once it has ended; None before. Such a status never changes.
        owned_by: as `JobRow.owned_by`.
    """

    __tablename__ = "remote_stack_jobs"
    __table_args__ = (UniqueConstraint("provider_id", "job_uuid"),)

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    provider_id: Mapped[str] = mapped_column(String(255))
    job_uuid: Mapped[str] = mapped_column(String(255))
    remote_uuid: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    body_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    owned_by: Mapped[str | None] = mapped_column(String(MAX_OWNER_LENGTH), default=None)


@dataclass(frozen=True)
class Sent:
    """What there is to remember of an accepted job."""

    job_uuid: str
    remote_uuid: str
    model: str
    body_hash: str


class RemoteJobs:
    """The jobs of one provider. Its methods block: call them in threads."""

    def __init__(self, database: Database, provider_id: str) -> None:
        self._database, self._provider_id = database, provider_id

    def make_table(self) -> None:
        """Make the table where it is missing."""
        with self._database.session() as session:
            _Tables.metadata.create_all(session.connection())

    def find_sent(self, job_uuid: str, body_hash: str) -> bool:
        """Whether this very job was accepted before. Raises Conflict where the id belongs to another body or owner."""
        with self._database.reading() as session:
            row = self._row(session, job_uuid)
            return row is not None and _is_same(row, body_hash)

    def add(self, sent: Sent) -> None:
        """Remember an accepted job. Raises Conflict where another took the id meanwhile."""
        row = RemoteJobRow(
            provider_id=self._provider_id,
            job_uuid=sent.job_uuid,
            remote_uuid=sent.remote_uuid,
            model=sent.model,
            body_hash=sent.body_hash,
            created_at=now(),
            owned_by=current_caller().owner,
        )
        try:
            with self._database.session() as session:
                session.add(row)
        except IntegrityError:
            self.find_sent(sent.job_uuid, sent.body_hash)

    def get(self, job_uuid: str) -> RemoteJobRow:
        """Raises JobNotFound, also where the job is another's."""
        with self._database.reading() as session:
            row = self._row(session, job_uuid)
        if row is None or not is_own(row.owned_by):
            raise JobNotFound(f"there is no job {job_uuid!r}", param="job_uuid")
        return row

    def set_ended(self, job_uuid: str, status: PostTrainingJobStatusResponse) -> None:
        with self._database.session() as session:
            mine = (RemoteJobRow.provider_id == self._provider_id, RemoteJobRow.job_uuid == job_uuid)
            session.execute(update(RemoteJobRow).where(*mine).values(ended=status.model_dump(mode="json")))

    def remove(self, job_uuid: str) -> None:
        with self._database.session() as session:
            mine = (RemoteJobRow.provider_id == self._provider_id, RemoteJobRow.job_uuid == job_uuid)
            session.execute(delete(RemoteJobRow).where(*mine))

    def listed(self, after: str | None, order: ListOrder) -> Sequence[RemoteJobRow]:
        """The caller's jobs behind `after`, a job's id or a place. Raises InvalidField where it is neither."""
        descending = order is ListOrder.desc
        column = RemoteJobRow.sequence
        query = select(RemoteJobRow).where(RemoteJobRow.provider_id == self._provider_id, own(RemoteJobRow.owned_by))
        with self._database.reading() as session:
            if after is not None:
                place = self._place(session, after)
                query = query.where(column < place if descending else column > place)
            return session.scalars(query.order_by(column.desc() if descending else column)).all()

    def _place(self, session: Session, after: str) -> int:
        number = after.removeprefix(_PLACE)
        if after.startswith(_PLACE) and number.isascii() and number.isdigit() and len(number) < len(str(MAX_INTEGER)):
            return int(number)
        row = self._row(session, after)
        if row is None or not is_own(row.owned_by):
            raise InvalidField(
                f"there is no job {after[:100]!r} to list the jobs behind; give the `next` of the page before",
                param="after",
            )
        return row.sequence

    def _row(self, session: Session, job_uuid: str) -> RemoteJobRow | None:
        mine = (RemoteJobRow.provider_id == self._provider_id, RemoteJobRow.job_uuid == job_uuid)
        return session.scalar(select(RemoteJobRow).where(*mine))


def place_of(row: RemoteJobRow) -> str:
    """What goes on behind this job, also once it is gone."""
    return f"{_PLACE}{row.sequence}"


def _is_same(row: RemoteJobRow, body_hash: str) -> bool:
    if row.body_hash != body_hash or not is_own(row.owned_by):
        raise Conflict(
            f"job {row.job_uuid!r} already exists with another request; choose another job_uuid", param="job_uuid"
        )
    return True

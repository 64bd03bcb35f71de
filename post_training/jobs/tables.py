"""The tables of the job store."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column

from post_training.jobs.database import Base, UtcDateTime
from post_training.jobs.step_events import unpack_step
from post_training.owners import MAX_OWNER_LENGTH


class JobRow(Base):
    """A job and where it stands.

    Attributes:
        sequence: orders the queue; a job that goes back to it keeps its place.
        device_kind: `cpu` or `cuda` where the job must run on one; null until then. Set by the first claim, since an
            attempt on the other kind would end in other bytes.
        attempt: how many times it was claimed.
        lost_attempts: attempts that ended without a result since the newest checkpoint.
        owned_by: the id of the API key that made it; null: made without one or with the administrator's.
        is_session: a client drives it, step by step; else it is a whole job.
        paused: a session that waits for its client and not for a device.
        completion_requested_at: when a session was asked to end with success.
        moved_at: time of the newest transition; later times of this job are never before it, whatever the clock does.
    """

    __tablename__ = "jobs"

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(String(255), unique=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    provider_id: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    owned_by: Mapped[str | None] = mapped_column(String(MAX_OWNER_LENGTH), default=None)
    is_session: Mapped[bool] = mapped_column(default=False, server_default=false())
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(String(16))
    paused: Mapped[bool] = mapped_column(default=False, server_default=false())
    device_kind: Mapped[str | None] = mapped_column(String(16), default=None)
    attempt: Mapped[int] = mapped_column(default=0)
    lost_attempts: Mapped[int] = mapped_column(default=0)
    scheduled_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    moved_at: Mapped[datetime] = mapped_column(UtcDateTime)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    completion_requested_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    resources: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    __table_args__ = (
        Index("jobs_by_status", "status", "sequence"),
        Index("jobs_by_queue", "status", "paused", "provider_id", "device_kind", "sequence"),
        Index("jobs_by_kind", "is_session", "sequence"),
        Index("jobs_by_owner", "owned_by", "sequence"),
    )


class LeaseRow(Base):
    """One worker's hold on one job and on one slot of one machine.

    Attributes:
        owner: the token that proves every write of the worker. A later lease has another one, so a worker that lost its
            job is fenced off by the token, not by a clock.
        slot: `cpu:0`, `cuda:1`, …; one lease at a time on each machine.
        pid, process_started: the worker's process, told apart from a later one with the same number.
        beats: counted up by the worker. Whoever watches compares this number over time measured by itself, so no clock
            that jumps makes a living worker look dead.
    """

    __tablename__ = "leases"

    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64), unique=True)
    host: Mapped[str] = mapped_column(String(255))
    slot: Mapped[str] = mapped_column(String(32))
    pid: Mapped[int | None] = mapped_column(default=None)
    process_started: Mapped[str | None] = mapped_column(String(64), default=None)
    beats: Mapped[int] = mapped_column(default=0)
    claimed_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (UniqueConstraint("host", "slot", name="one_lease_a_slot"),)


class TransitionRow(Base):
    """One move of a job between states."""

    __tablename__ = "transitions"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"), index=True)
    old: Mapped[str | None] = mapped_column(String(16))
    new: Mapped[str] = mapped_column(String(16))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempt: Mapped[int]
    reason: Mapped[str] = mapped_column(Text)


class EventKind(StrEnum):
    """What an event tells: a move between states, the numbers of a step, an announced checkpoint, anything else."""

    status = "status"
    step = "step"
    checkpoint = "checkpoint"
    log = "log"


class EventRow(Base):
    """Something that happened to a job. Ids grow in the order in which events become visible.

    Attributes:
        step: the optimizer step, for kind `step`; a later attempt may tell of the same step again.
        packed: the message and data of a step (`step_events.py`); what is not packed lies in `text` and `content`.
    """

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    # The number and not the id, which the row and both indexes would repeat at every step.
    job_sequence: Mapped[int] = mapped_column(ForeignKey("jobs.sequence", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    kind: Mapped[str] = mapped_column(String(16))
    step: Mapped[int | None] = mapped_column(default=None)
    text: Mapped[str] = mapped_column("message", Text, default="")
    content: Mapped[dict[str, Any] | None] = mapped_column("data", JSON(none_as_null=True), default=None)
    packed: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)

    # AUTOINCREMENT, since SQLite would otherwise give the id of a deleted event to a new one.
    __table_args__ = (
        Index("events_by_job", "job_sequence", "id"),
        Index("events_by_step", "job_sequence", "step", "id"),
        {"sqlite_autoincrement": True},
    )

    @property
    def message(self) -> str:
        """The line of the log."""
        return self.text if self._unpacked is None else self._unpacked[0]

    @property
    def data(self) -> dict[str, Any] | None:
        """The numbers, for kinds `step`, `checkpoint` and `status`."""
        return self.content if self._unpacked is None else self._unpacked[1]

    @cached_property
    def _unpacked(self) -> tuple[str, dict[str, Any]] | None:
        return None if self.packed is None or self.step is None else unpack_step(self.step, self.packed)


class CheckpointRow(Base):
    """A complete checkpoint on disk.

    Attributes:
        announced_at: when it was verified and became a model; null for one that is only there to resume from.
        identifier: the model id, once announced.
        name: what a session's client called it; null: one that it did not ask for, and all of a whole job's.
    """

    __tablename__ = "checkpoints"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"), index=True)
    identifier: Mapped[str | None] = mapped_column(String(255), unique=True, default=None)
    name: Mapped[str | None] = mapped_column(String(64), default=None)
    epoch: Mapped[int]
    step: Mapped[int]
    path: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    announced_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    metrics: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    verification: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    __table_args__ = (UniqueConstraint("job_uuid", "step"),)

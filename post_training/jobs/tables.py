"""The tables of the job store."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from post_training.jobs.database import Base, UtcDateTime


class JobRow(Base):
    """A job and where it stands.

    Attributes:
        sequence: orders the queue; a job that goes back to it keeps its place.
        device_kind: `cpu` or `cuda` where the job must run on one; null until then. Set by the first claim, since an
            attempt on the other kind would end in other bytes.
        attempt: how many times it was claimed.
        lost_attempts: attempts that ended without a result since the newest checkpoint.
        moved_at: time of the newest transition; later times of this job are never before it, whatever the clock does.
    """

    __tablename__ = "jobs"

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(String(255), unique=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    provider_id: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(String(16))
    device_kind: Mapped[str | None] = mapped_column(String(16), default=None)
    attempt: Mapped[int] = mapped_column(default=0)
    lost_attempts: Mapped[int] = mapped_column(default=0)
    scheduled_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    moved_at: Mapped[datetime] = mapped_column(UtcDateTime)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    resources: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    __table_args__ = (Index("jobs_by_status", "status", "sequence"),)


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
        message: the line of the log.
        step: the optimizer step, for kind `step`; a later attempt may tell of the same step again.
        data: the numbers, for kinds `step`, `checkpoint` and `status`.
    """

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    kind: Mapped[str] = mapped_column(String(16))
    step: Mapped[int | None] = mapped_column(default=None)
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    # AUTOINCREMENT, since SQLite would otherwise give the id of a deleted event to a new one.
    __table_args__ = (
        Index("events_by_job", "job_uuid", "id"),
        Index("events_by_step", "job_uuid", "step", "id"),
        {"sqlite_autoincrement": True},
    )


class CheckpointRow(Base):
    """A complete checkpoint on disk.

    Attributes:
        announced_at: when it was verified and became a model; null for one that is only there to resume from.
        identifier: the model id, once announced.
    """

    __tablename__ = "checkpoints"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"), index=True)
    identifier: Mapped[str | None] = mapped_column(String(255), unique=True, default=None)
    epoch: Mapped[int]
    step: Mapped[int]
    path: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    announced_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    metrics: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    verification: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    __table_args__ = (UniqueConstraint("job_uuid", "step"),)

"""The tables of the job store."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from post_training.jobs.database import Base, UtcDateTime


class JobRow(Base):
    """A job and where it stands.

    `sequence` orders the queue. `owner` is the token of the one worker that may write; a new claim replaces it, so a
    worker that lost its job is fenced off by the token, not by a clock.
    """

    __tablename__ = "jobs"

    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(String(255), unique=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    provider_id: Mapped[str] = mapped_column(String(255))
    model: Mapped[str] = mapped_column(String(255))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(String(16), index=True)
    attempt: Mapped[int] = mapped_column(default=0)
    scheduled_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    heartbeat_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    cancel_requested_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    report: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    resources: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)


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


class EventRow(Base):
    """A log line of a job, or the numbers of one step (`data`)."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)

    __table_args__ = (Index("events_by_job", "job_uuid", "id"),)


class CheckpointRow(Base):
    """A checkpoint that was written, verified and announced."""

    __tablename__ = "checkpoints"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_uuid: Mapped[str] = mapped_column(ForeignKey("jobs.job_uuid", ondelete="CASCADE"), index=True)
    identifier: Mapped[str] = mapped_column(String(255), unique=True)
    epoch: Mapped[int]
    step: Mapped[int]
    path: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    metrics: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    verification: Mapped[dict[str, Any] | None] = mapped_column(JSON)

    __table_args__ = (UniqueConstraint("job_uuid", "step"),)

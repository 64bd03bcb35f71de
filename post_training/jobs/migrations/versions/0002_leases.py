"""Jobs that resume: leases in a table of their own, kinds of events, checkpoints that are only there to resume from.

A worker's hold on a job of the first layout can't be carried over: such jobs go back to the queue.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.sql.elements import ColumnElement

revision = "0002"
down_revision = "0001"

TIME = sa.DateTime(timezone=True)
STATUSES = ("scheduled", "in_progress", "completed", "failed", "cancelled")

jobs = sa.table(
    "jobs",
    sa.column("job_uuid", sa.String()),
    sa.column("status", sa.String()),
    sa.column("attempt", sa.Integer()),
    sa.column("lost_attempts", sa.Integer()),
    sa.column("scheduled_at", TIME),
    sa.column("started_at", TIME),
    sa.column("completed_at", TIME),
    sa.column("moved_at", TIME),
    sa.column("cancel_requested_at", TIME),
)
transitions = sa.table(
    "transitions",
    sa.column("job_uuid", sa.String()),
    sa.column("old", sa.String()),
    sa.column("new", sa.String()),
    sa.column("at", TIME),
    sa.column("attempt", sa.Integer()),
    sa.column("reason", sa.Text()),
)
events = sa.table(
    "events",
    sa.column("job_uuid", sa.String()),
    sa.column("at", TIME),
    sa.column("kind", sa.String()),
    sa.column("step", sa.Integer()),
    sa.column("message", sa.Text()),
    sa.column("data", sa.JSON(none_as_null=True)),
)
checkpoints = sa.table("checkpoints", sa.column("created_at", TIME), sa.column("announced_at", TIME))


def upgrade() -> None:
    _jobs()
    _leases()
    _events()
    _checkpoints()
    _requeue()
    op.execute("UPDATE schema_version SET version = 2")


def _jobs() -> None:
    op.add_column("jobs", sa.Column("device_kind", sa.String(16)))
    op.add_column("jobs", sa.Column("lost_attempts", sa.Integer()))
    op.add_column("jobs", sa.Column("moved_at", TIME))
    op.execute(jobs.update().values(lost_attempts=0, moved_at=_newest_time()))
    with op.batch_alter_table("jobs") as table:
        table.alter_column("lost_attempts", existing_type=sa.Integer(), nullable=False)
        table.alter_column("moved_at", existing_type=TIME, nullable=False)
        table.drop_column("owner")
        table.drop_column("heartbeat_at")
        table.drop_index("ix_jobs_status")
        table.create_index("jobs_by_status", ["status", "sequence"])


def _newest_time() -> ColumnElement[datetime]:
    on_sqlite = op.get_bind().dialect.name == "sqlite"
    newest = sa.func.max if on_sqlite else sa.func.greatest
    moved = sa.select(sa.func.max(transitions.c.at)).where(transitions.c.job_uuid == jobs.c.job_uuid)
    times = (jobs.c.started_at, jobs.c.completed_at, moved.scalar_subquery())
    return newest(jobs.c.scheduled_at, *(sa.func.coalesce(time, jobs.c.scheduled_at) for time in times))


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("job_uuid", sa.String(255), sa.ForeignKey("jobs.job_uuid", ondelete="CASCADE"), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False, unique=True),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("slot", sa.String(32), nullable=False),
        sa.Column("pid", sa.Integer()),
        sa.Column("process_started", sa.String(64)),
        sa.Column("beats", sa.Integer(), nullable=False),
        sa.Column("claimed_at", TIME, nullable=False),
        sa.UniqueConstraint("host", "slot", name="one_lease_a_slot"),
    )


def _events() -> None:
    op.add_column("events", sa.Column("kind", sa.String(16)))
    op.add_column("events", sa.Column("step", sa.Integer()))
    # A missing value may be stored as the JSON value null.
    has_data = sa.func.coalesce(sa.cast(events.c.data, sa.Text()), "null") != "null"
    moved = sa.or_(*(sa.func.substr(events.c.message, 1, len(name) + 2) == f"{name}: " for name in STATUSES))
    op.execute(
        events.update().values(
            kind=sa.case((has_data, "step"), (moved, "status"), else_="log"),
            step=sa.case((has_data, events.c.data["step"].as_integer()), else_=None),
        )
    )
    with op.batch_alter_table("events", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.alter_column("kind", existing_type=sa.String(16), nullable=False)
        table.create_index("events_by_step", ["job_uuid", "step", "id"])


def _checkpoints() -> None:
    op.add_column("checkpoints", sa.Column("announced_at", TIME))
    op.execute(checkpoints.update().values(announced_at=checkpoints.c.created_at))
    with op.batch_alter_table("checkpoints") as table:
        table.alter_column("identifier", existing_type=sa.String(255), nullable=True)


def _requeue() -> None:
    connection = op.get_bind()
    for job in connection.execute(sa.select(jobs).where(jobs.c.status == "in_progress")).all():
        at = max(datetime.now(UTC), job.moved_at.replace(tzinfo=job.moved_at.tzinfo or UTC))
        cancelled = job.cancel_requested_at is not None
        new = "cancelled" if cancelled else "scheduled"
        reason = "the store was migrated while it ran"
        connection.execute(
            jobs.update()
            .where(jobs.c.job_uuid == job.job_uuid)
            .values(status=new, moved_at=at, completed_at=at if cancelled else None)
        )
        _record(connection, job.job_uuid, new, at, job.attempt, reason)


def _record(connection: sa.Connection, job_uuid: str, new: str, at: datetime, attempt: int, reason: str) -> None:
    move: dict[str, Any] = {"old": "in_progress", "new": new, "attempt": attempt, "reason": reason}
    connection.execute(transitions.insert().values(job_uuid=job_uuid, at=at, **move))
    data = {"status": new, "attempt": attempt, "reason": reason}
    connection.execute(
        events.insert().values(job_uuid=job_uuid, at=at, kind="status", message=f"{new}: {reason}", data=data)
    )

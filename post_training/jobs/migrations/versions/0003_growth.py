"""Stores that grow: steps in few bytes, events by the number of their job, an index of what waits.

Events of earlier steps stay as they are. A worker of the second layout can write none any more, so its job goes back to
the queue.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

TIME = sa.DateTime(timezone=True)

jobs = sa.table(
    "jobs",
    sa.column("sequence", sa.Integer()),
    sa.column("job_uuid", sa.String()),
    sa.column("status", sa.String()),
    sa.column("attempt", sa.Integer()),
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
    sa.column("job_sequence", sa.Integer()),
    sa.column("at", TIME),
    sa.column("kind", sa.String()),
    sa.column("message", sa.Text()),
    sa.column("data", sa.JSON(none_as_null=True)),
)
checkpoints = sa.table("checkpoints", sa.column("job_uuid", sa.String()), sa.column("announced_at", TIME))


def upgrade() -> None:
    op.create_index("jobs_by_queue", "jobs", ["status", "provider_id", "device_kind", "sequence"])
    _events()
    _requeue()
    op.execute("UPDATE schema_version SET version = 3")


def _events() -> None:
    op.drop_index("events_by_job", "events")
    op.drop_index("events_by_step", "events")
    op.add_column("events", sa.Column("job_sequence", sa.Integer()))
    op.add_column("events", sa.Column("packed", sa.LargeBinary()))
    # 0 is no job's: SQLite may hold events of no job, which are found and named at the end.
    number = sa.select(jobs.c.sequence).where(jobs.c.job_uuid == events.c.job_uuid).scalar_subquery()
    op.execute(events.update().values(job_sequence=sa.func.coalesce(number, 0)))
    newest = _newest_id()
    with op.batch_alter_table("events", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.alter_column("job_sequence", existing_type=sa.Integer(), nullable=False)
        table.drop_column("job_uuid")
        table.create_foreign_key("events_job_sequence_fkey", "jobs", ["job_sequence"], ["sequence"], ondelete="CASCADE")
    _never_again_up_to(newest)
    op.create_index("events_by_job", "events", ["job_sequence", "id"])
    op.create_index("events_by_step", "events", ["job_sequence", "step", "id"])


def _newest_id() -> int | None:
    """The highest id that an event ever had, where SQLite knows it; PostgreSQL's sequence stays as it is."""
    if op.get_bind().dialect.name != "sqlite":
        return None
    return op.get_bind().scalar(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'events'"))


def _never_again_up_to(newest: int | None) -> None:
    # The copy counts from the highest id it holds, and deleted jobs have taken events along.
    if newest is not None:
        op.execute("DELETE FROM sqlite_sequence WHERE name = 'events'")
        op.execute(f"INSERT INTO sqlite_sequence (name, seq) VALUES ('events', {newest})")


def _requeue() -> None:
    connection = op.get_bind()
    op.execute("DELETE FROM leases")
    for job in connection.execute(sa.select(jobs).where(jobs.c.status == "in_progress")).all():
        at = max(datetime.now(UTC), job.moved_at.replace(tzinfo=job.moved_at.tzinfo or UTC))
        cancelled = job.cancel_requested_at is not None
        new = "cancelled" if cancelled else "scheduled"
        connection.execute(
            jobs.update()
            .where(jobs.c.sequence == job.sequence)
            .values(status=new, moved_at=at, completed_at=at if cancelled else None)
        )
        if cancelled:
            ours = checkpoints.c.job_uuid == job.job_uuid
            connection.execute(checkpoints.delete().where(ours, checkpoints.c.announced_at.is_(None)))
        _record(connection, job, new, at, "the store was migrated while it ran")


def _record(connection: sa.Connection, job: Any, new: str, at: datetime, reason: str) -> None:
    move: dict[str, Any] = {"old": "in_progress", "new": new, "attempt": job.attempt, "reason": reason}
    connection.execute(transitions.insert().values(job_uuid=job.job_uuid, at=at, **move))
    told = {"kind": "status", "message": f"{new}: {reason}"}
    data = {"status": new, "attempt": job.attempt, "reason": reason}
    connection.execute(events.insert().values(job_sequence=job.sequence, at=at, data=data, **told))

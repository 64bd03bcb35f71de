"""Stores with very many jobs, filled past the API in a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Table, literal, select, text

from apis.post_training.models import JobStatus
from post_training.jobs.database import Base, Database
from post_training.jobs.tables import JobRow
from tests.test_job_store import PROVIDER, make_spec

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
# Of 100 jobs: most completed, some failed, some cancelled.
_ENDS = (JobStatus.completed,) * 90 + (JobStatus.failed,) * 7 + (JobStatus.cancelled,) * 3


def fill(database: Database, count: int, *, waiting: int = 50) -> None:
    """Add jobs `job-0`, `job-1`, … to an empty store, each with a transition and an event.

    They came in this order; the last `waiting` are scheduled.
    """
    jobs, transitions = (Base.metadata.tables[name] for name in (JobRow.__tablename__, "transitions"))
    for start in range(0, count, 10_000):
        numbers = range(start, min(start + 10_000, count))
        _insert(database, jobs, (_job(n, _status(n, count - waiting)) for n in numbers))
        _insert(database, transitions, (_transition(n) for n in numbers))
    with database.session() as session:
        told = (JobRow.sequence, JobRow.scheduled_at, literal("status"), literal("scheduled: submitted"))
        events = Base.metadata.tables["events"]
        session.execute(events.insert().from_select(["job_sequence", "at", "kind", "message"], select(*told)))
    if database.engine.dialect.name == "postgresql":
        # As autovacuum does in time; SQLite counts nothing by itself.
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))


def _insert(database: Database, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    with database.session() as session:
        session.execute(table.insert(), list(rows))


def _status(number: int, first_waiting: int) -> JobStatus:
    return _ENDS[number % len(_ENDS)] if number < first_waiting else JobStatus.scheduled


def _job(number: int, status: JobStatus) -> dict[str, Any]:
    at = FIRST + timedelta(seconds=number)
    return {
        "job_uuid": f"job-{number}",
        "body_hash": "0" * 64,
        "provider_id": PROVIDER,
        "model": "base",
        "spec": SPEC | {"job_uuid": f"job-{number}"},
        "status": status,
        "attempt": int(status.terminal),
        "lost_attempts": 0,
        "scheduled_at": at,
        "completed_at": at if status.terminal else None,
        "moved_at": at,
    }


def _transition(number: int) -> dict[str, Any]:
    at = FIRST + timedelta(seconds=number)
    return {"job_uuid": f"job-{number}", "new": "scheduled", "at": at, "attempt": 0, "reason": "submitted"}


SPEC = make_spec("job").model_dump(mode="json")

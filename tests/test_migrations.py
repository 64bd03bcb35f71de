"""The store's layout: made, migrated from the first one without losing a row, refused where it is newer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, inspect, text

# Imported for their tables.
import post_training.catalog.datasets
import post_training.catalog.keys
import post_training.catalog.model_tables
import post_training.jobs.tables  # noqa: F401
from apis.errors import StackError
from post_training.jobs.database import SCHEMA_VERSION, Base, Database, Layout, read_layout
from post_training.jobs.leases import Leases
from post_training.jobs.migrations import upgrade
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.owners import acting_as, key_holder

REPOSITORY = Path(__file__).resolve().parents[1]
Rows = dict[str, list[dict[str, Any]]]


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, 12, minute, tzinfo=UTC)


def old_job(sequence: int, status: str, **columns: object) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sequence": sequence,
        "job_uuid": f"job-{sequence}",
        "body_hash": f"hash-{sequence}",
        "provider_id": "torchtune",
        "model": "base",
        "spec": {"job_uuid": f"job-{sequence}", "nested": [1, {"a": None}]},
        "status": status,
        "attempt": 0,
        "scheduled_at": at(sequence),
    }
    return row | columns


JOBS = [
    old_job(1, "completed", attempt=2, started_at=at(2), completed_at=at(9), report={"loss": 0.5}),
    old_job(2, "scheduled"),
    old_job(3, "in_progress", attempt=1, started_at=at(4), owner="token-3", heartbeat_at=at(5), progress={"step": 7}),
    old_job(4, "in_progress", attempt=3, started_at=at(5), owner="token-4", cancel_requested_at=at(6)),
    old_job(5, "failed", started_at=at(6), completed_at=at(8), error={"code": "worker_died", "message": "killed"}),
    # Stopped with its server: the newest time is that of a transition.
    old_job(7, "scheduled", attempt=1, started_at=at(8)),
]
TRANSITIONS = [
    {"id": 1, "job_uuid": "job-1", "old": None, "new": "scheduled", "at": at(1), "attempt": 0, "reason": "submitted"},
    {"id": 4, "job_uuid": "job-7", "old": "in_progress", "new": "scheduled", "at": at(20), "attempt": 1, "reason": "x"},
]
EVENTS = [
    {"id": 1, "job_uuid": "job-1", "at": at(1), "message": "scheduled: submitted", "data": None},
    {"id": 2, "job_uuid": "job-1", "at": at(2), "message": "in_progress: attempt 1 claimed"},
    {"id": 3, "job_uuid": "job-1", "at": at(3), "message": "step 10", "data": {"step": 10, "loss": 1.5}},
    {"id": 4, "job_uuid": "job-1", "at": at(3), "message": "checkpoint base-sft-0 verified"},
    {"id": 5, "job_uuid": "job-3", "at": at(4), "message": "Failed: to warm the cache", "data": None},
    {"id": 6, "job_uuid": "job-3", "at": at(5), "message": "completed without a colon"},
]
KINDS = {1: "status", 2: "status", 3: "step", 4: "log", 5: "log", 6: "log"}
CHECKPOINTS = [
    {
        "id": number,
        "job_uuid": "job-1",
        "identifier": f"base-sft-job-1-{number}",
        "epoch": number,
        "step": 10 * number,
        "path": f"jobs/job-1/checkpoints/{10 * number}",
        "created_at": at(number),
        "metrics": {"loss": 1.0 / number},
        "verification": {"error": 1e-7},
    }
    for number in (1, 2)
]
CATALOG = {
    "catalog_models": [{"identifier": "base", "folder": "models/base", "details": {"a": 1}, "created_at": at(0)}],
    "catalog_checkpoints": [
        {
            "identifier": "base-sft-job-1-1",
            "job_uuid": "job-1",
            "model": "base",
            "kind": "sft",
            "epoch": 1,
            "step": 10,
            "folder": "jobs/job-1/checkpoints/10",
            "base_identifier": "base",
            "base_folder": "models/base",
            "details": {},
            "created_at": at(3),
            "completed_at": at(9),
        }
    ],
    "catalog_aliases": [{"identifier": "best", "target": "base-sft-job-1-1", "details": {}, "created_at": at(9)}],
    "catalog_datasets": [
        {
            "identifier": "data",
            "provider_id": "files",
            "purpose": "post-training/messages",
            "source": {"type": "rows", "rows": []},
            "details": {},
            "fingerprint": "f" * 64,
            "rows_file": "datasets/data/1.jsonl",
            "rows_bytes": 2**40,
            "created_at": at(0),
        }
    ],
}
OLD_ROWS: Rows = {"jobs": JOBS, "transitions": TRANSITIONS, "events": EVENTS, "checkpoints": CHECKPOINTS, **CATALOG}


def make_old_store(url: str) -> None:
    """A store as the first release made it, without a note of Alembic's, with rows in every table."""
    store = Database(url)
    with store.engine.begin() as connection:
        upgrade(connection, Layout(None, None), "0001")
        connection.execute(text("DROP TABLE alembic_version"))
        tables = MetaData()
        tables.reflect(connection)
        for name, rows in OLD_ROWS.items():
            for row in rows:
                connection.execute(tables.tables[name].insert().values(**row))
        if store.engine.dialect.name == "postgresql":
            for table, column in (("jobs", "sequence"), ("transitions", "id"), ("events", "id"), ("checkpoints", "id")):
                newest = f"(SELECT max({column}) FROM {table})"
                connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), {newest})"))
    store.close()


@pytest.fixture
def old_store(database_url: str) -> str:
    make_old_store(database_url)
    return database_url


def content(connection: Connection) -> Rows:
    """Every row of every table, as the database gives it."""
    tables = MetaData()
    tables.reflect(connection)
    queries = {name: table.select().order_by(*table.primary_key) for name, table in tables.tables.items()}
    return {name: [dict(row) for row in connection.execute(query).mappings()] for name, query in queries.items()}


def same_time(stored: datetime, expected: datetime) -> bool:
    return (stored if stored.tzinfo else stored.replace(tzinfo=UTC)) == expected


def layout(connection: Connection) -> dict[str, Any]:
    """Tables with their columns, keys and indexes, in an order of their own."""
    inspector = inspect(connection)
    found = {}
    for table in inspector.get_table_names():
        columns = {c["name"]: (str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(table)}
        keys = inspector.get_foreign_keys(table)
        found[table] = {
            "columns": columns,
            "primary": inspector.get_pk_constraint(table)["constrained_columns"],
            "foreign": [(k["constrained_columns"], k["referred_table"], k.get("options")) for k in keys],
            "unique": sorted(tuple(u["column_names"]) for u in inspector.get_unique_constraints(table)),
            "indexes": sorted((str(i["name"]), tuple(i["column_names"])) for i in inspector.get_indexes(table)),
        }
    return found


def test_migrations_make_what_the_models_declare(database_url: str):
    database = Database(database_url)
    database.migrate()
    with database.engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        migrated = layout(connection)
        Base.metadata.drop_all(connection)
    with database.engine.begin() as connection:
        Base.metadata.create_all(connection)
        declared = layout(connection)
    del migrated["alembic_version"], declared["alembic_version"]
    assert migrated == declared
    database.close()


def test_a_store_of_the_first_release_keeps_every_row(old_store: str):
    database = Database(old_store)
    with database.engine.connect() as connection:
        before = content(connection)
    database.migrate()
    with database.engine.connect() as connection:
        after = content(connection)
        assert read_layout(connection).current
    database.close()

    assert {name: len(rows) for name, rows in before.items()} == {
        **{n: len(r) for n, r in OLD_ROWS.items()},
        "schema_version": 1,
    }
    for name in CATALOG:
        assert [{key: row[key] for key in before[name][0]} for row in after[name]] == before[name]
    ids = {row["sequence"]: row["job_uuid"] for row in after["jobs"]}
    for row in after["events"]:
        row["job_uuid"] = ids[row["job_sequence"]]
    changed = {"status", "completed_at", "owner", "heartbeat_at"}
    for name, dropped in (("jobs", changed), ("transitions", set()), ("events", set()), ("checkpoints", set())):
        kept = [{k: v for k, v in row.items() if k not in dropped} for row in before[name]]
        assert [{k: new[k] for k in old} for old, new in zip(kept, after[name], strict=False)] == kept


def test_what_the_second_layout_adds_is_filled_in(old_store: str):
    database = Database(old_store)
    database.migrate()
    with database.engine.connect() as connection:
        after = content(connection)
    database.close()

    moved = {row["job_uuid"]: row["moved_at"] for row in after["jobs"]}
    for job_uuid, expected in {"job-1": at(9), "job-2": at(2), "job-5": at(8), "job-7": at(20)}.items():
        assert same_time(moved[job_uuid], expected), job_uuid
    assert {row["lost_attempts"] for row in after["jobs"]} == {0}
    assert {row["device_kind"] for row in after["jobs"]} == {None}
    old_events = [row for row in after["events"] if row["id"] in KINDS]
    assert {row["id"]: row["kind"] for row in old_events} == KINDS
    assert [row["step"] for row in old_events] == [None, None, 10, None, None, None]
    assert [row["announced_at"] for row in after["checkpoints"]] == [row["created_at"] for row in after["checkpoints"]]
    assert after["leases"] == []


def test_a_job_that_ran_under_the_first_layout_waits_again_and_one_being_cancelled_is_cancelled(old_store: str):
    started = datetime.now(UTC)
    database = Database(old_store)
    database.migrate()
    with database.engine.connect() as connection:
        after = content(connection)
    database.close()

    statuses = {row["job_uuid"]: row["status"] for row in after["jobs"]}
    assert statuses == {
        "job-1": "completed",
        "job-2": "scheduled",
        "job-3": "scheduled",
        "job-4": "cancelled",
        "job-5": "failed",
        "job-7": "scheduled",
    }
    ended = next(row for row in after["jobs"] if row["job_uuid"] == "job-4")
    assert ended["completed_at"] == ended["moved_at"]
    added = after["transitions"][len(TRANSITIONS) :]
    assert [(row["job_uuid"], row["old"], row["new"], row["attempt"]) for row in added] == [
        ("job-3", "in_progress", "scheduled", 1),
        ("job-4", "in_progress", "cancelled", 3),
    ]
    assert {row["reason"] for row in added} == {"the store was migrated while it ran"}
    assert all(started <= row["at"].replace(tzinfo=UTC) <= datetime.now(UTC) for row in added)
    told = after["events"][len(EVENTS) :]
    assert [(row["kind"], row["message"]) for row in told] == [
        ("status", "scheduled: the store was migrated while it ran"),
        ("status", "cancelled: the store was migrated while it ran"),
    ]


def test_after_a_migration_a_deleted_job_takes_its_history_along_and_event_ids_are_not_used_again(old_store: str):
    database = Database(old_store)
    database.migrate()
    with database.session() as session:
        newest = session.scalar(text("SELECT max(id) FROM events")) or 0
        session.execute(text("DELETE FROM jobs WHERE job_uuid = 'job-1'"))
        session.execute(text("DELETE FROM events"))
        left = [session.scalar(text(f"SELECT count(*) FROM {name}")) for name in ("checkpoints", "transitions")]
        assert left == [0, 3]
    with database.session() as session:
        columns, values = "job_sequence, at, kind, message", "2, '2026-01-01 00:00:00.000000', 'log', 'x'"
        session.execute(text(f"INSERT INTO events ({columns}) VALUES ({values})"))
        assert session.scalar(text("SELECT max(id) FROM events")) == newest + 1
    database.close()


def make_second_store(url: str) -> None:
    """A store of the second layout: a job that runs, one that ran, events of both and of one that was deleted."""
    store = Database(url)
    with store.engine.begin() as connection:
        upgrade(connection, Layout(None, None), "0002")
        tables = MetaData()
        tables.reflect(connection)
        added = {"lost_attempts": 0, "moved_at": at(9)}
        running = old_job(3, "in_progress", attempt=1, **added)
        for row in (running, old_job(7, "completed", **added), old_job(9, "failed", **added)):
            connection.execute(tables.tables["jobs"].insert().values(**row))
        lease = {"owner": "token", "host": "here", "slot": "cpu:0", "beats": 1, "claimed_at": at(9)}
        connection.execute(tables.tables["leases"].insert().values(job_uuid="job-3", **lease))
        for job_uuid in ("job-7", "job-3", "job-7", "job-9"):
            event = {"job_uuid": job_uuid, "at": at(9), "kind": "step", "step": 5, "message": f"step 5 of {job_uuid}"}
            connection.execute(tables.tables["events"].insert().values(data={"step": 5, "loss": 1.5}, **event))
        connection.execute(text("DELETE FROM events WHERE job_uuid = 'job-9'"))
        connection.execute(text("DELETE FROM jobs WHERE job_uuid = 'job-9'"))
    store.close()


def test_events_of_the_second_layout_are_told_as_before_and_their_ids_never_given_again(database_url: str):
    make_second_store(database_url)
    database = Database(database_url)
    database.migrate()
    store = JobStore(database)
    told = [(row.id, row.kind, row.step, row.message, row.data) for row in store.events("job-7", 0)]
    assert told == [(number, "step", 5, "step 5 of job-7", {"step": 5, "loss": 1.5}) for number in (1, 3)]
    assert [(row.step, row.data) for row in store.metrics("job-7", 0, 9)] == [(5, {"step": 5, "loss": 1.5})]
    assert all(same_time(row.at, at(9)) for row in store.events("job-7", 0))
    # The deleted job's event was the fourth.
    assert [row.id for row in store.events("job-3", 0)] == [2, 5]
    database.close()


def test_a_worker_of_the_second_layout_has_lost_its_job_which_waits_again(database_url: str):
    make_second_store(database_url)
    database = Database(database_url)
    database.migrate()
    store, leases = JobStore(database), Leases(database)
    with pytest.raises(LeaseLost):
        leases.beat("job-3", "token")
    job = store.get("job-3")
    assert (job.status, job.attempt, job.lost_attempts) == ("scheduled", 1, 0)
    assert store.transitions("job-3")[-1].reason == "the store was migrated while it ran"
    assert store.last_events("job-3", 1)[0].message == "scheduled: the store was migrated while it ran"
    assert store.get("job-7").status == "completed"
    database.close()


OWNED = ("jobs", "catalog_checkpoints", "catalog_aliases", "catalog_datasets")


def make_third_store(url: str) -> None:
    """A store of the third layout: a job that runs, and rows in every catalog."""
    store = Database(url)
    with store.engine.begin() as connection:
        upgrade(connection, Layout(None, None), "0003")
        tables = MetaData()
        tables.reflect(connection)
        running = old_job(3, "in_progress", attempt=1, lost_attempts=0, moved_at=at(9))
        connection.execute(tables.tables["jobs"].insert().values(**running))
        lease = {"owner": "token", "host": "here", "slot": "cpu:0", "beats": 1, "claimed_at": at(9)}
        connection.execute(tables.tables["leases"].insert().values(job_uuid="job-3", **lease))
        for name, rows in CATALOG.items():
            connection.execute(tables.tables[name].insert().values(rows))
    store.close()


def test_what_was_there_before_there_were_owners_has_none_and_nobody_who_holds_a_key_sees_it(database_url: str):
    make_third_store(database_url)
    database = Database(database_url)
    database.migrate()
    with database.engine.connect() as connection:
        after = content(connection)
    assert all({row["owned_by"] for row in after[name]} == {None} for name in OWNED)
    assert after["api_keys"] == []
    store = JobStore(database)
    assert [job.job_uuid for job in store.summaries()] == ["job-3"]
    with acting_as(key_holder("key_1")):
        assert store.summaries() == []
    database.close()


def test_a_worker_of_the_third_layout_goes_on_with_its_job(database_url: str):
    make_third_store(database_url)
    database = Database(database_url)
    database.migrate()
    store, leases = JobStore(database), Leases(database)
    leases.beat("job-3", "token")
    assert (store.get("job-3").status, len(store.transitions("job-3"))) == ("in_progress", 0)
    # As the program of the third layout writes a row, which knows nothing of owners.
    with database.session() as session:
        columns = "identifier, target, details, created_at"
        values = "'more', 'base', '{}', '2026-01-01 00:00:00.000000'"
        session.execute(text(f"INSERT INTO catalog_aliases ({columns}) VALUES ({values})"))
    database.close()


def test_a_store_with_a_newer_layout_number_is_refused_and_left_alone(database: Database):
    with database.session() as session:
        session.execute(text("UPDATE schema_version SET version = 99"))
    with pytest.raises(
        StackError, match=rf"layout 99.*up to {SCHEMA_VERSION}: upgrade Postgrad, or point \$POSTGRAD_HOME"
    ):
        database.migrate()
    with database.reading() as session:
        assert read_layout(session.connection()) == (99, f"{SCHEMA_VERSION:04}")


@pytest.mark.parametrize("version", [1, SCHEMA_VERSION])
def test_a_store_with_an_unknown_revision_is_refused(database: Database, version: int):
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'f00d'"))
        session.execute(text("UPDATE schema_version SET version = :version"), {"version": version})
    with pytest.raises(StackError, match=r"layout 'f00d'.*upgrade Postgrad, or point \$POSTGRAD_HOME"):
        database.migrate()


def _table_of_another_program(connection: Connection) -> None:
    connection.execute(text("CREATE TABLE leases (tenant TEXT)"))
    connection.execute(text("INSERT INTO leases VALUES ('flat 3')"))


def _null_in_a_time(connection: Connection) -> None:
    # Fails late, when the events' table was altered already.
    connection.execute(text("ALTER TABLE checkpoints ADD COLUMN announced_at INTEGER"))


@pytest.mark.parametrize("spoil", [_table_of_another_program, _null_in_a_time])
def test_a_migration_that_fails_leaves_the_store_as_it_was(old_store: str, spoil: Callable[[Connection], None]):
    database = Database(old_store)
    with database.engine.begin() as connection:
        spoil(connection)
    with database.engine.connect() as connection:
        before = content(connection), layout(connection)
    with pytest.raises(StackError, match=rf"could not be migrated from layout 1 to {SCHEMA_VERSION}: .*left as it was"):
        database.migrate()
    with database.engine.connect() as connection:
        assert (content(connection), layout(connection)) == before
    database.close()


def test_rows_of_no_job_which_only_sqlite_lets_come_about_stop_the_migration(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    make_old_store(database.url)
    with database.engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert driver is not None
        driver.cursor().execute("PRAGMA foreign_keys=OFF")
        connection.execute(text("DELETE FROM jobs WHERE job_uuid = 'job-1'"))
        connection.commit()
        connection.detach()
    with pytest.raises(
        StackError, match="7 rows of the store's tables checkpoints, events, transitions belong to no job"
    ):
        database.migrate()
    with database.reading() as session:
        assert read_layout(session.connection()) == (1, None)
    database.close()


_MIGRATE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from post_training.jobs.database import Database
database = Database(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
database.migrate()
print("alembic" in sys.modules)
"""


def migrating_process(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _MIGRATE, url],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_at_once(url: str, count: int) -> list[tuple[int, str, str]]:
    """Exit code, output and error output of `count` processes that migrate the store at the same moment."""
    processes = [migrating_process(url) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    return [(process.returncode, *answer) for process, answer in zip(processes, answers, strict=True)]


def test_processes_that_make_a_store_at_once_all_succeed(database_url: str):
    results = run_at_once(database_url, 4)
    assert [(code, errors) for code, _, errors in results] == [(0, "")] * 4
    database = Database(database_url)
    with database.reading() as session:
        assert read_layout(session.connection()).current
    database.close()


def test_processes_that_migrate_a_store_at_once_do_it_once(old_store: str):
    results = run_at_once(old_store, 4)
    assert [code for code, _, _ in results] == [0] * 4
    said = [errors for _, _, errors in results if errors]
    assert said == [f"INFO:post_training.jobs.database:the store's layout 1 was migrated to {SCHEMA_VERSION}\n"]
    database = Database(old_store)
    with database.reading() as session:
        assert session.scalar(text("SELECT count(*) FROM transitions")) == len(TRANSITIONS) + 2
    database.close()


def test_a_store_that_is_up_to_date_is_opened_without_alembic(database: Database):
    assert run_at_once(database.url, 1) == [(0, "False\n", "")]

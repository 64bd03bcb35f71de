"""What a transaction means on SQLite and PostgreSQL, and what is said where the store fails: on real failures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from apis.errors import StackError, StoreUnavailable
from post_training.jobs import engines
from post_training.jobs.database import Database, store_error
from tests.postgres import Cluster

REPOSITORY = Path(__file__).resolve().parents[1]
NOBODY = 65534
PASSWORD = "pa55-w0rd"
INSERT = text(
    "INSERT INTO catalog_aliases (identifier, target, details, created_at) "
    "VALUES (:name, 'x', '{}', '2026-01-01 00:00:00.000000')"
)
COUNT = text("SELECT count(*) FROM catalog_aliases")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop its user or mount")


def unavailable(error: SQLAlchemyError) -> str:
    """What a client is told of `error`."""
    said = store_error(error)
    assert isinstance(said, StoreUnavailable)
    assert (said.code, said.http_status, said.retryable) == ("store_unavailable", 503, True)
    return said.message


def insert(database: Database, name: str) -> None:
    with database.session() as session:
        session.execute(INSERT, {"name": name})


def count(database: Database) -> int:
    with database.reading() as session:
        return session.scalar(COUNT) or 0


# -- what a transaction means --------------------------------------------------------------------------------------


def test_writers_take_turns_so_what_one_counted_holds_until_it_commits(database: Database):
    def add_if_below_ten(number: int) -> None:
        with database.session() as session:
            if (session.scalar(COUNT) or 0) < 10:
                time.sleep(0.002)
                session.execute(INSERT, {"name": f"alias-{number}"})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_if_below_ten, range(40)))
    assert count(database) == 10


def test_a_writer_of_another_process_waits_and_then_sees_what_was_committed(database: Database):
    other = Database(database.url)
    seen: list[int] = []

    def write() -> None:
        with other.session() as session:
            seen.append(session.scalar(COUNT) or 0)

    thread = threading.Thread(target=write)
    with database.session() as session:
        thread.start()
        session.execute(INSERT, {"name": "first"})
        thread.join(0.3)
        assert seen == []
    thread.join(10)
    assert seen == [1]
    other.close()


def test_a_reader_waits_for_no_writer_and_sees_one_state(database: Database):
    with database.session() as writing:
        writing.execute(INSERT, {"name": "one"})
        start = time.monotonic()
        assert count(database) == 0
        assert time.monotonic() - start < 1

    with database.reading() as reading:
        assert reading.scalar(COUNT) == 1
        insert(database, "two")
        assert reading.scalar(COUNT) == 1
    assert count(database) == 2


def test_a_reader_cannot_write_and_its_connection_writes_again_afterwards(database: Database):
    with pytest.raises(DBAPIError, match=r"readonly|read-only"), database.reading() as session:
        session.execute(INSERT, {"name": "one"})
    insert(database, "two")
    assert count(database) == 1


def test_a_block_that_raises_changes_nothing(database: Database):
    def fail() -> None:
        with database.session() as session:
            session.execute(INSERT, {"name": "one"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert count(database) == 0


def test_more_threads_than_the_server_has_can_hold_a_session_each(database: Database):
    barrier = threading.Barrier(45)

    def read(_: int) -> int:
        with database.reading() as session:
            barrier.wait(20)
            return session.scalar(COUNT) or 0

    with ThreadPoolExecutor(45) as pool:
        assert list(pool.map(read, range(45))) == [0] * 45


def test_a_committed_write_is_forced_to_disk(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    with database.reading() as session:
        settings = [session.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous", "foreign_keys")]
        assert settings == ["wal", 2, 1]
        assert session.scalar(text("PRAGMA busy_timeout")) == 15_000
    database.close()


def test_a_fault_of_the_program_is_not_called_a_fault_of_the_store(database: Database):
    insert(database, "one")
    with pytest.raises(IntegrityError) as twice:
        insert(database, "one")
    assert store_error(twice.value) is None
    with pytest.raises(SQLAlchemyError) as wrong, database.reading() as session:
        session.execute(text("SELECT nothing FROM nowhere"))
    assert store_error(wrong.value) is None


# -- failures while a server runs ----------------------------------------------------------------------------------

_HOLD = """
import sys
from sqlalchemy import text
from post_training.jobs.database import Database
with Database(sys.argv[1]).session() as session:
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_by_another_process(url: str) -> Iterator[None]:
    """The store, while another process is in the middle of a write."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", _HOLD, url]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_store_that_another_process_holds_is_waited_for_and_then_called_locked(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_SECONDS", 1)
    impatient = Database(database.url)
    with held_by_another_process(database.url):
        start = time.monotonic()
        with pytest.raises(SQLAlchemyError) as caught:
            insert(impatient, "one")
        assert 0.9 < time.monotonic() - start < 5
        assert unavailable(caught.value).startswith("the store is locked")
        assert count(impatient) == 0
    insert(impatient, "one")
    assert count(impatient) == 1
    impatient.close()


def test_a_full_disk_stores_nothing_and_says_so(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.migrate()

    @event.listens_for(database.engine, "connect")
    def _limit(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA max_page_count=60")

    database.engine.dispose()
    insert(database, "before")
    many = [{"name": f"{number:04}" + "x" * 4000} for number in range(100)]
    with pytest.raises(SQLAlchemyError) as caught, database.session() as session:
        session.execute(INSERT, many)
    assert unavailable(caught.value).startswith("the store's disk is full: nothing was written")
    assert count(database) == 1
    database.close()


def test_a_stopped_postgres_is_unreachable_and_served_again_once_it_is_back(postgres_cluster: Cluster):
    database = Database(postgres_cluster.create_database())
    database.migrate()
    insert(database, "before")

    def be_cut() -> None:
        with database.session() as session:
            session.execute(INSERT, {"name": "lost"})
            postgres_cluster.stop(immediate=True)
            session.execute(COUNT)

    with pytest.raises(SQLAlchemyError) as cut:
        be_cut()
    assert "ended the connection" in unavailable(cut.value)
    with pytest.raises(SQLAlchemyError) as away:
        insert(database, "away")
    assert unavailable(away.value).startswith("the store is unreachable")
    postgres_cluster.start()
    insert(database, "after")
    assert count(database) == 2
    database.close()


def test_connections_that_a_restart_cut_are_replaced_unseen(postgres_cluster: Cluster):
    database = Database(postgres_cluster.create_database())
    database.migrate()
    insert(database, "before")
    assert count(database) == 1
    postgres_cluster.restart()
    insert(database, "after")
    assert count(database) == 2
    database.close()


def test_a_writer_that_stands_still_is_cut_off_before_the_others_give_up(
    postgres_server: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engines, "IDLE_WRITER_SECONDS", 1)
    database = Database(postgres_server.create_database("migrated"))

    def stand_still() -> None:
        with database.session() as session:
            session.execute(INSERT, {"name": "lost"})
            start = time.monotonic()
            insert(database, "waited")  # on a connection of its own
            assert 0.5 < time.monotonic() - start < 5
            session.execute(COUNT)

    with pytest.raises(SQLAlchemyError) as caught:
        stand_still()
    assert "ended the connection" in unavailable(caught.value)
    assert count(database) == 1
    database.close()
    postgres_server.drop_database(database.url)


def test_a_postgres_that_takes_no_writes_is_read_only(postgres_server: Cluster):
    url = postgres_server.create_database("migrated")
    name = url.partition("?")[0].rpartition("/")[2]
    postgres_server.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    database = Database(url)
    with pytest.raises(SQLAlchemyError) as caught:
        insert(database, "one")
    assert unavailable(caught.value).startswith("the store is read-only")
    database.close()
    postgres_server.drop_database(url)


# -- failures while a server starts --------------------------------------------------------------------------------


def refusal(url: str) -> str:
    """What the command line says of a store that can't be opened."""
    with pytest.raises(StackError) as caught:
        Database(url).migrate()
    assert PASSWORD not in caught.value.message
    return caught.value.message


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes " * 100)
    assert refusal(f"sqlite:///{file}").startswith(f"{file} is not a SQLite database")
    assert file.read_text() == "these are my notes " * 100


def test_a_missing_folder_and_a_folder_in_the_files_place_are_named(tmp_path: Path):
    assert "no such folder" in refusal(f"sqlite:///{tmp_path / 'missing' / 'store.db'}")
    assert "is a folder: name a file in it" in refusal(f"sqlite:///{tmp_path}")
    assert "name a file" in refusal("sqlite://")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"postgresql://user:{PASSWORD}@host:port/db", "URL cannot be read"),
        (f"{PASSWORD} no url", "URL cannot be read"),
        (f"mysql://user:{PASSWORD}@host/db", "not in 'mysql'"),
    ],
)
def test_a_url_that_is_no_stores_is_refused_without_repeating_it(url: str, said: str):
    assert said in refusal(url)


def test_a_server_that_is_not_there_is_named_without_the_password(tmp_path: Path):
    said = refusal(f"postgres://user:{PASSWORD}@/db?host={tmp_path}")
    assert said.startswith("the PostgreSQL store cannot be opened: connection")
    assert "check its address" in said


def test_a_database_that_is_not_there_is_named(postgres_server: Cluster):
    assert 'database "nothing" does not exist' in refusal(postgres_server.url("nothing"))


def test_both_spellings_of_a_postgres_url_lead_to_the_same_store(postgres_server: Cluster):
    url = postgres_server.create_database("migrated")
    databases = [Database(f"{scheme}:{url.partition(':')[2]}") for scheme in ("postgres", "postgresql+psycopg")]
    insert(databases[0], "one")
    assert count(databases[1]) == 1
    for database in databases:
        database.close()
    postgres_server.drop_database(url)


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "pip install 'postgrad[postgres]'" in refusal("postgresql://host/db")


# -- rights that only the system can take away ---------------------------------------------------------------------

_OPEN = """
import os, sys
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from apis.errors import PostgradError
from post_training.jobs.database import Database, store_error
url, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
database = Database(url)
try:
    database.migrate()
except PostgradError as error:
    print(error.code, error.message)
try:
    with database.session() as session:
        for number in range(200):
            session.execute(text("UPDATE catalog_aliases SET target = :text"), {"text": "x" * 20000})
            session.execute(text("INSERT INTO catalog_aliases SELECT :i, target, details, created_at, owned_by "
                                 "FROM catalog_aliases LIMIT 1"), {"i": str(number)})
except SQLAlchemyError as error:
    print(store_error(error).code, store_error(error).message)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, with a store of root's in it that holds one alias."""
    with tempfile.TemporaryDirectory(prefix="postgrad-store-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        database = Database(f"sqlite:///{folder / 'store.db'}")
        database.migrate()
        insert(database, "one")
        database.close()
        yield folder


def open_in_child(folder: Path, *, user: int = 0, prepare: str | None = None) -> list[str]:
    """What a process says that migrates the store in `folder` and then writes to it.

    Args:
        user: whose rights it drops to; 0 keeps root's.
        prepare: shell commands, run before it in a mount namespace of its own; `$1` is the folder.
    """
    command = [sys.executable, "-c", _OPEN, f"sqlite:///{folder / 'store.db'}", str(user)]
    if prepare is not None:
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("this machine lets no process have mounts of its own")
        script = f'set -e; {prepare}; shift; exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *command]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@needs_root
def test_a_user_who_may_not_write_the_store_is_told_so_at_start_and_later(open_folder: Path):
    at_start, later = open_in_child(open_folder, user=NOBODY)
    assert at_start.startswith(f"stack_error the store {open_folder / 'store.db'} cannot be used: this user may not")
    assert later.startswith("store_unavailable the store is read-only")


@needs_root
def test_a_store_on_a_read_only_mount_is_told_at_start_and_later(open_folder: Path):
    at_start, later = open_in_child(open_folder, prepare='mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"')
    assert "lies on a read-only mount" in at_start
    # There, SQLite can't make the files it works with, and knows no better word for it.
    assert later.startswith("store_unavailable the store is unreachable: its file cannot be opened or written")


@needs_root
def test_a_disk_that_runs_full_is_told(open_folder: Path):
    fill = 'cp -r "$1" "$1.copy"; mount -t tmpfs -o size=1m tmpfs "$1"; cp "$1.copy/"* "$1"; rm -r "$1.copy"'
    (later,) = open_in_child(open_folder, prepare=fill)
    assert later.startswith("store_unavailable the store's disk is full")

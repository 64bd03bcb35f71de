"""Engines over SQLite and PostgreSQL with one meaning of a transaction.

A transaction that writes takes a lock of the whole store as it begins, so writers take turns: what one counted or read
stays true until it commits, and ids grow in the order in which rows become visible. A transaction that only reads sees
one state of the store, can't write, and waits for no writer.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from apis.errors import StackError

BUSY_TIMEOUT_SECONDS = 15
CONNECT_TIMEOUT_SECONDS = 5
# A writer that was stopped inside its transaction is cut off before the ones that wait for it give up.
IDLE_WRITER_SECONDS = 10
READ_ONLY = "postgrad_read_only"
WAIT_SECONDS = "postgrad_wait_seconds"

# More than the 40 threads that serve requests and the few of the scheduler.
_POOL = {"pool_size": 10, "max_overflow": 50}
# What is stored stays out of logs and of errors' texts: somebody's rows, or a key that was sent in place of an id.
_QUIET = {"hide_parameters": True}
IN_MEMORY = (None, "", ":memory:")
_WRITERS_LOCK = int.from_bytes(b"postgrad")
_RETRY_SECONDS = 0.02
# A server that vanished without a word is noticed in about as long as a lock is waited for.
_KEEPALIVE = {
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": BUSY_TIMEOUT_SECONDS * 1000,
}


def make_engine(url: str) -> Engine:
    """An engine for a store's URL; nothing is opened yet.

    Args:
        url: `sqlite:///<file>`, or `postgresql://…` (also `postgres://…`), which is reached through psycopg.

    Raises:
        StackError: not such a URL, or psycopg is missing.
    """
    parsed = _parse(url)
    return _sqlite_engine(parsed) if parsed.drivername == "sqlite" else _postgresql_engine(parsed)


def reading_engine(engine: Engine) -> Engine:
    """The same engine, whose transactions only read."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(**{READ_ONLY: True})
    return engine.execution_options(**{READ_ONLY: True}, isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # Not chained: the cause may hold the URL and its password.
        raise StackError(
            "the store's URL cannot be read: write sqlite:///<file> or "
            "postgresql://<user>:<password>@<host>:<port>/<database>, with special characters percent-encoded"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    drivers = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    if backend not in drivers:
        raise StackError(f"a store is kept in SQLite or PostgreSQL, not in {backend!r}: change the store's URL")
    return parsed.set(drivername=drivers[backend])


def _sqlite_engine(url: URL) -> Engine:
    pool = {} if url.database in IN_MEMORY else _POOL
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS}, **_QUIET, **pool)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        # The driver must not open transactions on its own; `begin` below takes the write lock up front, so that a
        # read-then-write transaction never fails half-way with "database is locked".
        connection.isolation_level = None
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = bool(connection.get_execution_options().get(READ_ONLY))
        connection.exec_driver_sql(f"PRAGMA query_only={int(read_only)}")
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: Any) -> None:
    # SQLite waits for locks, but not for the one that this change needs when another process makes it as well.
    end = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)


def _postgresql_engine(url: URL) -> Engine:
    wanted = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "application_name": "postgrad", **_KEEPALIVE}
    try:
        engine = create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            connect_args={key: value for key, value in wanted.items() if key not in url.query},
            **_QUIET,
            **_POOL,
        )
    except ImportError as error:
        raise StackError(
            "a PostgreSQL store needs psycopg: install it with pip install 'postgrad[postgres]'"
        ) from error

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get(READ_ONLY):
            return
        wait = int(options.get(WAIT_SECONDS, BUSY_TIMEOUT_SECONDS))
        idle = max(IDLE_WRITER_SECONDS, wait - BUSY_TIMEOUT_SECONDS)
        connection.exec_driver_sql(
            f"SELECT set_config('lock_timeout', '{wait}s', true), "
            f"set_config('idle_in_transaction_session_timeout', '{idle}s', true)"
        )
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})")

    return engine

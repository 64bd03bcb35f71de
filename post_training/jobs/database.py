"""The one store: an engine, short sessions, tables made at start.

SQLite by default (write-ahead log: a `reading` session never waits for a writer), any SQLAlchemy URL otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from sqlalchemy import Connection, DateTime, Engine, create_engine, event, insert, inspect, select, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.types import TypeDecorator

from apis.errors import StackError

SCHEMA_VERSION = 1
BUSY_TIMEOUT_SECONDS = 15
_READ_ONLY = "postgrad_read_only"


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime, stored as UTC; SQLite has no zones of its own."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of every table."""


class SchemaRow(Base):
    """One row: which layout the tables have."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(primary_key=True)


def now() -> datetime:
    return datetime.now(UTC)


class Database:
    """An engine and its sessions. Cheap to make; connections open on first use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _create_engine(url)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)
        self._reading = sessionmaker(self.engine.execution_options(**{_READ_ONLY: True}), expire_on_commit=False)

    def create_tables(self) -> None:
        """Make what is missing.

        Raises:
            StackError: the store was written by a newer Postgrad.
        """
        with self.engine.begin() as connection:
            if inspect(connection).has_table(SchemaRow.__tablename__):
                found = connection.scalar(select(SchemaRow.version))
                if found is not None and found > SCHEMA_VERSION:
                    raise StackError(
                        f"the store has layout {found}, this Postgrad knows layouts up to {SCHEMA_VERSION}: "
                        "upgrade Postgrad, or point $POSTGRAD_HOME at another folder"
                    )
            Base.metadata.create_all(connection)
            if connection.scalar(select(SchemaRow.version)) is None:
                connection.execute(insert(SchemaRow).values(version=SCHEMA_VERSION))

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction: committed at the end of the block, rolled back on an exception."""
        with self._sessions.begin() as session:
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads: it sees one state of the store and takes no lock that a writer waits for."""
        with self._reading.begin() as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()


def _create_engine(url: str) -> Engine:
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_SECONDS})

    @event.listens_for(engine, "connect")
    def _configure(connection: object, _record: object) -> None:
        # The driver must not open transactions on its own; `begin` below takes the write lock up front, so that a
        # read-then-write transaction never fails half-way with "database is locked".
        connection.isolation_level = None  # pyright: ignore[reportAttributeAccessIssue]
        cursor = connection.cursor()  # pyright: ignore[reportAttributeAccessIssue]
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY)
        connection.execute(text("BEGIN" if read_only else "BEGIN IMMEDIATE"))

    return engine

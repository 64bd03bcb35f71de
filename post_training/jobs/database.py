"""The one store: its engine, short sessions, and the layout of its tables.

SQLite (write-ahead log) by default, PostgreSQL by URL; `engines.py` says what a transaction means on both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, DateTime, inspect, select, text
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.types import TypeDecorator

from apis.errors import StackError
from post_training.jobs.engines import BUSY_TIMEOUT_SECONDS, WAIT_SECONDS, make_engine, reading_engine
from post_training.jobs.store_faults import check_file, opening_error, store_error

__all__ = [
    "BUSY_TIMEOUT_SECONDS",
    "SCHEMA_VERSION",
    "Base",
    "Database",
    "SchemaRow",
    "UtcDateTime",
    "now",
    "store_error",
]

log = logging.getLogger(__name__)

SCHEMA_VERSION = 5
# Another process may be migrating a large store; nobody else holds the lock for long.
MIGRATION_WAIT_SECONDS = 300


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


class Layout(NamedTuple):
    """What a store says of its tables.

    Attributes:
        version: the number in `schema_version`, None where there are no tables yet.
        revision: Alembic's, None in a store that was made before there were migrations.
    """

    version: int | None
    revision: str | None

    @property
    def current(self) -> bool:
        return self == (SCHEMA_VERSION, revision_of(SCHEMA_VERSION))


class Database:
    """An engine and its sessions. Cheap to make; connections open on first use.

    Raises:
        StackError: the URL is not a store's, or its driver is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = make_engine(url)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)
        self._reading = sessionmaker(reading_engine(self.engine), expire_on_commit=False)

    def migrate(self) -> None:
        """Bring the tables to this program's layout; a new store gets them all.

        Processes that do this at once wait for each other. A migration that fails leaves the store as it was.

        Raises:
            StackError: the store cannot be opened or written, a newer Postgrad wrote it, or a migration failed.
        """
        check_file(self.engine.url)
        try:
            with self.reading() as session:
                found = read_layout(session.connection())
            if not found.current:
                _refuse_newer(found)
                self._upgrade()
        except SQLAlchemyError as error:
            raise opening_error(error, self.engine.url) from error

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction: committed at the end of the block, rolled back on an exception.

        It waits for its turn to write before the block begins, up to `BUSY_TIMEOUT_SECONDS`.
        """
        with self._sessions.begin() as session:
            session.connection()  # the turn is taken here and not with the first statement: times grow like ids
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads: it sees one state of the store and takes no lock that a writer waits for."""
        with self._reading.begin() as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()

    def _upgrade(self) -> None:
        _hush_alembic()
        # Imported here: it takes a tenth of a second, and most starts find nothing to do.
        from post_training.jobs.migrations import upgrade

        with self.engine.connect() as connection, _migrating(connection), connection.begin():
            found = read_layout(connection)
            if found.current:
                return
            _refuse_newer(found)
            upgrade(connection, found, revision_of(SCHEMA_VERSION))
        if found.version is not None:
            log.info("the store's layout %s was migrated to %s", found.version, SCHEMA_VERSION)


def revision_of(version: int) -> str:
    """The name of the Alembic revision that makes a layout."""
    return f"{version:04}"


def read_layout(connection: Connection) -> Layout:
    tables = inspect(connection)
    version = connection.scalar(select(SchemaRow.version)) if tables.has_table(SchemaRow.__tablename__) else None
    query = text("SELECT version_num FROM alembic_version")
    revision = connection.scalar(query) if tables.has_table("alembic_version") else None
    return Layout(version, revision)


def _refuse_newer(found: Layout) -> None:
    if found.version is not None and found.version > SCHEMA_VERSION:
        raise StackError(
            f"the store has layout {found.version}, this Postgrad knows layouts up to {SCHEMA_VERSION}: "
            "upgrade Postgrad, or point $POSTGRAD_HOME at another folder"
        )
    known = [revision_of(version) for version in range(1, SCHEMA_VERSION + 1)]
    if found.revision is not None and found.revision not in known:
        raise StackError(
            f"the store has layout {found.revision!r}, this Postgrad knows {', '.join(known)}: "
            "upgrade Postgrad, or point $POSTGRAD_HOME at another folder"
        )


def _hush_alembic() -> None:
    # What it tells of each step, and already of its import, concerns nobody who starts a server.
    logger = logging.getLogger("alembic")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


@contextmanager
def _migrating(connection: Connection) -> Iterator[None]:
    """Make a connection fit to rebuild tables. It is closed afterwards, and not used for anything else."""
    connection.execution_options(**{WAIT_SECONDS: MIGRATION_WAIT_SECONDS})
    connection.detach()
    driver = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite" and driver is not None:
        # SQLite alters a table by copying it and dropping the old one, which would cascade to the tables below it.
        driver.cursor().execute("PRAGMA foreign_keys=OFF")
        driver.cursor().execute(f"PRAGMA busy_timeout={MIGRATION_WAIT_SECONDS * 1000}")
    yield

"""The layouts of the store, one Alembic revision each: `0001` is layout 1, `0002` layout 2.

A revision is written once and never changed: it names tables and columns by itself and imports none of the models.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from apis.errors import StackError
from post_training.jobs.database import Layout, revision_of, store_error

_FOLDER = Path(__file__).resolve().parent


def upgrade(connection: Connection, found: Layout, target: str) -> None:
    """Run what leads from the layout `found` to the revision `target`, in the open transaction of `connection`.

    Raises:
        StackError: a migration failed, or left rows that belong to no job. The caller rolls back.
    """
    config = _config(connection)
    if found.revision is None and found.version is not None:
        command.stamp(config, revision_of(found.version))
    try:
        command.upgrade(config, target)
    except DBAPIError as error:
        if store_error(error):
            raise
        said = " ".join(str(error.orig).split())
        what = "made" if found.version is None else f"migrated from layout {found.version} to {int(target)}"
        raise StackError(f"the store could not be {what}: {said}; it is left as it was") from error
    _check_references(connection)


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config


def _check_references(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        tables = ", ".join(sorted({str(row[0]) for row in broken}))
        raise StackError(
            f"{len(broken)} rows of the store's tables {tables} belong to no job: it is left as it was; "
            "put a backup in its place, or move it away"
        )

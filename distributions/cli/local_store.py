"""The store of a stack on this machine, opened by commands that need no running server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from apis.errors import StackError

if TYPE_CHECKING:
    from post_training.jobs.database import Database

STACK_HELP = "The stack's run.yaml or template, where it names its own store."


@contextmanager
def local_store(home: Path, stack: str | None, *, make: bool = False) -> Iterator[Database]:
    """The store of a state folder, or that which `stack` names, brought to this program's layout.

    Args:
        make: make the state folder and the store where there are none.

    Raises:
        StackError: there is no store, it cannot be opened, a newer Postgrad wrote it, or a server of an older one works
            on it.
    """
    from distributions.home import ensure_home
    from distributions.run_config import StoreConfig, load_run_config
    from post_training.jobs.database import Database

    store = load_run_config(stack, os.environ).metadata_store if stack else StoreConfig()
    url = store.sqlalchemy_url(home)
    file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else None
    if make:
        ensure_home(home)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    elif file is not None and not file.is_file():
        raise StackError(
            f"{home} holds no store of a stack; set $POSTGRAD_HOME to the stack's state folder, "
            "or name its run.yaml with --stack"
        )
    database = Database(url)
    try:
        with _kept_from_servers(home, database):
            database.migrate()
        yield database
    finally:
        database.close()


@contextmanager
def _kept_from_servers(home: Path, database: Database) -> Iterator[None]:
    """Keep servers off the state folder where the store has an older layout: one that runs would lose it."""
    from distributions.home import lock_home

    if not _is_older(database):
        yield
        return
    try:
        lock = lock_home(home)
    except StackError as error:
        raise StackError(
            f"the store has the layout of an older Postgrad, and a server works on it ({error.message}): stop the "
            "server, and start it with this Postgrad, which brings the store to its own layout"
        ) from None
    with lock:
        yield


def _is_older(database: Database) -> bool:
    from sqlalchemy.exc import SQLAlchemyError

    from post_training.jobs.database import SCHEMA_VERSION, read_layout

    try:
        with database.reading() as session:
            version = read_layout(session.connection()).version
    except SQLAlchemyError:
        return False  # `migrate` says what is wrong with it
    return version is not None and version < SCHEMA_VERSION

"""`postgrad keys`: API keys of a stack, made and revoked in its store, whether it runs or not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributions.cli.groups import CommandGroup
from distributions.cli.local_store import STACK_HELP, local_store
from distributions.cli.output import AsJson, local_time, print_table

if TYPE_CHECKING:
    from post_training.catalog.keys import ApiKeyRow, ApiKeys

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

Stack = Annotated[str | None, typer.Option("--stack", metavar="STACK", help=STACK_HELP)]


@app.command("create")
def create(
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the key is for, or whose it is.")] = "",
    stack: Stack = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key and print it; it is shown this once and kept nowhere.

    The first key switches authentication on, also of a stack that runs: from then on every request needs a key.
    What a key makes, jobs, models and data sets, no other key sees.

    \b
    Examples:
      postgrad keys create --name alice
      export LLAMA_STACK_API_KEY=$(postgrad keys create --name notebook)
    """
    with _keys(stack, make=True) as keys:
        row, key = keys.create(name)
    if as_json:
        print(json.dumps({**_shown(row), "key": key}, indent=2))
        return
    print(key)
    print(
        f"This is the only time that the key is shown. Revoke it with: postgrad keys revoke {row.id}", file=sys.stderr
    )


@app.command("list")
def list_keys(stack: Stack = None, as_json: AsJson = False) -> None:
    """List the keys by their ids, revoked ones included. The keys themselves are not known."""
    with _keys(stack) as keys:
        rows = keys.all()
    if as_json:
        print(json.dumps([_shown(row) for row in rows], indent=2))
        return
    header = ("id", "name", "created", "last used", "revoked")
    times = [(local_time(r.created_at), local_time(r.last_used_at), local_time(r.revoked_at)) for r in rows]
    cells = [(r.id, r.name, *(time or "-" for time in at)) for r, at in zip(rows, times, strict=True)]
    print_table(header, cells)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="A key's id, as `keys list` shows it.")],
    stack: Stack = None,
) -> None:
    """Revoke a key for good; a stack that runs refuses it within a second.

    What it made stays, and only the administrator's key ($POSTGRAD_API_KEY of the server) sees it then. Authentication
    stays on, also when no key is left.
    """
    with _keys(stack) as keys:
        row = keys.revoke(key_id)
    print(f"{row.id} is revoked")


def _shown(row: ApiKeyRow) -> dict[str, Any]:
    times = {"created_at": row.created_at, "last_used_at": row.last_used_at, "revoked_at": row.revoked_at}
    return {"id": row.id, "name": row.name, **{name: _iso(at) for name, at in times.items()}}


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


@contextmanager
def _keys(stack: str | None, *, make: bool = False) -> Iterator[ApiKeys]:
    from sqlalchemy.exc import SQLAlchemyError

    from distributions.home import state_home
    from post_training.catalog.keys import ApiKeys
    from post_training.jobs.store_faults import opening_error

    with local_store(state_home(), stack, make=make) as database:
        try:
            yield ApiKeys(database)
        except SQLAlchemyError as error:
            raise opening_error(error, database.engine.url) from error

"""What commands print: JSON for scripts, tables for people, errors on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from apis.errors import PostgradError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from post_training.client import StackClient

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, for scripts.")]


@dataclass(frozen=True)
class Connection:
    """The global options: where the stack is."""

    endpoint: str | None
    api_key: str | None


def connect(ctx: typer.Context) -> StackClient:
    """A client of the stack that the global options name; closed when the command ends. Raises InvalidField."""
    from post_training.client import StackClient

    connection = ctx.obj if isinstance(ctx.obj, Connection) else Connection(None, None)
    client = StackClient(connection.endpoint, api_key=connection.api_key)
    ctx.call_on_close(client.close)
    return client


def print_error(error: PostgradError) -> None:
    """`Error: message`, and the field where the message does not name it."""
    named = error.param is None or error.param in error.message
    suffix = "" if named else f" (field: {error.param})"
    print(f"Error: {error.message}{suffix}", file=sys.stderr)


def console(stream: TextIO) -> Console:
    """A rich console that writes control codes to terminals only, whatever FORCE_COLOR says."""
    from rich.console import Console

    return Console(file=stream, force_terminal=stream.isatty(), highlight=False, markup=False, soft_wrap=True)


def print_json(answer: BaseModel | Sequence[BaseModel]) -> None:
    """One JSON value on stdout, indented."""
    plain: Any
    if isinstance(answer, Sequence):
        plain = [item.model_dump(mode="json") for item in answer]
    else:
        plain = answer.model_dump(mode="json")
    print(json.dumps(plain, indent=2, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns, never cut or wrapped, so that ids can be copied and piped."""
    from rich.text import Text

    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    out = console(sys.stdout)
    for number, line in enumerate(lines):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        out.print(Text(text, style="bold" if number == 0 else ""))


def print_fields(fields: Iterable[tuple[str, str | None]]) -> None:
    """`name: value` lines; a None is left out."""
    shown = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name.ljust(width)}  {value}")


def local_time(moment: datetime | None) -> str | None:
    """A time of day in this machine's zone, to the second."""
    return None if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

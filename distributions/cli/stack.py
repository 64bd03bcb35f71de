"""`postgrad stack`: run a stack, and list what stacks are made of."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from apis.common import Api
from apis.errors import PostgradError, StackError
from distributions.environment import parse_env_options
from distributions.run_config import load_run_config, template_names, template_text

app = typer.Typer(help="Run a stack, and list what stacks are made of.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.command()
def run(
    stack: Annotated[str, typer.Argument(help="A template's name, or the path of a run.yaml.")],
    host: Annotated[str | None, typer.Option(help="Address to serve on.  [run.yaml's, else 127.0.0.1]")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            envvar=["POSTGRAD_PORT", "LLAMA_STACK_PORT"],
            help="Port to serve on; 0 takes any free one.  [run.yaml's, else 8321]",
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="NAME=VALUE for ${env.NAME} in the run.yaml; may be repeated.")
    ] = None,
) -> None:
    """Serve a stack until it is told to stop (Ctrl-C, SIGTERM)."""
    # The other commands need no web server; importing it here keeps them quick.
    from distributions.server import configure_logging, serve

    with errors_on_stderr():
        # Workers inherit the environment, so it holds what --env says.
        os.environ.update(parse_env_options(env or []))
        configure_logging()
        config = load_run_config(stack, os.environ)
        configure_logging(config.logging)
        serve(
            config, host, port, on_ready=lambda url: print(f"Postgrad serves {config.image_name} at {url}", flush=True)
        )


@app.command("list-templates")
def list_templates(as_json: AsJson = False) -> None:
    """List the stacks that ship with Postgrad."""
    rows = [(name, _first_comment(template_text(name))) for name in template_names()]
    _print_table(("template", "description"), rows, as_json)


@app.command("list-apis")
def list_apis(as_json: AsJson = False) -> None:
    """List the APIs that a stack can serve."""
    _print_table(("api",), [(api.value,) for api in Api], as_json)


@app.command("list-providers")
def list_providers(
    api: Annotated[str | None, typer.Argument(help="Only those of this API.")] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/providers.md.")] = False,
) -> None:
    """List the providers that a run.yaml may name: the built-in ones and those of installed packages."""
    from distributions.provider_page import provider_page
    from providers.external import installed
    from providers.registry import BUILT_IN

    with errors_on_stderr():
        if api is not None and api not in [known.value for known in Api]:
            raise StackError(f"there is no API {api!r}; there are: {', '.join(known.value for known in Api)}")
        if as_markdown:
            # Of what is built in alone, so that the page is the same everywhere.
            typer.echo(provider_page([spec for spec in BUILT_IN if api in (None, spec.api.value)]), nl=False)
            return
    found = installed()
    for fault in found.faults:
        typer.echo(f"Warning: {fault}", err=True)
    rows = [
        (
            spec.api.value,
            spec.provider_type,
            spec.description,
            ", ".join(spec.capabilities),
            ", ".join(spec.pip_packages),
        )
        for spec in (*BUILT_IN, *found.specs)
        if api is None or spec.api.value == api
    ]
    _print_table(("api", "provider_type", "description", "capabilities", "pip_packages"), rows, as_json)


@contextmanager
def errors_on_stderr() -> Iterator[None]:
    """Print an error of ours as one `Error: …` line and exit with code 1."""
    try:
        yield
    except PostgradError as error:
        typer.echo(f"Error: {error.message}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _first_comment(text: str) -> str:
    first = text.partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], as_json: bool) -> None:
    """A table for people; tab-separated lines where the output goes to a program; JSON where asked for."""
    if as_json:
        records: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in rows]
        typer.echo(json.dumps(records, indent=2))
    elif not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(row))
    else:
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        Console().print(table)

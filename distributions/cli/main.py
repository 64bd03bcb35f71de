"""The `postgrad` command: `postgrad [--endpoint URL] [--api-key KEY] GROUP COMMAND …`."""

from __future__ import annotations

from typing import Annotated

import typer

from distributions.cli import datasets, keys, models, post_training, sft
from distributions.cli.groups import RootGroup
from distributions.cli.output import Connection

# Plain help: the same bytes on a terminal, in a pipe and in CI, and no time spent on drawing it.
app = typer.Typer(cls=RootGroup, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
# Listed here, loaded by RootGroup.
app.add_typer(typer.Typer(), name="stack", help="Start a stack; list templates, APIs and providers.")
app.add_typer(post_training.app, name="post_training", help="Start, watch and stop fine-tuning jobs.")
app.add_typer(sft.app, name="sft", help="Fine-tune step by step, with the data and the loop on this machine.")
app.add_typer(datasets.app, name="datasets", help="Register data and look at its rows.")
app.add_typer(models.app, name="models", help="See, import and export models.")
app.add_typer(keys.app, name="keys", help="Make, list and revoke API keys of a stack on this machine.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from post_training.client.core import client_version

        print(f"postgrad {client_version()}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="The stack's URL. Left out: $POSTGRAD_BASE_URL, $LLAMA_STACK_BASE_URL, else http://127.0.0.1:8321.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", help="Its API key. Left out: $POSTGRAD_API_KEY or $LLAMA_STACK_API_KEY."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Fine-tune language models on a Postgrad stack, and serve them.

    \b
    Example:
      postgrad stack run experimental-post-training
      postgrad post_training supervised_fine_tune --model SmolLM2-135M-Instruct --dataset tickets.jsonl --follow

    Exit codes: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 3 the followed job was cancelled,
    130 interrupted.
    """
    ctx.obj = Connection(endpoint, api_key)


if __name__ == "__main__":
    app(prog_name="postgrad")

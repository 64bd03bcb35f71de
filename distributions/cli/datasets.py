"""`postgrad datasets …`: register data and look at its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distributions.cli.groups import CommandGroup
from distributions.cli.output import AsJson, connect, print_fields, print_json, print_table

if TYPE_CHECKING:
    from apis.datasets.models import Dataset, IterrowsResponse
    from post_training.client import StackClient

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

DatasetId = Annotated[str, typer.Argument(metavar="DATASET_ID", help="The data set's id.", show_default=False)]


@app.command("register")
def register(
    ctx: typer.Context,
    dataset_id: Annotated[
        str | None,
        typer.Option("--dataset-id", help="Its id. Left out: made of the file's name and a hash of its content."),
    ] = None,
    purpose: Annotated[
        Literal["post-training/messages", "eval/question-answer", "eval/messages-answer"],
        typer.Option("--purpose", help="What the rows are for."),
    ] = "post-training/messages",
    url: Annotated[
        str | None,
        typer.Option("--url", help="What the server reads: a path or file: URI there, data:, or a hub id."),
    ] = None,
    dataset_path: Annotated[
        Path | None, typer.Option("--dataset-path", help="A file here (.jsonl .json .csv); its rows are sent.")
    ] = None,
    metadata: Annotated[str | None, typer.Option("--metadata", help="A JSON object kept with it, or @FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Register a data set and print its id.

    \b
    Examples:
      postgrad datasets register --dataset-id tickets --dataset-path tickets.jsonl
      postgrad datasets register --dataset-id tickets --purpose post-training/messages --url file:///data/tickets.jsonl
    """
    from distributions.cli.job_request import json_object
    from distributions.cli.local_rows import read_source

    if (url is None) == (dataset_path is None):
        raise typer.BadParameter("give one of --url and --dataset-path")
    if dataset_path is not None:
        source, derived_id = read_source(dataset_path)
    else:
        source, derived_id = {"type": "uri", "uri": url}, None
    answer = connect(ctx).datasets.register(
        source,
        dataset_id=dataset_id or derived_id,
        purpose=purpose,
        metadata=json_object(metadata, "--metadata") or None,
    )
    if as_json:
        print_json(answer)
    else:
        print(answer.identifier)


@app.command("list")
def list_datasets(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the registered data sets.

    \b
    Example:
      postgrad datasets list
    """
    answer = connect(ctx).datasets.list()
    if as_json:
        print_json(answer)
        return
    rows = [(item.identifier, item.purpose.value, item.provider_id, _source(item)) for item in answer]
    print_table(("DATASET", "PURPOSE", "PROVIDER", "SOURCE"), rows)


def _source(dataset: Dataset, longest: int = 80) -> str:
    if dataset.source.type == "rows":
        return "rows"
    uri = dataset.source.uri
    # A data: URI is the data itself.
    return uri if len(uri) <= longest else uri[: longest - 1] + "…"


@app.command("get")
def get(ctx: typer.Context, dataset_id: DatasetId, as_json: AsJson = False) -> None:
    """Show one data set.

    \b
    Example:
      postgrad datasets get tickets
    """
    answer = connect(ctx).datasets.get(dataset_id)
    if as_json:
        print_json(answer)
        return
    print_fields(
        [
            ("dataset", answer.identifier),
            ("purpose", answer.purpose.value),
            ("provider", answer.provider_id),
            ("source", _source(answer)),
            ("metadata", json.dumps(answer.metadata, ensure_ascii=False) if answer.metadata else None),
        ]
    )


@app.command("rows")
def rows(
    ctx: typer.Context,
    dataset_id: DatasetId,
    start: Annotated[int, typer.Option("--start", min=0, help="Number of the first row, from 0.")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=-1, help="Most rows; -1: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Print rows, one JSON object a line; with --json the whole answer, which says whether more follow.

    \b
    Example:
      postgrad datasets rows tickets --limit 5
    """
    answer = _all_rows(connect(ctx), dataset_id, start, limit)
    if as_json:
        print_json(answer)
        return
    for row in answer.data:
        print(json.dumps(row, ensure_ascii=False))


def _all_rows(client: StackClient, dataset_id: str, start: int, limit: int) -> IterrowsResponse:
    """As one answer, however many the server takes to give that much."""
    answer = client.datasets.rows(dataset_id, start_index=start, limit=limit)
    data = answer.data
    while answer.data and answer.has_more and (limit == -1 or len(data) < limit):
        left = -1 if limit == -1 else limit - len(data)
        answer = client.datasets.rows(dataset_id, start_index=start + len(data), limit=left)
        data = [*data, *answer.data]
    return answer.model_copy(update={"data": data})


@app.command("append")
def append(
    ctx: typer.Context,
    dataset_id: DatasetId,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows to add (.jsonl .json .csv).", show_default=False)],
) -> None:
    """Add a file's rows to the end of a data set that was registered by rows.

    \b
    Example:
      postgrad datasets append tickets more-tickets.jsonl
    """
    from distributions.cli.local_rows import read_rows

    new_rows = read_rows(file)
    connect(ctx).datasets.append(dataset_id, new_rows)
    print(f"added {len(new_rows)} row{'' if len(new_rows) == 1 else 's'} to {dataset_id}")


@app.command("unregister")
def unregister(ctx: typer.Context, dataset_id: DatasetId) -> None:
    """Forget a data set. A file it was registered from stays.

    \b
    Example:
      postgrad datasets unregister tickets
    """
    connect(ctx).datasets.unregister(dataset_id)

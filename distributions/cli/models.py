"""`postgrad models …`: see the models of a stack, bring one in, write a merged one out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from apis.errors import InvalidField
from distributions.cli.groups import CommandGroup
from distributions.cli.local_store import local_store
from distributions.cli.output import AsJson, connect, console, print_fields, print_json, print_table
from distributions.home import state_home

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from apis.models.models import Model
    from post_training.catalog.models import ModelCatalog

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

ModelId = Annotated[str, typer.Argument(metavar="MODEL_ID", help="The model's id.", show_default=False)]


@app.command("list")
def list_models(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List base models and checkpoints.

    \b
    Example:
      postgrad models list
    """
    answer = connect(ctx).models.list()
    if as_json:
        print_json(answer)
        return
    rows = [(item.identifier, item.model_type, item.provider_id, item.provider_resource_id) for item in answer]
    print_table(("MODEL", "TYPE", "PROVIDER", "RESOURCE"), rows)


@app.command("get")
def get(ctx: typer.Context, model_id: ModelId, as_json: AsJson = False) -> None:
    """Show one model.

    \b
    Example:
      postgrad models get SmolLM2-135M-Instruct
    """
    answer = connect(ctx).models.get(model_id)
    if as_json:
        print_json(answer)
        return
    print_fields(
        [
            ("model", answer.identifier),
            ("type", answer.model_type),
            ("provider", answer.provider_id),
            ("resource", answer.provider_resource_id),
            ("metadata", json.dumps(answer.metadata, ensure_ascii=False) if answer.metadata else None),
        ]
    )


@app.command("unregister")
def unregister(ctx: typer.Context, model_id: ModelId) -> None:
    """Forget a model's id. Its files stay.

    \b
    Example:
      postgrad models unregister SmolLM2-135M-Instruct
    """
    connect(ctx).models.unregister(model_id)


@app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model folder, or a hub id.", show_default=False)],
    model_id: Annotated[
        str | None, typer.Option("--model-id", help="Id to import it under. Left out: made of the source's name.")
    ] = None,
    allow_hub: Annotated[bool, typer.Option("--allow-hub", help="Let SOURCE be fetched from the hub.")] = False,
) -> None:
    """Bring a model into this machine's state folder ($POSTGRAD_HOME or ~/.postgrad) and print its id.

    Works on files, without a server.

    \b
    Examples:
      postgrad models import ./SmolLM2-135M-Instruct
      postgrad models import HuggingFaceTB/SmolLM2-135M-Instruct --allow-hub
    """
    from post_training.catalog.importing import import_model as bring_in

    print(bring_in(source, model_id, state_home(), allow_hub=allow_hub))


@app.command("export")
def export_model(
    model_id: Annotated[
        str,
        typer.Argument(metavar="MODEL_ID", help="A checkpoint's id; with --gguf also a base's.", show_default=False),
    ],
    merged: Annotated[bool, typer.Option("--merged", help="Adapter merged into its base: a whole model.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="One file for llama.cpp and what is built on it.")] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "f32", "f16", "q8_0"],
        typer.Option("--dtype", help="Number format of the weights; f16 and q8_0 with --gguf only."),
    ] = "fp32",
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="With --gguf: where to write it. Left out: in the state folder."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="The stack's template or run.yaml, if its store is not the default one."),
    ] = None,
) -> None:
    """Write a model of this machine's state folder in another form, verified, and print where it lies.

    --merged makes a whole Hugging Face model of a checkpoint; --gguf one file for llama.cpp.

    \b
    Examples:
      postgrad models export SmolLM2-135M-Instruct-sft-1234-0 --merged --dtype bf16
      postgrad models export SmolLM2-135M-Instruct-sft-1234-0 --gguf --dtype q8_0 --to tickets.gguf
    """
    from post_training.catalog.exporting import export_gguf, export_merged

    if merged == gguf:
        raise typer.BadParameter(
            "give --merged or --gguf, one of them: the adapter is part of every checkpoint already"
        )
    if merged and to is not None:
        raise typer.BadParameter("--to goes with --gguf: a merged model is written into the state folder")
    if merged and dtype in ("f16", "q8_0"):
        raise typer.BadParameter(f"--dtype {dtype} goes with --gguf: a merged model is fp32 or bf16")
    with _local_catalog(state_home(), stack) as catalog:
        if gguf:
            print(export_gguf(catalog, model_id, "f32" if dtype == "fp32" else dtype, to))
        else:
            print(export_merged(catalog, model_id, "bf16" if dtype == "bf16" else "fp32"))


@app.command("download")
def download(
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CHECKPOINT", help="A checkpoint's id, or another name of it.", show_default=False
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="A new or empty folder. Left out: the id's last part, here."),
    ] = None,
    form: Annotated[
        Literal["adapter", "merged", "all"],
        typer.Option("--form", help="The adapter (PEFT), the whole merged model, or every file of the checkpoint."),
    ] = "adapter",
) -> None:
    """Bring a checkpoint of a stack to this machine, checked against its hashes, and print its folder.

    A download that was cut goes on where it was.

    \b
    Examples:
      postgrad models download SmolLM2-135M-Instruct-sft-1234-0
      postgrad models download SmolLM2-135M-Instruct-sft-1234-0 --to tickets-model --form merged
    """
    client = connect(ctx)
    job_uuid, step = _job_and_step(client.models.get(checkpoint))
    target = to or Path(checkpoint.rpartition("/")[2])
    with _bar(target.name) as on_progress:
        folder = client.post_training.download_checkpoint(job_uuid, step, target, form, on_progress)
    print(folder)


def _job_and_step(model: Model) -> tuple[str, int]:
    job_uuid, step = model.metadata.get("job_uuid"), model.metadata.get("step")
    if not isinstance(job_uuid, str) or not isinstance(step, int):
        raise InvalidField(
            f"{model.identifier!r} is no checkpoint of a job, and only those can be downloaded; "
            "`postgrad models list` shows the models",
            param="MODEL_OR_CHECKPOINT",
        )
    return job_uuid, step


def _bar(name: str) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """On a terminal, a bar on stderr that the result moves; else nothing."""
    return _drawn_bar(name) if sys.stderr.isatty() else nullcontext()


@contextmanager
def _drawn_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda here, whole: bar.update(task, completed=here, total=whole)


@contextmanager
def _local_catalog(home: Path, stack: str | None) -> Iterator[ModelCatalog]:
    """The models of a state folder, in the store that `stack` names. Raises StackError where there is none."""
    from post_training.catalog.models import ModelCatalog

    with local_store(home, stack) as database:
        yield ModelCatalog(database, home)

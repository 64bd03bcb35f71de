"""`postgrad sft …`: fine-tune step by step from this machine, which holds the data and the loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributions.cli.groups import CommandGroup
from distributions.cli.output import AsJson, Connection, local_time, print_fields, print_json, print_table

if TYPE_CHECKING:
    from distributions.cli.sft_config import RunFile
    from post_training.client import SFTClient
    from post_training.client.sft_result import FitResult

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

EXIT_CANCELLED, EXIT_INTERRUPTED = 3, 130
JobArgument = Annotated[str, typer.Argument(metavar="JOB_ID", help="The session's id.", show_default=False)]


@app.command("run")
def run(
    ctx: typer.Context,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A YAML file; its keys are listed above.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Goes over the file; may be repeated.", show_default=False),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option("--job-id", help="Id of the new session. Left out: one is made and printed.", show_default=False),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="JOB_ID", help="Go on with an interrupted run, on the same data.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train on a file of this machine, step by step, and print the checkpoints.

    \b
    Examples:
      postgrad sft run warmup.yaml
      postgrad sft run warmup.yaml --set batch_size=16 --set lora.lora_rank=8 --set optimizer_config.lr=1e-4

    \b
    Keys of the file, of which only data_path must be there:
      data_path, val_data_path         .jsonl, .json or .csv files of this machine
      batch_size, val_batch_size       rows of a step and of a validation call; 8
      num_epochs, num_steps            1 epoch; num_steps goes first
      shuffle, seed                    false; another order each epoch, drawn from the seed
      save_freq, test_freq             steps between checkpoints and validations; both at the end in any case
      logger_backends, log_dir         of console, jsonl, tensorboard, wandb; files go to runs/
      project_name, experiment_name, wandb_key
      scheduler_url, scheduler_api_key, num_gpus
      model, lora, optimizer_config, dtype, total_steps … as in the config of a session

    Ctrl-C saves a checkpoint and exits with 130; --resume goes on from it.
    """
    from distributions.cli.sft_config import read_run_file

    if job_id is not None and resume is not None:
        raise typer.BadParameter("give --job-id to a new session or --resume an earlier one", param_hint="--job-id")
    file = read_run_file(config, overrides or [])
    client = _connect(ctx, file)
    result = _fit(client, file, job_id, resume, as_json=as_json)
    if as_json:
        print(json.dumps(_as_json(result), indent=2))
        return
    print(f"completed {result.total_steps} steps")
    for checkpoint in result.checkpoints:
        print(f"checkpoint {checkpoint.identifier}")


@app.command("list")
def list_sessions(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List your sessions, oldest first."""
    sessions = _connect(ctx).list_jobs()
    if as_json:
        print_json(sessions)
        return
    rows = [
        (one.job_id, "PAUSED" if one.paused else one.status.value, local_time(one.created_at) or "") for one in sessions
    ]
    print_table(("job_id", "status", "created"), rows)


@app.command("status")
def status(ctx: typer.Context, job_id: JobArgument) -> None:
    """Show where a session stands."""
    shown = _connect(ctx).job_status(job_id)
    print_fields(
        (
            ("job_id", shown.job_id),
            ("status", "PAUSED" if shown.paused else shown.status.value),
            ("message", shown.message),
            ("error", shown.error_message),
            ("last durable step", None if shown.last_durable_step is None else str(shown.last_durable_step)),
            ("created", local_time(shown.created_at)),
            ("started", local_time(shown.started_at)),
            ("completed", local_time(shown.completed_at)),
        )
    )


@app.command("cancel")
def cancel(ctx: typer.Context, job_id: JobArgument) -> None:
    """End a session without a result; checkpoints that it saved stay."""
    answer = _connect(ctx).cancel(job_id)
    print(f"{answer.job_id} {answer.status.value}")


def _connect(ctx: typer.Context, file: RunFile | None = None) -> SFTClient:
    """A client of the stack that the global options name, else the file, else the environment."""
    from post_training.client import SFTClient

    given = ctx.obj if isinstance(ctx.obj, Connection) else Connection(None, None)
    url, key = given.endpoint, given.api_key
    if file is not None:
        secret = file.settings.scheduler_api_key
        url, key = url or file.settings.scheduler_url, key or (secret.get_secret_value() if secret else None)
    client = SFTClient(url, key)
    ctx.call_on_close(client.close)
    return client


def _fit(client: SFTClient, file: RunFile, job_id: str | None, resume: str | None, *, as_json: bool) -> FitResult:
    from apis.errors import JobFailure, PostgradError
    from post_training.client.sft_rows import read_file

    settings = file.settings
    rows = read_file(Path(settings.data_path))
    validation = read_file(Path(settings.val_data_path)) if settings.val_data_path is not None else None
    # Checked first: nothing is opened for what cannot run.
    config = file.session_config(len(rows))
    identifier = resume or job_id or _new_id(file)
    with _tracking(file, identifier, as_json=as_json) as tracker:
        if resume is None:
            client.submit(config, job_id=identifier, num_gpus=settings.num_gpus, wait=False)
            print(f"session {identifier}", file=sys.stderr)
        try:
            return client.fit(
                rows,
                validation,
                batch_size=settings.batch_size,
                epochs=None if settings.num_steps is not None else settings.num_epochs,
                steps=settings.num_steps,
                validate_every=settings.test_freq,
                save_every=settings.save_freq,
                validation_batch_size=settings.val_batch_size,
                shuffle=settings.shuffle,
                seed=config.seed or 0,
                resume=resume,
                tracker=tracker,
            )
        except KeyboardInterrupt:
            _leave(client, identifier)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except JobFailure:
            if _cancelled(client, identifier):
                print(f"session {identifier} was cancelled", file=sys.stderr)
                raise typer.Exit(EXIT_CANCELLED) from None
            raise
        except PostgradError:
            _say_how_to_go_on(client, identifier)
            raise


def _tracking(file: RunFile, identifier: str, *, as_json: bool) -> Any:
    from post_training.client.tracking import open_tracking

    settings, key = file.settings, file.settings.wandb_key
    return open_tracking(
        settings.logger_backends,
        project=file.session.get("project_name"),
        run=identifier,
        name=file.session.get("experiment_name"),
        folder=settings.log_dir,
        wandb_key=None if key is None else key.get_secret_value(),
        config=file.shown,
        console=sys.stderr if as_json else sys.stdout,
    )


def _new_id(file: RunFile) -> str:
    from distributions.cli.job_request import new_job_id

    return new_job_id(file.session.get("experiment_name") or file.settings.data_path)


def _cancelled(client: SFTClient, job_id: str) -> bool:
    from apis.errors import PostgradError

    try:
        return client.job_status(job_id).status.value == "CANCELLED"
    except PostgradError:
        return False


def _leave(client: SFTClient, job_id: str) -> None:
    """After Ctrl-C: a session that waits for its first device is not left to take one later, for nobody."""
    from apis.errors import PostgradError

    try:
        if client.job_status(job_id).started_at is None:
            client.cancel(job_id)
            print(f"session {job_id} had not begun and was cancelled", file=sys.stderr)
            return
    except PostgradError as error:
        print(f"session {job_id}: {error.message}", file=sys.stderr)
        return
    _say_how_to_go_on(client, job_id)


def _say_how_to_go_on(client: SFTClient, job_id: str) -> None:
    """Nothing where there is nothing to go on with: it never was, or has ended."""
    from apis.errors import PostgradError

    try:
        status = client.job_status(job_id)
    except PostgradError:
        return
    if status.completed_at is not None:
        return
    where = "is saved and paused" if status.paused else "goes on waiting, and is paused once its lease is over"
    print(
        f"Session {job_id} {where}.\n"
        f"  go on:      postgrad sft run CONFIG --resume {job_id}\n"
        f"  cancel it:  postgrad sft cancel {job_id}",
        file=sys.stderr,
    )


def _as_json(result: FitResult) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "job_id": result.job_id,
        "total_steps": result.total_steps,
        "losses": [{"step": step.step, "epoch": step.epoch, "loss": step.loss} for step in result.steps],
        "validations": [asdict(validation) for validation in result.validations],
        "checkpoints": [checkpoint.model_dump(mode="json") for checkpoint in result.checkpoints],
    }

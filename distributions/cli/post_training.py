"""`postgrad post_training …`: submit, watch and stop fine-tuning jobs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distributions.cli.groups import CommandGroup
from distributions.cli.output import AsJson, connect, local_time, print_fields, print_json, print_table

if TYPE_CHECKING:
    from apis.post_training.models import PostTrainingJobStatusResponse
    from post_training.client import StackClient

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)


def _option(*names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **settings)


JobArgument = Annotated[str | None, typer.Argument(metavar="[JOB_UUID]", help="The job's id.", show_default=False)]
JobOption = Annotated[str | None, _option("--job-uuid", help="The job's id, as an option.")]
NewJob = Annotated[str | None, _option("--job-uuid", help="Id of the new job. Left out: one is made and printed.")]
TrainingJson = Annotated[
    str | None, _option("--training-config", help="A TrainingConfig as JSON, or @FILE. Single options go over it.")
]
AlgorithmJson = Annotated[
    str | None,
    _option("--algorithm-config", help="The algorithm as JSON, or @FILE. Single options go over it."),
]
DataSet = Annotated[
    str | None, _option("--dataset", help="Rows to train on: a file here (.jsonl .json .csv) or a registered id.")
]
ValidationSet = Annotated[
    str | None, _option("--validation-dataset", help="Rows for the validation after each epoch, given as --dataset is.")
]
Epochs = Annotated[
    int | None, _option("--epochs", min=1, help="Passes over the data. Left out: 3, or as the rows ask.")
]
LearningRate = Annotated[float | None, _option("--lr", help="Peak learning rate. Left out: by the model's width.")]
BatchSize = Annotated[
    int | None, _option("--batch-size", min=1, help="Rows in a micro-batch. Left out: 8, or as the rows ask.")
]
MaxSeqLen = Annotated[
    int | None, _option("--max-seq-len", min=8, help="Tokens a row is cut to. Left out: the model's, at most 4096.")
]
DtypeOption = Annotated[
    Literal["bf16", "fp32"] | None, _option("--dtype", help="Number format of the base model. Left out: bf16.")
]
Seed = Annotated[int | None, _option("--seed", min=0, help="Seed of order and initial weights. Left out: 0.")]
ModelOption = Annotated[
    str | None, _option("--model", help="Model or earlier checkpoint to start from. Left out: the stack's default.")
]
Rank = Annotated[int | None, _option("--rank", min=1, help="LoRA rank. Left out: 16.")]
Alpha = Annotated[
    int | None, _option("--alpha", min=1, help="LoRA alpha; updates are scaled by alpha/rank. Left out: 32.")
]
CheckpointDir = Annotated[
    str | None, _option("--checkpoint-dir", help="A base-model or output folder there, as the provider reads it.")
]
ProviderOption = Annotated[
    str | None, _option("--provider", help="The provider that trains; else the first there that supports the job.")
]
Follow = Annotated[bool, _option("--follow", "-f", help="Watch it end: exit 0 completed, 1 failed, 3 cancelled.")]


@app.command("supervised_fine_tune")
def supervised_fine_tune(
    ctx: typer.Context,
    job_uuid: NewJob = None,
    model: ModelOption = None,
    dataset: DataSet = None,
    validation_dataset: ValidationSet = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    rank: Rank = None,
    alpha: Alpha = None,
    batch_size: BatchSize = None,
    max_seq_len: MaxSeqLen = None,
    dtype: DtypeOption = None,
    seed: Seed = None,
    algorithm_config: AlgorithmJson = None,
    training_config: TrainingJson = None,
    checkpoint_dir: CheckpointDir = None,
    provider_id: ProviderOption = None,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Start a fine-tuning job and print its id.

    \b
    Examples:
      postgrad post_training supervised_fine_tune --model SmolLM2-135M-Instruct \\
          --dataset tickets.jsonl --epochs 2 --follow
      postgrad post_training supervised_fine_tune --job-uuid 1234 --model SmolLM2-135M-Instruct \\
          --algorithm-config '{"type": "LoRA", "rank": 8, "alpha": 16}' --training-config @training.json
    """
    from distributions.cli.job_request import fine_tune_fields, new_job_id

    client = connect(ctx)
    options = _training(client, dataset, validation_dataset, epochs, lr, batch_size, max_seq_len, dtype, seed)
    options |= {"model": model, "checkpoint_dir": checkpoint_dir, "provider_id": provider_id}
    options |= {"job_uuid": job_uuid or new_job_id(dataset)}
    fields = fine_tune_fields(training_config, algorithm_config, options, rank, alpha)
    job = client.post_training.supervised_fine_tune(**fields)
    _submitted(client, job.job_uuid, follow=follow, as_json=as_json)


@app.command("preflight")
def preflight(
    ctx: typer.Context,
    job_uuid: Annotated[str | None, _option("--job-uuid", help="Id that the job shall have; checked as well.")] = None,
    model: ModelOption = None,
    dataset: DataSet = None,
    validation_dataset: ValidationSet = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    rank: Rank = None,
    alpha: Alpha = None,
    batch_size: BatchSize = None,
    max_seq_len: MaxSeqLen = None,
    dtype: DtypeOption = None,
    seed: Seed = None,
    algorithm_config: AlgorithmJson = None,
    training_config: TrainingJson = None,
    checkpoint_dir: CheckpointDir = None,
    provider_id: ProviderOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what supervised_fine_tune with these options would train on and take, without training.

    \b
    Example:
      postgrad post_training preflight --model SmolLM2-135M-Instruct --dataset tickets.jsonl --epochs 2
    """
    from distributions.cli.job_request import fine_tune_fields
    from distributions.cli.preflight import print_report

    client = connect(ctx)
    options = _training(client, dataset, validation_dataset, epochs, lr, batch_size, max_seq_len, dtype, seed)
    options |= {"model": model, "checkpoint_dir": checkpoint_dir, "provider_id": provider_id}
    options |= {"job_uuid": job_uuid}
    report = client.post_training.preflight(**fine_tune_fields(training_config, algorithm_config, options, rank, alpha))
    if as_json:
        print_json(report)
    else:
        print_report(report)


@app.command("preference_optimize")
def preference_optimize(
    ctx: typer.Context,
    finetuned_model: Annotated[str, _option("--finetuned-model", help="Model or checkpoint to start from.")],
    job_uuid: NewJob = None,
    dataset: DataSet = None,
    validation_dataset: ValidationSet = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    beta: Annotated[float | None, _option("--beta", help="Weight of the reference model. Left out: 0.1.")] = None,
    loss_type: Annotated[
        Literal["sigmoid", "hinge", "ipo", "kto_pair"] | None,
        _option("--loss-type", help="DPO loss. Left out: sigmoid."),
    ] = None,
    batch_size: BatchSize = None,
    max_seq_len: MaxSeqLen = None,
    dtype: DtypeOption = None,
    seed: Seed = None,
    algorithm_config: AlgorithmJson = None,
    training_config: TrainingJson = None,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Start a preference (DPO) job on rows of prompt, chosen and rejected; print its id.

    \b
    Example:
      postgrad post_training preference_optimize --finetuned-model SmolLM2-135M-Instruct-sft-1234-0 \\
          --dataset preferences.jsonl --beta 0.1 --follow
    """
    from distributions.cli.job_request import json_object, new_job_id, set_fields

    client = connect(ctx)
    fields = {"training_config": json_object(training_config, "--training-config")}
    set_fields(fields, _training(client, dataset, validation_dataset, epochs, lr, batch_size, max_seq_len, dtype, seed))
    algorithm = json_object(algorithm_config, "--algorithm-config")
    set_fields(algorithm, {"beta": beta, "loss_type": loss_type})
    set_fields(fields, {"finetuned_model": finetuned_model, "job_uuid": job_uuid or new_job_id(dataset)})
    job = client.post_training.preference_optimize(**fields, algorithm_config=algorithm)
    _submitted(client, job.job_uuid, follow=follow, as_json=as_json)


def _training(
    client: StackClient,
    dataset: str | None,
    validation_dataset: str | None,
    epochs: int | None,
    lr: float | None,
    batch_size: int | None,
    max_seq_len: int | None,
    dtype: str | None,
    seed: int | None,
) -> dict[str, Any]:
    """The single options as fields of a request; local data files are registered on the way."""
    from distributions.cli.local_rows import dataset_of

    return {
        "training_config.data_config.dataset_id": dataset and dataset_of(client, dataset),
        "training_config.data_config.validation_dataset_id": validation_dataset
        and dataset_of(client, validation_dataset),
        "training_config.data_config.batch_size": batch_size,
        "training_config.data_config.max_seq_len": max_seq_len,
        "training_config.n_epochs": epochs,
        "training_config.optimizer_config.lr": lr,
        "training_config.dtype": dtype,
        "training_config.seed": seed,
    }


def _submitted(client: StackClient, job_uuid: str, *, follow: bool, as_json: bool) -> None:
    from distributions.cli import progress

    if not as_json:
        print(job_uuid, flush=True)
    if follow:
        progress.follow(client, job_uuid, as_json=as_json)
    if as_json:
        print_json(client.post_training.status(job_uuid))


def _one_job(argument: str | None, option: str | None) -> str:
    given = [value for value in (argument, option) if value is not None]
    if len(given) != 1:
        raise typer.BadParameter("give the job's id, once: as JOB_UUID or with --job-uuid")
    return given[0]


@app.command("list")
def list_jobs(
    ctx: typer.Context,
    limit: Annotated[int | None, _option("--limit", "-n", min=1, help="Only the newest so many.")] = None,
    status: Annotated[
        Literal["scheduled", "in_progress", "completed", "failed", "cancelled"] | None,
        _option("--status", help="Only the jobs that are so."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, oldest first: all, or the newest so many.

    \b
    Examples:
      postgrad post_training list
      postgrad post_training list --limit 20 --status failed
    """
    from distributions.cli.job_output import listed_jobs

    jobs = listed_jobs(connect(ctx), limit, status)
    if as_json:
        print_json(jobs)
        return
    rows = [(job.job_uuid, job.status.value, job.model, local_time(job.created_at) or "") for job in jobs]
    print_table(("JOB", "STATUS", "MODEL", "CREATED"), rows)


@app.command("status")
def status(
    ctx: typer.Context,
    job: JobArgument = None,
    job_uuid: JobOption = None,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Show how far a job is and, where it failed, why.

    \b
    Examples:
      postgrad post_training status --job-uuid 1234
      postgrad post_training status 1234 --follow
    """
    from distributions.cli import progress

    client, name = connect(ctx), _one_job(job, job_uuid)
    if follow:
        progress.follow(client, name, as_json=as_json)
    answer = client.post_training.status(name)
    if as_json:
        print_json(answer)
    else:
        print_fields(_status_fields(answer))


def _status_fields(answer: PostTrainingJobStatusResponse) -> list[tuple[str, str | None]]:
    from distributions.cli.progress import summary

    error = answer.error
    return [
        ("job", answer.job_uuid),
        ("status", answer.status.value),
        ("model", answer.model),
        ("now", None if answer.status.terminal else summary(answer)),
        ("error", error and f"{error.message} [{error.code}]"),
        ("attempt", _attempt(answer) if answer.attempt > 1 else None),
        ("scheduled", local_time(answer.scheduled_at)),
        ("started", local_time(answer.started_at)),
        ("completed", local_time(answer.completed_at)),
        *(("checkpoint", checkpoint.identifier) for checkpoint in answer.checkpoints),
    ]


def _attempt(answer: PostTrainingJobStatusResponse) -> str:
    limit = answer.max_attempts
    lost = f" ({answer.lost_attempts} of {limit} lost)" if answer.lost_attempts and limit else ""
    return f"{answer.attempt}{lost}"


@app.command("artifacts")
def artifacts(ctx: typer.Context, job: JobArgument = None, job_uuid: JobOption = None, as_json: AsJson = False) -> None:
    """List a job's finished checkpoints; each is a model that the stack serves.

    \b
    Example:
      postgrad post_training artifacts --job-uuid 1234
    """
    answer = connect(ctx).post_training.artifacts(_one_job(job, job_uuid))
    if as_json:
        print_json(answer)
        return
    rows = [
        (item.identifier, str(item.epoch), str(item.step), *_losses(item.training_metrics), item.path)
        for item in answer.checkpoints
    ]
    print_table(("CHECKPOINT", "EPOCH", "STEP", "TRAIN LOSS", "VALIDATION LOSS", "PATH"), rows)


def _losses(metrics: Any) -> tuple[str, str]:
    values = (metrics.train_loss, metrics.validation_loss) if metrics is not None else (None, None)
    train, validation = ("-" if value is None else f"{value:.4f}" for value in values)
    return train, validation


@app.command("cancel")
def cancel(ctx: typer.Context, job: JobArgument = None, job_uuid: JobOption = None, as_json: AsJson = False) -> None:
    """Stop a waiting or running job. On one that has ended nothing happens.

    \b
    Example:
      postgrad post_training cancel --job-uuid 1234
    """
    client, name = connect(ctx), _one_job(job, job_uuid)
    client.post_training.cancel(name)
    if as_json:
        print_json(client.post_training.status(name))


@app.command("delete")
def delete(
    ctx: typer.Context,
    job: JobArgument = None,
    job_uuid: JobOption = None,
    yes: Annotated[bool, _option("--yes", "-y", help="Do not ask first.")] = False,
) -> None:
    """Delete a job that has ended: its log, its checkpoints, the models they are, all of its files.

    \b
    Example:
      postgrad post_training delete 1234
    """
    client, name = connect(ctx), _one_job(job, job_uuid)
    if not yes:
        _confirm_deletion(client, name)
    client.post_training.delete(name)


def is_terminal() -> bool:
    """Whether there is someone to ask."""
    return sys.stdin.isatty()


def _confirm_deletion(client: StackClient, job_uuid: str) -> None:
    if not is_terminal():
        raise typer.BadParameter("there is no terminal to ask on: give --yes to delete without being asked")
    checkpoints = len(client.post_training.artifacts(job_uuid).checkpoints)
    noun = "checkpoint" if checkpoints == 1 else "checkpoints"
    typer.confirm(f"Delete job {job_uuid} with its {checkpoints} {noun} and all files?", abort=True, err=True)


@app.command("logs")
def logs(
    ctx: typer.Context,
    job: JobArgument = None,
    job_uuid: JobOption = None,
    follow: Annotated[bool, _option("--follow", "-f", help="Go on with new lines until the job ends.")] = False,
    tail: Annotated[
        int | None, _option("--tail", "-n", min=1, max=10_000, help="Begin with the newest so many lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's log. With --json: one LogStream object, or one event a line with --follow.

    \b
    Examples:
      postgrad post_training logs 1234 --tail 20
      postgrad post_training logs 1234 --follow
    """
    from distributions.cli.job_output import follow_log, print_log

    show = follow_log if follow else print_log
    show(connect(ctx), _one_job(job, job_uuid), tail, as_json=as_json)


@app.command("metrics")
def metrics(ctx: typer.Context, job: JobArgument = None, job_uuid: JobOption = None, as_json: AsJson = False) -> None:
    """Print the numbers of every optimizer step: loss, learning rate, gradient norm, speed, memory.

    \b
    Example:
      postgrad post_training metrics 1234 --json
    """
    from distributions.cli.job_output import print_metrics

    print_metrics(connect(ctx), _one_job(job, job_uuid), as_json=as_json)

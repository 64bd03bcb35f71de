"""What a post-training request and its answers hold.

Field names are those of the Llama Stack post-training API, so that every client of it fits. Defaults train well by
themselves: a request needs a data set and nothing else. Every field acts or the request is refused with its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, computed_field, field_validator

from apis.common import Identifier, RequestModel, ResponseModel

# A switch that clients may send as null, which means what leaving it out means.
OffByDefault = Annotated[bool | None, AfterValidator(bool)]


class OptimizerType(StrEnum):
    adam = "adam"
    adamw = "adamw"
    sgd = "sgd"


class DatasetFormat(StrEnum):
    """How a row becomes messages. `instruct` and `dialog` are Llama Stack's; null means: told by the columns."""

    instruct = "instruct"
    dialog = "dialog"
    messages = "messages"
    prompt_completion = "prompt_completion"
    alpaca = "alpaca"
    sharegpt = "sharegpt"
    text = "text"

    @property
    def required_columns(self) -> tuple[str, ...]:
        return _COLUMNS[self][0]

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, the required ones first."""
        return _COLUMNS[self][0] + _COLUMNS[self][1]


_COLUMNS: dict[DatasetFormat, tuple[tuple[str, ...], tuple[str, ...]]] = {
    DatasetFormat.messages: (("messages",), ("tools",)),
    DatasetFormat.dialog: (("dialog",), ()),
    DatasetFormat.instruct: (("chat_completion_input", "expected_answer"), ()),
    DatasetFormat.prompt_completion: (("prompt", "completion"), ()),
    DatasetFormat.alpaca: (("instruction", "output"), ("input", "system", "history")),
    DatasetFormat.sharegpt: (("conversations",), ("system", "tools")),
    DatasetFormat.text: (("text",), ()),
}
"""Required and optional columns of each format."""


class JobStatus(StrEnum):
    scheduled = "scheduled"
    in_progress = "in_progress"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobStatus.completed, JobStatus.failed, JobStatus.cancelled)


class DataConfig(RequestModel):
    """Which rows are trained on and how they are batched."""

    dataset_id: Identifier
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Rows per micro-batch; with `packed`, packs per micro-batch. null: 8, fewer for few rows and up to "
        "32 for many (docs/training.md)",
    )
    shuffle: bool = Field(default=True, description="A seeded permutation of the rows, anew each epoch")
    data_format: DatasetFormat | None = Field(default=None, description="null: told by the columns of the first row")
    columns: dict[str, str] | None = Field(
        default=None,
        description='Where the data set names the columns of its format otherwise: {"prompt": "question"} reads '
        "`prompt` from its column `question`",
    )
    validation_dataset_id: Identifier | None = None
    validation_split: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="This part of the rows, drawn by the seed, is validated on and not trained on; at least one row",
    )
    packed: OffByDefault = Field(
        default=False, description="Fill packs of `max_seq_len` tokens with whole rows, in order"
    )
    train_on_input: OffByDefault = Field(default=False, description="Supervise every message, not only the assistant's")
    max_seq_len: int | None = Field(
        default=None,
        ge=8,
        description="The most tokens of a row; null: the model's context, at most 4096",
    )
    on_overlength: Literal["truncate", "drop", "error"] = Field(
        default="truncate",
        description="What happens to a row of more tokens: cut on the right, left out, or the job is refused",
    )

    @field_validator("columns")
    @classmethod
    def _of_one_format(cls, value: dict[str, str] | None, info: ValidationInfo) -> dict[str, str] | None:
        check_columns(value, info.data.get("data_format"))
        return value


def check_columns(columns: dict[str, str] | None, data_format: DatasetFormat | None) -> None:
    """Raises ValueError where no format, or not the given one, reads all of these columns, or a name is no text."""
    try:
        "".join((columns or {}).values()).encode()
    except UnicodeEncodeError:
        raise ValueError("a name holds an unpaired surrogate (\\ud800 to \\udfff), which is not text") from None
    formats = [data_format] if data_format else list(DatasetFormat)
    if columns and not any(set(columns) <= set(each.columns) for each in formats):
        raise ValueError(_unknown_columns(set(columns), formats))


def _unknown_columns(names: set[str], formats: list[DatasetFormat]) -> str:
    known = "; ".join(f"{data_format}: {', '.join(data_format.columns)}" for data_format in formats)
    wrong = sorted(names - {column for data_format in formats for column in data_format.columns}) or sorted(names)
    return f"no data format here reads {', '.join(map(repr, wrong))} (together); there are {known}"


class OptimizerConfig(RequestModel):
    """How weights are changed. A field that the chosen optimizer or schedule has no use for is refused."""

    optimizer_type: OptimizerType = OptimizerType.adamw
    lr: float | None = Field(
        default=None,
        validate_default=True,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="The highest learning rate; null: by the model's width, 3e-4 at 2,048 (docs/training.md), for adam "
        "and adamw only",
    )
    weight_decay: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Decoupled for adamw, in the gradient for adam and sgd"
    )
    num_warmup_steps: int | None = Field(
        default=None, ge=0, description="Linear warm-up, then `lr_schedule`; null: a tenth of all steps, at most 100"
    )
    lr_schedule: Literal["cosine", "linear", "constant"] | None = Field(
        default=None, description="How the rate falls after the warm-up, until the job's last step; null: cosine"
    )
    min_lr_ratio: float | None = Field(
        default=None, ge=0, le=1, description="The part of `lr` that cosine and linear fall to; null: 0"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] | None = Field(
        default=None, description="adam and adamw: decay of the two moments; null: 0.9, 0.999"
    )
    eps: float | None = Field(
        default=None, gt=0, le=1, allow_inf_nan=False, description="adam and adamw: added to the divisor; null: 1e-8"
    )
    momentum: float | None = Field(default=None, ge=0, lt=1, description="sgd; null: 0")

    @field_validator("lr")
    @classmethod
    def _known_for_the_optimizer(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None and info.data.get("optimizer_type") == OptimizerType.sgd:
            raise ValueError("sgd has no default rate, since a good one depends on the size of the gradients; give lr")
        return value

    @field_validator("betas", "eps", "momentum")
    @classmethod
    def _of_the_optimizer(cls, value: object, info: ValidationInfo) -> object:
        chosen = info.data.get("optimizer_type")
        if (
            value is not None
            and chosen is not None
            and (chosen == OptimizerType.sgd) != (info.field_name == "momentum")
        ):
            raise ValueError(f"{info.field_name} has no effect on {chosen.value}; leave it out")
        return value

    @field_validator("min_lr_ratio")
    @classmethod
    def _of_the_schedule(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("lr_schedule") == "constant":
            raise ValueError("min_lr_ratio has no effect on a constant lr_schedule; leave it out")
        return value


class EfficiencyConfig(RequestModel):
    enable_activation_checkpointing: OffByDefault = False
    enable_activation_offloading: OffByDefault = False
    memory_efficient_fsdp_wrap: OffByDefault = False
    fsdp_cpu_offload: OffByDefault = False


class TrainingConfig(RequestModel):
    n_epochs: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="null: 3, up to 10 for few rows and down to 1 for many (docs/training.md)",
    )
    max_steps_per_epoch: int | None = Field(
        default=None, ge=1, description="Optimizer steps; null (or 0): the whole epoch"
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=65536)
    max_validation_steps: int | None = Field(
        default=None, ge=1, description="Batches of a validation, where the job has one; null (or 0): all"
    )
    data_config: DataConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    efficiency_config: EfficiencyConfig = EfficiencyConfig()
    dtype: Literal["bf16", "fp32"] | None = "bf16"
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False, description="null: no clipping")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: the provider's `torch_seed`, else 0")
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        description="End the job once the validation loss has not improved for so many epochs; null: run all epochs",
    )
    save_every_n_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between the checkpoints inside an epoch that a job resumes from; null: about "
        "every 5 minutes",
    )
    save_total_limit: int | None = Field(
        default=None,
        ge=1,
        description="How many checkpoints inside epochs are kept while the job runs; those after an epoch always are. "
        "null: the newest",
    )
    max_attempts: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Attempts that may end without a result (a lost worker) before the job fails, counted since its "
        "newest checkpoint; null: the stack's `jobs.max_attempts`",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="The kind of device to wait for; null: any that the provider can use"
    )

    @field_validator("max_steps_per_epoch", "max_validation_steps", mode="before")
    @classmethod
    def _zero_means_all(cls, value: object) -> object:
        # Upstream's own documentation sends 0 here and means "no limit".
        return None if value == 0 and not isinstance(value, bool) else value

    @field_validator("optimizer_config", mode="before")
    @classmethod
    def _default_optimizer(cls, value: object) -> object:
        return OptimizerConfig() if value is None else value

    @field_validator("efficiency_config", mode="before")
    @classmethod
    def _default_efficiency(cls, value: object) -> object:
        return EfficiencyConfig() if value is None else value


AttentionModule = Literal["q_proj", "k_proj", "v_proj", "output_proj"]
LayerName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class LoraFinetuningConfig(RequestModel):
    type: Literal["LoRA"] = "LoRA"
    lora_attn_modules: list[LayerName] = Field(
        default=["q_proj", "k_proj", "v_proj", "output_proj"],
        description="q_proj, k_proj, v_proj, output_proj, whatever the model calls them; providers that say so in "
        "their capabilities also take a model's own names of any of its layers",
    )
    apply_lora_to_mlp: bool = True
    apply_lora_to_output: bool = False
    rank: int = Field(default=16, ge=1, le=4096)
    alpha: int = Field(
        default=32, ge=1, le=65536, description="The adapter is scaled by alpha / rank, or as `use_rslora` says"
    )
    use_dora: OffByDefault = Field(
        default=False, description="Train the length of each row of an adapted weight as well (DoRA)"
    )
    quantize_base: OffByDefault = Field(
        default=False,
        description="Train against a base held in 4 bits (NF4, QLoRA); adapter and merge are for the whole",
    )
    use_rslora: bool | None = Field(default=None, description="Scale by alpha / sqrt(rank); null: no")
    lora_dropout: float | None = Field(
        default=None, ge=0, lt=1, description="Part of an adapter's inputs that training leaves out at random; null: 0"
    )

    @field_validator("lora_attn_modules")
    @classmethod
    def _once_each(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("each attention module may be named once")
        return value


class FullFinetuningConfig(RequestModel):
    """Every weight is trained; a checkpoint holds a whole model."""

    type: Literal["Full"] = "Full"


class QATFinetuningConfig(RequestModel):
    type: Literal["QAT"] = "QAT"
    quantizer_name: str
    group_size: int = Field(ge=1)


AlgorithmConfig = Annotated[
    LoraFinetuningConfig | FullFinetuningConfig | QATFinetuningConfig, Field(discriminator="type")
]
RunnableAlgorithm = Annotated[LoraFinetuningConfig | FullFinetuningConfig, Field(discriminator="type")]
"""What a job may train with, once a provider has accepted it."""


class DPOLossType(StrEnum):
    sigmoid = "sigmoid"
    hinge = "hinge"
    ipo = "ipo"
    kto_pair = "kto_pair"


class DPOAlignmentConfig(RequestModel):
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    loss_type: DPOLossType = DPOLossType.sigmoid


class _TrainingRequest(RequestModel):
    provider_id: str | None = Field(
        default=None,
        max_length=255,
        description="Which provider trains; null: the first configured one that supports the model and algorithm",
    )
    training_config: TrainingConfig = TrainingConfig()
    hyperparam_search_config: dict[str, Any] | None = None
    logger_config: dict[str, Any] | None = None

    @field_validator("hyperparam_search_config", "logger_config")
    @classmethod
    def _legacy_and_empty(cls, value: dict[str, Any] | None) -> None:
        # Every client sends these as {}; no provider ever read them. Content would be silently ignored, so refuse it.
        if value:
            raise ValueError("this legacy field has no effect; send {} or leave it out")


class _FineTuneRequest(_TrainingRequest):
    model: Identifier | None = Field(
        default=None, description="A model or an earlier checkpoint; null: provider's default"
    )
    checkpoint_dir: str | None = None
    algorithm_config: AlgorithmConfig | None = Field(
        default=None,
        description="null: LoRA with its defaults, or with those of the adapter that training goes on from",
    )


class SupervisedFineTuneRequest(_FineTuneRequest):
    job_uuid: Identifier


class PreflightRequest(_FineTuneRequest):
    """A `SupervisedFineTuneRequest` that is checked and not run."""

    job_uuid: Identifier | None = Field(default=None, description="Checked where given, as in a submit")

    def as_job(self, job_uuid: str) -> SupervisedFineTuneRequest:
        """The request to run it; what is left out here is left out there."""
        given = {name: getattr(self, name) for name in self.model_fields_set} | {"job_uuid": job_uuid}
        return SupervisedFineTuneRequest.model_construct(set(given), **given)


class PreferenceOptimizeRequest(_TrainingRequest):
    job_uuid: Identifier
    finetuned_model: Identifier
    algorithm_config: DPOAlignmentConfig = DPOAlignmentConfig()


class PostTrainingMetric(ResponseModel):
    """Of one epoch; losses in nats. `token_accuracy`: the share of supervised validation tokens predicted right."""

    epoch: int
    train_loss: float
    validation_loss: float | None = None
    perplexity: float | None = None
    token_accuracy: float | None = None


class Checkpoint(ResponseModel):
    """A finished, verified checkpoint. `identifier` is a model id that inference serves."""

    identifier: str
    created_at: datetime
    epoch: int
    step: int
    post_training_job_id: str
    path: str = Field(description="Where it lies, relative to the server's state folder")
    training_metrics: PostTrainingMetric | None = None
    verification: dict[str, Any] | None = Field(
        default=None, description="What was measured when it was loaded again, and what the merge lost by its dtype"
    )


class JobError(ResponseModel):
    code: str
    message: str
    param: str | None = None


class JobProgress(ResponseModel):
    """How far a job is. `loss` is that of the newest step; `tokens_per_second` counts every token of a row."""

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    loss: float | None = None
    lr: float | None = None
    tokens_seen: int = 0
    supervised_tokens_seen: int = 0
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    skipped_steps: int = 0
    phase: str | None = Field(default=None, description="load_model, tokenize, train, validation, checkpoint or verify")

    @computed_field(description="Of all optimizer steps, 0 to 100; null until their number is known")
    @property
    def percent(self) -> float | None:
        if not self.total_steps:
            return None
        return round(min(100.0, 100.0 * self.step / self.total_steps), 1)


class PostTrainingJob(ResponseModel):
    job_uuid: str


class JobSummary(PostTrainingJob):
    status: JobStatus
    model: str
    created_at: datetime


class ListOrder(StrEnum):
    """By the time of the submit: the oldest first, or the newest."""

    asc = "asc"
    desc = "desc"


class ListPostTrainingJobsResponse(ResponseModel):
    """All jobs asked for, or a page of them; `has_more` and `next` are only in the answer to a call with `limit`."""

    data: list[JobSummary]
    has_more: bool | None = None
    next: str | None = Field(default=None, description="Pass as `after` for the next page; null: this is the last")


class PostTrainingJobStatusResponse(ResponseModel):
    job_uuid: str
    status: JobStatus
    scheduled_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    resources_allocated: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = []
    best_checkpoint: str | None = Field(
        default=None, description="The one with the lowest validation loss or, without validation, training loss"
    )
    model: str | None = None
    provider_id: str | None = None
    attempt: int = Field(default=0, description="How many times a worker took the job up")
    max_attempts: int | None = Field(
        default=None, description="How many attempts may be lost since the newest checkpoint before the job fails"
    )
    lost_attempts: int = Field(default=0, description="Attempts that ended without a result since then")
    queue_position: int | None = Field(default=None, description="0: next; null: not waiting")
    waiting_reason: str | None = None
    progress: JobProgress | None = None
    error: JobError | None = None
    report: dict[str, Any] | None = Field(
        default=None, description="What the data set held and which settings were used"
    )


class PostTrainingJobArtifactsResponse(ResponseModel):
    job_uuid: str
    checkpoints: list[Checkpoint] = []


class PostTrainingJobLogStream(ResponseModel):
    job_uuid: str
    log_lines: list[str]
    next: int = Field(default=0, description="Pass as `after` to read on from here")


class JobEventKind(StrEnum):
    """What an event tells: a move between states, an optimizer step, a finished checkpoint, anything else; `end` is
    the last thing a stream says about a job that has ended."""

    status = "status"
    step = "step"
    checkpoint = "checkpoint"
    log = "log"
    end = "end"


class JobEvent(ResponseModel):
    """Something that happened to a job. Ids grow; `message` is the line of the log."""

    id: int = Field(description="Pass as `after` or Last-Event-ID to read on from here; `end` repeats the one before")
    at: datetime
    kind: JobEventKind
    message: str
    step: int | None = None
    data: dict[str, Any] | None = Field(default=None, description="status: status, attempt, reason; step: its metrics")


class StepMetric(ResponseModel):
    """The numbers of one optimizer step. `tokens` counts every token of a row, `supervised_tokens` the trained ones."""

    step: int = Field(description="From 1, over the whole job")
    at: datetime
    epoch: int | None = None
    loss: float | None = Field(default=None, description="null where it was not finite")
    lr: float | None = None
    grad_norm: float | None = Field(default=None, description="Before clipping; null where it was not finite")
    tokens: int | None = None
    supervised_tokens: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = Field(default=None, description="Resident memory of the worker")
    device_memory_bytes: int | None = Field(default=None, description="Peak of what the accelerator held")
    skipped: bool = Field(default=False, description="The step changed nothing, since its numbers were not finite")


class PostTrainingJobMetricsResponse(ResponseModel):
    job_uuid: str
    data: list[StepMetric]
    next: int = Field(default=0, description="Pass as `after_step` to read on from here")


class CheckpointFile(ResponseModel):
    name: str = Field(description="Path inside the checkpoint, such as adapter/adapter_config.json")
    size: int = Field(description="Bytes")
    sha256: str = Field(description="Hexadecimal; the file's ETag is the same in double quotes")


class CheckpointFilesResponse(ResponseModel):
    job_uuid: str
    step: int
    data: list[CheckpointFile]


@dataclass(frozen=True)
class StoredFile:
    """A checkpoint's file where it lies on the server; `sha256` in hexadecimal."""

    path: Path
    size: int
    sha256: str

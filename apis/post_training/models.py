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

from pydantic import Field, computed_field, field_validator

from apis.common import Identifier, RequestModel, ResponseModel


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
    batch_size: int = Field(
        default=8, ge=1, le=65536, description="Rows per micro-batch; with `packed`, packs per micro-batch"
    )
    shuffle: bool = Field(default=True, description="A seeded permutation of the rows, anew each epoch")
    data_format: DatasetFormat | None = Field(default=None, description="null: told by the columns of the first row")
    validation_dataset_id: Identifier | None = None
    packed: bool | None = Field(
        default=False, description="Fill packs of `max_seq_len` tokens with whole rows, in order"
    )
    train_on_input: bool | None = Field(default=False, description="Supervise every message, not only the assistant's")
    max_seq_len: int | None = Field(
        default=None,
        ge=8,
        description="Longer rows are truncated on the right; null: the model's context, at most 4096",
    )


class OptimizerConfig(RequestModel):
    optimizer_type: OptimizerType = OptimizerType.adamw
    lr: float = Field(default=3e-4, gt=0, le=10, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    num_warmup_steps: int | None = Field(
        default=None, ge=0, description="Linear warm-up, then cosine to 0; null: a tenth of all steps, at most 100"
    )


class EfficiencyConfig(RequestModel):
    enable_activation_checkpointing: bool | None = False
    enable_activation_offloading: bool | None = False
    memory_efficient_fsdp_wrap: bool | None = False
    fsdp_cpu_offload: bool | None = False


class TrainingConfig(RequestModel):
    n_epochs: int = Field(default=3, ge=1, le=10_000)
    max_steps_per_epoch: int | None = Field(
        default=None, ge=1, description="Optimizer steps; null (or 0): the whole epoch"
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=65536)
    max_validation_steps: int | None = Field(default=None, ge=1, description="Batches; null (or 0): all of them")
    data_config: DataConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    efficiency_config: EfficiencyConfig = EfficiencyConfig()
    dtype: Literal["bf16", "fp32"] | None = "bf16"
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False, description="null: no clipping")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: the provider's `torch_seed`, else 0")
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


class LoraFinetuningConfig(RequestModel):
    type: Literal["LoRA"] = "LoRA"
    lora_attn_modules: list[AttentionModule] = ["q_proj", "k_proj", "v_proj", "output_proj"]
    apply_lora_to_mlp: bool = True
    apply_lora_to_output: bool = False
    rank: int = Field(default=16, ge=1, le=4096)
    alpha: int = Field(default=32, ge=1, le=65536, description="The adapter is scaled by alpha / rank")
    use_dora: bool | None = False
    quantize_base: bool | None = False

    @field_validator("lora_attn_modules")
    @classmethod
    def _once_each(cls, value: list[AttentionModule]) -> list[AttentionModule]:
        if len(set(value)) != len(value):
            raise ValueError("each attention module may be named once")
        return value


class QATFinetuningConfig(RequestModel):
    type: Literal["QAT"] = "QAT"
    quantizer_name: str
    group_size: int = Field(ge=1)


AlgorithmConfig = Annotated[LoraFinetuningConfig | QATFinetuningConfig, Field(discriminator="type")]


class DPOLossType(StrEnum):
    sigmoid = "sigmoid"
    hinge = "hinge"
    ipo = "ipo"
    kto_pair = "kto_pair"


class DPOAlignmentConfig(RequestModel):
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    loss_type: DPOLossType = DPOLossType.sigmoid


class _JobRequest(RequestModel):
    job_uuid: Identifier
    training_config: TrainingConfig = TrainingConfig()
    hyperparam_search_config: dict[str, Any] | None = None
    logger_config: dict[str, Any] | None = None

    @field_validator("hyperparam_search_config", "logger_config")
    @classmethod
    def _legacy_and_empty(cls, value: dict[str, Any] | None) -> None:
        # Every client sends these as {}; no provider ever read them. Content would be silently ignored, so refuse it.
        if value:
            raise ValueError("this legacy field has no effect; send {} or leave it out")


class SupervisedFineTuneRequest(_JobRequest):
    model: Identifier | None = Field(
        default=None, description="A model or an earlier checkpoint; null: provider's default"
    )
    checkpoint_dir: str | None = None
    algorithm_config: AlgorithmConfig | None = Field(
        default=None,
        description="null: LoRA with its defaults, or with those of the adapter that training goes on from",
    )


class PreferenceOptimizeRequest(_JobRequest):
    finetuned_model: Identifier
    algorithm_config: DPOAlignmentConfig = DPOAlignmentConfig()


class PostTrainingMetric(ResponseModel):
    epoch: int
    train_loss: float
    validation_loss: float | None = None
    perplexity: float | None = None


class Checkpoint(ResponseModel):
    """A finished, verified checkpoint. `identifier` is a model id that inference serves."""

    identifier: str
    created_at: datetime
    epoch: int
    step: int
    post_training_job_id: str
    path: str = Field(description="Where it lies, relative to the server's state folder")
    training_metrics: PostTrainingMetric | None = None


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


class ListPostTrainingJobsResponse(ResponseModel):
    data: list[JobSummary]


class PostTrainingJobStatusResponse(ResponseModel):
    job_uuid: str
    status: JobStatus
    scheduled_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    resources_allocated: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = []
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

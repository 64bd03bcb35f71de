"""What a post-training request and its answers hold.

Field names are those of the Llama Stack post-training API, so that every client of it fits. Defaults train well by
themselves: a request needs a data set and nothing else. Every field acts or the request is refused with its name.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

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
    attempt: int = 0
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

"""What a scheduler of SFT sessions is asked and answers. Paths, field names and states are OpenTinker's."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from apis.common import MAX_INTEGER, Identifier, RequestModel, ResponseModel
from apis.post_training.models import (
    AttentionModule,
    DatasetFormat,
    LoraFinetuningConfig,
    OptimizerConfig,
    check_columns,
)
from apis.sft_sessions.foreign_keys import refuse_foreign_keys
from apis.sft_sessions.numbers import no_boolean

DEFAULT_LEASE_SECONDS = 300.0
DEFAULT_WINDOW = 4
ALL_LINEAR = "all-linear"
# Hugging Face's names of linear layers, and what the post_training API calls those of attention.
_ATTENTION: dict[str, AttentionModule] = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "o_proj": "output_proj",
}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_OUTPUT = "lm_head"
_LAYERS = (*_ATTENTION, "gate_proj", "up_proj", "down_proj", _OUTPUT)


class JobType(StrEnum):
    """What a submitted job is. OpenTinker's other types are not offered."""

    SFT = "SFT"


class SessionState(StrEnum):
    """OpenTinker's states. QUEUED: waits for a device, or paused until its client resumes it; STARTING: the model is
    loaded; RUNNING: the training server answers."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class LoraSection(RequestModel):
    """The adapter, in OpenTinker's words.

    Attributes:
        target_modules: Hugging Face's names of linear layers, or `all-linear` (not the output layer).
        lora_adapter_path: the id of a model of this stack that is an adapter, to go on from.
        lr: the same as `optimizer_config.lr`.
    """

    lora_rank: int = Field(default=16, ge=1, le=4096)
    lora_alpha: int = Field(default=32, ge=1, le=65536)
    target_modules: Literal["all-linear"] | list[str] = ALL_LINEAR
    exclude_modules: list[str] | None = None
    lora_adapter_path: Identifier | None = Field(
        default=None, description="Id of an adapter of this stack to go on from"
    )
    lr: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)

    _numbers = field_validator("lora_rank", "lora_alpha", "lr", mode="before")(no_boolean)

    @field_validator("lora_rank", mode="before")
    @classmethod
    def _adapts(cls, value: object) -> object:
        if value == 0:
            raise ValueError("0 stands for full fine-tuning, which is not offered: give a rank of at least 1")
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        if value != ALL_LINEAR and not isinstance(value, list):
            raise ValueError(f"must be {ALL_LINEAR!r} or a list of layers: {', '.join(_LAYERS)}")
        return value

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _known_modules(cls, value: str | list[str] | None) -> str | list[str] | None:
        for name in value if isinstance(value, list) else ():
            if name not in _LAYERS:
                raise ValueError(f"no layer is called {name!r}: there are {', '.join(_LAYERS)}")
        return value

    @model_validator(mode="after")
    def _mlp_is_whole(self) -> LoraSection:
        chosen = self._chosen() & _MLP
        if chosen and chosen != _MLP:
            raise ValueError(
                f"gate_proj, up_proj and down_proj get adapters together or not at all, not {sorted(chosen)} alone"
            )
        if not self.target_modules:
            raise ValueError("target_modules names no layer: leave it out for all linear ones")
        if not self._chosen():
            raise ValueError("no layer is left to adapt: exclude_modules takes away all that target_modules names")
        return self

    def _chosen(self) -> set[str]:
        """Hugging Face's names of the layers that get an adapter."""
        asked = {*_ATTENTION, *_MLP} if self.target_modules == ALL_LINEAR else set(self.target_modules)
        return asked - set(self.exclude_modules or ())

    def as_algorithm(self) -> LoraFinetuningConfig:
        """The same adapter in the post_training API's words. What is left out here is left out there, where it then is
        that of the adapter that training goes on from."""
        given: dict[str, Any] = {}
        for name, wire in (("lora_rank", "rank"), ("lora_alpha", "alpha")):
            if name in self.model_fields_set:
                given[wire] = getattr(self, name)
        if "target_modules" in self.model_fields_set or self.exclude_modules is not None:
            chosen = self._chosen()
            given["lora_attn_modules"] = [wire for name, wire in _ATTENTION.items() if name in chosen]
            given["apply_lora_to_mlp"] = bool(chosen & _MLP)
            given["apply_lora_to_output"] = _OUTPUT in chosen
        return LoraFinetuningConfig(**given)


class SessionConfig(RequestModel):
    """What a session trains and how. A key that is not here is refused by its name.

    Attributes:
        total_steps: optimizer steps that the schedule of the learning rate is made for; without it, it is constant.
        lease_seconds: after so long without a call from its client the session is saved, and its device goes to others.
        window: how many steps may be sent ahead of the next one.
        project_name, experiment_name: labels that the job's report repeats.
    """

    model: Identifier | None = Field(default=None, description="A model or an earlier checkpoint; null: the provider's")
    provider_id: str | None = Field(
        default=None,
        max_length=255,
        description="Which provider trains; null: the first configured one that supports the model and algorithm",
    )
    lora: LoraSection | None = Field(default=None, description="The adapter in OpenTinker's words")
    algorithm_config: LoraFinetuningConfig | None = Field(
        default=None, description="The adapter in post_training's words"
    )
    optimizer_config: OptimizerConfig = OptimizerConfig()
    total_steps: int | None = Field(
        default=None, ge=1, le=MAX_INTEGER, description="Of the learning rate's schedule; null: constant"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False, description="null: no clipping")
    dtype: Literal["bf16", "fp32"] = "bf16"
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: the provider's `torch_seed`, else 0")
    device: Literal["cpu", "cuda"] | None = Field(default=None, description="The kind of device; null: any")
    kernels: Literal["auto", "compiled", "fused", "plain"] = Field(
        default="auto", description="How the model is computed; auto: the provider's setting, else fused"
    )
    enable_activation_checkpointing: bool = False
    data_format: DatasetFormat | None = Field(
        default=None, description="Of rows; null: told by the columns of each batch"
    )
    columns: dict[str, str] | None = Field(default=None, description="As in a job's data_config")
    train_on_input: bool = False
    max_seq_len: int | None = Field(default=None, ge=8, description="The most tokens of a row; null: as for a job")
    on_overlength: Literal["truncate", "error"] = Field(
        default="truncate", description="A longer row is cut on the right, or its batch is refused"
    )
    save_every_n_steps: int | None = Field(
        default=None, ge=1, description="Steps between the checkpoints that a session resumes from; null: by time"
    )
    lease_seconds: float = Field(default=DEFAULT_LEASE_SECONDS, ge=1, le=86400, allow_inf_nan=False)
    window: int = Field(default=DEFAULT_WINDOW, ge=0, le=256)
    project_name: str | None = Field(default=None, max_length=255)
    experiment_name: str | None = Field(default=None, max_length=255)

    _numbers = field_validator(
        *("total_steps", "max_grad_norm", "seed", "max_seq_len", "save_every_n_steps", "lease_seconds", "window"),
        mode="before",
    )(no_boolean)

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, value: Any) -> Any:
        refuse_foreign_keys(cls.__name__, value)
        return value

    @field_validator("columns")
    @classmethod
    def _of_one_format(cls, value: dict[str, str] | None, info: ValidationInfo) -> dict[str, str] | None:
        check_columns(value, info.data.get("data_format"))
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> SessionConfig:
        if self.lora is not None and self.algorithm_config is not None:
            raise ValueError("give lora or algorithm_config, not both")
        if self.lora is not None and self.lora.lr is not None and self.optimizer_config.lr is not None:
            raise ValueError("give lora.lr or optimizer_config.lr, not both")
        if self.lora is not None and self.lora.lora_adapter_path is not None and self.model is not None:
            raise ValueError("give model or lora.lora_adapter_path, not both: an adapter brings its base model with it")
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> SessionConfig:
        if self.total_steps is None:
            if self.optimizer_config.lr_schedule in ("cosine", "linear"):
                raise ValueError(f"lr_schedule {self.optimizer_config.lr_schedule} falls until total_steps: give them")
            if self.optimizer_config.min_lr_ratio is not None:
                raise ValueError("min_lr_ratio has no effect without total_steps: the rate is constant")
        return self


class SubmitJobRequest(RequestModel):
    """A session to be opened. `enable_agent_loop` and `wandb_key` are what OpenTinker's clients always send."""

    config: SessionConfig = SessionConfig()
    job_type: JobType = JobType.SFT
    job_id: Identifier | None = Field(
        default=None,
        description="Chosen by the client; null: made here. The same again "
        "with the same body answers as the first time",
    )
    num_gpus: int | None = Field(default=None, ge=0, description="null: what `config.device` says; 0: a CPU")
    enable_agent_loop: Literal[False] = Field(default=False, description="Belongs to reinforcement learning")
    wandb_key: None = Field(default=None, description="A tracker's key stays with the client, which does the tracking")

    _numbers = field_validator("num_gpus", mode="before")(no_boolean)

    @field_validator("enable_agent_loop", mode="before")
    @classmethod
    def _no_agents(cls, value: object) -> object:
        if value is not False:
            raise ValueError("belongs to reinforcement learning: send false or leave it out")
        return value

    @field_validator("wandb_key", mode="before")
    @classmethod
    def _no_key(cls, value: object) -> object:
        if value is not None:
            raise ValueError("a tracker's key stays with the client, which does the tracking: leave it out")
        return value


class SubmitJobResponse(ResponseModel):
    """`server_url` is as in `SessionStatusResponse`."""

    job_id: str
    status: SessionState
    message: str
    server_url: str | None = None


class SessionStatusResponse(ResponseModel):
    """Where a session stands.

    Attributes:
        server_url: of the training server, `http://session:<token>@host:port`, to the one who submitted it while it
            runs. Any HTTP client turns that into Basic authentication; the token is as good as a Bearer token.
        paused: its client was silent for too long; it waits, without a device, to be resumed.
    """

    job_id: str
    status: SessionState
    gpu_ids: list[int] = []
    port: int | None = None
    server_url: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    error_message: str | None = None
    message: str | None = Field(default=None, description="What it waits for, or why it is paused")
    paused: bool = False
    queue_position: int | None = None
    last_durable_step: int | None = Field(default=None, description="Of the newest checkpoint; null: none yet")


class ListSessionsResponse(ResponseModel):
    jobs: list[SessionStatusResponse]


class SessionActionResponse(ResponseModel):
    job_id: str
    status: SessionState
    message: str


class SchedulerInfo(ResponseModel):
    service: str = "Postgrad SFT sessions"
    version: str
    status: str = "running"
    authentication: bool
    endpoints: list[str]

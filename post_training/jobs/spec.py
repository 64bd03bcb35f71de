"""What a worker needs to run one job: stored whole with the job, so that every attempt does the same.

Nothing in it names a class or a provider's internals: the model module is found by name, files by path.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from apis.post_training.models import FullFinetuningConfig, RunnableAlgorithm, TrainingConfig


class ModelRef(BaseModel):
    """A model resolved to files when the job was accepted, so that a later alias change cannot move it.

    Attributes:
        identifier: the id the request named.
        base_identifier: id of the base model under it (the same where `identifier` is a base model).
        base_dir: Hugging Face directory of the base.
        adapter_dir: PEFT adapter to go on from, or None.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    identifier: str
    base_identifier: str
    base_dir: str
    adapter_dir: str | None = None


class DatasetRef(BaseModel):
    """A data set resolved when the job was accepted: its source and the rules for reading it."""

    model_config = ConfigDict(extra="forbid")

    dataset_id: str
    source: dict[str, Any]
    policy: dict[str, Any]


class WorkerSettings(BaseModel):
    """What the provider's config decides. Fixed at submit and reused by every attempt.

    Attributes:
        model_module: module with `load_model` and nothing else the worker relies on.
        export: which forms of the trained model each checkpoint holds.
        micro_batch_tokens: most tokens in one forward pass; larger batches are split, which never changes the result.
        kernels: how the model is computed; see `post_training.training.model.ModelConfig`. `auto`: `compiled` where the
            job is long enough to win back the time that compiling takes, else `fused`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_module: str
    device: str = "auto"
    threads: int | None = None
    micro_batch_tokens: int = 4096
    kernels: Literal["auto", "compiled", "fused", "plain"] = "auto"
    export: tuple[Literal["adapter", "merged"], ...] = ("adapter",)
    merged_dtype: Literal["fp32", "bf16"] = "fp32"
    default_max_seq_len: int = 4096


class SessionSettings(BaseModel):
    """What makes a job a session, which a client drives.

    Attributes:
        token_sha256: hexadecimal digest of the token that its calls must carry.
        host: the address that its training server listens on.
        lease_seconds: after so long without a call it is saved and paused.
        window: how many calls may be sent ahead of the next one.
        total_steps: of the schedule of the learning rate; None: it is constant.
        labels: what the client calls the run, for the report.
    """

    model_config = ConfigDict(extra="forbid")

    token_sha256: str
    host: str = "127.0.0.1"
    lease_seconds: float
    window: int
    total_steps: int | None = None
    labels: dict[str, str] = {}


class JobSpec(BaseModel):
    """One job, whole.

    Attributes:
        created_at: when it was accepted; what a chat template that prints the date is told, on every attempt.
        training_config: the request's, with a learning rate. Epochs and batch size may be left open: they depend on the
            rows, and `post_training.data.planning.settle` fills them in.
        dataset: None for a session, whose client brings the rows.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    job_uuid: str
    created_at: datetime
    provider_id: str
    model: ModelRef
    training_config: TrainingConfig
    algorithm_config: RunnableAlgorithm
    dataset: DatasetRef | None
    validation: DatasetRef | None = None
    seed: int = 0
    worker: WorkerSettings
    session: SessionSettings | None = None

    def settled(self, chosen: Mapping[str, Any]) -> JobSpec:
        """The job with `n_epochs` and `batch_size` of `chosen`, such as its report, where its request left them out."""
        config, data = self.training_config, self.training_config.data_config
        assert data is not None  # no job is accepted without
        data = data.model_copy(update={"batch_size": data.batch_size or chosen["batch_size"]})
        update = {"n_epochs": config.n_epochs or chosen["n_epochs"], "data_config": data}
        return self.model_copy(update={"training_config": config.model_copy(update=update)})

    @property
    def n_epochs(self) -> int:
        """Passes over the data, of a settled spec."""
        epochs = self.training_config.n_epochs
        assert epochs is not None  # settle comes before any plan
        return epochs

    @property
    def batch_size(self) -> int:
        """Rows, or packs, of a micro-batch, of a settled spec."""
        data = self.training_config.data_config
        assert data is not None  # no job is accepted without
        assert data.batch_size is not None  # settle comes before any plan
        return data.batch_size

    @property
    def trains_all(self) -> bool:
        """Whether every weight is trained, so that a checkpoint holds a whole model and no adapter."""
        return isinstance(self.algorithm_config, FullFinetuningConfig)

    @property
    def lr(self) -> float:
        """The highest learning rate."""
        lr = self.training_config.optimizer_config.lr
        assert lr is not None  # no job is accepted without
        return lr

    @property
    def device_kind(self) -> str | None:
        """`cpu` or `cuda` where the job must run on one, None where either will do."""
        if self.training_config.device is not None:
            return self.training_config.device
        kind = self.worker.device.partition(":")[0]
        return None if kind == "auto" else kind

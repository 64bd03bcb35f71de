"""What a worker needs to run one job: stored whole with the job, so that every attempt does the same.

Nothing in it names a class or a provider's internals: the model module is found by name, files by path.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from apis.post_training.models import LoraFinetuningConfig, TrainingConfig


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
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_module: str
    device: str = "auto"
    threads: int | None = None
    micro_batch_tokens: int = 4096
    export: tuple[Literal["adapter", "merged"], ...] = ("adapter",)
    merged_dtype: Literal["fp32", "bf16"] = "fp32"
    default_max_seq_len: int = 4096


class JobSpec(BaseModel):
    """One job, whole.

    Attributes:
        created_at: when it was accepted; what a chat template that prints the date is told, on every attempt.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    job_uuid: str
    created_at: datetime
    provider_id: str
    model: ModelRef
    training_config: TrainingConfig
    algorithm_config: LoraFinetuningConfig
    dataset: DatasetRef
    validation: DatasetRef | None = None
    seed: int = 0
    worker: WorkerSettings

    @property
    def device_kind(self) -> str | None:
        """`cpu` or `cuda` where the job must run on one, None where either will do."""
        if self.training_config.device is not None:
            return self.training_config.device
        kind = self.worker.device.partition(":")[0]
        return None if kind == "auto" else kind

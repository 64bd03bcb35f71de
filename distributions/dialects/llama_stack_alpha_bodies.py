"""The requests of clients 0.0.53 to 0.0.61: data set, optimizer and algorithm beside the training config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from apis.common import Identifier, RequestModel
from apis.errors import NotSupported
from apis.post_training.models import (
    DPOAlignmentConfig,
    LoraFinetuningConfig,
    OptimizerType,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)
from distributions.dialects.validation import SHAPE_TAG, validated
from distributions.dialects.words import Words

_OLD, _NEW = f"{SHAPE_TAG}0.0.61", f"{SHAPE_TAG}0.0.63"
_OLD_FIELDS = frozenset({"algorithm", "dataset_id", "validation_dataset_id", "optimizer_config"})

_WORDS = {
    "training_config.max_steps_per_epoch": "training_config.n_iters",
    "training_config.data_config": "dataset_id.",
    "training_config.data_config.validation_dataset_id": "validation_dataset_id",
    "training_config.data_config.batch_size": "training_config.batch_size",
    "training_config.data_config.shuffle": "training_config.shuffle",
    "training_config.optimizer_config": "optimizer_config",
    "training_config.optimizer_config.min_lr_ratio": "optimizer_config.lr_min",
    "training_config.efficiency_config": "training_config",
}
# These clients cannot leave it out, so an empty one means none.
OptionalId = Annotated[Identifier | None, BeforeValidator(lambda value: value or None)]


class AlphaOptimizerConfig(RequestModel):
    optimizer_type: OptimizerType = OptimizerType.adamw
    lr: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    lr_min: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Where the rate falls to; null: 0"
    )
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _falls(self) -> AlphaOptimizerConfig:
        if self.lr_min and (self.lr is None or self.lr_min > self.lr):
            raise ValueError(f"`lr_min` is {self.lr_min} and `lr` is {self.lr}: the rate falls from lr to lr_min")
        return self

    def spec(self) -> dict[str, Any]:
        given = self.model_dump(exclude_unset=True, exclude={"lr_min"})
        return given | ({"min_lr_ratio": self.lr_min / self.lr} if self.lr_min and self.lr else {})


class AlphaTrainingConfig(RequestModel):
    n_epochs: int | None = Field(default=None, ge=1, le=10_000)
    n_iters: int | None = Field(default=None, ge=0, description="Optimizer steps of an epoch; null or 0: all of it")
    batch_size: int | None = Field(default=None, ge=1, le=65536)
    shuffle: bool = True
    enable_activation_checkpointing: bool | None = False
    memory_efficient_fsdp_wrap: bool | None = False
    fsdp_cpu_offload: bool | None = False

    def spec(self) -> dict[str, Any]:
        efficiency = {"enable_activation_checkpointing", "memory_efficient_fsdp_wrap", "fsdp_cpu_offload"}
        return {
            "n_epochs": self.n_epochs,
            "max_steps_per_epoch": self.n_iters,
            "efficiency_config": self.model_dump(include=efficiency, exclude_unset=True),
        }


class _AlphaRequest(RequestModel):
    job_uuid: Identifier
    dataset_id: Identifier
    validation_dataset_id: OptionalId = None
    optimizer_config: AlphaOptimizerConfig = AlphaOptimizerConfig()
    training_config: AlphaTrainingConfig = AlphaTrainingConfig()
    hyperparam_search_config: dict[str, Any] | None = None
    logger_config: dict[str, Any] | None = None

    def words(self) -> Words:
        """What the fields of `spec()` are called here."""
        return _WORDS

    def shared(self) -> dict[str, Any]:
        data = {
            "dataset_id": self.dataset_id,
            "validation_dataset_id": self.validation_dataset_id,
            "batch_size": self.training_config.batch_size,
            "shuffle": self.training_config.shuffle,
        }
        return {
            "job_uuid": self.job_uuid,
            "training_config": {
                **self.training_config.spec(),
                "data_config": data,
                "optimizer_config": self.optimizer_config.spec(),
            },
            "hyperparam_search_config": self.hyperparam_search_config,
            "logger_config": self.logger_config,
        }


class AlphaSupervisedFineTuneRequest(_AlphaRequest):
    model: OptionalId = None
    algorithm: Literal["full", "lora", "qlora", "dora"] = "lora"
    algorithm_config: LoraFinetuningConfig | None = None

    def spec(self) -> SupervisedFineTuneRequest:
        """The same request in the typed spec.

        Raises:
            NotSupported: full fine-tuning.
            RequestValidationError: a value that the spec does not take.
        """
        if self.algorithm == "full":
            raise NotSupported("whole models are not trained here; choose lora, qlora or dora", param="algorithm")
        return validated(
            SupervisedFineTuneRequest, {**self.shared(), "model": self.model, "algorithm_config": self._adapter()}
        )

    def words(self) -> Words:
        given = self.algorithm_config.model_fields_set if self.algorithm_config else set()
        named = {f"algorithm_config.{name}": "algorithm" for name in ("use_dora", "quantize_base") if name not in given}
        return _WORDS | named

    def _adapter(self) -> dict[str, Any] | None:
        kind = {"lora": {}, "qlora": {"quantize_base": True}, "dora": {"use_dora": True}}[self.algorithm]
        if self.algorithm_config is None and not kind:
            return None
        given = self.algorithm_config.model_dump(exclude_unset=True) if self.algorithm_config else {}
        return {"type": "LoRA", **given, **kind}


class AlphaPreferenceOptimizeRequest(_AlphaRequest):
    finetuned_model: Identifier
    algorithm: Literal["dpo"] = "dpo"
    algorithm_config: DPOAlignmentConfig = DPOAlignmentConfig()

    def spec(self) -> PreferenceOptimizeRequest:
        """The same request in the typed spec. Raises RequestValidationError."""
        config = self.algorithm_config.model_dump(exclude_unset=True)
        return validated(
            PreferenceOptimizeRequest,
            {**self.shared(), "finetuned_model": self.finetuned_model, "algorithm_config": config},
        )


def words_of_request(request: object) -> Words:
    """What the fields of the typed spec are called in a request of either shape."""
    return request.words() if isinstance(request, _AlphaRequest) else {}


def _shape(value: object) -> str:
    return _OLD if isinstance(value, dict) and not _OLD_FIELDS.isdisjoint(value) else _NEW


AlphaFineTune = Annotated[
    Annotated[AlphaSupervisedFineTuneRequest, Tag(_OLD)] | Annotated[SupervisedFineTuneRequest, Tag(_NEW)],
    Discriminator(_shape),
]
AlphaPreference = Annotated[
    Annotated[AlphaPreferenceOptimizeRequest, Tag(_OLD)] | Annotated[PreferenceOptimizeRequest, Tag(_NEW)],
    Discriminator(_shape),
]

"""Requests in the words of a Llama Stack up to 0.6.1; what it has no word for is refused by name, never left out."""

from __future__ import annotations

from typing import Any

from apis.errors import InvalidField
from apis.post_training.models import (
    DatasetFormat,
    LoraFinetuningConfig,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    TrainingConfig,
)

# Its own defaults are one step of each epoch and one batch of a validation, and 0 is none; releases before 0.2.2 take
# no null. It stops at the lower of this and what there is.
WHOLE_EPOCH = 2**31 - 1

_TRAINING = ("n_epochs", "max_steps_per_epoch", "gradient_accumulation_steps", "max_validation_steps", "dtype")
_DATA = ("dataset_id", "batch_size", "shuffle", "data_format", "validation_dataset_id", "packed", "train_on_input")
_OPTIMIZER = ("optimizer_type", "lr", "weight_decay", "num_warmup_steps")
_LORA = ("type", "lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output", "rank", "alpha", "use_dora")
_FORMATS = (DatasetFormat.instruct, DatasetFormat.dialog)


def fine_tune_body(request: SupervisedFineTuneRequest) -> dict[str, Any]:
    """The body of a supervised-fine-tune.

    Raises:
        InvalidField: a field that it does not have, or one left out that it has no default for.
    """
    # It has no adapter of its own to fall back on.
    algorithm = request.algorithm_config or LoraFinetuningConfig()
    if isinstance(algorithm, LoraFinetuningConfig):
        words: Any = _words(algorithm, (*_LORA, "quantize_base"), "algorithm_config")
    else:
        words = algorithm.model_dump(mode="json")
    return {
        "job_uuid": request.job_uuid,
        "model": request.model,
        "checkpoint_dir": request.checkpoint_dir,
        "algorithm_config": words,
        "training_config": _training(request.training_config),
        **_LEGACY,
    }


def preference_body(request: PreferenceOptimizeRequest) -> dict[str, Any]:
    """The body of a preference-optimize. Raises as `fine_tune_body`."""
    return {
        "job_uuid": request.job_uuid,
        "finetuned_model": request.finetuned_model,
        "algorithm_config": request.algorithm_config.model_dump(mode="json"),
        "training_config": _training(request.training_config, formats=False),
        **_LEGACY,
    }


_LEGACY: dict[str, Any] = {"hyperparam_search_config": {}, "logger_config": {}}


def _training(config: TrainingConfig, formats: bool = True) -> dict[str, Any]:
    sections = ("data_config", "optimizer_config", "efficiency_config")
    words = _words(config, (*_TRAINING, *sections), "training_config")
    _need(words, ("n_epochs",), "training_config")
    words["max_steps_per_epoch"] = config.max_steps_per_epoch or WHOLE_EPOCH
    words["max_validation_steps"] = config.max_validation_steps or WHOLE_EPOCH
    words["optimizer_config"] = _words(config.optimizer_config, _OPTIMIZER, "training_config.optimizer_config")
    _need(words["optimizer_config"], ("lr", "num_warmup_steps"), "training_config.optimizer_config")
    if config.data_config is not None:
        words["data_config"] = _words(config.data_config, _DATA, "training_config.data_config")
        _need(words["data_config"], ("batch_size", "data_format"), "training_config.data_config")
        if formats and config.data_config.data_format not in _FORMATS:
            raise InvalidField(
                f"a Llama Stack reads rows of the formats {' and '.join(_FORMATS)} only",
                param="training_config.data_config.data_format",
            )
    return words


def _words(config: Any, known: tuple[str, ...], place: str) -> dict[str, Any]:
    """The fields of a section that a Llama Stack has. Raises InvalidField where another one was asked for."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        asked = name in config.model_fields_set and value not in (None, False, info.get_default())
        if asked and name not in known:
            raise InvalidField(
                f"{name} is not among what a Llama Stack can do, and that is what trains here; leave it out",
                param=f"{place}.{name}",
            )
    return config.model_dump(mode="json", include=set(known))


def _need(words: dict[str, Any], names: tuple[str, ...], place: str) -> None:
    for name in names:
        if words[name] is None:
            raise InvalidField(
                f"{name} must be given: a Llama Stack, which trains here, has no default for it",
                param=f"{place}.{name}",
            )

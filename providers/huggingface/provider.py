"""inline::huggingface as the server sees it: checks requests, hands jobs to the queue. Never imports torch."""

from __future__ import annotations

from pathlib import Path

from apis.errors import InvalidField
from apis.post_training.models import (
    FullFinetuningConfig,
    LoraFinetuningConfig,
    RunnableAlgorithm,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from post_training.catalog.models import ResolvedModel
from post_training.defaults import default_lr
from post_training.job_specs import ProviderProfile
from post_training.jobs.spec import WorkerSettings
from post_training.service import JobService
from providers.huggingface.adapter_options import adapter_config, check_adapter, settings_of_adapter
from providers.huggingface.config import HuggingfacePostTrainingConfig
from providers.huggingface.families import Facts, describe
from providers.spec import ProviderDeps

MODEL_MODULE = "providers.huggingface.model"

_UNAVAILABLE_EFFICIENCY = {
    "enable_activation_offloading": (
        "on a CPU activations are in main memory already; use enable_activation_checkpointing"
    ),
    "memory_efficient_fsdp_wrap": "there is no FSDP on a single device",
    "fsdp_cpu_offload": "there is no FSDP on a single device",
}


async def get_provider_impl(config: HuggingfacePostTrainingConfig, deps: ProviderDeps) -> JobService:
    roots = config.model_roots or [str(deps.home / "models")]
    checks = RequestChecks(exports_merged="merged" in config.forms)
    profile = ProviderProfile(
        provider_id=deps.provider_id,
        check=checks.check,
        default_lr=lora_lr,
        worker=WorkerSettings(
            model_module=MODEL_MODULE,
            device=config.device,
            threads=config.threads,
            micro_batch_tokens=config.micro_batch_tokens,
            kernels="fused" if config.kernels == "auto" else config.kernels,
            export=config.forms,
            merged_dtype=config.merged_dtype,
            default_max_seq_len=config.max_seq_length,
        ),
        default_model=config.default_model,
        default_seed=config.torch_seed or 0,
        model_roots=tuple(Path(root).expanduser() for root in roots),
    )
    return JobService(deps.database, deps.home, deps.models, deps.datasets, profile, deps.scheduler)


class RequestChecks:
    """Refuses, by field, what this provider would not do.

    Args:
        exports_merged: whether checkpoints hold a merged model.
    """

    def __init__(self, *, exports_merged: bool = False) -> None:
        self._exports_merged = exports_merged

    def check(self, request: SupervisedFineTuneRequest, model: ResolvedModel) -> RunnableAlgorithm:
        """The algorithm that a job of this request runs.

        Raises:
            InvalidField, UnsupportedModel, ModelInvalid.
        """
        facts = describe(model.base_dir)
        _check_context(request.training_config, model, facts)
        _refuse_unavailable(request.training_config)
        if isinstance(request.algorithm_config, FullFinetuningConfig):
            return _all_weights(request.algorithm_config, model)
        algorithm = _algorithm(request, model, facts)
        wanted = adapter_config(facts, algorithm)
        if model.adapter_dir is not None:
            check_adapter(model.adapter_dir, wanted)
        if self._exports_merged and facts.transposed:
            raise InvalidField(
                f"{facts.model_type} holds its weights as [in, out], and a merged model is not written of such; take "
                "`merged` out of the provider's `export` and use the adapter",
                param="model",
            )
        return algorithm


def lora_lr(model: ResolvedModel) -> float:
    """The learning rate for a model, by its width. Raises UnsupportedModel, ModelInvalid."""
    return default_lr(describe(model.base_dir).width)


def _check_context(training: TrainingConfig, model: ResolvedModel, facts: Facts) -> None:
    asked = training.data_config.max_seq_len if training.data_config else None
    if asked is not None and facts.context_length is not None and asked > facts.context_length:
        raise InvalidField(
            f"max_seq_len {asked} is beyond the context of {model.identifier!r}, {facts.context_length}",
            param="training_config.data_config.max_seq_len",
        )


def _all_weights(asked: FullFinetuningConfig, model: ResolvedModel) -> FullFinetuningConfig:
    if model.adapter_dir is not None:
        raise InvalidField(
            f"{model.identifier!r} is an adapter, and all weights are those of a whole model: merge it first "
            "(`postgrad models export --merged`, then `postgrad models import`), or train LoRA on from it",
            param="algorithm_config.type",
        )
    return asked


def _algorithm(request: SupervisedFineTuneRequest, model: ResolvedModel, facts: Facts) -> LoraFinetuningConfig:
    """The request's; what it leaves out is the adapter's that it goes on from, else the default that the model has."""
    asked = request.algorithm_config or LoraFinetuningConfig()
    if not isinstance(asked, LoraFinetuningConfig):
        raise InvalidField(
            "QAT is not offered on any device; use {'type': 'LoRA', ...} or {'type': 'Full'}",
            param="algorithm_config.type",
        )
    given = {name: getattr(asked, name) for name in asked.model_fields_set}
    if model.adapter_dir is not None:
        return settings_of_adapter(model.adapter_dir, facts).model_copy(update=given)
    # Experts cannot be adapted, so a request that says nothing of them means the rest.
    defaults = {"apply_lora_to_mlp": False} if facts.layers.experts else {}
    return asked.model_copy(update=defaults | given)


def _refuse_unavailable(training: TrainingConfig) -> None:
    for field, why in _UNAVAILABLE_EFFICIENCY.items():
        if getattr(training.efficiency_config, field):
            raise InvalidField(f"{field} is not offered: {why}", param=f"training_config.efficiency_config.{field}")

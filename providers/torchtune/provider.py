"""inline::torchtune as the server sees it: checks requests, hands jobs to the queue. Never imports torch."""

from __future__ import annotations

from pathlib import Path

from apis.errors import InvalidField
from apis.post_training.models import (
    FullFinetuningConfig,
    LoraFinetuningConfig,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from post_training.catalog.models import ResolvedModel
from post_training.defaults import default_lr
from post_training.job_specs import ProviderProfile
from post_training.jobs.spec import WorkerSettings
from post_training.service import JobService
from providers.spec import ProviderDeps
from providers.torchtune.adapter_config import AdapterShape, check_adapter, settings_of_adapter
from providers.torchtune.architecture import Architecture
from providers.torchtune.config import TorchtunePostTrainingConfig
from providers.torchtune.families import describe
from providers.torchtune.lora_options import check_lora

MODEL_MODULE = "providers.torchtune.model"
DEFAULT_MAX_SEQ_LEN = 4096

_UNAVAILABLE_EFFICIENCY = {
    "enable_activation_offloading": (
        "on a CPU activations are in main memory already, and torchtune's way on CUDA is not proven here; "
        "use enable_activation_checkpointing"
    ),
    "memory_efficient_fsdp_wrap": "there is no FSDP on a single device",
    "fsdp_cpu_offload": "there is no FSDP on a single device",
}


async def get_provider_impl(config: TorchtunePostTrainingConfig, deps: ProviderDeps) -> JobService:
    roots = config.model_roots or [str(deps.home / "models")]
    profile = ProviderProfile(
        provider_id=deps.provider_id,
        check=check_request,
        default_lr=lora_lr,
        worker=WorkerSettings(
            model_module=MODEL_MODULE,
            device=config.device,
            threads=config.threads,
            micro_batch_tokens=config.micro_batch_tokens,
            kernels=config.kernels,
            export=config.forms,
            merged_dtype=config.merged_dtype,
            default_max_seq_len=DEFAULT_MAX_SEQ_LEN,
        ),
        default_model=config.default_model,
        default_seed=config.torch_seed or 0,
        model_roots=tuple(Path(root).expanduser() for root in roots),
    )
    return JobService(deps.database, deps.home, deps.models, deps.datasets, profile, deps.scheduler)


def check_request(request: SupervisedFineTuneRequest, model: ResolvedModel) -> LoraFinetuningConfig:
    """Refuse, by field, what this provider would not do.

    Raises:
        InvalidField, UnsupportedModel, ModelInvalid.
    """
    data = request.training_config.data_config
    max_seq_len = data.max_seq_len if data else None
    architecture = describe(model.base_dir, max_seq_len or DEFAULT_MAX_SEQ_LEN)
    if max_seq_len is not None and max_seq_len > architecture.context_length:
        raise InvalidField(
            f"max_seq_len {max_seq_len} is beyond the context of {model.identifier!r}, {architecture.context_length}",
            param="training_config.data_config.max_seq_len",
        )
    algorithm = _algorithm(request, model, architecture)
    _refuse_unavailable(request.training_config)
    check_lora(architecture, algorithm)
    if model.adapter_dir is not None:
        check_adapter(model.adapter_dir, architecture, AdapterShape.of_request(algorithm))
    return algorithm


def lora_lr(model: ResolvedModel) -> float:
    """The learning rate for a model, by its width. Raises UnsupportedModel, ModelInvalid."""
    return default_lr(describe(model.base_dir).embed_dim)


def _algorithm(
    request: SupervisedFineTuneRequest, model: ResolvedModel, architecture: Architecture
) -> LoraFinetuningConfig:
    """The request's; going on from an adapter, its settings for all that the request leaves out."""
    asked = request.algorithm_config or LoraFinetuningConfig()
    if isinstance(asked, FullFinetuningConfig):
        raise InvalidField(
            "this provider trains adapters: use {'type': 'LoRA', ...}, or a provider of type inline::huggingface",
            param="algorithm_config.type",
        )
    if not isinstance(asked, LoraFinetuningConfig):
        raise InvalidField(
            "QAT is not offered on any device: torchtune 0.6.1 has it in its recipes for several CUDA devices only, "
            "and jobs here train on one; use {'type': 'LoRA', ...}, with quantize_base for a 4-bit base",
            param="algorithm_config.type",
        )
    if model.adapter_dir is None:
        return asked
    given = {name: getattr(asked, name) for name in asked.model_fields_set}
    return settings_of_adapter(model.adapter_dir, architecture).model_copy(update=given)


def _refuse_unavailable(training: TrainingConfig) -> None:
    for field, why in _UNAVAILABLE_EFFICIENCY.items():
        if getattr(training.efficiency_config, field):
            raise InvalidField(f"{field} is not offered: {why}", param=f"training_config.efficiency_config.{field}")

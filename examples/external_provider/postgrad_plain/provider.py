"""inline::plain as the server sees it: what it is, what it refuses, which module its workers load. No torch here."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from apis.common import Api
from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig, SupervisedFineTuneRequest
from post_training.catalog.models import ResolvedModel
from post_training.defaults import default_lr
from post_training.job_specs import ProviderProfile
from post_training.jobs.spec import WorkerSettings
from post_training.service import JobService
from providers.spec import ProviderDeps, ProviderSpec

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ("gate_proj", "up_proj", "down_proj")


def get_provider_spec() -> ProviderSpec:
    return ProviderSpec(
        spec_version=1,
        api=Api.post_training,
        provider_type="inline::plain",
        module="postgrad_plain.provider",
        config_class="postgrad_plain.provider.PlainConfig",
        api_dependencies=(Api.datasetio,),
        description="LoRA by plain transformers and PEFT, one row at a time",
        pip_packages=("postgrad[torchtune]",),
        capabilities=("supervised_fine_tune", "preflight", "sft_sessions", "LoRA", "rsLoRA"),
        model_types=MODEL_TYPES,
    )


class PlainConfig(BaseModel):
    """What a run.yaml may say under `config:`; a field that is not here is refused."""

    model_config = ConfigDict(extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="What jobs wait for where they do not say")


async def get_provider_impl(config: PlainConfig, deps: ProviderDeps) -> JobService:
    worker = WorkerSettings(model_module="postgrad_plain.model", device=config.device, kernels="plain")
    profile = ProviderProfile(deps.provider_id, check, lambda model: default_lr(_config(model)["hidden_size"]), worker)
    return JobService(deps.database, deps.home, deps.models, deps.datasets, profile, deps.scheduler)


def check(request: SupervisedFineTuneRequest, model: ResolvedModel) -> LoraFinetuningConfig:
    """Refuse, by field, what `model.py` would not do: whatever is accepted acts."""
    config, lora = _config(model), request.algorithm_config or LoraFinetuningConfig()
    if config.get("model_type") not in MODEL_TYPES:
        raise InvalidField(f"inline::plain trains {', '.join(MODEL_TYPES)} and no other", param="model")
    if model.adapter_dir is not None:
        raise InvalidField("inline::plain starts from base models", param="model")
    if not isinstance(lora, LoraFinetuningConfig):
        raise InvalidField("inline::plain has LoRA only", param="algorithm_config.type")
    if not ATTENTION.keys() >= set(lora.lora_attn_modules):
        raise InvalidField(f"layers are {', '.join(ATTENTION)}", param="algorithm_config.lora_attn_modules")
    for field in ("use_dora", "quantize_base", "apply_lora_to_output"):
        if getattr(lora, field):
            raise InvalidField(f"inline::plain has no {field}", param=f"algorithm_config.{field}")
    for field, wanted in request.training_config.efficiency_config:
        if wanted:
            raise InvalidField(f"inline::plain has no {field}", param=f"training_config.efficiency_config.{field}")
    data = request.training_config.data_config
    if data and (data.max_seq_len or 0) > config["max_position_embeddings"]:
        raise InvalidField("longer than the model's context", param="training_config.data_config.max_seq_len")
    return lora


def _config(model: ResolvedModel) -> dict:
    return json.loads((model.base_dir / "config.json").read_text(encoding="utf-8"))

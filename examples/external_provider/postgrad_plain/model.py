"""What a worker of inline::plain computes with. See `post_training.training.model.TrainableModel`."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from post_training.training.model import TORCH_DTYPES, Computation, LoraSettings, ModelConfig, Segments

from .provider import ATTENTION, MLP


def load_model(config: ModelConfig) -> PlainModel:
    network: Any = AutoModelForCausalLM.from_pretrained(
        config.base_dir, dtype=TORCH_DTYPES[config.dtype], local_files_only=True, use_safetensors=True
    )
    torch.manual_seed(config.seed)  # PEFT draws the A factors from it
    return PlainModel(network.to(config.device), _settings(config.lora))


def _settings(lora: LoraSettings) -> dict[str, Any]:
    layers = [ATTENTION[name] for name in lora.attn_modules] + list(MLP if lora.mlp else ())
    scaling = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "lora_dropout": lora.dropout}
    return {"task_type": "CAUSAL_LM", "target_modules": sorted(layers), **scaling}


class PlainModel:
    computation = Computation("plain")

    def __init__(self, network: Any, settings: dict[str, Any]) -> None:
        self._network, self._settings = network, settings
        self.module: nn.Module = get_peft_model(network, LoraConfig(**settings))
        self.device: torch.device = network.device

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def hidden_states(self, segments: Segments) -> Tensor:
        rows = segments.tokens.split(list(segments.lengths))
        return torch.cat([self._network.base_model(row[None], use_cache=False).last_hidden_state[0] for row in rows])

    def output(self, hidden: Tensor) -> Tensor:
        return self._network.get_output_embeddings()(hidden)

    def head_weight(self) -> Tensor | None:
        return None  # the loss then goes through `output`

    def peft_adapter(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name.replace(".default", ""): value.detach().clone() for name, value in parameters.items()}
        return tensors, {"peft_type": "LORA", "base_model_name_or_path": "", "bias": "none", **self._settings}

"""What the trainer needs of a model: hidden states over flat segments, an output layer, adapter parameters.

A provider's `model.py` offers `load_model(config: ModelConfig) -> TrainableModel`. A worker finds it by the module name
that its job carries, so nothing here names a provider.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Dtype = Literal["bf16", "fp32"]
KernelForm = Literal["compiled", "fused", "plain"]
TORCH_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class LoraSettings:
    """Which layers get an adapter, how large and of which kind. The update of a layer is `scaling * B @ A`.

    Attributes:
        dora: each row of the updated weight is brought to a trained length (DoRA, https://arxiv.org/abs/2402.09353).
        rslora: scaling is alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732), not alpha / rank.
        dropout: probability that an input of an adapter is left out while training.
        quantized_base: the base is held in NF4 (QLoRA, https://arxiv.org/abs/2305.14314) and computed with as such.
    """

    rank: int = 16
    alpha: float = 32
    attn_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "output_proj")
    mlp: bool = True
    output: bool = False
    dora: bool = False
    rslora: bool = False
    dropout: float = 0.0
    quantized_base: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides how a model is loaded.

    Attributes:
        base_dir: a Hugging Face model directory (config.json, *.safetensors, tokenizer.json).
        full: every weight is trained and there is no adapter; `lora` says nothing then.
        adapter_dir: a PEFT adapter directory to go on from, or None for fresh adapters (A random by `seed`, B zero).
        device: `cpu` or `cuda:<n>`.
        kernels: how the model is computed. `plain`: by its library's own modules. `fused`: the same function in fewer
            and larger operations. `compiled`: that, with the element-wise operations compiled, which takes time once.
    """

    base_dir: Path
    lora: LoraSettings = field(default_factory=LoraSettings)
    full: bool = False
    adapter_dir: Path | None = None
    dtype: Dtype = "bf16"
    device: str = "cpu"
    seed: int = 0
    activation_checkpointing: bool = False
    kernels: KernelForm = "fused"


@dataclass(frozen=True)
class Computation:
    """How a model is computed in fact.

    Attributes:
        kernels: the form; see `ModelConfig`.
        remarks: what was asked for and is computed the plain way, with the reason.
    """

    kernels: KernelForm
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segments:
    """A flat stream of sequences, concatenated without padding, on the model's device.

    Attributes:
        tokens: [T] int64.
        positions: [T] int64, restarting at 0 in each segment.
        lengths: segment lengths, summing to T. Attention is causal within a segment and never crosses one.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]


class TrainableModel(Protocol):
    """A frozen base with trainable adapters; with `ModelConfig.full`, a model of which every weight is trained."""

    @property
    def device(self) -> torch.device: ...

    @property
    def module(self) -> nn.Module:
        """The network, for `train()` and `eval()`; a fast form may hold its weights elsewhere."""
        ...

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by stable name, in a stable order. Everything else has requires_grad False."""
        ...

    def hidden_states(self, segments: Segments) -> Tensor:
        """Final hidden states after the last norm, [T, D]."""
        ...

    def output(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], in the hidden states' dtype or fp32."""
        ...

    @property
    def computation(self) -> Computation: ...

    def head_weight(self) -> Tensor | None:
        """The weight [V, D] of the output layer where that is all it is and the model's form is not `plain`.

        The loss is then computed together with its gradient, without autograd.
        """
        ...

    def peft_adapter(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Adapter parameters (by the names of `adapter_parameters`) as PEFT knows them.

        Returns:
            tensors for adapter_model.safetensors (keys `base_model.model.….lora_A.weight`), same dtype as given, to be
            loaded on the base as it is stored, whether or not it was trained against a quantized one,
            and the complete content of adapter_config.json.
        """
        ...


@runtime_checkable
class TrainsAll(Protocol):
    """What a model has beside, where its provider takes `ModelConfig.full`; `peft_adapter` is then not called."""

    def whole_model(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every tensor of the model by its Hugging Face name, those of `parameters` (by the names of
        `adapter_parameters`) in the dtype given. A tensor that is tied to another is left out.
        """
        ...

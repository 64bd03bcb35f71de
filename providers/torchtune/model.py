"""A Hugging Face model in torchtune's building blocks: a frozen base and LoRA adapters, run over flat segments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from post_training.training.kernels import CompilingFailed, can_compile
from post_training.training.model import TORCH_DTYPES, Computation, KernelForm, LoraSettings, ModelConfig, Segments
from providers.torchtune import shim
from providers.torchtune.adapter_config import AdapterShape, adapter_config, check_adapter, module_names
from providers.torchtune.adapters import DoRALinear, add_adapters, fresh_adapter, is_adapter, quantize_base
from providers.torchtune.architecture import Architecture
from providers.torchtune.attention import segment_attention
from providers.torchtune.convert import load_base
from providers.torchtune.families import check_max_seq_len, describe
from providers.torchtune.fused import FusedDecoder, compiled_kernels
from providers.torchtune.fused_kernels import Kernels
from providers.torchtune.lora_options import check_shape
from providers.torchtune.peft_export import from_peft, to_peft


def load_model(config: ModelConfig) -> TorchtuneModel:
    """Load the base, frozen and in `config.dtype`, with fresh adapters or those of `config.adapter_dir`.

    Raises:
        UnsupportedModel: torchtune lacks the model or would compute it wrongly.
        ModelInvalid: files are missing, damaged or do not fit together.
        InvalidField: LoRA options that the model cannot honour, or that differ from the adapter to go on from.
    """
    architecture = describe(config.base_dir)
    shape = _shape(config.lora)
    check_shape(architecture, shape, quantized=config.lora.quantized_base)
    if config.adapter_dir is not None:
        check_adapter(config.adapter_dir, architecture, shape)
    module = _build(architecture, shape)
    _fill(module, architecture, shape, config)
    return TorchtuneModel(module, architecture, shape, config)


class TorchtuneModel:
    """The TrainableModel of this provider."""

    def __init__(
        self, module: shim.TransformerDecoder, architecture: Architecture, shape: AdapterShape, config: ModelConfig
    ) -> None:
        self._module = module
        self._architecture = architecture
        self._shape = shape
        self._checkpointing = config.activation_checkpointing
        self._computation, kernels = _computation(architecture, config)
        self._fused = None
        if kernels is not None:
            self._fused = FusedDecoder(module, architecture, kernels, TORCH_DTYPES[config.dtype])
            if self.device.type == "cuda" and (reason := self._fused.blocks_because) is not None:
                remark = f"attention is computed block by block: {reason}"
                self._computation = replace(self._computation, remarks=(*self._computation.remarks, remark))

    @property
    def device(self) -> torch.device:
        return self._module.tok_embeddings.weight.device

    @property
    def module(self) -> nn.Module:
        return self._module

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """`layers.<n>.<attn|mlp>.<name>.lora_<a|b>.weight`, A [rank, in] and B [out, rank], in layer order.

        With DoRA also `….magnitude`, [out] fp32.
        """
        return {name: parameter for name, parameter in self._module.named_parameters() if is_adapter(name)}

    def hidden_states(self, segments: Segments) -> Tensor:
        """Final hidden states after the last norm, [T, D].

        Raises:
            InvalidField, UnsupportedModel: a segment is longer than the model computes rightly.
        """
        check_max_seq_len(self._architecture, max(segments.lengths))
        if self._fused is not None:
            return self._fused.hidden_states(segments, self._checkpointing, self._shape.dropout > 0)
        hidden = self._module.tok_embeddings(segments.tokens[None])
        positions = segments.positions[None]
        for layer in self._module.layers:
            run = partial(layer, mask=segments.lengths, input_pos=positions)
            if self._checkpointing and torch.is_grad_enabled():
                # Only dropout draws numbers, and must draw the same ones when the layer is computed again.
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=self._shape.dropout > 0)
            else:
                hidden = run(hidden)
        return self._module.norm(hidden)[0]

    def output(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], in the hidden states' dtype."""
        return self._module.output(hidden)

    @property
    def computation(self) -> Computation:
        return self._computation

    def head_weight(self) -> Tensor | None:
        """The weight [V, D] of an output layer without adapter, unless the form is `plain`."""
        if self._fused is None or isinstance(self._module.output, shim.LoRALinear):
            return None
        head: Any = self._module.tok_embeddings if self._architecture.tied else self._module.output
        return head.weight

    def peft_adapter(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of `parameters` under PEFT's names, and `adapter_config.json` with an empty base model name.

        Only the adapter is read: the base is never merged into, so exporting cannot change the model.
        """
        tensors = to_peft(parameters, self._architecture, self._shape)
        return tensors, adapter_config(self._architecture, self._shape)


def _computation(architecture: Architecture, config: ModelConfig) -> tuple[Computation, Kernels | None]:
    """How the model is computed in fact, and the fast path's kernels, where that is its way."""
    if config.kernels == "plain":
        return Computation("plain"), None
    kernels, remarks = None, []
    if config.kernels == "compiled":
        try:
            kernels = _compiled(architecture, config)
        except CompilingFailed as error:
            remarks.append(f"element-wise operations are not compiled: {error}")
    if config.lora.dora:
        remarks.append("adapted layers run by themselves, not joined: use_dora")
    if config.lora.quantized_base:
        remarks.append("linear layers run by themselves, not joined: quantize_base")
    form: KernelForm = "fused" if kernels is None else "compiled"
    kernels = kernels or Kernels(compiled=False, gelu=architecture.family == "gemma")
    return Computation(form, tuple(remarks)), kernels


def _compiled(architecture: Architecture, config: ModelConfig) -> Kernels:
    if (reason := can_compile()) is not None:
        raise CompilingFailed(reason)
    joined = not config.lora.quantized_base and not (config.lora.dora and _adapts_attention(config.lora))
    return compiled_kernels(architecture, joined, TORCH_DTYPES[config.dtype], torch.device(config.device))


def _adapts_attention(lora: LoraSettings) -> bool:
    return bool({"q_proj", "k_proj", "v_proj"} & set(lora.attn_modules))


def _joins(config: ModelConfig) -> bool:
    """Whether adapters live in joined products, which take fp32 parameters."""
    return config.kernels != "plain" and not config.lora.dora and not config.lora.quantized_base


def _shape(lora: LoraSettings) -> AdapterShape:
    modules = module_names(lora.attn_modules, lora.mlp, lora.output)
    return AdapterShape(lora.rank, lora.alpha, modules, lora.dora, lora.rslora, lora.dropout)


def _build(architecture: Architecture, shape: AdapterShape) -> shim.TransformerDecoder:
    """The network without storage: every parameter is on the meta device, the RoPE table is real."""
    rope = _rope(architecture)
    with torch.device("meta"):
        module = _decoder(architecture)
        add_adapters(module, shape)
    for layer in cast(Any, module.layers):
        # One RoPE table for all layers. It is never cast: a bf16 table turns far positions by wrong angles.
        layer.attn.pos_embeddings = rope
        layer.attn._attention_call = segment_attention
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return module


def _decoder(a: Architecture) -> shim.TransformerDecoder:
    common: dict[str, Any] = {
        "vocab_size": a.vocab_size,
        "num_layers": a.num_layers,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "embed_dim": a.embed_dim,
        "intermediate_dim": a.intermediate_dim,
        "max_seq_len": a.context_length,
        "norm_eps": a.norm_eps,
    }
    if a.family == "gemma":
        return shim.gemma(**common, head_dim=a.head_dim)
    if a.family == "phi3":
        return shim.phi3(**common)
    if a.family == "qwen2":
        return shim.qwen2(**common, tie_word_embeddings=a.tied)
    # Llama of any version and Mistral are the same network but for RoPE, which is replaced, and the window, which is
    # checked. torchtune's other builders of these two cannot tie.
    return shim.llama3_2(**common, tie_word_embeddings=a.tied)


def _rope(a: Architecture) -> nn.Module:
    """The fp32 rotation table, [context_length, ...], computed under no device or dtype context."""
    common: dict[str, Any] = {"dim": a.head_dim, "max_seq_len": a.context_length, "base": a.rope_base}
    if a.family == "qwen2":
        return shim.Qwen2RotaryPositionalEmbeddings(**common)
    if a.family == "phi3":
        return shim.Phi3RotaryPositionalEmbeddings(**common)
    scaling = a.rope_scaling
    if scaling is None:
        return shim.RotaryPositionalEmbeddings(**common)
    return shim.Llama3ScaledRoPE(
        **common,
        scale_factor=cast(int, scaling.factor),
        low_freq_factor=cast(int, scaling.low_freq_factor),
        high_freq_factor=cast(int, scaling.high_freq_factor),
        old_context_len=scaling.original_context,
    )


def _fill(
    module: shim.TransformerDecoder, architecture: Architecture, shape: AdapterShape, config: ModelConfig
) -> None:
    dtype = TORCH_DTYPES[config.dtype]
    sizes = {name: parameter.shape for name, parameter in module.named_parameters() if is_adapter(name)}
    tensors = load_base(config.base_dir, architecture, dtype)
    if config.adapter_dir is None:
        adapter = fresh_adapter(sizes, tensors, config.seed)
    else:
        adapter = from_peft(config.adapter_dir, sizes, architecture, shape)
    for name, tensor in adapter.items():
        is_joined = _joins(config) and name.startswith("layers.")
        kept = torch.float32 if is_joined or name.endswith(".magnitude") else dtype
        # Adapters are written to, so they get memory of their own, never a mapped file's.
        tensors[name] = tensor.to(kept, copy=True).contiguous()
    on_device = {name: tensor.to(config.device) for name, tensor in tensors.items()}
    module.load_state_dict(on_device, assign=True)
    module.to(config.device)
    for layer in module.modules():
        if isinstance(layer, DoRALinear):
            layer.remember_rows()
    if config.lora.quantized_base:
        quantize_base(module)

"""A transformers model with PEFT's adapters, run over flat segments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from apis.post_training.models import LoraFinetuningConfig
from post_training.training.model import TORCH_DTYPES, Computation, LoraSettings, ModelConfig, Segments
from providers.huggingface.adapter_options import adapter_config, check_adapter
from providers.huggingface.adapters import add_adapters, fill_fresh, fill_from, is_adapter, saved_name
from providers.huggingface.families import describe
from providers.huggingface.segments import SegmentRunner

_NOT_COMPILED = "element-wise operations are not compiled: this provider has the library's own"


def load_model(config: ModelConfig) -> HuggingfaceModel:
    """Load the base in `config.dtype`: frozen, with fresh adapters or those of `config.adapter_dir`, or all to train.

    Raises:
        UnsupportedModel: transformers lacks the model, or it cannot be trained over rows here.
        ModelInvalid: files are missing, damaged or do not fit together.
        InvalidField: options that the model cannot honour, or that differ from the adapter to go on from.
    """
    facts = describe(config.base_dir)
    if config.full:
        return HuggingfaceModel(_load_base(config), None, {}, config, facts.context_length)
    wanted = adapter_config(facts, _as_request(config.lora))
    if config.adapter_dir is not None:
        check_adapter(config.adapter_dir, wanted)
    network = _load_base(config)
    adapted = add_adapters(network, wanted)
    if config.adapter_dir is None:
        fill_fresh(adapted, config.seed)
    else:
        fill_from(adapted, config.adapter_dir)
    return HuggingfaceModel(network, adapted, wanted, config, facts.context_length)


class HuggingfaceModel:
    """The TrainableModel of this provider."""

    def __init__(
        self,
        network: PreTrainedModel,
        adapted: nn.Module | None,
        wanted: dict[str, Any],
        config: ModelConfig,
        context_length: int | None,
    ) -> None:
        self._network = network
        self._trained = (network if adapted is None else adapted).eval()
        self._full = adapted is None
        self._wanted = wanted
        self._context = context_length
        fused = config.kernels != "plain"
        self._runner = SegmentRunner(network, join=fused)
        # Its formula has no gradient of the output layer itself.
        self._head = self._plain_head() if fused and not self._full else None
        remarks = [_NOT_COMPILED] if config.kernels == "compiled" else []
        remarks += [self._runner.remark] if self._runner.remark else []
        self._computation = Computation("fused" if fused else "plain", tuple(remarks))

    @property
    def device(self) -> torch.device:
        return self._network.device

    @property
    def module(self) -> nn.Module:
        return self._trained

    @property
    def computation(self) -> Computation:
        return self._computation

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """By PEFT's names of them in memory, in the model's order: A [rank, in], B [out, rank] and, with DoRA, [out].

        With `ModelConfig.full`, all parameters by the model's names of them.
        """
        return {name: p for name, p in self._trained.named_parameters() if self._full or is_adapter(name)}

    def hidden_states(self, segments: Segments) -> Tensor:
        """Final hidden states after the last norm, [T, D].

        Raises:
            InvalidField: a segment is longer than the model's context.
        """
        longest = max(segments.lengths)
        if self._context is not None and longest > self._context:
            raise InvalidField(
                f"max_seq_len is {longest}, but the model's context is {self._context} tokens; choose at most that",
                param="training_config.data_config.max_seq_len",
            )
        return self._runner.run(segments)

    def output(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], in the hidden states' dtype or fp32."""
        return self._tail(hidden) if self._head is None else F.linear(hidden, self._head)

    def head_weight(self) -> Tensor | None:
        """The weight [V, D] of an output layer that is nothing else, unless the form is `plain`."""
        return self._head

    def peft_adapter(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of `parameters` under PEFT's names, and `adapter_config.json` with an empty base model name."""
        copies = {
            saved_name(name): tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in parameters.items()
        }
        return copies, dict(self._wanted)

    def whole_model(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `post_training.training.model.TrainsAll`."""
        own = {parameter.data_ptr() for parameter in self._network.parameters()}
        kept = {
            name: tensor.detach().clone()
            for name, tensor in self._network.state_dict().items()
            if name not in parameters and tensor.data_ptr() not in own
        }
        return parameters | kept

    def _tail(self, hidden: Tensor) -> Tensor:
        """What the model makes of hidden states, its output layer and all that it scales, bounds or projects."""
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with _gives(self._runner.decoder, hidden[None]):
            return self._network(input_ids=tokens, use_cache=False).logits[0]

    @torch.no_grad()
    def _plain_head(self) -> Tensor | None:
        """The weight of the output layer where multiplying by it is all that the model does: found by trying."""
        head = self._network.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            return None
        generator = torch.Generator("cpu").manual_seed(0)
        hidden = torch.randn(4, head.in_features, generator=generator).to(head.weight)
        # Wide enough for a bound on logits to be felt.
        hidden *= 100
        same = torch.equal(self._tail(hidden), F.linear(hidden, head.weight))
        return head.weight if same else None


class _Given(BaseModelOutputWithPast):
    """Hidden states, and None for whatever else a kind of model looks for in its decoder's answer."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _gives(decoder: nn.Module, hidden: Tensor) -> Iterator[None]:
    """While entered, `decoder` gives these hidden states [1, N, D] whatever it is asked."""
    decoder.forward = lambda *_args, **_options: _Given(last_hidden_state=hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        del decoder.forward


def _load_base(config: ModelConfig) -> PreTrainedModel:
    """The whole model on its device, every weight of it from its files."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        settings = AutoConfig.from_pretrained(config.base_dir, **options)
        _without_dropout(settings)
        network, found = cast(Any, AutoModelForCausalLM).from_pretrained(
            config.base_dir,
            config=settings,
            dtype=TORCH_DTYPES[config.dtype],
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelInvalid(f"transformers cannot load the model: {str(error).splitlines()[0]}") from error
    # It fills what is missing with noise and passes over what it does not know.
    for kind, keys in (("lack", found["missing_keys"]), ("hold", found["unexpected_keys"])):
        if keys:
            raise UnsupportedModel(
                f"the model's files {kind} {min(keys)}, unlike a {type(network).__name__} of transformers; get the "
                "model's own config.json, or choose another model"
            )
    network = network.to(config.device)
    if config.activation_checkpointing:
        _checkpoint(network)
    return network


def _without_dropout(settings: Any) -> None:
    """Only adapters have dropout: the base is the model as it computes, and rows mean the same in every batch."""
    for key, value in settings.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, 0.0)


def _checkpoint(network: PreTrainedModel) -> None:
    if not network.supports_gradient_checkpointing:
        raise InvalidField(
            f"enable_activation_checkpointing: transformers' {type(network).__name__} has none; leave it out",
            param="training_config.efficiency_config.enable_activation_checkpointing",
        )
    network.activation_checkpointing_enable({"use_reentrant": False})


def _as_request(lora: LoraSettings) -> LoraFinetuningConfig:
    return LoraFinetuningConfig.model_construct(
        rank=lora.rank,
        alpha=lora.alpha,
        lora_attn_modules=list(lora.attn_modules),
        apply_lora_to_mlp=lora.mlp,
        apply_lora_to_output=lora.output,
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        lora_dropout=lora.dropout,
        quantize_base=lora.quantized_base,
    )

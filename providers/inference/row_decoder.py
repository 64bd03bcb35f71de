"""One token after another through a decoder: the numbers of transformers' forward pass, in less time.

For a token, transformers makes some 55 calls into torch per layer, through 13 Python modules. Here it is 35 calls on
vectors, into memory laid out beforehand, the slow ones replaced by equal ones: with 30 layers of almost no width, a
token takes 4 ms instead of 10 (fp32) or 14 (bf16). What is left is reading the weights, see `projections.py`. The same
values are rounded in the same order, so the logits are the same bits wherever `torch.mv` sums as `F.linear` does, which
it does on the CPU tried. The prompt is read by the model itself.

Layers are those of the decoders in `_FAMILIES`, with h [D] the token's hidden state:

    h += O attention(rope(QKV norm(h)));   h += down(act(gate norm(h)) * up norm(h))

`RowDecoder.of` gives None for any other model, for adapters other than LoRA and DoRA on linear layers, and off the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DynamicCache,
    GemmaForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from providers.inference.kv_cache import KeyValueCache
from providers.inference.projections import Projection, UnsupportedModelError, projection, share_storage

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, GemmaForCausalLM, Phi3ForCausalLM)
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Phi3RMSNorm)
_log = logging.getLogger(__name__)
Transform = Callable[[Tensor], Tensor]


class RowDecoder:
    """A model as it was when this was built: with its adapter on, or off. One sequence at a time takes a step."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModelError."""
        _check(model)
        body, attention = model.model, model.model.layers[0].self_attn
        self._embed, self._rotary = body.embed_tokens, body.rotary_emb
        self._heads, self._key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._window = _window(model)
        self._rotated = 2 * body.rotary_emb.inv_freq.numel()
        self._swap = torch.arange(self._rotated).roll(self._rotated // 2)
        self._layers = [self._layer(layer) for layer in body.layers]
        self._norm, self._head = _norm(body.norm), projection(model.lm_head)

    @classmethod
    def of(cls, model: Any) -> RowDecoder | None:
        """The decoder of `model`, or None where it has something that is not known here."""
        try:
            with torch.inference_mode():
                return cls(model)
        except UnsupportedModelError as reason:
            _log.info("tokens are computed by transformers' own forward pass, because of %s", reason)
            return None

    def take_over(self, cache: DynamicCache) -> KeyValueCache:
        """What `cache` holds of the tokens that the model has read, moved to where `step` goes on from it."""
        return KeyValueCache(cache.layers, cache.get_seq_length(), self._window)

    def step(self, token: int, cache: KeyValueCache) -> Tensor:
        """Logits [V] of what follows `token`, which joins `cache`."""
        hidden = self._embed(torch.tensor([token]))[0]
        cos, sin = self._rotation(cache.length, hidden)
        for layer, place, keys, values in zip(self._layers, *cache.advance(), strict=True):
            hidden = hidden + self._attention(layer, hidden, (cos, sin), place, keys, values)
            layer.gate_up(layer.mlp_norm(hidden))
            hidden = hidden + layer.down(layer.activation(layer.gate).mul_(layer.up))
        return self._head(self._norm(hidden)).clone()

    def _rotation(self, position: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos [R] and sin [R] of a position as the model has them, the first half of sin negated for `_attention`."""
        cos, sin = self._rotary(like[None, None], position_ids=torch.tensor([[position]]))
        sin[..., : self._rotated // 2].neg_()
        return cos[0, 0], sin[0, 0]

    def _attention(
        self,
        layer: _Layer,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        place: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Attention's share [D], with the token's key and value written to `place`, which `keys` and `values` include.

        RoPE (Su et al., 2021) pairs i with i + R/2: (a, b) becomes (a cos - b sin, b cos + a sin), which is
        x cos + swapped(x) (-sin, sin).
        """
        layer.qkv(layer.attention_norm(hidden))
        swapped = layer.rotated.index_select(1, self._swap).mul_(rotation[1])
        layer.rotated.mul_(rotation[0]).add_(swapped)
        place.copy_(layer.key_value)
        attended = scaled_dot_product_attention(
            layer.query, keys, values, scale=self._scaling, enable_gqa=self._heads > self._key_heads
        )
        return layer.output(attended.view(-1))

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        phi3 = hasattr(attention, "qkv_proj")
        qkv = projection(*([attention.qkv_proj] if phi3 else _qkv(attention)))
        gate_up = projection(*([mlp.gate_up_proj] if phi3 else _gate_up(mlp)))
        heads = qkv.result.view(-1, self._head_dim)
        gate, up = gate_up.result.chunk(2)
        return _Layer(
            attention_norm=_norm(layer.input_layernorm),
            qkv=qkv,
            rotated=heads[: self._heads + self._key_heads, : self._rotated],
            query=heads[: self._heads].view(1, self._heads, 1, self._head_dim),
            key_value=heads[self._heads :].view(2, self._key_heads, 1, self._head_dim),
            output=projection(attention.o_proj),
            mlp_norm=_norm(layer.post_attention_layernorm),
            gate_up=gate_up,
            gate=gate,
            up=up,
            activation=mlp.activation_fn if phi3 else mlp.act_fn,
            down=projection(mlp.down_proj),
        )


@dataclass(frozen=True)
class _Layer:
    """The steps of one layer; the tensors are views of what `qkv` and `gate_up` computed last."""

    attention_norm: Transform
    qkv: Projection
    rotated: Tensor
    query: Tensor
    key_value: Tensor
    output: Projection
    mlp_norm: Transform
    gate_up: Projection
    gate: Tensor
    up: Tensor
    activation: Transform
    down: Projection


def share_projections(model: Any) -> None:
    """Lay the weights of projections with one input beside each other, where a RowDecoder can come of it.

    To be called before adapters are put on. The model computes as before, from the same values.
    """
    if type(model) not in _FAMILIES or type(model) is Phi3ForCausalLM or model.device.type != "cpu":
        return
    for layer in model.model.layers:
        share_storage(*_qkv(layer.self_attn))
        share_storage(*_gate_up(layer.mlp))


def _qkv(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gate_up(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj]


def _check(model: Any) -> None:
    if type(model) not in _FAMILIES:
        raise UnsupportedModelError(f"the architecture {type(model).__name__}")
    if model.config._attn_implementation != "sdpa":
        raise UnsupportedModelError(f"{model.config._attn_implementation} attention")
    if model.device.type != "cpu":
        raise UnsupportedModelError(f"the device {model.device.type}, where nothing of this was measured")


def _window(model: Any) -> int | None:
    """How many tokens each layer attends to, by the cache that transformers would make."""
    windows = {getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers}
    if len(windows) > 1:
        raise UnsupportedModelError("layers with different attention windows")
    return windows.pop() if windows else None


def _norm(module: Any) -> Transform:
    """RMSNorm (Zhang and Sennrich, 2019), x / sqrt(mean(x^2) + eps) in fp32, rounded where the module rounds.

    Llama's rounds and then multiplies by the weight, Gemma's multiplies by 1 + weight and then rounds. Numbers are held
    as tensors because torch would make one of each Python number each time: 6 us instead of 12.
    """
    weight = module.weight.detach()
    dtype, count = weight.dtype, torch.tensor(float(len(weight)))
    gemma = type(module) is GemmaRMSNorm
    if not gemma and type(module) not in _NORMS:
        raise UnsupportedModelError(f"a norm of type {type(module).__name__}")
    eps = torch.tensor(module.eps if gemma else module.variance_epsilon)
    factor = 1.0 + weight.float() if gemma else weight

    def normalized(x: Tensor) -> Tensor:
        x = x.float()
        scaled = (x * x).sum(-1, keepdim=True).div_(count).add_(eps).rsqrt_().mul(x)
        return scaled.mul_(factor).to(dtype) if gemma else scaled.to(dtype).mul_(factor)

    return normalized

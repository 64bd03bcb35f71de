"""A model's sizes, under whichever name its `config.json` has them. No torch here.

transformers gives many configuration classes names of their own for the same thing, GPT-2's `n_embd` for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apis.errors import ModelInvalid

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def width(config: Mapping[str, Any]) -> int:
    """The size of a hidden state. Raises ModelInvalid where the config does not tell."""
    return _needed(config, _WIDTH)


def context_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens that positions reach for; None where the config does not tell or the model has no such limit."""
    return _first(config, _CONTEXT)


def layers(config: Mapping[str, Any]) -> int:
    """How many there are. Raises ModelInvalid where the config does not tell."""
    return _needed(config, _LAYERS)


def heads(config: Mapping[str, Any]) -> int:
    """Of a layer's attention; 1 where the config does not tell, as a model without attention's."""
    return _first(config, _HEADS) or 1


def intermediate(config: Mapping[str, Any]) -> int:
    """The width within a layer's feed-forward part; four times the model's where the config does not tell."""
    return _first(config, _INTERMEDIATE) or 4 * width(config)


def _needed(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = _first(config, names)
    if found is None:
        raise ModelInvalid(f"config.json: {names[0]} must be a positive integer; get the model's own config.json")
    return found


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

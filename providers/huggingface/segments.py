"""A flat stream of segments through a transformers model: all of them in one pass where the model allows.

transformers models call their attention by a name that can be given. The one here splits queries, keys and values into
the segments, so that no token sees another segment's and no [T, T] mask is made; what a layer does beside attention is
by position. Models with attention or state of another kind run each segment by itself, which is right for any model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from apis.errors import UnsupportedModel
from post_training.training.model import Segments

ATTENTION = "postgrad_segments"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
# What some models have their attention do beyond softmax(q k^T) v.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "attention_bias", "head_mask")
_PROBE_LENGTHS = (6, 4)
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class NotPlain(Exception):
    """A model's attention is more than what is computed here."""


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segment_lengths: tuple[int, ...] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention per segment, by transformers' protocol for attention functions.

    Args:
        query: [1, H, T, D].
        key, value: [1, G, T, D], G groups of heads.
        attention_mask, dropout: none; models are trained without dropout but the adapters'.
        segment_lengths: summing to T.

    Returns:
        [1, T, H, D].

    Raises:
        NotPlain: the model wants something else done as well.
    """
    odd = [name for name in _UNKNOWN if others.get(name) is not None]
    if odd or segment_lengths is None:
        raise NotPlain(f"its attention has {odd[0]}" if odd else "its attention is not told of segments")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    pieces = zip(*(each.split(segment_lengths, dim=2) for each in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*piece, is_causal=True, scale=scaling) for piece in pieces]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _no_mask(*_args: Any, **_options: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, segment_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class SegmentRunner:
    """Runs a model's decoder over segments.

    Args:
        join: whether to run them in one pass where the model allows.

    Attributes:
        joins: whether it does.
        remark: why it does not, where it was asked to.

    Raises:
        UnsupportedModel: the model lets a token see those behind it.
    """

    def __init__(self, network: PreTrainedModel, *, join: bool) -> None:
        self._network = network
        self._decoder: nn.Module = network.base_model
        self._own = network.config._attn_implementation
        self._window = getattr(network.config, "sliding_window", None)
        self.joins = False
        probe = _probe(network)
        alone = self._prove_causal(probe)
        self.remark = self._prove_joined(probe, alone) if join else None
        self.joins = join and self.remark is None

    @property
    def decoder(self) -> nn.Module:
        return self._decoder

    def run(self, segments: Segments) -> Tensor:
        """Final hidden states after the last norm, [T, D]."""
        # A window is the mask's doing in some models, and no mask is made where segments are joined.
        fits = self._window is None or max(segments.lengths) <= self._window
        return self._together(segments) if self.joins and fits else self._each(segments)

    def _together(self, segments: Segments) -> Tensor:
        self._attend(ATTENTION)
        found = self._decoder(
            input_ids=segments.tokens[None],
            position_ids=segments.positions[None],
            use_cache=False,
            segment_lengths=segments.lengths,
        )
        return found.last_hidden_state[0]

    def _each(self, segments: Segments) -> Tensor:
        self._attend(self._own)
        pieces = segments.tokens.split(segments.lengths)
        return torch.cat([self._decoder(input_ids=p[None], use_cache=False).last_hidden_state[0] for p in pieces])

    def _attend(self, name: str | None) -> None:
        if name is not None and self._network.config._attn_implementation != name:
            self._network.set_attn_implementation(name)

    @torch.no_grad()
    def _prove_causal(self, probe: Segments) -> Tensor:
        """Hidden states of the probe. A token's must not change with those behind it."""
        changed = probe.tokens.clone()
        changed[_PROBE_LENGTHS[0] - 1] = (changed[_PROBE_LENGTHS[0] - 1] + 1) % self._network.config.vocab_size
        alone = self._each(probe)
        before = slice(0, _PROBE_LENGTHS[0] - 1)
        if not _same(self._each(Segments(changed, probe.positions, probe.lengths))[before], alone[before]):
            raise UnsupportedModel(
                f"{type(self._network).__name__} lets a token see those behind it, so it is no causal language model; "
                "choose another model"
            )
        return alone

    @torch.no_grad()
    def _prove_joined(self, probe: Segments, alone: Tensor) -> str | None:
        """Why segments cannot be joined, None where they can: then joined they are what they are alone."""
        if (reason := _other_kind(self._network)) is not None:
            return f"each row runs by itself: {reason}"
        try:
            same = _same(self._together(probe), alone)
        except (NotPlain, TypeError, RuntimeError) as error:
            return f"each row runs by itself: {str(error).splitlines()[0]}"
        return None if same else "each row runs by itself: joined, the model computes something else"


def _other_kind(network: PreTrainedModel) -> str | None:
    """What the model has beside attention that can be given to it."""
    if not network._supports_attention_backend:
        return "its attention cannot be exchanged"
    if network._is_stateful:
        return "it keeps a state from token to token"
    kinds = set(getattr(network.config, "layer_types", None) or _PLAIN_LAYERS)
    if kinds - _PLAIN_LAYERS:
        return f"it has layers of type {min(kinds - _PLAIN_LAYERS)}"
    return "its attention goes by chunks" if getattr(network.config, "attention_chunk_size", None) else None


def _probe(network: PreTrainedModel) -> Segments:
    generator = torch.Generator("cpu").manual_seed(0)
    count = sum(_PROBE_LENGTHS)
    tokens = torch.randint(network.config.vocab_size, (count,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS])
    return Segments(tokens.to(network.device), positions.to(network.device), _PROBE_LENGTHS)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Within what the type's rounding explains, by Frobenius norm."""
    tolerance = _TOLERANCES[expected.dtype]
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= tolerance * expected.norm())

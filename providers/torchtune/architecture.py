"""The facts of a model that building, loading and exporting it need. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "gemma", "phi3"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies; `original_context` in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Architecture:
    """All that building, loading and exporting a model needs.

    Attributes:
        tied: the output layer is the embedding.
        context_length: tokens, the config's `max_position_embeddings`.
        sliding_window: tokens; the window of a layer that has one, else None. Up to this length attention is plain.
    """

    family: Family
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int
    intermediate_dim: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None
    tied: bool
    context_length: int
    sliding_window: int | None

    @property
    def fused(self) -> bool:
        """Whether the Hugging Face model holds q, k, v in one matrix and gate, up in another."""
        return self.family == "phi3"

    @property
    def interleaved_rope(self) -> bool:
        """Whether torchtune rotates neighbouring pairs, so that rows of q and k are permuted on loading."""
        return self.family in ("llama", "mistral", "gemma")

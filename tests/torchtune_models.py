"""Tiny random Hugging Face models of every family that the torchtune provider takes, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 96
CONTEXT = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100_000.0}}),
    "llama3_scaled": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_theta": 1_000_000.0}}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "phi3": ("Phi3", {}),
}
"""transformers' class prefix and what differs from the common settings, by name of the case."""

UNTIED = ("llama", "llama3_scaled", "mistral", "qwen2", "phi3")


def make_model(path: Path, case: str = "llama", seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """Save a tiny random model of `MODELS[case]` into `path` and return it, fp32 and in eval mode.

    Every parameter is random, biases and norm scales too: what is zero or one by default would hide a wrong mapping.
    """
    prefix, own = MODELS[case]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **own, **overrides})
    with torch.random.fork_rng():
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    randomize(model, seed)
    model.save_pretrained(path)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter from one seeded generator, near the scale that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            around = 1.0 if parameter.dim() == 1 and "norm" in name else 0.0
            parameter.copy_(around + noise * (0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """[length] int64 token ids below VOCAB."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius norm of the difference."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())

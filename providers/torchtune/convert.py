"""Hugging Face weights under torchtune's names and in torchtune's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apis.errors import ModelInvalid
from post_training.catalog.model_files import TensorHeader
from providers.torchtune.architecture import Architecture
from providers.torchtune.shim import hf_to_tune, phi3_hf_to_tune, qwen2_hf_to_tune
from providers.torchtune.weights import EMBEDDING, LM_HEAD, check_weights

NORM_SUFFIX = ".scale"


def load_base(model_dir: Path, architecture: Architecture, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight of the base by torchtune's name, on the CPU.

    Norm scales come in fp32 whatever `dtype`: torchtune norms in fp32, and a scale of that type is exact and takes the
    fused kernel, where a bf16 one falls to a slow path with a warning.

    Raises:
        ModelInvalid: naming the first missing, unexpected or mis-shaped tensor or a damaged file.
    """
    weights = _read(check_weights(model_dir, architecture))
    if architecture.tied:
        _drop_equal_head(weights)
    converted = _to_torchtune(weights, architecture)
    return {name: tensor.to(_dtype_of(name, dtype)) for name, tensor in converted.items()}


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of q or k from Hugging Face's halves to torchtune's pairs.

    Hugging Face rotates row i of a head with row i + head_dim / 2, torchtune row 2i with row 2i + 1.

    Args:
        rows: [heads * head_dim, ...].
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def deinterleave(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleave`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _read(headers: dict[str, TensorHeader]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in dict.fromkeys(header.file for header in headers.values()):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name, header in headers.items() if header.file == file]
                weights |= {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise ModelInvalid(f"{file.name} cannot be read ({error}); get the file again") from None
    return weights


def _drop_equal_head(weights: dict[str, Tensor]) -> None:
    head = weights.pop(LM_HEAD, None)
    if head is not None and not torch.equal(head, weights[EMBEDDING]):
        raise ModelInvalid(
            f"config.json ties the output layer to the embedding, but {LM_HEAD} and {EMBEDDING} differ; "
            'set "tie_word_embeddings" to false in config.json if they are meant to'
        )


def _to_torchtune(weights: dict[str, Tensor], a: Architecture) -> dict[str, Tensor]:
    heads = {"num_heads": a.num_heads, "num_kv_heads": a.num_kv_heads, "dim": a.embed_dim}
    if a.family == "phi3":
        return phi3_hf_to_tune(weights, **heads)
    if a.family == "qwen2":
        return qwen2_hf_to_tune(weights, **heads, head_dim=a.head_dim, tie_word_embeddings=a.tied)
    return hf_to_tune(weights, **heads, head_dim=a.head_dim)


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(NORM_SUFFIX) else dtype

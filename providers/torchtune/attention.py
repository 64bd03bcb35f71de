"""Causal attention within each segment of a flat stream, without a [T, T] mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: tuple[int, ...], dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Scaled dot-product attention per segment, in the place of torchtune's `_attention_call`.

    torchtune hands its layers' `mask` on untouched, so the segment lengths travel as the mask. That keeps this free of
    state: recomputing a layer in the backward pass sees the lengths of its own forward pass.

    Args:
        q, k, v: [1, H, T, D], keys and values already repeated for each query head.
        mask: segment lengths, summing to T.
        dropout_p: unused, adapters here train without attention dropout.
        is_causal: unused, each segment is causal.

    Returns:
        [1, H, T, D].
    """
    if len(mask) == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    pieces = zip(q.split(mask, dim=2), k.split(mask, dim=2), v.split(mask, dim=2), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*piece, is_causal=True) for piece in pieces], dim=2)

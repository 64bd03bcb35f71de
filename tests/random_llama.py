"""The torchtune provider's model with what a test of resuming needs: random numbers in it, and rows that overflow.

A worker finds it by its module name, as it finds a provider's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from post_training.training.model import Computation, ModelConfig, Segments, TrainableModel
from providers.torchtune.model import load_model as load_plain

OVERFLOWS = "~"
"""A row that holds this character has no finite loss."""


def load_model(config: ModelConfig) -> RandomLlama:
    tokenizer = Tokenizer.from_file(str(config.base_dir / "tokenizer.json"))
    overflows = tokenizer.token_to_id(OVERFLOWS)
    assert overflows is not None
    return RandomLlama(load_plain(config), overflows)


class RandomLlama:
    """Drops a tenth of the hidden states while it trains."""

    def __init__(self, inner: TrainableModel, overflows: int) -> None:
        self._inner = inner
        self._overflows = overflows

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def module(self) -> nn.Module:
        return self._inner.module

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        return self._inner.adapter_parameters()

    def hidden_states(self, segments: Segments) -> Tensor:
        hidden = self._inner.hidden_states(segments)
        if not self.module.training:
            return hidden
        factor = math.inf if bool((segments.tokens == self._overflows).any()) else 1.0
        return F.dropout(hidden, 0.1) * factor

    def output(self, hidden: Tensor) -> Tensor:
        return self._inner.output(hidden)

    @property
    def computation(self) -> Computation:
        return self._inner.computation

    def head_weight(self) -> Tensor | None:
        return self._inner.head_weight()

    def peft_adapter(self, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self._inner.peft_adapter(parameters)

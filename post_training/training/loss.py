"""Weighted cross-entropy over supervised positions only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_POSITIONS = 512
"""Positions whose logits exist at one time: 512 x 49,152 x 4 bytes = 100 MB for a vocabulary of 49,152."""


@dataclass
class LossSums:
    """Sums over supervised positions; divide only once everything is added up.

    Attributes:
        loss: sum of weight x cross-entropy, in nats.
        weight: sum of weights.
        tokens: supervised positions.
        correct: of those, how many the model's most likely token gets right.
    """

    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    correct: int = 0

    def add(self, other: LossSums) -> None:
        self.loss += other.loss
        self.weight += other.weight
        self.tokens += other.tokens
        self.correct += other.correct

    @property
    def mean(self) -> float:
        """Loss per unit of weight, in nats; NaN where nothing was supervised."""
        return self.loss / self.weight if self.weight else math.nan


def loss_and_gradient(
    output: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, weights: Tensor, weight_sum: float
) -> LossSums:
    """Back-propagate the step's loss, the output layer chunk by chunk.

    Each chunk's logits are made, differentiated and dropped before the next, so `[positions, vocabulary]` never exists
    as a whole; their gradients meet in a detached copy of the hidden states, from which one backward pass goes on into
    the network.

    Args:
        output: hidden states [n, D] to logits [n, V].
        hidden: [N, D], supervised positions only, part of the graph.
        targets: [N] int64.
        weights: [N] float32.
        weight_sum: the sum of weights of the whole optimizer step, so that micro-batches add up to the step's mean.
    """
    detached = hidden.detach().requires_grad_()
    sums = LossSums()
    for rows, target, weight in _chunks(detached, targets, weights):
        logits = output(rows).float()
        loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
        (loss / weight_sum).backward()
        sums.add(_sums(loss, logits, target, weight))
    hidden.backward(detached.grad)
    return sums


@torch.no_grad()
def loss_only(output: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, weights: Tensor) -> LossSums:
    """The same sums without gradients. Shapes as in `loss_and_gradient`."""
    sums = LossSums()
    for rows, target, weight in _chunks(hidden, targets, weights):
        logits = output(rows).float()
        loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum()
        sums.add(_sums(loss, logits, target, weight))
    return sums


def _chunks(hidden: Tensor, targets: Tensor, weights: Tensor) -> zip[tuple[Tensor, Tensor, Tensor]]:
    return zip(
        hidden.split(CHUNK_POSITIONS), targets.split(CHUNK_POSITIONS), weights.split(CHUNK_POSITIONS), strict=True
    )


def _sums(loss: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> LossSums:
    correct = (logits.detach().argmax(-1) == targets).sum()
    return LossSums(loss.item(), weights.double().sum().item(), targets.numel(), int(correct.item()))

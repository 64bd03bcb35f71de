"""Weighted cross-entropy over supervised positions only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from post_training.training.kernels import CompilingFailed, Kernel, compiling, varying
from post_training.training.model import TrainableModel

Output = Callable[[Tensor], Tensor]

CHUNK_POSITIONS = 256
"""Positions whose logits exist at one time: 256 x 49,152 x 2 bytes = 25 MB in bf16, and as much for their gradient."""

POSITIONS_STEP = 32
"""Positions are filled up to a multiple of so many with some of weight 0: code is compiled for each number of them."""


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
    model: TrainableModel,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    weight_sum: float,
    *,
    compiled: bool = False,
) -> LossSums:
    """Back-propagate the step's loss, the output layer chunk by chunk.

    Each chunk's logits are made, differentiated and dropped before the next, so `[positions, vocabulary]` never exists
    as a whole; their gradients meet in one tensor, from which a backward pass goes on into the network.

    Args:
        hidden: [N, D], supervised positions only, part of the graph.
        targets: [N] int64.
        weights: [N] float32.
        weight_sum: the sum of weights of the whole optimizer step, so that micro-batches add up to the step's mean.
        compiled: as `can_compile_loss` said.
    """
    head = model.head_weight()
    if head is None:
        sums, gradient = _by_autograd(model.output, hidden.detach(), targets, weights, weight_sum)
    else:
        sums, gradient = _by_formula(head, compiled, hidden.detach(), targets, weights, weight_sum)
    if hidden.requires_grad:  # else only the output layer is trained
        hidden.backward(gradient)
    return sums


def _by_autograd(
    output: Output, hidden: Tensor, targets: Tensor, weights: Tensor, weight_sum: float
) -> tuple[LossSums, Tensor | None]:
    hidden.requires_grad_()
    sums = LossSums()
    for rows, target, weight in _chunks(hidden, targets, weights):
        logits = output(rows).float()
        loss = (_cross_entropy(logits, target) * weight).sum()
        (loss / weight_sum).backward()
        sums.add(_sums(loss, logits, target, weight))
    return sums, hidden.grad


@torch.no_grad()
def _by_formula(
    head: Tensor, compiled: bool, hidden: Tensor, targets: Tensor, weights: Tensor, weight_sum: float
) -> tuple[LossSums, Tensor]:
    """With z = h W^T and p = softmax(z), the gradient of a token's cross-entropy to h is (p - onehot(target)) W.

    It is there as soon as the loss is, so logits are made once and nothing of them is kept (as in Liger Kernel's fused
    linear cross-entropy, https://arxiv.org/abs/2410.10989).
    """
    kernel = softmax_parts.form(compiled)
    count, more = len(targets), -len(targets) % POSITIONS_STEP
    hidden, targets = F.pad(hidden, (0, 0, 0, more)), F.pad(targets, (0, more))
    shares, gradient = F.pad(weights / weight_sum, (0, more)), torch.empty_like(hidden)
    losses: list[Tensor] = []
    for rows, target, share, out in _chunks(hidden, targets, shares, gradient):
        logits = rows @ head.T
        wanted = logits.gather(-1, target[:, None])
        log_total, d_logits = kernel(logits, share)
        loss = log_total - wanted.squeeze(-1).float()
        # At the target it is p - 1 = e^-loss - 1: as a difference of rounded numbers little of it would be left.
        # (Not by scatter_, which on a CPU copies all of it first.)
        at_target = (torch.expm1(-loss) * share).to(d_logits.dtype)
        d_logits[torch.arange(len(target), device=target.device), target] = at_target
        losses.append(loss)
        torch.mm(d_logits, head, out=out)
    weighted = torch.cat(losses)[:count].double() * weights
    return LossSums(weighted.sum().item(), weights.double().sum().item(), count), gradient[:count]


@Kernel
def softmax_parts(logits: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """log sum exp of each position, [n] fp32, and softmax times `shares` [n], [n, V] in the logits' type."""
    z = logits.float()
    highest = z.amax(-1, keepdim=True)
    e = torch.exp(z - highest)
    total = e.sum(-1, keepdim=True)
    return (highest + total.log()).squeeze(-1), (e * (shares[:, None] / total)).to(logits.dtype)


@torch.no_grad()
def can_compile_loss(model: TrainableModel) -> bool:
    """Compile `softmax_parts` for a model's output layer, at a typical number of positions; False where it is not to.

    Also where the compiler fails: the plain form then does.
    """
    head = model.head_weight()
    if head is None or model.computation.kernels != "compiled":
        return False
    logits = varying(head.new_zeros(CHUNK_POSITIONS, len(head)), 0)
    try:
        with compiling():
            softmax_parts.form(compiled=True)(logits, varying(torch.zeros(CHUNK_POSITIONS, device=head.device), 0))
    except CompilingFailed:
        return False
    return True


@torch.no_grad()
def loss_only(output: Output, hidden: Tensor, targets: Tensor, weights: Tensor) -> LossSums:
    """The same sums without gradients. Shapes as in `loss_and_gradient`."""
    sums = LossSums()
    for rows, target, weight in _chunks(hidden, targets, weights):
        logits = output(rows).float()
        loss = (_cross_entropy(logits, target) * weight).sum()
        sums.add(_sums(loss, logits, target, weight))
    return sums


def _chunks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_POSITIONS) for tensor in tensors), strict=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each position, [n]. PyTorch's own adds a large vocabulary's exponentials up one by one, and loses 4e-6."""
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None]).squeeze(-1)


def _sums(loss: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> LossSums:
    correct = (logits.detach().argmax(-1) == targets).sum()
    return LossSums(loss.item(), weights.double().sum().item(), targets.numel(), int(correct.item()))

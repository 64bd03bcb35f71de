"""Masters, optimizer and schedule: everything between a gradient and a changed weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adam", "adamw", "sgd"]
ScheduleName = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class OptimSettings:
    """How weights are changed.

    Attributes:
        lr: the peak learning rate.
        betas, eps: of adam and adamw; None: PyTorch's defaults.
        momentum: of sgd; None: none.
        warmup_steps: the rate climbs linearly over these steps, then follows `schedule` until `total_steps`.
        schedule: `cosine` (half a period) and `linear` fall to `min_lr_ratio` of `lr`, `constant` stays at `lr`.
        max_grad_norm: gradients are scaled down to this total L2 norm; None leaves them.
    """

    total_steps: int
    optimizer: OptimizerName = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    schedule: ScheduleName = "cosine"
    min_lr_ratio: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None


def learning_rate(settings: OptimSettings, step: int) -> float:
    """The rate of the optimizer step with this 0-based number.

    A pure function of the step, so a resumed run cannot restart it. The first step of a warm-up has rate
    lr / warmup_steps rather than 0, which would waste it.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    share = _share_of_peak(settings.schedule, min(1.0, progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


def _share_of_peak(schedule: ScheduleName, progress: float) -> float:
    """From 1 at progress 0 to 0 at progress 1, but for `constant`."""
    if schedule == "constant":
        return 1.0
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class Masters:
    """fp32 copies of the trainable parameters, which the optimizer changes.

    A bf16 adapter has 8 bits of mantissa: an update smaller than 1/256 of a weight would vanish in it. So the network
    computes with the parameters as they are, and gradients and updates live in fp32. For an fp32 network the masters
    are the parameters themselves.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.tensors: dict[str, Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in parameters.items()
        }

    def collect_gradients(self) -> None:
        """Add the network's gradients to the masters' and clear them, after each micro-batch."""
        for name, parameter in self._parameters.items():
            master = self.tensors[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the network, after each optimizer step."""
        for name, parameter in self._parameters.items():
            if self.tensors[name] is not parameter:
                parameter.copy_(self.tensors[name])

    def scale_gradients(self, factor: float) -> None:
        for tensor in self.tensors.values():
            if tensor.grad is not None:
                tensor.grad.mul_(factor)

    def clear_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self.tensors[name].grad = None

    def snapshot(self) -> dict[str, Tensor]:
        """fp32 copies on the CPU, detached: what a checkpoint saves."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Raises KeyError where a parameter is missing."""
        for name, master in self.tensors.items():
            master.copy_(tensors[name])
        self.publish()


def create_optimizer(settings: OptimSettings, masters: Masters, *, fused: bool = False) -> torch.optim.Optimizer:
    """adam and sgd have weight decay in their gradient (L2), adamw decoupled (https://arxiv.org/abs/1711.05101).

    Args:
        fused: one loop over the numbers of a parameter, instead of ten; the same formula.
    """
    parameters = list(masters.tensors.values())
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": fused}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, **options, momentum=settings.momentum or 0.0)
    if settings.betas is not None:
        options["betas"] = settings.betas
    if settings.eps is not None:
        options["eps"] = settings.eps
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **options)


def clip_gradients(masters: Masters, max_norm: float | None) -> float:
    """Scale gradients to at most `max_norm`; returns their total L2 norm before that (inf or NaN if not finite)."""
    gradients = [tensor.grad for tensor in masters.tensors.values() if tensor.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm

"""What a job says of itself while it runs: how far it is, and the numbers of each step."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apis.errors import NonFiniteLoss
from apis.post_training.models import JobProgress
from post_training.jobs.step_events import step_line
from post_training.training.interruption import Interrupted
from post_training.training.trainer import StepResult, ValidationResult
from post_training.worker.lease import Lease

MAX_SKIPPED_IN_A_ROW = 10
"""Non-finite steps are skipped one by one; this many in a row mean the run has diverged."""
SPEED_WINDOW_STEPS = 20
_STATM = Path("/proc/self/statm")


@dataclass
class LossSoFar:
    """Sums over steps, and whether the run diverges.

    Attributes:
        loss, weight: sums over the steps with an update, for their mean loss.
        skipped_in_a_row: the newest steps that had a loss or gradient that is not finite.
    """

    loss: float = 0.0
    weight: float = 0.0
    skipped_in_a_row: int = 0

    def count(self, result: StepResult) -> None:
        if not result.skipped:
            self.loss += result.loss * result.weight
            self.weight += result.weight
            self.skipped_in_a_row = 0
        elif result.supervised_tokens:  # a step without supervised tokens is no sign of divergence
            self.skipped_in_a_row += 1

    def check(self, step: int) -> None:
        """Raises NonFiniteLoss after too many steps in a row without an update, `step` the newest."""
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise not_finite(f"{MAX_SKIPPED_IN_A_ROW} steps in a row, the last of them step {step},")


def not_finite(steps: str) -> NonFiniteLoss:
    remedy = "lower optimizer_config.lr or look at the data"
    return NonFiniteLoss(f"{steps} had a loss or gradient that is not finite; {remedy}")


class ProgressReport:
    """Keeps `progress` and stores it, step by step."""

    def __init__(self, lease: Lease) -> None:
        self.progress = JobProgress()
        self._lease = lease
        self._recent: list[tuple[float, int]] = []

    def phase(self, name: str) -> None:
        """Say what comes now. Raises Interrupted where nothing more should; LeaseLost."""
        if self._lease.should_stop():
            raise Interrupted
        self.progress.phase = name
        self._lease.update(progress=self.progress)

    def step(self, result: StepResult, epoch: int, device: torch.device) -> None:
        """Store a step's numbers. Raises LeaseLost."""
        progress = self.progress
        progress.step, progress.lr = result.step, result.lr
        progress.tokens_seen += result.tokens
        if result.skipped:
            progress.skipped_steps += 1
        else:
            progress.loss = result.loss
            progress.supervised_tokens_seen += result.supervised_tokens
        self._estimate(result)
        numbers = step_numbers(result, epoch) | memory_numbers(device)
        message = step_line(numbers, progress.total_steps)
        self._lease.update(progress=progress, message=message, step=result.step, data=numbers)

    def seconds_for(self, steps: int) -> float:
        """How long so many steps will take, by the newest ones."""
        return steps * sum(s for s, _ in self._recent) / max(1, len(self._recent))

    def _estimate(self, result: StepResult) -> None:
        """Speed over the newest steps, so that a slow first one does not colour the whole run."""
        self._recent = [*self._recent, (result.seconds, result.tokens)][-SPEED_WINDOW_STEPS:]
        seconds = sum(s for s, _ in self._recent)
        self.progress.tokens_per_second = sum(t for _, t in self._recent) / seconds
        if self.progress.total_steps:
            left = self.progress.total_steps - result.step
            self.progress.seconds_left = left * seconds / len(self._recent)


def finite(value: float) -> float | None:
    """JSON has no NaN; a validation set without a supervised token has no loss."""
    return value if math.isfinite(value) else None


def step_numbers(result: StepResult, epoch: int) -> dict[str, Any]:
    """The data of an event of kind `step`."""
    return {
        "step": result.step,
        "epoch": epoch,
        "loss": finite(result.loss),
        "lr": result.lr,
        "grad_norm": finite(result.grad_norm),
        "tokens": result.tokens,
        "supervised_tokens": result.supervised_tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "skipped": result.skipped,
    }


def memory_numbers(device: torch.device) -> dict[str, int]:
    """Bytes in use: of this process and, on CUDA, the most that was allocated on its device."""
    numbers = {"memory_bytes": resident_bytes()}
    if device.type == "cuda":
        numbers["device_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return numbers


def resident_bytes() -> int:
    """This process's memory now; where the system does not tell, the most it ever had."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The most memory this process ever had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_validation(epoch: int, result: ValidationResult) -> str:
    return (
        f"validation after epoch {epoch}: loss {result.loss:.4f} perplexity {result.perplexity:.3f} "
        f"token accuracy {result.token_accuracy:.3f} over {result.supervised_tokens} tokens"
    )

"""One optimizer step, one validation, and the state between them. Knows no job and no HTTP.

A job's loop in a worker and a client over HTTP drive the same methods; the same batches in the same order give the
same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from post_training.data.types import FlatBatch
from post_training.training.interruption import Interrupted
from post_training.training.loss import LossSums, can_compile_loss, loss_and_gradient, loss_only
from post_training.training.model import Segments, TrainableModel
from post_training.training.optim import Masters, OptimSettings, clip_gradients, create_optimizer, learning_rate

MASTER_PREFIX = "master."
OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: optimizer steps done, this one included.
        loss: weighted mean over the step's supervised tokens, in nats, before the update.
        grad_norm: total L2 norm before clipping.
        lr: the rate it was made with.
        tokens, supervised_tokens: of the step's rows.
        seconds: wall time.
        skipped: no update was made: nothing supervised, or a loss or gradient that is not finite.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    supervised_tokens: int
    seconds: float
    skipped: bool
    weight: float


@dataclass(frozen=True)
class ValidationResult:
    """Weighted mean loss in nats, perplexity exp(loss), share of supervised tokens predicted right.

    Attributes:
        weight: the sum of the tokens' weights, by which means of several validations are merged.
    """

    loss: float
    perplexity: float
    token_accuracy: float
    supervised_tokens: int
    weight: float


@dataclass
class _Waiting:
    """Gradients that wait for an update, and what they come of."""

    calls: int = 0
    sums: LossSums = field(default_factory=LossSums)
    tokens: int = 0
    seconds: float = 0.0


def _never() -> bool:
    return False


class Trainer:
    """Trains the adapters of one model.

    Args:
        should_stop: asked between micro-batches; true raises Interrupted out of the step.
    """

    def __init__(
        self, model: TrainableModel, settings: OptimSettings, *, should_stop: Callable[[], bool] = _never
    ) -> None:
        self.model = model
        self.settings = settings
        self.step = 0
        self.masters = Masters(model.adapter_parameters())
        self._optimizer = create_optimizer(settings, self.masters, fused=model.computation.kernels != "plain")
        self._waiting = _Waiting()
        self._should_stop = should_stop
        self._compiled_loss = can_compile_loss(model)

    def train_step(self, batches: Sequence[FlatBatch], *, lr: float | None = None) -> StepResult:
        """One update from all micro-batches together.

        The loss is the sum of token losses times weights divided by the sum of weights over all of `batches`, so how
        rows are split into micro-batches does not change it. No gradients may wait for `optim_step`.

        Args:
            lr: the rate of this step; None: what the schedule says.
        """
        assert not self.gradients_wait
        start = time.perf_counter()
        weight_sum = sum(batch.weight_sum for batch in batches)
        try:
            sums = self._accumulate(batches, weight_sum)
            grad_norm, applied = self._apply(sums, lr)
        finally:
            self.masters.clear_gradients()
        tokens = sum(len(batch.tokens) for batch in batches)
        return self._stepped(sums, tokens, grad_norm, applied, lr, time.perf_counter() - start)

    @property
    def gradients_wait(self) -> bool:
        """Whether `forward_backward` was called since the last update."""
        return self._waiting.calls > 0

    def forward_backward(self, batches: Sequence[FlatBatch]) -> LossSums:
        """Add the gradients of all micro-batches to those that wait for `optim_step`.

        Returns:
            the sums of these batches alone.
        """
        start = time.perf_counter()
        try:
            # Not divided by any weight yet: the step's is known when its last batch has come.
            sums = self._accumulate(batches, 1.0)
        except BaseException:
            self.drop_gradients()
            raise
        self._waiting.calls += 1
        self._waiting.sums.add(sums)
        self._waiting.tokens += sum(len(batch.tokens) for batch in batches)
        self._waiting.seconds += time.perf_counter() - start
        return sums

    def optim_step(self, *, lr: float | None = None) -> StepResult:
        """One update by the gradients that wait: the same as `train_step` on all their batches, but for rounding."""
        start = time.perf_counter()
        waiting = self._waiting
        try:
            if waiting.sums.weight:
                self.masters.scale_gradients(1.0 / waiting.sums.weight)
            grad_norm, applied = self._apply(waiting.sums, lr)
        finally:
            self.drop_gradients()
        seconds = waiting.seconds + time.perf_counter() - start
        return self._stepped(waiting.sums, waiting.tokens, grad_norm, applied, lr, seconds)

    def drop_gradients(self) -> None:
        """Forget the gradients that wait."""
        self.masters.clear_gradients()
        self._waiting = _Waiting()

    @torch.no_grad()
    def validate(self, batches: Iterable[FlatBatch]) -> ValidationResult:
        """Weighted over all supervised tokens of all batches, in eval mode and without gradients."""
        self.model.module.eval()
        sums = LossSums()
        for batch in batches:
            self._check_stop()
            if batch.supervised:
                hidden, targets, weights = self._supervised(batch)
                sums.add(loss_only(self.model.output, hidden, targets, weights))
        accuracy = sums.correct / sums.tokens if sums.tokens else math.nan
        perplexity = math.exp(sums.mean) if sums.mean < 700 else math.inf  # e^710 is past float64
        return ValidationResult(sums.mean, perplexity, accuracy, sums.tokens, sums.weight)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs: masters and optimizer tensors by name, and plain values."""
        tensors = {MASTER_PREFIX + name: tensor for name, tensor in self.masters.snapshot().items()}
        optimizer = self._optimizer.state_dict()["state"]
        for index, name in enumerate(self.masters.tensors):
            for key, value in optimizer.get(index, {}).items():
                # Moments are tensors; a step count may be a plain number.
                tensors[f"{OPTIMIZER_PREFIX}{key}.{name}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
        return tensors, {"step": self.step}

    def restart_optimizer(self) -> None:
        """Go on with the weights as they are and an optimizer and schedule that have seen no step."""
        self._optimizer = create_optimizer(self.settings, self.masters, fused=self.model.computation.kernels != "plain")
        self.step = 0

    def load_state(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises KeyError where a parameter is missing."""
        self.masters.load({name: tensors[MASTER_PREFIX + name] for name in self.masters.tensors})
        state: dict[int, dict[str, Tensor]] = {}
        names = {name: index for index, name in enumerate(self.masters.tensors)}
        for key, value in tensors.items():
            if key.startswith(OPTIMIZER_PREFIX):
                kind, name = key.removeprefix(OPTIMIZER_PREFIX).split(".", 1)
                state.setdefault(names[name], {})[kind] = value.clone()
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.step = int(meta["step"])

    def _accumulate(self, batches: Sequence[FlatBatch], weight_sum: float) -> LossSums:
        self.model.module.train()
        sums = LossSums()
        for batch in batches:
            self._check_stop()
            if batch.supervised:
                sums.add(self._backward(batch, weight_sum))
        return sums

    def _stepped(
        self, sums: LossSums, tokens: int, grad_norm: float, applied: bool, lr: float | None, seconds: float
    ) -> StepResult:
        """Count the step and say what it did."""
        result = StepResult(
            step=self.step + 1,
            loss=sums.mean,
            grad_norm=grad_norm,
            lr=self._rate(lr),
            tokens=tokens,
            supervised_tokens=sums.tokens,
            seconds=seconds,
            skipped=not applied,
            weight=sums.weight,
        )
        self.step += 1
        return result

    def _rate(self, lr: float | None) -> float:
        return learning_rate(self.settings, self.step) if lr is None else lr

    def _backward(self, batch: FlatBatch, weight_sum: float) -> LossSums:
        hidden, targets, weights = self._supervised(batch)
        sums = loss_and_gradient(self.model, hidden, targets, weights, weight_sum, compiled=self._compiled_loss)
        self.masters.collect_gradients()
        return sums

    def _supervised(self, batch: FlatBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, targets and weights of the supervised positions: [N, D], [N], [N]."""
        device = self.model.device
        segments = Segments(
            tokens=torch.from_numpy(batch.tokens).to(device),
            positions=torch.from_numpy(batch.positions).to(device),
            lengths=batch.lengths,
        )
        weights = torch.from_numpy(batch.weights).to(device)
        keep = weights.nonzero().squeeze(1)
        targets = torch.from_numpy(batch.targets).to(device)
        return self.model.hidden_states(segments)[keep], targets[keep], weights[keep]

    def _apply(self, sums: LossSums, lr: float | None) -> tuple[float, bool]:
        """Clip and step, unless there is nothing to learn from or something is not finite."""
        if not sums.tokens:
            return 0.0, False
        norm = clip_gradients(self.masters, self.settings.max_grad_norm)
        if not (math.isfinite(sums.mean) and math.isfinite(norm)):
            return norm, False
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(lr)
        self._optimizer.step()
        self.masters.publish()
        return norm, True

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Interrupted

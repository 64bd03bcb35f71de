"""What `fit` is asked for and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from apis.errors import DataInvalid, InvalidField
from apis.sft_sessions.training_models import SessionCheckpoint, TrainStepResponse, ValidateResponse


@dataclass(frozen=True)
class FitOptions:
    """See `SFTClient.fit`. Raises InvalidField where they contradict each other."""

    batch_size: int
    epochs: int | None = None
    steps: int | None = None
    validate_every: int | None = None
    save_every: int | None = None
    validation_batch_size: int | None = None
    shuffle: bool = False
    seed: int = 0
    complete: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "steps", "validate_every", "save_every", "validation_batch_size"):
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidField(f"{name} must be a whole number, 1 or more, not {value!r}", param=name)
        if self.epochs is not None and self.steps is not None:
            raise InvalidField("give epochs or steps, not both", param="steps")
        if self.seed < 0:
            raise InvalidField(f"seed must be 0 or more, not {self.seed}", param="seed")

    @property
    def passes(self) -> int | None:
        """Epochs to make; None where the steps say when it ends."""
        return self.epochs if self.epochs is not None or self.steps is not None else 1


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of a fit.

    Attributes:
        step: from 1, counted over the whole fit.
        epoch: from 0.
        answer: what the server measured; None for a step whose answer was lost with the server that gave it.
    """

    step: int
    epoch: int
    answer: TrainStepResponse | None

    @property
    def loss(self) -> float | None:
        """Mean over the step's supervised tokens, weighted, before the update, in nats; None: not finite, or lost."""
        return None if self.answer is None else self.answer.loss


@dataclass(frozen=True)
class ValidationResult:
    """Means over the supervised tokens of all validation rows.

    Attributes:
        step: of the fit, from 1, after which it was made; None where it was asked for by itself.
        global_steps: optimizer steps that the session had done.
        loss: in nats, weighted; None: not finite.
        token_accuracy: the part of supervised tokens that the model predicts.
    """

    step: int | None
    global_steps: int
    loss: float | None
    perplexity: float | None
    token_accuracy: float | None
    supervised_tokens: int
    weight: float


@dataclass(frozen=True)
class FitResult:
    """What a fit ended with.

    Attributes:
        steps: those that this call made, in order; an earlier call's are not repeated by one that resumes it.
        total_steps: of the whole fit, with those of earlier calls.
        checkpoints: those that this call saved, oldest first; the last one is the fit's result.
    """

    job_id: str
    total_steps: int
    steps: tuple[StepResult, ...]
    validations: tuple[ValidationResult, ...]
    checkpoints: tuple[SessionCheckpoint, ...]

    @property
    def losses(self) -> tuple[float | None, ...]:
        return tuple(step.loss for step in self.steps)

    @property
    def checkpoint_ids(self) -> tuple[str, ...]:
        """Ids that inference and later sessions take as models."""
        return tuple(checkpoint.identifier for checkpoint in self.checkpoints)

    @property
    def checkpoint_id(self) -> str:
        """The last one's."""
        return self.checkpoints[-1].identifier


def merge_validations(answers: Iterable[ValidateResponse], step: int | None = None) -> ValidationResult:
    """One result of several calls: losses weighted by `weight`, accuracies by `supervised_tokens`.

    Raises:
        DataInvalid: no row had a supervised token.
    """
    parts = list(answers)
    weight, tokens = sum(part.weight for part in parts), sum(part.supervised_tokens for part in parts)
    if not parts or weight <= 0:
        raise DataInvalid("the validation rows have no supervised token; check their format")
    loss = _mean([(part.loss, part.weight) for part in parts], weight)
    return ValidationResult(
        step=step,
        global_steps=parts[-1].global_steps,
        loss=loss,
        perplexity=None if loss is None or loss > _LARGEST_EXPONENT else math.exp(loss),
        token_accuracy=_mean([(part.token_accuracy, part.supervised_tokens) for part in parts], tokens),
        supervised_tokens=tokens,
        weight=weight,
    )


_LARGEST_EXPONENT = 709.0  # e to the power of more is no double


def _mean(values: list[tuple[float | None, float]], total: float) -> float | None:
    """The weighted mean; None where a part that counts has no value."""
    counted = [(value, weight) for value, weight in values if weight > 0]
    if total <= 0 or any(value is None for value, _ in counted):
        return None
    return math.fsum(value * weight for value, weight in counted if value is not None) / total

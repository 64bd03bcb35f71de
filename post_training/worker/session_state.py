"""Where a session stands, and what of it a checkpoint keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from post_training.checkpoints.state import rng_tensors
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.training.trainer import StepResult, Trainer
from post_training.worker.lease import Lease
from post_training.worker.progress import LossSoFar, ProgressReport
from post_training.worker.saving import Saver
from post_training.worker.session_calls import Call, CallQueue, Done
from post_training.worker.session_messages import ClientCursor


@dataclass
class Boundary(LossSoFar):
    """The newest point that a checkpoint can be made of: no gradients waited there.

    Attributes:
        number: of the newest call that is part of it.
        cursor: what the client gave with that call or an earlier one.
        rng: states of the random generators, as `rng_tensors` has them.
        loss, weight: of the steps since the newest checkpoint with a name.
    """

    number: int = 0
    cursor: ClientCursor | None = None
    rng: dict[str, Tensor] = field(default_factory=rng_tensors)

    def advance(self, number: int, cursor: ClientCursor | None, result: StepResult | None = None) -> None:
        """Go on to after a call; `result` of one that made a step."""
        self.number = number
        self.cursor = self.cursor if cursor is None else cursor
        self.rng = rng_tensors()
        if result is not None:
            self.count(result)

    def place(self, calls: CallQueue) -> dict[str, Any]:
        """What a checkpoint keeps beside weights, optimizer and generators; JSON can hold it."""
        answers = [[number, done.digest, done.answer] for number, done in calls.kept(self.number)]
        return {
            "number": self.number,
            "client": self.cursor,
            "loss": self.loss,
            "weight": self.weight,
            "skipped_in_a_row": self.skipped_in_a_row,
            "answers": answers,
        }

    @classmethod
    def at(cls, place: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Boundary:
        """The point at which `place` was taken, with the generators' states among a training state's tensors."""
        return cls(
            loss=place["loss"],
            weight=place["weight"],
            skipped_in_a_row=place["skipped_in_a_row"],
            number=place["number"],
            cursor=place["client"],
            rng={name: tensor for name, tensor in tensors.items() if name.startswith("rng.")},
        )


def answers_of(place: Mapping[str, Any]) -> list[tuple[int, Done]]:
    """The answers that `Boundary.place` kept."""
    return [(number, Done(digest, answer)) for number, digest, answer in place["answers"]]


@dataclass
class Session:
    """One session in its worker.

    Attributes:
        durable: the number of the newest call that a checkpoint holds.
        unverified: recorded checkpoints with a name that nobody verifies yet, oldest first.
        awaited: saves whose answer waits for the checkpoint of this number to be announced.
        completing, pausing: calls that wait for the session's end, or for its pause.
    """

    lease: Lease
    spec: JobSpec
    home: Path
    trainer: Trainer
    saver: Saver
    report: ProgressReport
    calls: CallQueue
    boundary: Boundary
    durable: int = 0
    unverified: deque[CheckpointRow] = field(default_factory=deque[CheckpointRow])
    awaited: list[tuple[int, Call]] = field(default_factory=list[tuple[int, Call]])
    completing: list[Call] = field(default_factory=list[Call])
    pausing: list[Call] = field(default_factory=list[Call])

    def status(self) -> dict[str, Any]:
        """The live part of what `TrainingStatusResponse` tells; asked for from any thread."""
        progress = self.report.progress
        return {
            "global_steps": self.trainer.step,
            "next_step": self.calls.done + 1,
            "last_durable_step": self.durable,
            "cursor": self.boundary.cursor,
            "pending_gradients": self.trainer.gradients_wait,
            "phase": progress.phase,
        }

    def rows(self) -> list[CheckpointRow]:
        """All recorded checkpoints by number."""
        return list(self.lease.store.all_checkpoints(self.spec.job_uuid))

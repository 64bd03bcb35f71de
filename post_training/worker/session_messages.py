"""What a session's training server and its worker tell each other. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec

ClientCursor = dict[str, Any]
LINK_VARIABLE = "POSTGRAD_SESSION_LINK_FD"
"""The environment variable that tells the server which of its open files is the link to its worker."""
STOP_SECONDS = 2.0
"""So long the server may take to send what is answered already, once the session ends."""


@dataclass(frozen=True)
class Opening:
    """What the server is told before it serves.

    Attributes:
        owned: the session belongs to an API key, which may be revoked.
        done: the number of the newest call that was done before.
    """

    spec: JobSpec
    owned: bool
    done: int


@dataclass(frozen=True)
class StepWork:
    """What `train_step`, `forward_backward` and `validate` are done with."""

    rows: list[TokenizedRow]
    lr: float | None = None
    cursor: ClientCursor | None = None


@dataclass(frozen=True)
class UpdateWork:
    """What `optim_step` is done with."""

    lr: float | None = None
    cursor: ClientCursor | None = None


@dataclass(frozen=True)
class SaveWork:
    """What `save_checkpoint` is done with. `wait`: it is answered once it is verified."""

    name: str | None
    cursor: ClientCursor | None = None
    validation_loss: float | None = None
    wait: bool = True


@dataclass(frozen=True)
class LoadWork:
    """What `load_checkpoint` is done with."""

    name: str
    optimizer: bool
    cursor: ClientCursor | None = None

"""Which checkpoints may go. A pure function: files and rows are removed by its caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_LIMIT = 1


@dataclass(frozen=True)
class SavedCheckpoint:
    """What retention needs to know of a checkpoint.

    Attributes:
        step: global optimizer step; the newest checkpoint has the highest.
        announced: whether it is listed as a model. One after an epoch that is not is being verified, or will be.
        metrics: `train_loss` and `validation_loss`, of a checkpoint after an epoch; None inside one.
    """

    step: int
    announced: bool
    metrics: Mapping[str, Any] | None = None


def removable(checkpoints: Sequence[SavedCheckpoint], limit: int | None) -> frozenset[int]:
    """The steps of the checkpoints that may be removed now.

    Of those inside an epoch that are not announced the newest `limit` stay (None: 1). The newest of all, every
    announced one and every one after an epoch stay whatever the limit.
    """
    inside = sorted(c.step for c in checkpoints if not c.announced and c.metrics is None)
    newest = max((checkpoint.step for checkpoint in checkpoints), default=None)
    return frozenset(inside[: -(limit or DEFAULT_LIMIT)]) - {newest}


def best_step(checkpoints: Sequence[SavedCheckpoint]) -> int | None:
    """The step with the lowest validation loss or, where none has one, training loss; the earlier of two equal ones.

    A loss that is not a number is never the best.
    """
    for name in ("validation_loss", "train_loss"):
        losses = [(loss, c.step) for c in checkpoints if (loss := _loss(c, name)) is not None]
        if losses:
            return min(losses)[1]
    return None


def _loss(checkpoint: SavedCheckpoint, name: str) -> float | None:
    loss = (checkpoint.metrics or {}).get(name)
    return None if loss is None or math.isnan(loss) else float(loss)

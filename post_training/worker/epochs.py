"""When to save inside an epoch, and after which epoch to stop early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

SAVE_SECONDS = 300.0
"""Time between checkpoints inside an epoch where the request gives no number of steps."""
SAVING_SHARE = 0.03
"""At most this part of the time goes into such checkpoints."""


def stops_early(losses: Sequence[float | None], patience: int | None) -> bool:
    """Whether the newest `patience` validation losses, one for each epoch, have not improved on the best before them.

    A loss that is missing or not a number improves on nothing.
    """
    if patience is None or len(losses) <= patience:
        return False
    values = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
    return min(values[-patience:]) >= min(values[:-patience])


class SaveTimer:
    """When the next checkpoint inside an epoch is due.

    Args:
        every_n_steps: at each multiple of this; None: by time.
        monotonic: seconds.
    """

    def __init__(self, every_n_steps: int | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every = every_n_steps
        self._monotonic = monotonic
        self._interval = SAVE_SECONDS
        self._since = monotonic()

    def due(self, step: int) -> bool:
        """Whether to save after this step (global, from 1)."""
        if self._every is not None:
            return step % self._every == 0
        return self._monotonic() - self._since >= self._interval

    def saved(self, seconds: float) -> None:
        """Wait again after a save that took so long; a slow one is followed by a longer wait."""
        self._interval = max(SAVE_SECONDS, seconds / SAVING_SHARE)
        self.restart()

    def restart(self) -> None:
        """Wait again as long as before."""
        self._since = self._monotonic()

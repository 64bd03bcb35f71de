"""How long to leave something alone that just failed."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0


class Backoff:
    """A pause that doubles with each failure in a row.

    Args:
        monotonic: seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seconds = 0.0
        self._until = 0.0

    def failed(self) -> float:
        """Begin a pause; returns its seconds."""
        self._seconds = min(LONGEST_SECONDS, self._seconds * 2 or FIRST_SECONDS)
        self._until = self._monotonic() + self._seconds
        return self._seconds

    def worked(self) -> None:
        self._seconds = 0.0

    @property
    def pausing(self) -> bool:
        return self._monotonic() < self._until

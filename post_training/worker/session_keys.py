"""The API key that a session belongs to: once it is revoked, nobody drives the session any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from post_training.owners import EVERYBODY

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""So long a revoked key may still be taken for good."""


class OwnersKey:
    """Whether the API key that a session belongs to is still good: read from the store at most once a second.

    Args:
        owner: its id, or what stands where no key owns the session.
        is_live: asks the store about a key; a store that cannot be read changes nothing.
    """

    def __init__(
        self, owner: str | None, is_live: Callable[[str], bool], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._owner = None if owner in (None, "", EVERYBODY) else owner
        self._is_live = is_live
        self._monotonic = monotonic
        self._read_at = -FRESH_SECONDS
        self._good = True

    def good(self) -> bool:
        if self._owner is not None and self._monotonic() - self._read_at >= FRESH_SECONDS:
            self._read_at = self._monotonic()
            try:
                self._good = self._is_live(self._owner)
            except SQLAlchemyError as error:
                logger.warning("the API keys cannot be read: %s", type(error).__name__)
        return self._good

    @property
    def is_key(self) -> bool:
        return self._owner is not None

"""Is a worker that says nothing dead? Judged by what was seen and by a clock that nobody sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from post_training.jobs.leases import HeldLease

LEASE_SECONDS = 15.0
EXIT_SECONDS = 10.0
_LONGEST_GAP_SECONDS = 5.0


@dataclass
class _Seen:
    beats: int
    beats_since: float
    cancelling_since: float | None = None


class Watch:
    """What was last seen of each lease, and for how long.

    Args:
        monotonic: seconds; it must not jump when the wall clock is set.
    """

    def __init__(
        self, *, lease_seconds: float = LEASE_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_seconds = lease_seconds
        self._monotonic = monotonic
        self._seen: dict[str, _Seen] = {}
        self._gone_since: dict[str, float] = {}
        self._looked_at = monotonic()

    def look(self, held: Sequence[HeldLease]) -> None:
        """Take in the leases as they are now; call it every moment."""
        now = self._monotonic()
        if now - self._looked_at > _LONGEST_GAP_SECONDS:
            # We were not looking ourselves (stopped, or the store was away): silence in that time means nothing.
            for seen in self._seen.values():
                seen.beats_since = now
        self._looked_at = now
        for lease in held:
            self._take_in(lease, now)
        owners = {lease.owner for lease in held}
        for owner in self._seen.keys() - owners:
            del self._seen[owner]

    def _take_in(self, lease: HeldLease, now: float) -> None:
        seen = self._seen.setdefault(lease.owner, _Seen(lease.beats, now))
        if seen.beats != lease.beats:
            seen.beats, seen.beats_since = lease.beats, now
        if lease.cancel_requested and seen.cancelling_since is None:
            seen.cancelling_since = now

    def silent(self, lease: HeldLease) -> bool:
        """Whether the lease has run out."""
        return self._monotonic() - self._seen[lease.owner].beats_since > self.lease_seconds

    def cancelling_for(self, lease: HeldLease) -> float:
        """Seconds since its cancel was first seen; 0 where there is none."""
        since = self._seen[lease.owner].cancelling_since
        return 0.0 if since is None else self._monotonic() - since

    def forget(self, owner: str) -> None:
        """A worker has exited."""
        self._gone_since.pop(owner, None)

    def overdue(self, owner: str) -> bool:
        """Whether a worker without a lease had time enough to exit."""
        return self._monotonic() - self._gone_since.setdefault(owner, self._monotonic()) > EXIT_SECONDS

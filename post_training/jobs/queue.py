"""The jobs that wait, read so that an answer does not take longer the more of them there are, nor the more have ended.

What a waiting job needs (its provider, a kind of device or any) leads the index that is read here. One look for each
combination keeps every look to one place of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sqlalchemy import ColumnElement, false, func, select
from sqlalchemy.orm import Session

from apis.post_training.models import JobStatus
from post_training.jobs.tables import JobRow

ANY_DEVICE = None
# A paused session waits for its client: no device is kept for it, and nobody waits behind it.
_WAITING = (JobRow.status == JobStatus.scheduled, JobRow.paused == false())


def oldest_waiting(session: Session, provider_ids: Collection[str], kinds: Iterable[str]) -> int | None:
    """The number of the job that waits longest of those that run on one of these kinds of device; None: there is none.

    Args:
        kinds: of the devices that are free. Without one there is no job for them.
    """
    free = set(kinds)
    # Ordered by the kind as well, though there is but one: PostgreSQL sees the index's order only then.
    firsts = [
        select(JobRow.sequence).where(*waiting).order_by(JobRow.device_kind, JobRow.sequence).limit(1)
        for waiting in _each_need(provider_ids, {ANY_DEVICE, *free} if free else ())
    ]
    found = [session.scalar(first) for first in firsts]
    return min((sequence for sequence in found if sequence is not None), default=None)


def count_ahead(session: Session, sequence: int, provider_ids: Collection[str], kinds: Iterable[str]) -> int:
    """How many jobs wait with a number below `sequence` that could run on one of these kinds of device."""
    counts = [
        select(func.count()).select_from(JobRow).where(*waiting, JobRow.sequence < sequence)
        for waiting in _each_need(provider_ids, {ANY_DEVICE, *kinds})
    ]
    return sum(session.scalar(count) or 0 for count in counts)


def count_waiting(session: Session) -> int:
    query = select(func.count()).select_from(JobRow).where(*_WAITING)
    return session.scalar(query) or 0


def _each_need(provider_ids: Collection[str], kinds: Iterable[str | None]) -> Iterator[tuple[ColumnElement[bool], ...]]:
    """The conditions of each combination of a provider and a kind of device, which no job meets two of."""
    for kind in kinds:
        device = JobRow.device_kind.is_(None) if kind is ANY_DEVICE else JobRow.device_kind == kind
        for provider_id in provider_ids:
            yield *_WAITING, JobRow.provider_id == provider_id, device

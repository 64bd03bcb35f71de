"""Follows the events of jobs in the store, for any number of readers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import anyio
import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from apis.errors import JobNotFound, Unavailable
from apis.post_training.models import JobEvent, JobStatus
from post_training.job_views import end_of, event_of
from post_training.jobs.store import JobStore

POLL_SECONDS = 0.3
PAGE_EVENTS = 500
# How long the store may fail before a stream ends; a short outage goes unnoticed.
STORE_PATIENCE_SECONDS = 60.0
# Readers share these, so that many of them never take the threads that requests are answered in.
READING_THREADS = 2
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Page:
    """Events in order, and what follows: more at once (`full`), the end, or a pause."""

    events: list[JobEvent]
    full: bool = False
    end: JobEvent | None = None


_NOTHING_NEW = _Page([])


class EventStreams:
    """Polls the store in threads, in short transactions: none is open while a reader takes its time."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._stopping = asyncio.Event()
        self._threads = anyio.CapacityLimiter(READING_THREADS)

    def end(self) -> None:
        """End all streams, and each later one at once. Call it in the event loop."""
        self._stopping.set()

    async def follow(self, job_uuid: str, after: int) -> AsyncGenerator[JobEvent]:
        """As `PostTraining.stream_job_events`. Raises JobNotFound."""
        newest = await anyio.to_thread.run_sync(self._store.newest_event, job_uuid, limiter=self._threads)
        after = min(after, newest)  # an id that never was would hide all that are to come
        return self._events(job_uuid, after, await self._read(job_uuid, after))

    async def _events(self, job_uuid: str, after: int, page: _Page | None) -> AsyncGenerator[JobEvent]:
        read_at = time.monotonic()
        while True:
            if page is not None:
                read_at = time.monotonic()
                for event in page.events:
                    yield event
                    after = event.id
                if page.end is not None:
                    yield page.end
                    return
            if await self._stopped(0 if page is not None and page.full else POLL_SECONDS):
                return
            try:
                page = await anyio.to_thread.run_sync(self._next_page, job_uuid, after, limiter=self._threads)
            except JobNotFound:
                return  # deleted meanwhile
            except (SQLAlchemyError, Unavailable) as error:
                if time.monotonic() - read_at > STORE_PATIENCE_SECONDS:
                    logger.warning("a stream of events ends: the store cannot be read (%s)", type(error).__name__)
                    return
                page = None

    async def _stopped(self, seconds: float) -> bool:
        """Whether the server stops, waiting up to `seconds` for it."""
        if self._stopping.is_set() or seconds == 0:
            return self._stopping.is_set()
        with anyio.move_on_after(seconds):
            await self._stopping.wait()
        return self._stopping.is_set()

    async def _read(self, job_uuid: str, after: int) -> _Page:
        return await anyio.to_thread.run_sync(self._page, job_uuid, after, limiter=self._threads)

    def _next_page(self, job_uuid: str, after: int) -> _Page:
        """As `_page`, for one whose last page did not end the stream: a job's end is an event, too."""
        if self._store.newest_event(job_uuid) <= after:
            return _NOTHING_NEW
        return self._page(job_uuid, after)

    def _page(self, job_uuid: str, after: int) -> _Page:
        # The job before its events: the last of them is stored together with its end.
        job = self._store.get(job_uuid)
        rows = self._store.events(job_uuid, after, PAGE_EVENTS)
        events = [event_of(row) for row in rows]
        full = len(rows) == PAGE_EVENTS
        if full or not JobStatus(job.status).terminal:
            return _Page(events, full)
        return _Page(events, end=end_of(job, events[-1].id if events else after))

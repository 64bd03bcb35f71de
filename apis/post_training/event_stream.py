"""A job's events on the wire: Server-Sent Events, as the HTML standard has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import anyio
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from apis.common import MAX_INTEGER
from apis.errors import InvalidField
from apis.post_training.models import JobEvent, JobEventKind

RETRY_MILLISECONDS = 3000
KEEP_ALIVE_SECONDS = 15.0
# A reader that takes nothing for so long is cut off; it can read on later from where it was.
SLOW_READER_SECONDS = 60.0
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


def event_id(header: str) -> int:
    """The number in a Last-Event-ID header. Raises InvalidField."""
    if header.isascii() and header.isdigit() and len(header) < len(str(MAX_INTEGER)):
        return int(header)
    raise InvalidField("Last-Event-ID must be the id of an event, a whole number", param="Last-Event-ID")


class JobEventStream(StreamingResponse):
    """Answers with `events`, and closes them in every case: at their end, when the reader goes, when the server stops.

    Between events a comment is sent every `KEEP_ALIVE_SECONDS`, so that neither side takes the other for dead.
    """

    def __init__(self, events: AsyncIterator[JobEvent]) -> None:
        self._frames = _frames(events)
        super().__init__(self._frames, media_type="text/event-stream", headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(SLOW_READER_SECONDS):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            _log.info("%s: the reader took nothing for %.0f s and was cut off", scope["path"], SLOW_READER_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):
                await self._frames.aclose()


async def _frames(events: AsyncIterator[JobEvent]) -> AsyncGenerator[str]:
    pending: asyncio.Future[JobEvent | None] | None = None
    try:
        yield f"retry: {RETRY_MILLISECONDS}\n\n"
        while True:
            pending = pending or asyncio.ensure_future(anext(events, None))
            done, _ = await asyncio.wait({pending}, timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield ": keep-alive\n\n"
                continue
            event, pending = pending.result(), None
            if event is None:
                return
            yield frame(event)
    finally:
        with anyio.CancelScope(shield=True):
            await _close(pending, events)


async def _close(pending: asyncio.Future[JobEvent | None] | None, events: AsyncIterator[JobEvent]) -> None:
    if pending is not None:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    if isinstance(events, AsyncGenerator):
        await events.aclose()


def frame(event: JobEvent) -> str:
    """One event as it is sent. ASCII only, so that no reader takes a character of a message for the end of a line."""
    absent = {name for name in ("step", "data") if getattr(event, name) is None}
    data = event.model_dump_json(exclude=absent, ensure_ascii=True)
    # `end` has no id of its own: a reader that comes back asks for what follows the last event.
    number = "" if event.kind is JobEventKind.end else f"id: {event.id}\n"
    return f"{number}event: {event.kind}\ndata: {data}\n\n"

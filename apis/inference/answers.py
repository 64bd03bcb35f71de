"""How an inference answer is sent: awaited while its client stays, or streamed as Server-Sent Events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from apis.errors import PostgradError

CLIENT_CLOSED_REQUEST = 499
DONE = "[DONE]"
# For the OpenAPI document of a route that answers with JSON, or with a stream where `stream` is true.
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "Whole, or Server-Sent Events with `stream`", "content": {"text/event-stream": {}}}
}
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


async def while_connected(http: Request, answer: Awaitable[_Answer]) -> Response | _Answer:
    """Await `answer`, or cancel it when the client goes away."""
    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def streamed(http: Request, chunks: AsyncIterator[BaseModel], end: str | None = DONE) -> Response:
    """Answer with a stream, whose last event is `end`; None: it just ends.

    Waits for the first chunk, so that an error before it still has its HTTP status.
    """
    first = await while_connected(http, anext(chunks))
    return first if isinstance(first, Response) else _EventStream(first, chunks, end)


class _EventStream(StreamingResponse):
    """Closes its source in every case, so that a client that goes away stops the generation at once."""

    def __init__(self, first: BaseModel, rest: AsyncIterator[BaseModel], end: str | None) -> None:
        self._events, self._rest = _events(first, rest, end), rest
        super().__init__(self._events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            if isinstance(self._rest, AsyncGenerator):
                await self._rest.aclose()


async def _events(first: BaseModel, rest: AsyncIterator[BaseModel], end: str | None) -> AsyncGenerator[str]:
    try:
        yield _event(first.model_dump_json())
        async for chunk in rest:
            yield _event(chunk.model_dump_json())
        if end is not None:
            yield _event(end)
    except Exception as error:
        yield _event(json.dumps({"error": _error_body(error)}))


def _event(data: str) -> str:
    return f"data: {data}\n\n"


def _error_body(error: Exception) -> dict[str, Any]:
    """The HTTP status is sent already, so the error travels as an event. Only our own errors are told to the client."""
    if not isinstance(error, PostgradError):
        _log.error("a stream broke", exc_info=error)
        error = PostgradError("the server failed while it was answering; its log says why")
    return {"message": error.message, "type": error.code, "code": error.code, "param": error.param}

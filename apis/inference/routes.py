"""The inference API over HTTP: JSON answers, or Server-Sent Events as OpenAI has them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from apis.errors import PostgradError
from apis.inference.models import ChatCompletion, ChatCompletionRequest, Completion, CompletionRequest
from apis.inference.protocol import Inference

CLIENT_CLOSED_REQUEST = 499
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


def create_router(impl: Inference) -> APIRouter:
    """Serve `impl` under `/chat/completions` and `/completions`; mount with the prefix of the API's version."""
    router = APIRouter(tags=["inference"])

    @router.post("/chat/completions", response_model=ChatCompletion)
    async def chat_completion(request: ChatCompletionRequest, http: Request) -> Response | ChatCompletion:
        if request.stream:
            return await _stream(http, impl.stream_chat_completion(request))
        return await _while_connected(http, impl.chat_completion(request))

    @router.post("/completions", response_model=Completion)
    async def completion(request: CompletionRequest, http: Request) -> Response | Completion:
        if request.stream:
            return await _stream(http, impl.stream_completion(request))
        return await _while_connected(http, impl.completion(request))

    return router


async def _while_connected(http: Request, answer: Awaitable[_Answer]) -> Response | _Answer:
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


async def _stream(http: Request, chunks: AsyncIterator[BaseModel]) -> Response:
    """Answer with a stream. Waits for the first chunk, so that an error before it still has its HTTP status."""
    first = await _while_connected(http, anext(chunks))
    return first if isinstance(first, Response) else _EventStream(first, chunks)


class _EventStream(StreamingResponse):
    """Closes its source in every case, so that a client that goes away stops the generation at once."""

    def __init__(self, first: BaseModel, rest: AsyncIterator[BaseModel]) -> None:
        self._events, self._rest = _events(first, rest), rest
        super().__init__(self._events, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            if isinstance(self._rest, AsyncGenerator):
                await self._rest.aclose()


async def _events(first: BaseModel, rest: AsyncIterator[BaseModel]) -> AsyncGenerator[str]:
    try:
        yield _event(first.model_dump_json())
        async for chunk in rest:
            yield _event(chunk.model_dump_json())
        yield _event("[DONE]")
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

"""A bound on what a request may bring, for every server of ours."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import PostgradError, TooLarge

LINGER_SECONDS = 5.0


class _Exceeded(HTTPException):
    """An HTTPException, since FastAPI turns any other exception while it reads a body into a 400."""


class BodyLimit:
    """ASGI middleware: refuses a body of more than `limit` bytes, at once where its length is declared, else as soon as
    that shows.

    Args:
        answer: makes the answer to a refused request of an error and the request's path.
    """

    def __init__(self, app: ASGIApp, limit: int, answer: Callable[[PostgradError, str], ASGIApp]) -> None:
        self.app, self.limit, self.answer = app, limit, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = TooLarge(f"the body is over this server's limit of {self.limit} bytes")
        body = _Body(self.limit, error, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        body.exceeds = declared.isdigit() and int(declared) > self.limit
        try:
            if not body.exceeds:
                await self.app(scope, body.receive, body.send)
                return
        except _Exceeded:
            pass
        await self.answer(error, scope["path"])(scope, receive, body.send)


class _Body:
    """A request's body, counted while it is read; what answers one that `exceeds` the limit goes through `send`."""

    def __init__(self, limit: int, error: PostgradError, receive: Receive, send: Send) -> None:
        self._limit, self._error, self._receive, self._send = limit, error, receive, send
        self._seen = 0
        self.exceeds = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            self.exceeds = True
            raise _Exceeded(self._error.http_status, self._error.message)
        return message

    async def send(self, message: Message) -> None:
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (ends and self.exceeds):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._read_on()
        await self._send({"type": "http.response.body", "body": b""})

    async def _read_on(self) -> None:
        """Read a little further: a connection that is closed while its client still sends takes the answer with it."""
        left = self._limit
        with anyio.move_on_after(LINGER_SECONDS):
            while left > 0:
                message = await self._receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return

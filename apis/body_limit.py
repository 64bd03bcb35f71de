"""A bound on what a request may bring, for every server of ours."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import PostgradError, TooLarge


class _Exceeded(HTTPException):
    """An HTTPException, since FastAPI turns any other exception while it reads a body into a 400."""


class BodyLimit:
    """ASGI middleware: refuses a body of more than `limit` bytes, whether its length is declared or only shows while it
    arrives.

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
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self.limit:
            await self._drain(receive)
            await self.answer(error, scope["path"])(scope, receive, send)
            return
        try:
            await self.app(scope, self._counting(receive, error), send)
        except _Exceeded:
            await self.answer(error, scope["path"])(scope, receive, send)

    def _counting(self, receive: Receive, error: TooLarge) -> Receive:
        seen = 0

        async def count() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                await self._drain(receive)
                raise _Exceeded(error.http_status, error.message)
            return message

        return count

    async def _drain(self, receive: Receive) -> None:
        """Read a little further, so that a client that sends first and reads afterwards gets the answer."""
        left = self.limit
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return

"""What a path can be asked for: HEAD as GET without its body, OPTIONS, and which methods there are."""

from __future__ import annotations

from collections.abc import Iterable

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods that some route takes at the path of `scope`; HEAD is taken wherever GET is."""
    routes = list(routes)
    found = [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if "GET" in found and "HEAD" not in found:
        found.insert(found.index("GET") + 1, "HEAD")
    return found


class Methods:
    """ASGI middleware that answers HEAD and OPTIONS for every route. An unknown path is left to the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        if method == "OPTIONS" and (allowed := allowed_methods(scope["app"].routes, scope)):
            answer = Response(status_code=204, headers={"allow": ", ".join([*allowed, "OPTIONS"])})
            await answer(scope, receive, send)
        elif method == "HEAD" and not self._takes_head(scope):
            await self._without_body(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _takes_head(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)

    async def _without_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as answering:

            async def send_head(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    await send({"type": "http.response.body", "body": b""})
                    # What would follow may have no end: a stream of events.
                    answering.cancel()
                await anyio.lowlevel.checkpoint()

            await self.app({**scope, "method": "GET"}, receive, send_head)

"""Streams in OpenAI's shape for Llama Stack's own clients, which read every event as JSON up to 0.6."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.inference.answers import DONE

_PATHS = ("/chat/completions", "/completions")
_CLIENT = "LlamaStackClient/"
_LAST_EVENT = f"data: {DONE}\n\n".encode()


class StreamsWithoutDone:
    """ASGI middleware: a stream to those clients ends without `[DONE]`, as theirs did, which would break them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(_PATHS) or not _reads_json_only(scope):
            await self.app(scope, receive, send)
            return

        async def leave_out_done(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body") == _LAST_EVENT:
                message = {**message, "body": b""}
            await send(message)

        await self.app(scope, receive, leave_out_done)


def _reads_json_only(scope: Scope) -> bool:
    return _CLIENT in Headers(scope=scope).get("user-agent", "")

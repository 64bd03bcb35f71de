"""What meets a request before its route: a trace id, the size limit, translation of old shapes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributions.dialects.words import Words, speak

Translation = Callable[[dict[str, Any]], dict[str, Any]]
TellWords = Callable[[dict[str, Any]], Words]
SMALL_BODY_BYTES = 2**18


class TraceId:
    """Gives every answer an `x-trace-id` of 32 hexadecimal digits."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace_id = secrets.token_hex(16)

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-trace-id", trace_id)
            await send(message)

        await self.app(scope, receive, mark)


class TranslateBody:
    """Hands the JSON object in a request's body to the translation of its path, so that routes see one shape only.

    Args:
        words: for paths whose translation moves fields, what the moved ones are called in a body; see `dialects.words`.
    """

    def __init__(
        self, app: ASGIApp, translations: Mapping[str, Translation], words: Mapping[str, TellWords] | None = None
    ) -> None:
        self.app, self.translations, self.words = app, translations, words or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        translation = self.translations.get(scope["path"]) if posted else None
        if translation is None:
            await self.app(scope, receive, send)
            return
        body, tell = await _read(receive), self.words.get(scope["path"])
        if len(body) <= SMALL_BODY_BYTES:
            body, words = _translated(body, translation, tell)
        else:  # takes long enough to keep other requests waiting
            body, words = await anyio.to_thread.run_sync(_translated, body, translation, tell)
        if words:
            speak(scope, words)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(_with_length(scope, len(body)), replay, send)


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _translated(body: bytes, translation: Translation, tell: TellWords | None) -> tuple[bytes, Words]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body, {}  # the route says what is wrong with it
    if not isinstance(value, dict):
        return body, {}
    translated, words = translation(value), tell(value) if tell else {}
    return body if translated == value else json.dumps(translated).encode(), words


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}

"""The HTTP side of a training server: its token, the size of bodies, errors, and whether the client is there."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import threading
import time
from collections.abc import Callable

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.body_limit import BodyLimit
from apis.errors import DataInvalid, InvalidField, MethodNotAllowed, NotFound, PostgradError, TooLarge, Unauthorized
from apis.faults import describe_faults, fault_of, first_fault
from apis.sft_sessions.protocol import TrainingServer
from apis.sft_sessions.routes import TRAINING_PREFIX, create_training_router
from post_training.session_tokens import token_digest
from post_training.worker.session_keys import OwnersKey

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
OPEN_PATH = f"{TRAINING_PREFIX}/health"
_KINDS = {kind.http_status: kind for kind in (NotFound, MethodNotAllowed, TooLarge)}


class Presence:
    """Whether a session's client is there: it has a call open, or had one not long ago."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open = 0
        self._last = monotonic()
        self._lock = threading.Lock()

    def silent_for(self) -> float:
        """Seconds since the newest call ended, 0 while one is open."""
        with self._lock:
            return 0.0 if self._open else self._monotonic() - self._last

    def touch(self) -> None:
        """Something came from the client just now."""
        with self._lock:
            self._last = self._monotonic()

    def opened(self) -> None:
        with self._lock:
            self._open += 1

    def closed(self) -> None:
        with self._lock:
            self._open -= 1
            self._last = self._monotonic()


def create_app(impl: TrainingServer, token_sha256: str, presence: Presence, key: OwnersKey) -> FastAPI:
    """The routes of a training server.

    Args:
        token_sha256: digest of the token that every call but `health` must bring, as Bearer or as Basic's password.
        presence: told of every call that brought it.
        key: of the session's owner; no call is taken once it is revoked.
    """
    app = FastAPI(title="Postgrad training server", docs_url=None, redoc_url=None)
    app.include_router(create_training_router(impl))
    app.add_exception_handler(PostgradError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(BodyLimit, limit=MAX_BODY_BYTES, answer=lambda error, _path: answer(error))
    app.add_middleware(TokenGate, token_sha256=token_sha256, presence=presence, key=key)
    return app


class TokenGate:
    """ASGI middleware: lets in who brings the session's token, and everybody to `health`."""

    def __init__(self, app: ASGIApp, token_sha256: str, presence: Presence, key: OwnersKey) -> None:
        self.app, self._digest, self._presence, self._key = app, token_sha256, presence, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN_PATH:
            await self.app(scope, receive, send)
        elif not self._opens(Headers(scope=scope).get("authorization", "")):
            said = "this session wants its token, which `server_url` of its job's status holds"
            await answer(Unauthorized(said))(scope, receive, send)
        elif self._key.is_key and not await anyio.to_thread.run_sync(self._key.good):
            await answer(Unauthorized("the API key that this session belongs to was revoked"))(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call; it is open once all of it is here. One that stops coming is no sign of a client."""
        opened = False
        self._presence.touch()

        async def watch() -> Message:
            nonlocal opened
            message = await receive()
            self._presence.touch()
            if not opened and message["type"] == "http.request" and not message.get("more_body", False):
                opened = True
                self._presence.opened()
            return message

        try:
            await self.app(scope, watch, send)
        finally:
            if opened:
                self._presence.closed()

    def _opens(self, header: str) -> bool:
        kind, _, value = header.partition(" ")
        token = _password(value) if kind.lower() == "basic" else value if kind.lower() == "bearer" else ""
        return hmac.compare_digest(token_digest(token.strip()), self._digest)


def answer(error: PostgradError) -> JSONResponse:
    """An error on the wire, in the envelope that the stack's own server has."""
    body: dict[str, object] = {"code": error.code, "message": error.message, "param": error.param}
    if isinstance(error, DataInvalid):
        body |= {"row": error.row, "pointer": error.pointer}
    if error.http_status == InvalidField.http_status:
        body["detail"] = {"errors": [fault_of(error)]}
    headers = {"retry-after": "1"} if error.retryable else {"x-should-retry": "false"}
    return JSONResponse({"error": body, "detail": error.message}, error.http_status, headers=headers)


def _password(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PostgradError)
    return answer(error)


async def _on_invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = describe_faults(error.errors(), error.body)
    field, message = first_fault(faults)
    invalid = InvalidField(message, param=field)
    body = {"code": invalid.code, "message": message, "param": field, "detail": {"errors": faults}}
    return JSONResponse({"error": body}, invalid.http_status, headers={"x-should-retry": "false"})


async def _on_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = _KINDS.get(error.status_code, InvalidField)
    return answer(kind(str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s failed", request.url.path, exc_info=error)
    return answer(PostgradError("the training server failed; the session's log says why"))

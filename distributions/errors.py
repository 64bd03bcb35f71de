"""Errors on the wire: our own envelope, OpenAI's on its routes; never a traceback, a server path or an input."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import (
    BadRequest,
    DataInvalid,
    InvalidField,
    MethodNotAllowed,
    NotFound,
    PostgradError,
    TooLarge,
    Unauthorized,
)
from apis.faults import describe_faults, fault_of, first_fault
from distributions.dialects.validation import SHAPE_TAG
from distributions.dialects.words import Words, param_as_sent, place_as_sent, text_as_sent, words_of
from distributions.methods import allowed_methods
from post_training.checkpoints.layout import disk_full
from post_training.jobs.database import store_error

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions")
_OPENAI_PREFIX = "/v1/openai/"
_SHARED_WITH_OPENAI = "/v1/models"
_CODES = {kind.http_status: kind.code for kind in (Unauthorized, NotFound, MethodNotAllowed, TooLarge)}


def add_exception_handlers(app: FastAPI) -> None:
    """Answer our errors, invalid requests and unknown routes of `app` in the envelope."""
    app.add_exception_handler(PostgradError, _on_postgrad_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)


def error_response(error: PostgradError, path: str, status: int | None = None, part: str = "body") -> JSONResponse:
    """The answer to a request to `path` that `error` ended.

    Args:
        part: the part of the request that `error.param` lies in: body, query, path or header.
    """
    status = error.http_status if status is None else status
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if error.retryable else {"x-should-retry": "false"}
    said = _Said(status, error.code, error.message, error.param, [fault_of(error, part)])
    return said.answer(path, headers, _place(error))


class CatchAll:
    """ASGI middleware: a store or disk that fails is a 503; what else nobody caught is logged with its traceback and
    answered with a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            if not isinstance(error, PostgradError):
                error = _as_ours(error, f"{scope['method']} {scope['path']}")
            await error_response(error, scope["path"])(scope, receive, send)


def _as_ours(error: Exception, request: str) -> PostgradError:
    known = store_error(error) if isinstance(error, SQLAlchemyError) else disk_full(error, "what the request brought")
    if known is None:
        log.error("%s failed", request, exc_info=error)
        return PostgradError("the server failed; its log says why")
    log.error("%s could not be served: %s", request, known.message)
    return known


def _place(error: PostgradError) -> dict[str, Any]:
    if not isinstance(error, DataInvalid):
        return {}
    return {key: value for key, value in (("row", error.row), ("pointer", error.pointer)) if value is not None}


@dataclass(frozen=True)
class _Said:
    """What an answer says of an error; a 400 lists its `faults`."""

    status: int
    code: str
    message: str
    param: str | None
    faults: Sequence[Mapping[str, Any]] = ()

    def answer(
        self, path: str, headers: Mapping[str, str], extra: Mapping[str, Any] | None = None, *, detail: bool = True
    ) -> JSONResponse:
        """In the envelope that clients of `path` read."""
        error: dict[str, Any] = {"code": self.code, "message": self.message, "param": self.param}
        if answers_as_openai(path):
            body: dict[str, Any] = {"error": {**error, "type": _openai_type(self.status)}}
            return JSONResponse(body, self.status, headers=dict(headers))
        if path.startswith(_SHARED_WITH_OPENAI):
            error["type"] = _openai_type(self.status)
        if self.status == BadRequest.http_status:
            error["detail"] = {"errors": self.faults}
        body = {"error": {**error, **(extra or {})}} | ({"detail": self.message} if detail else {})
        return JSONResponse(body, self.status, headers=dict(headers))


def answers_as_openai(path: str) -> bool:
    """Whether errors at `path` are in OpenAI's envelope."""
    return path in _OPENAI_PATHS or path.startswith(_OPENAI_PREFIX)


def _openai_type(status: int) -> str:
    named = {401: "authentication_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


async def _on_postgrad_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PostgradError)
    if error.http_status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if words := words_of(request.scope):
        error.param, error.message = param_as_sent(error.param, words), text_as_sent(error.message, words)
    return error_response(error, request.url.path, part=_part_of(request, error.param))


def _part_of(request: Request, param: str | None) -> str:
    """Where a request holds a parameter: in its body, if it has one."""
    if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
        return "body"
    for part, names in (("path", request.path_params), ("header", request.headers)):
        if param is not None and param in names:
            return part
    return "query"


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    headers = {name.lower(): value for name, value in (error.headers or {}).items()} | {"x-should-retry": "false"}
    if status == MethodNotAllowed.http_status:
        allowed = allowed_methods(request.app.routes, request.scope)
        headers["allow"] = ", ".join([*allowed, "OPTIONS"])
        # An id may hold slashes, so DELETE takes every path below the jobs: that alone makes no route of it.
        status = NotFound.http_status if allowed == ["DELETE"] else status
    messages = {
        404: "there is no such route; GET /v1/inspect/routes lists them all",
        405: f"this route does not take {request.method}",
        # FastAPI's words for a body of other bytes than UTF-8, or nested beyond what a parser follows.
        400: "the body cannot be parsed: send JSON in UTF-8, with content-type: application/json",
    }
    message = messages.get(status, str(error.detail))
    faults = [fault_of(BadRequest(message), _part_of(request, None))]
    said = _Said(status, _CODES.get(status, BadRequest.code), message, None, faults)
    return said.answer(request.url.path, headers)


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = describe_faults(error.errors(), error.body, left_out=SHAPE_TAG)
    if words := words_of(request.scope):
        faults = [_as_sent(fault, words) for fault in faults]
    param, message = first_fault(faults)
    said = _Said(BadRequest.http_status, InvalidField.code, message, param, faults)
    # As in Llama Stack's own answer to it, `detail` stands in `error` alone.
    return said.answer(request.url.path, {"x-should-retry": "false"}, detail=False)


def _as_sent(fault: Mapping[str, Any], words: Words) -> dict[str, Any]:
    part, *place = fault["loc"]
    return {**fault, "loc": [part, *place_as_sent(place, words)], "msg": text_as_sent(fault["msg"], words)}

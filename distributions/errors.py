"""Errors on the wire: our own envelope, OpenAI's on its routes; never a traceback, a server path or an input."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import DataInvalid, MethodNotAllowed, NotFound, PostgradError, TooLarge, Unauthorized
from apis.faults import describe_faults, first_fault
from distributions.dialects.validation import SHAPE_TAG
from distributions.methods import allowed_methods
from post_training.checkpoints.layout import disk_full
from post_training.jobs.database import store_error

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5
_OPENAI_TAILS = ("/chat/completions", "/completions")
_OPENAI_PREFIX = "/v1/openai/"
_SHARED_WITH_OPENAI = "/v1/models"
_CODES = {kind.http_status: kind.code for kind in (Unauthorized, NotFound, MethodNotAllowed, TooLarge)}


def add_exception_handlers(app: FastAPI) -> None:
    """Answer our errors, invalid requests and unknown routes of `app` in the envelope."""
    app.add_exception_handler(PostgradError, _on_postgrad_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)


def error_response(error: PostgradError, path: str, status: int | None = None) -> JSONResponse:
    """The answer to a request to `path` that `error` ended."""
    status = error.http_status if status is None else status
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if error.retryable else {"x-should-retry": "false"}
    return _answer(path, status, error.code, error.message, error.param, headers, extra=_place(error))


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


def _answer(
    path: str,
    status: int,
    code: str,
    message: str,
    param: str | None,
    headers: Mapping[str, str],
    extra: Mapping[str, Any],
    with_detail: bool = True,
) -> JSONResponse:
    error = {"code": code, "message": message, "param": param}
    if answers_as_openai(path):
        return JSONResponse({"error": {**error, "type": _openai_type(status)}}, status, headers=dict(headers))
    if path.startswith(_SHARED_WITH_OPENAI):
        error["type"] = _openai_type(status)
    body: dict[str, Any] = {"error": {**error, **extra}}
    if with_detail:
        body["detail"] = message
    return JSONResponse(body, status, headers=dict(headers))


def answers_as_openai(path: str) -> bool:
    """Whether errors at `path` are in OpenAI's envelope."""
    return path.endswith(_OPENAI_TAILS) or path.startswith(_OPENAI_PREFIX)


def _openai_type(status: int) -> str:
    named = {401: "authentication_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


async def _on_postgrad_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PostgradError)
    if error.http_status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(error, request.url.path)


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
    }
    message = messages.get(status, str(error.detail))
    return _answer(request.url.path, status, _CODES.get(status, "bad_request"), message, None, headers, extra={})


async def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = describe_faults(error.errors(), error.body, left_out=SHAPE_TAG)
    param, message = first_fault(faults)
    return _answer(
        request.url.path,
        400,
        "invalid_field",
        message,
        param,
        {"x-should-retry": "false"},
        extra={"detail": {"errors": faults}},
        with_detail=False,
    )

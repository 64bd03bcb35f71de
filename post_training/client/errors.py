"""Answers that are no success, as the exceptions of `apis.errors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import ValidationError

from apis.errors import (
    BadRequest,
    DataInvalid,
    InvalidField,
    NotFound,
    NotSupported,
    PostgradError,
    QueueFull,
    TooLarge,
    Unauthorized,
    Unavailable,
    error_class,
    field_path,
)

START_REMEDY = "is the server running? start it with: postgrad stack run experimental-post-training"


_BY_STATUS: Mapping[int, type[PostgradError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: TooLarge,
    429: QueueFull,
    501: NotSupported,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def _class_of(code: object, status: int | None) -> type[PostgradError]:
    """For a code this client does not know, the class that `status` stands for."""
    known = error_class(code)
    if known is not None or status is None:
        return known or PostgradError
    return _BY_STATUS.get(status, BadRequest if 400 <= status < 500 else PostgradError)


def build_error(fields: Mapping[str, Any], *, message: str, status: int | None = None) -> PostgradError:
    """An exception from the wire's fields `code`, `param`, `row` and `pointer`."""
    param = fields.get("param")
    error = _class_of(fields.get("code"), status)(message, param=param if isinstance(param, str) else None)
    if isinstance(error, DataInvalid):
        # The server's message names the row already; the constructor would name it twice.
        row, pointer = fields.get("row"), fields.get("pointer")
        error.row = row if isinstance(row, int) else None
        error.pointer = pointer if isinstance(pointer, str) else None
    return error


def error_from_response(status: int, body: Any, *, text: str = "") -> PostgradError:
    """The exception that an HTTP answer stands for.

    Args:
        status: the HTTP status, 400 or more.
        body: the parsed JSON, or None where it was not JSON.
        text: the raw body, quoted where nothing better is known.
    """
    envelope = body if isinstance(body, dict) else {}
    error = envelope.get("error")
    fields = error if isinstance(error, dict) else {}
    message = fields.get("message")
    if not isinstance(message, str) or not message:
        message = _detail(fields.get("detail")) or _detail(envelope.get("detail")) or _detail(error)
    return build_error(fields, message=message or _unexplained(status, text), status=status)


def _unexplained(status: int, text: str) -> str:
    summary = " ".join(text.split())[:200]
    return f"the server answered HTTP {status}" + (f": {summary}" if summary else " without a reason")


def _detail(detail: Any) -> str | None:
    """A message out of the older shapes: a string, `{"errors": [...]}`, or a list of `{loc, msg}`."""
    if isinstance(detail, str):
        return detail or None
    if isinstance(detail, dict):
        return _detail(detail.get("errors"))
    if isinstance(detail, list):
        parts = [_located(item) for item in detail if isinstance(item, dict) and item.get("msg")]
        return "; ".join(parts) or None
    return None


def _located(item: Mapping[str, Any]) -> str:
    location = ".".join(str(part) for part in item.get("loc", ()) if part != "body")
    return f"{location}: {item['msg']}" if location else str(item["msg"])


def unreachable(base_url: str, cause: httpx.TransportError, timeout: float) -> Unavailable:
    """The exception for a request that got no answer."""
    if isinstance(cause, httpx.TimeoutException) and not isinstance(cause, httpx.ConnectTimeout):
        return Unavailable(f"no answer from {base_url} within {timeout:g} s; try again, or raise the client's timeout")
    reason = str(cause) or type(cause).__name__
    return Unavailable(f"cannot reach {base_url} ({reason}); {START_REMEDY}")


def invalid_request(error: ValidationError, request: Any) -> InvalidField:
    """The first fault of `request`, which does not fit its model; nothing was sent."""
    fault = error.errors(include_url=False)[0]
    param = ".".join(map(str, field_path(fault["loc"], request)))
    unknown = fault["type"] == "extra_forbidden"
    reason = "there is no such field" if unknown else fault["msg"].removeprefix("Value error, ")
    return InvalidField(f"{param}: {reason}" if param else reason, param=param or None)

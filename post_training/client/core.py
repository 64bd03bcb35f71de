"""What the sync and the async client share: what is sent, what is retried, how an answer is read. No I/O."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from apis.common import check_identifier
from apis.errors import InvalidField, PostgradError
from post_training.client.errors import build_error, error_from_response

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)

DEFAULT_BASE_URL = "http://127.0.0.1:8321"
DEFAULT_TIMEOUT = 60.0
DEFAULT_MAX_RETRIES = 2
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_RETRY_AFTER = 0.5, 8.0, 60.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def client_version() -> str:
    """The installed distribution's version."""
    try:
        return version("postgrad")
    except PackageNotFoundError:
        return "0"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request as plain data, with the way to read its answer.

    Attributes:
        parse: turns the JSON of a success (None for an empty body) into the result.
        idempotent: whether sending it twice does what sending it once does, so that a lost answer may be retried.
        patience: seconds to wait for more of the answer, where that is longer than the client's timeout.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True
    patience: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How a client reaches its server. Times in seconds."""

    base_url: str
    api_key: str | None
    timeout: float
    max_retries: int

    @classmethod
    def resolve(cls, base_url: str | None, api_key: str | None, timeout: float, max_retries: int) -> Settings:
        """Fill what is None from `POSTGRAD_*`, then `LLAMA_STACK_*`, then the defaults.

        Raises:
            InvalidField: the URL is not http(s)://host, or `max_retries` is negative.
        """
        url = base_url or _from_environment("BASE_URL") or DEFAULT_BASE_URL
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidField(f"{url!r} is not a server's URL; give one such as {DEFAULT_BASE_URL}", param="base_url")
        if max_retries < 0:
            raise InvalidField("max_retries must be 0 or more", param="max_retries")
        return cls(url.rstrip("/"), api_key or _from_environment("API_KEY"), timeout, max_retries)

    def httpx_options(self) -> dict[str, Any]:
        headers = {"User-Agent": f"postgrad/{client_version()}", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # A proxy from the environment cannot reach this machine's loopback address.
        local = urlsplit(self.base_url).hostname in _LOOPBACK
        return {"headers": headers, "timeout": self.timeout, "trust_env": not local}


def _from_environment(name: str) -> str | None:
    return os.environ.get(f"POSTGRAD_{name}") or os.environ.get(f"LLAMA_STACK_{name}") or None


def path_id(identifier: str, *, param: str) -> str:
    """An id as part of a path: percent-encoded, its slashes kept.

    Raises:
        InvalidField: not a well-formed id, which could otherwise climb to another route.
    """
    return quote(check_identifier(identifier, param=param), safe="/")


def parse_as(model: type[ModelT]) -> Callable[[Any], ModelT]:
    """A parser that leaves out fields which a newer server has added, at any depth."""
    return lambda body: model.model_validate(body, extra="ignore")


def parse_nothing(body: Any) -> None:
    """For answers without content."""


def retry_delay(call: Call[Any], attempt: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
    """Seconds to wait before sending `call` again, or None where it must not be sent again.

    `attempt` counts from 0. A call that is not idempotent is only sent again where the server cannot have acted on it:
    no connection was made, or it refused with 429.
    """
    if isinstance(outcome, httpx.TransportError):
        never_sent = isinstance(outcome, (httpx.ConnectError, httpx.ConnectTimeout))
        return _backoff(attempt) if never_sent or call.idempotent else None
    if outcome.headers.get("x-should-retry", "").lower() == "false":
        return None
    if outcome.status_code != 429 and not (call.idempotent and _transient(outcome.status_code)):
        return None
    asked = _retry_after(outcome.headers.get("retry-after"))
    if asked is None:
        return _backoff(attempt)
    # Waiting less than asked would be rude, and waiting minutes inside a call a surprise: the caller decides.
    return asked if asked <= _LONGEST_RETRY_AFTER else None


def _transient(status: int) -> bool:
    return status == 408 or status >= 500


def _backoff(attempt: int) -> float:
    # Up to a quarter less, so that many clients do not come back in step.
    return min(_FIRST_DELAY * 2**attempt, _LONGEST_DELAY) * random.uniform(0.75, 1.0)


def _retry_after(header: str | None) -> float | None:
    """Seconds from a Retry-After header (RFC 9110, 10.2.3): a number or an HTTP date; None where there is none."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def read(call: Call[T], response: httpx.Response) -> T:
    """The result that a whole answer holds.

    Raises:
        PostgradError: the class that the answer's code or status stands for.
    """
    body = _json(response)
    if response.is_error:
        raise error_from_response(response.status_code, body, text=response.text)
    try:
        return call.parse(body)
    except (ValidationError, TypeError, KeyError):
        raise PostgradError(
            f"the answer to {call.method} {response.request.url} is not what was expected; is a Postgrad server there?"
        ) from None


def _json(response: httpx.Response) -> Any:
    try:
        return response.json() if response.content else None
    except ValueError:
        return None


END_OF_STREAM = object()


def read_event(call: Call[T], line: str) -> T | object | None:
    """The result of one `data:` line of a server-sent stream; None for other lines, END_OF_STREAM for `[DONE]`.

    Raises:
        PostgradError: the event carries an error, with its class by code, or is not what was expected.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return END_OF_STREAM
    try:
        event = json.loads(data)
        if isinstance(event, dict) and isinstance(event.get("error"), dict):
            fields = event["error"]
            raise build_error(fields, message=str(fields.get("message", "the stream ended with an error")))
        return call.parse(event)
    except (ValueError, TypeError, KeyError):
        raise PostgradError(f"the stream holds an event that was not expected: {data[:100]}") from None

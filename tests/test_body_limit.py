"""A body over the limit is refused at once, and its client gets the answer however it sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from apis.body_limit import BodyLimit
from tests.in_memory_stack import serving

LIMIT = 100_000


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = Starlette(routes=[Route("/", length, methods=["POST"])])
    with serving(BodyLimit(app, LIMIT, lambda error, _: JSONResponse({"code": error.code}, error.http_status))) as url:
        yield url


def connected(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname or "", where.port or 0), timeout=10)


def head(size: int, *lines: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", "Host: localhost", f"Content-Length: {size}", *lines, "", ""]).encode()


@pytest.mark.parametrize("lines", [(), ("Expect: 100-continue",), ("Connection: close",)])
def test_a_declared_length_over_the_limit_is_refused_before_a_byte_of_it_is_sent(url: str, lines: tuple[str, ...]):
    with connected(url) as sent:
        began = time.monotonic()
        sent.sendall(head(10**12, *lines))
        answer = sent.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - began < 1


def test_a_client_that_sends_all_and_closes_gets_the_answer(url: str):
    """As Python's urllib does, with more than the buffers between both hold."""
    size = LIMIT + 1
    with connected(url) as sent:
        sent.sendall(head(size, "Connection: close") + b"x" * size)
        answer = b"".join(iter(lambda: sent.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b'{"code":"too_large"}')


def test_the_connection_serves_the_next_request(url: str):
    with httpx.Client() as http:
        assert http.post(url, content=b"x" * (LIMIT * 20)).json() == {"code": "too_large"}
        assert http.post(url, content=b"x" * LIMIT).text == str(LIMIT)
        assert http.post(url, content=(b"x" * 1000 for _ in range(LIMIT))).status_code == 413
        assert http.post(url, content=(b"x" * 1000 for _ in range(3))).text == "3000"

"""What meets a request before its route, on its own."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apis.errors import StackError
from distributions.authentication import hash_key
from distributions.middleware import SMALL_BODY_BYTES, TranslateBody


async def test_a_large_body_is_translated_beside_the_event_loop():
    threads = []

    def translation(body: dict[str, Any]) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {**body, "translated": True}

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(str(json.loads(await Request(scope, receive).body())["translated"]))(scope, receive, send)

    app = TranslateBody(echo, {"/": translation})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        for size in (10, SMALL_BODY_BYTES):
            assert (await http.post("/", json={"text": "x" * size})).text == "True"
    assert threads[0] == threading.get_ident() != threads[1]


def test_a_key_may_be_given_as_its_digest():
    # From `printf sesame | sha256sum`.
    digest = "d0c04f4b1951e4aeaaec8223ed2039e542f3aae805a6fa7f6d794e5afff5d272"
    assert hash_key(f"sha256:{digest}") == hash_key("sesame") == bytes.fromhex(digest)
    with pytest.raises(StackError, match="64 hexadecimal"):
        hash_key("sha256:abc")

"""Every path that a real client was seen to ask for is one that the server has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.clients.conftest import Served
from tests.clients.matrix import cells

RECORDED = Path(__file__).parent / "recorded"
IDS = {"{job}": "lab/no-job", "{dataset}": "lab/none", "{alias}": "lab/no-model", "{model}": "lab/tiny"}


def recorded(name: str) -> list[dict[str, Any]]:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def http(stack: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url) as made:
        yield made


@pytest.mark.parametrize("name", [cell.name for cell in cells()])
def test_every_recorded_request_has_its_route(http: httpx.Client, name: str):
    requests = recorded(name)
    assert requests
    for request in requests:
        answer = ask(http, request)
        assert answer.status_code != 405, request
        assert "no such route" not in answer.text, request


def ask(http: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    """Ask for the recorded path with ids that do not exist, and with an empty body where there was one."""
    path = request["path"]
    for name, value in IDS.items():
        path = path.replace(name, quote(value, safe="" if request.get("quoted") else "/"))
    return http.request(request["method"], path, json={} if "body" in request else None)


def test_a_path_that_no_client_asks_for_has_no_route(http: httpx.Client):
    answer = ask(http, {"method": "GET", "path": "/v1/post-training/job/{job}"})
    assert answer.status_code == 404
    assert "no such route" in answer.text


def test_recordings_are_small_and_tell_nothing_of_the_machine():
    files = sorted(RECORDED.glob("*.json"))
    assert {file.stem for file in files} == {cell.name for cell in cells()}
    for file in files:
        text = file.read_text()
        assert len(text) < 40_000, file
        assert str(Path.home()) not in text
        assert "127.0.0.1" not in text

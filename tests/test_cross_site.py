"""What a page of another site can have a visitor's browser send to a stack without keys on the visitor's machine."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from post_training.catalog.keys import ApiKeys
from post_training.jobs.database import Database
from tests.test_keys import asked_stack, bearer

CANCEL = "/v1alpha/post-training/jobs/none/cancel"
ELSEWHERE = ["http://evil.example", "https://127.0.0.1.evil.example", "null", "http://[::2]:8321", "file://"]


@pytest.mark.parametrize("origin", ELSEWHERE)
async def test_a_page_of_another_site_can_change_nothing(tmp_path: Path, origin: str):
    async with asked_stack(tmp_path / "home", None) as (http, _):
        for method, path in (("POST", CANCEL), ("POST", "/complete_job/none"), ("DELETE", "/v1/models/none")):
            answer = await http.request(method, path, headers={"origin": origin})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Origin")
        assert (await http.get("/v1/models", headers={"origin": origin})).status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8321"])
async def test_a_page_of_this_machine_and_who_is_no_browser_is_served(tmp_path: Path, origin: str):
    async with asked_stack(tmp_path / "home", None) as (http, _):
        told: list[httpx.Response] = [await http.post(CANCEL, headers={"origin": origin}), await http.post(CANCEL)]
        assert [answer.status_code for answer in told] == [404, 404]


async def test_with_a_key_it_does_not_matter_where_a_request_comes_from(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    database.migrate()
    _, key = ApiKeys(database).create()
    database.close()
    async with asked_stack(home, None) as (http, _):
        headers = {**bearer(key), "origin": "http://evil.example"}
        assert (await http.post(CANCEL, headers=headers)).status_code == 404

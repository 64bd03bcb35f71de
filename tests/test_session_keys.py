"""Sessions of a stack with API keys: whose they are, and what is left of one whose key is revoked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from post_training.catalog.keys import ApiKeys
from post_training.jobs.database import Database
from tests.served_stack import run_yaml_with, served
from tests.session_stack import CONFIG, attached, done, make_home, refused, rows

ADMINISTRATOR = "the administrator's key of this test"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def keys(home: Path) -> Iterator[ApiKeys]:
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    database.migrate()
    yield ApiKeys(database)
    database.close()


@pytest.fixture(scope="module")
def url(home: Path, keys: ApiKeys) -> Iterator[str]:
    stack = run_yaml_with(home.parent, jobs={"devices": ["cpu", "cpu"]})
    with served(home, stack=stack, POSTGRAD_API_KEY=ADMINISTRATOR) as (url, _):
        yield url


def asking(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_only_who_submitted_a_session_gets_its_token(url: str, keys: ApiKeys) -> None:
    _, alices = keys.create("alice")
    _, bobs = keys.create("bob")
    with asking(url, alices) as alice, asking(url, bobs) as bob, asking(url, ADMINISTRATOR) as administrator:
        time.sleep(1.1)  # so old the keys that a server knows may be
        done(alice.post("/submit_job", json={"job_id": "hers", "config": CONFIG}))
        with attached(alice, "hers") as client:
            assert done(client.get("/status"))["job_id"] == "hers"
        refused(bob.get("/job_status/hers"), "job_not_found", 404)
        refused(bob.post("/resume_job/hers"), "job_not_found", 404)
        seen = done(administrator.get("/job_status/hers"))["server_url"]
        assert seen.startswith("http://127.0.0.1:")
        assert "@" not in seen
        with asking(seen, alices) as stranger:
            refused(stranger.get("/api/v1/status"), "unauthorized", 401)
        assert done(alice.delete("/cancel_job/hers"))["job_id"] == "hers"


def test_a_session_whose_key_is_revoked_is_closed_within_seconds_saved_and_paused(url: str, keys: ApiKeys) -> None:
    row, key = keys.create("carol")
    with asking(url, key) as carol, asking(url, ADMINISTRATOR) as administrator:
        time.sleep(1.1)
        done(carol.post("/submit_job", json={"job_id": "revoked", "config": CONFIG}))
        with attached(carol, "revoked") as client:
            done(client.post("/train_step", json={"rows": rows(2), "step": 1}))
            keys.revoke(row.id)
            time.sleep(1.1)
            with suppress(httpx.TransportError):  # it may be closed already
                refused(client.post("/train_step", json={"rows": rows(2), "step": 2}), "unauthorized", 401)
        deadline = time.monotonic() + 30
        while not (status := done(administrator.get("/job_status/revoked")))["paused"]:
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        assert status["last_durable_step"] == 1
        assert "was revoked" in status["message"]
        done(administrator.delete("/cancel_job/revoked"))

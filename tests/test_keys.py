"""API keys: made on the command line, known by digest alone, asked for on every request, revoked at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner, Result

from apis.errors import InvalidField, NotFound, StackError
from distributions.authentication import FRESH_SECONDS, Authenticate, KeyRing, hash_key
from distributions.cli.main import app as cli
from distributions.home import lock_home
from distributions.resolver import plan
from distributions.run_config import StackRunConfig
from distributions.server import check_exposure, create_app, serve
from distributions.stack import build_stack
from post_training.catalog import keys as keys_module
from post_training.catalog.keys import KEY_PREFIX, USE_NOTED_EVERY, ApiKeys, key_digest
from post_training.jobs.database import SCHEMA_VERSION, Database, Layout, read_layout
from post_training.jobs.migrations import upgrade
from post_training.owners import Caller, current_caller
from providers.registry import BUILT_IN
from tests.served_stack import run_yaml_with, served

ADMINISTRATOR = "the-administrators-own-key"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- in the store ----------------------------------------------------------------------------------------------------


def test_a_key_has_256_random_bits_and_only_its_sha256_is_stored(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.migrate()
    row, key = ApiKeys(database).create("alice")
    others = {ApiKeys(database).create()[1] for _ in range(20)}
    database.close()

    assert re.fullmatch(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}", key)  # 43 characters of 6 bits hold 256 bits
    assert key not in others
    assert len(others) == 20
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as store:
        stored = store.execute("SELECT * FROM api_keys WHERE name = 'alice'").fetchall()
    assert stored[0][:3] == (row.id, "alice", hashlib.sha256(key.encode()).hexdigest())
    for file in tmp_path.iterdir():
        assert key.removeprefix(KEY_PREFIX).encode() not in file.read_bytes()


def test_a_revoked_key_stays_in_the_list_and_opens_nothing(database: Database):
    keys = ApiKeys(database)
    assert not keys.any_stored()
    (first, first_key), (second, second_key) = keys.create("first"), keys.create("second")
    at = keys.revoke(first.id).revoked_at
    assert at is not None
    assert keys.revoke(first.id).revoked_at == at
    assert [(row.id, row.name, row.revoked_at) for row in keys.all()] == [
        (first.id, "first", at),
        (second.id, "second", None),
    ]
    table = keys.table()
    assert {digest: key.id for digest, key in table.live.items()} == {key_digest(second_key): second.id}
    assert key_digest(first_key) not in table.live
    keys.revoke(second.id)
    assert (keys.table().live, keys.table().any_stored, keys.any_stored()) == ({}, True, True)
    with pytest.raises(NotFound, match=r"there is no key .key_0.*keys list"):
        keys.revoke("key_0")


@pytest.mark.parametrize("name", ["x" * 101, "a\x1b[2Jb", "a\nb"])
def test_a_name_that_would_spoil_a_list_is_refused(database: Database, name: str):
    with pytest.raises(InvalidField, match="name has at most 100 characters, all of which print"):
        ApiKeys(database).create(name)


def test_the_time_of_use_is_written_once_in_ten_minutes(database: Database):
    keys = ApiKeys(database)
    row, _ = keys.create()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for at, expected in (
        (noon, noon),
        (noon + timedelta(minutes=9), noon),
        (noon + USE_NOTED_EVERY, noon + USE_NOTED_EVERY),
    ):
        keys.note_use(row.id, at)
        assert keys.all()[0].last_used_at == expected


# -- as a server knows them ------------------------------------------------------------------------------------------


class CountingKeys(ApiKeys):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.reads, self.notes = 0, 0

    def table(self) -> keys_module.KeyTable:
        self.reads += 1
        return super().table()

    def note_use(self, key_id: str, at: datetime) -> None:
        self.notes += 1
        super().note_use(key_id, at)


async def test_keys_are_read_once_a_second_however_many_ask(database: Database):
    keys, clock = CountingKeys(database), [0.0]
    row, key = keys.create()
    ring = KeyRing(keys, lambda: clock[0])
    digest = key_digest(key)
    found = await asyncio.gather(*(ring.find(digest) for _ in range(50)))
    assert {made.id for made in found if made} == {row.id}
    assert keys.reads == 1
    keys.revoke(row.id)
    clock[0] = FRESH_SECONDS - 0.01
    assert await ring.find(digest) is not None
    clock[0] = FRESH_SECONDS
    assert await asyncio.gather(*(ring.find(digest) for _ in range(50))) == [None] * 50
    assert keys.reads == 2
    assert FRESH_SECONDS <= 2


async def test_a_store_that_cannot_be_read_keeps_each_who_asks_waiting_once_and_not_one_after_the_other(
    database: Database,
):
    class FailingKeys(CountingKeys):
        fails = False

        def table(self) -> keys_module.KeyTable:
            found = super().table()
            if self.fails:
                raise OperationalError("select", {}, Exception("no answer in time"))
            return found

    keys, clock = FailingKeys(database), [0.0]
    _, key = keys.create()
    ring = KeyRing(keys, lambda: clock[0])
    keys.fails, clock[0] = True, FRESH_SECONDS
    asked = await asyncio.gather(*(ring.find(key_digest(key)) for _ in range(20)), return_exceptions=True)
    assert {type(answer) for answer in asked} == {OperationalError}
    assert keys.reads == 2
    assert await ring.still_opens(key_digest(key))
    keys.fails, clock[0] = False, 2 * FRESH_SECONDS
    assert await ring.find(key_digest(key)) is not None


async def test_a_slow_store_does_not_hold_up_the_event_loop(database: Database):
    class SlowKeys(ApiKeys):
        def table(self) -> keys_module.KeyTable:
            time.sleep(0.3)
            return super().table()

    keys, clock = SlowKeys(database), [0.0]
    ring = KeyRing(keys, lambda: clock[0])
    clock[0] = 10.0
    asking = asyncio.create_task(ring.demanded())
    ticks = 0
    while not asking.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 10


async def test_the_use_of_a_key_is_noted_beside_the_request_and_seldom(database: Database):
    keys = CountingKeys(database)
    _, key = keys.create()
    ring = KeyRing(keys)
    for _ in range(10):
        found = await ring.find(key_digest(key))
        assert found is not None
        ring.note_use(found)
    await asyncio.gather(*ring._writing)
    assert keys.all()[0].last_used_at is not None
    assert keys.notes == 1


async def ask_callers(database: Database, administrator: str | None, *headers: dict[str, Any]) -> list[str]:
    """What the middleware says to each request: who it acts for, or the code of its refusal."""

    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        caller = await asyncio.to_thread(current_caller)
        text = "all" if caller.sees_all else str(caller.owner)
        await PlainTextResponse(text)(scope, receive, send)

    digest = None if administrator is None else hash_key(administrator)
    ring = KeyRing(ApiKeys(database))
    app = Authenticate(tell, ring, digest)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answers = [await http.get("/v1/models", headers=each) for each in headers]
    await asyncio.gather(*ring._writing)
    return [a.text if a.status_code == 200 else f"{a.status_code} {a.json()['error']['code']}" for a in answers]


REFUSED = "401 unauthorized"


async def test_who_a_request_acts_for_follows_from_its_key(database: Database):
    assert await ask_callers(database, None, {}, {"Host": "evil.example"}, bearer("x")) == [
        "all",
        "400 invalid_field",
        "all",
    ]
    row, key = ApiKeys(database).create()
    told = await ask_callers(database, None, {}, bearer("x"), bearer(key), {**bearer(key), "Host": "example.org"})
    assert told == [REFUSED, REFUSED, row.id, row.id]
    told = await ask_callers(database, ADMINISTRATOR, {}, bearer(ADMINISTRATOR), bearer(key))
    assert told == [REFUSED, "all", row.id]
    ApiKeys(database).revoke(row.id)
    # The last key is gone, and the stack is not open again.
    assert await ask_callers(database, None, {}, bearer(key)) == [REFUSED, REFUSED]
    assert await ask_callers(database, ADMINISTRATOR, bearer(key), bearer(ADMINISTRATOR)) == [REFUSED, "all"]


async def test_only_the_whole_key_in_the_right_place_is_taken(database: Database):
    row, key = ApiKeys(database).create()
    digest = key_digest(key).hex()
    wrong: list[dict[str, Any]] = [
        {"Authorization": key},
        {"Authorization": f"Basic {key}"},
        {"Authorization": f"Token {key}"},
        {"Authorization": f"Bearer{key}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"X-Api-Key": key},
        {"Cookie": f"key={key}"},
        *map(bearer, (key[:-1], key + "x", key.upper(), key.removeprefix(KEY_PREFIX), row.id, digest)),
        bearer(f"sha256:{digest}"),
        bearer(f"{key} {key}"),
        {"Authorization": b"Bearer \xe9"},
    ]
    assert await ask_callers(database, ADMINISTRATOR, *wrong) == [REFUSED] * len(wrong)
    # As clients write it, in capitals or not.
    right = [{"Authorization": f"bearer {key}"}, {"Authorization": f"Bearer  {key} "}]
    assert await ask_callers(database, ADMINISTRATOR, *right) == [row.id, row.id]


async def test_a_stream_ends_once_its_key_is_revoked_and_one_of_the_administrators_goes_on(database: Database):
    keys, clock = ApiKeys(database), [0.0]
    row, key = keys.create()

    async def events() -> AsyncIterator[bytes]:
        for number in range(20):
            if number == 5:
                keys.revoke(row.id)
                clock[0] += FRESH_SECONDS
            yield b"x"

    ring = KeyRing(keys, lambda: clock[0])
    app = FastAPI()
    app.get("/events")(lambda: StreamingResponse(events()))
    app.add_middleware(Authenticate, keys=ring, administrator=hash_key(ADMINISTRATOR))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        assert (await http.get("/events", headers=bearer(key))).text == "x" * 5
        assert (await http.get("/events", headers=bearer(ADMINISTRATOR))).text == "x" * 20
    await asyncio.gather(*ring._writing)


async def test_a_store_that_cannot_be_read_lets_nobody_in_who_holds_a_key_and_the_administrator_still(
    tmp_path: Path,
):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.migrate()
    _, key = ApiKeys(database).create()
    clock = [0.0]

    async def welcome(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    app = Authenticate(welcome, KeyRing(ApiKeys(database), lambda: clock[0]), hash_key(ADMINISTRATOR))
    database.close()
    for file in tmp_path.glob("store.db*"):
        file.write_bytes(b"no store" * 1000)
    clock[0] = 10.0
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 500  # CatchAll makes a 503 of it
        assert (await http.get("/v1/models", headers=bearer(ADMINISTRATOR))).text == "in"
        assert (await http.get("/v1/health")).text == "in"


# -- every route -----------------------------------------------------------------------------------------------------


def stack_config(home: Path, **sections: Any) -> StackRunConfig:
    providers = {
        "post_training": [{"provider_id": "torchtune", "provider_type": "inline::torchtune"}],
        "datasetio": [{"provider_id": "localfs", "provider_type": "inline::localfs"}],
        "inference": [{"provider_id": "transformers", "provider_type": "inline::transformers"}],
    }
    config = StackRunConfig.model_validate({"image_name": "keys", "providers": providers, **sections})
    config._environ = {"POSTGRAD_HOME": str(home)}
    return config


@asynccontextmanager
async def asked_stack(home: Path, api_key: str | None, **sections: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A whole stack behind its app; no job runs, since it is not started. Gives a client and the app."""
    config = stack_config(home, **sections)
    stack = await build_stack(config, plan(config, BUILT_IN))
    app = create_app(stack, api_key)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, app
    finally:
        stack.database.close()
        stack.lock.close()


HEALTH = {"/v1/health", "/alpha/health", "/v1alpha/admin/health"}


def operations(app: Any) -> list[tuple[str, str]]:
    """Method and path of every route, the pages of documentation included; path parameters are filled with an x."""
    paths = app.openapi()["paths"].items()
    found = [(method.upper(), re.sub(r"\{[^}]*\}", "x", path)) for path, methods in paths for method in methods]
    assert len(found) > 60
    found += [(other, path) for method, path in found if method == "GET" for other in ("HEAD", "OPTIONS")]
    return [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/")]


@pytest.mark.parametrize("administrator", [None, ADMINISTRATOR])
async def test_every_route_but_health_refuses_no_key_and_a_bad_one(tmp_path: Path, administrator: str | None):
    async with asked_stack(tmp_path / "home", administrator) as (http, app):
        keys = ApiKeys(Database(f"sqlite:///{tmp_path / 'home' / 'postgrad.db'}"))
        if administrator is None:
            keys.create()
            await asyncio.sleep(FRESH_SECONDS)
        revoked, revoked_key = keys.create()
        keys.revoke(revoked.id)
        bad: list[dict[str, str]] = [{}, bearer("x"), bearer("sesame"), bearer(revoked_key), {"Authorization": ""}]
        for method, path in operations(app):
            for headers in bad:
                answer = await http.request(method, path, headers=headers, content=b"{}")
                if path in HEALTH:
                    assert answer.status_code in (200, 204), (method, path)
                    continue
                assert answer.status_code == 401, (method, path, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-should-retry"] == "false"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "unauthorized"
        for path in ("/v1/health/", "//v1/health", "/v1/health/../models", "/v1/HEALTH", "/v1/nothing"):
            assert (await http.get(path)).status_code == 401, path


# -- a stack that runs -----------------------------------------------------------------------------------------------


def run_cli(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"POSTGRAD_HOME": str(home)})


def created(home: Path, *options: str) -> dict[str, Any]:
    return json.loads(run_cli(home, "keys", "create", "--json", *options).stdout)


def wait_for(status: int, url: str, key: str) -> float:
    """Seconds until the server answers with `status`."""
    began = time.monotonic()
    while httpx.get(url, headers=bearer(key)).status_code != status:
        assert time.monotonic() - began < 10, f"no {status}"
        time.sleep(0.02)
    return time.monotonic() - began


def malformed(key: str) -> list[Callable[[httpx.Client], httpx.Response]]:
    """Ways in which a key gets where it does not belong."""
    quoted = json.dumps({"job_uuid": key, "key": key})
    return [
        lambda http: http.get("/v1/models", headers={"Authorization": key}),
        lambda http: http.get("/v1/models", headers={"Authorization": f"Basic {key}"}),
        lambda http: http.get("/v1/models", headers=bearer(f"{key}\t{key}")),
        lambda http: http.get("/v1/models", headers=bearer(key + "x")),
        lambda http: http.get("/v1/models", headers={"X-Api-Key": key, "Cookie": f"key={key}"}),
        lambda http: http.get(f"/v1/models?api_key={key}", headers=bearer(key)),
        lambda http: http.get(f"/v1/models/{key}", headers=bearer(key)),
        lambda http: http.get(f"/v1/{key}/nothing", headers=bearer(key)),
        lambda http: http.delete(f"/v1/datasets/{key}", headers=bearer(key)),
        lambda http: http.get(f"/v1/post-training/job/status?job_uuid={key}", headers=bearer(key)),
        lambda http: http.post("/v1/post-training/supervised-fine-tune", content=quoted, headers=bearer(key)),
        lambda http: http.post("/v1/datasets", content=f'{{"{key}', headers=bearer(key)),
        lambda http: http.post("/v1/chat/completions", json={"model": key, "messages": []}, headers=bearer(key)),
    ]


def test_keys_work_on_a_stack_that_runs_and_are_in_no_log(tmp_path: Path):
    home = tmp_path / "home"
    stack = run_yaml_with(tmp_path, logging={"category_levels": {"all": "DEBUG"}})
    with (
        (tmp_path / "log").open("w") as log,
        served(home, stack=stack, stderr=log, POSTGRAD_API_KEY=ADMINISTRATOR) as (url, process),
        httpx.Client(base_url=url) as http,
    ):
        assert http.get("/v1/models").status_code == 401
        made = run_cli(home, "keys", "create", "--name", "alice")
        key = made.stdout.strip()
        assert "only time" in made.stderr
        assert wait_for(200, f"{url}/v1/models", key) < 2
        assert http.get("/v1/models", headers=bearer(ADMINISTRATOR)).status_code == 200
        statuses = [ask(http).status_code for ask in malformed(key)]
        assert statuses[:5] == [401] * 5
        assert max(statuses) < 500
        statuses = [ask(http).status_code for ask in malformed(ADMINISTRATOR)]
        assert max(statuses) < 500
        listed = json.loads(run_cli(home, "keys", "list", "--json").stdout)
        assert [(row["name"], row["revoked_at"]) for row in listed] == [("alice", None)]
        assert listed[0]["last_used_at"] is not None
        assert run_cli(home, "keys", "revoke", listed[0]["id"]).exit_code == 0
        assert wait_for(401, f"{url}/v1/models", key) < 2
        process.terminate()
        process.wait(20)
    said = (tmp_path / "log").read_bytes()
    assert b"DEBUG" in said
    for secret in (key, ADMINISTRATOR):
        assert secret.encode() not in said
        assert not [file for file in home.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def test_the_first_key_closes_an_open_stack_that_runs(tmp_path: Path):
    home = tmp_path / "home"
    with served(home) as (url, _):
        assert httpx.get(f"{url}/v1/models").status_code == 200
        key = created(home)["key"]
        assert wait_for(401, f"{url}/v1/models", "none") < 2
        assert httpx.get(f"{url}/v1/models", headers=bearer(key)).status_code == 200
        assert httpx.get(f"{url}/v1/health").status_code == 200


def test_a_stored_key_is_enough_to_serve_other_machines(tmp_path: Path):
    config = stack_config(tmp_path / "home")
    with pytest.raises(StackError, match="postgrad keys create"):
        serve(config, host="0.0.0.0", port=0)
    assert not (tmp_path / "home").exists()
    check_exposure("0.0.0.0", None, lambda: True)
    row = created(tmp_path / "home")
    with contextlib.suppress(KeyboardInterrupt):
        serve(config, host="0.0.0.0", port=0, on_ready=_stop)
    run_cli(tmp_path / "home", "keys", "revoke", row["id"])
    with contextlib.suppress(KeyboardInterrupt):
        serve(config, host="0.0.0.0", port=0, on_ready=_stop)


def _stop(_url: str) -> None:
    raise KeyboardInterrupt


# -- the command line ------------------------------------------------------------------------------------------------


def test_keys_are_made_listed_and_revoked_before_a_stack_ever_ran(tmp_path: Path):
    home = tmp_path / "home"
    absent = run_cli(home, "keys", "list")
    assert (absent.exit_code, "holds no store" in absent.stderr) == (1, True)
    made = created(home, "--name", "notebook")
    assert set(made) == {"id", "name", "created_at", "last_used_at", "revoked_at", "key"}
    assert made["key"].startswith(KEY_PREFIX)
    assert (home.stat().st_mode & 0o077) == 0
    shown = run_cli(home, "keys", "list")
    assert made["id"] in shown.stdout
    assert "notebook" in shown.stdout
    assert made["key"] not in shown.output
    unknown = run_cli(home, "keys", "revoke", "key_0")
    assert (unknown.exit_code, "there is no key 'key_0'" in unknown.stderr) == (1, True)
    assert "is revoked" in run_cli(home, "keys", "revoke", made["id"]).stdout
    assert json.loads(run_cli(home, "keys", "list", "--json").stdout)[0]["revoked_at"] is not None


def test_keys_go_to_the_store_that_a_run_yaml_names(tmp_path: Path):
    file = tmp_path / "elsewhere" / "keys.db"
    stack = run_yaml_with(tmp_path, metadata_store={"type": "sqlite", "db_path": str(file)})
    row = created(tmp_path / "home", "--stack", stack)
    database = Database(f"sqlite:///{file}")
    assert [key.id for key in ApiKeys(database).all()] == [row["id"]]
    database.close()
    assert not (tmp_path / "home" / "postgrad.db").exists()


def store_of_layout(home: Path, version: int) -> Database:
    """A state folder whose store has an older layout, or the number of a newer one."""
    home.mkdir()
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    with database.engine.begin() as connection:
        upgrade(connection, Layout(None, None), f"{min(version, SCHEMA_VERSION):04}")
        connection.execute(text("UPDATE schema_version SET version = :version"), {"version": version})
    return database


def layout_of(database: Database) -> int | None:
    with database.reading() as session:
        return read_layout(session.connection()).version


COMMANDS = [("create",), ("list",), ("revoke", "key_0")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_store_that_a_newer_program_migrated_is_refused_in_one_line(tmp_path: Path, command: tuple[str, ...]):
    database = store_of_layout(tmp_path / "home", SCHEMA_VERSION + 1)
    done = run_cli(tmp_path / "home", "keys", *command)
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert re.search(
        rf"layout {SCHEMA_VERSION + 1}, this Postgrad knows layouts up to .*: upgrade Postgrad", done.stderr
    )
    database.close()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_store_is_not_migrated_under_a_server_of_an_older_program(tmp_path: Path, command: tuple[str, ...]):
    home = tmp_path / "home"
    database = store_of_layout(home, SCHEMA_VERSION - 1)
    with lock_home(home):
        done = run_cli(home, "keys", *command)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "layout of an older Postgrad, and a server works on it" in done.stderr
    assert str(home) in done.stderr
    assert layout_of(database) == SCHEMA_VERSION - 1
    assert run_cli(home, "keys", "create").exit_code == 0
    assert layout_of(database) == SCHEMA_VERSION
    lock_home(home).close()  # it is free again
    database.close()


def test_a_store_that_another_holds_is_said_to_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    created(home)
    monkeypatch.setattr("post_training.jobs.engines.BUSY_TIMEOUT_SECONDS", 0.1)
    with contextlib.closing(sqlite3.connect(home / "postgrad.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        done = run_cli(home, "keys", "create")
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "the store is locked" in done.stderr


def test_a_caller_that_sees_all_is_the_default_of_work_without_a_request():
    assert current_caller() == Caller(None, sees_all=True)

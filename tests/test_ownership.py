"""What a key makes is its own: whoever holds another key is told on every route that it does not exist."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import text

from apis.datasets.models import RegisterDatasetRequest, RowsDataSource
from apis.errors import Conflict, DatasetNotFound, Forbidden, JobNotFound, ModelNotFound
from apis.models.models import RegisterModelRequest
from apis.post_training.models import JobStatus, ListOrder
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.keys import ApiKeys
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.spec import SessionSettings
from post_training.jobs.store import JobStore
from post_training.owners import ADMINISTRATOR, STACK, Caller, acting_as, key_holder
from providers.localfs.config import LocalFSConfig
from providers.localfs.provider import LocalFiles
from tests.job_server import JobServer
from tests.test_job_store import make_spec
from tests.test_keys import ADMINISTRATOR as ADMINISTRATORS_KEY
from tests.test_keys import HEALTH, asked_stack, bearer

SESSION = "alices-session"
JOB, DATA, MODEL, ALIAS = "alices-job", "alices-data", "base-sft-alices-job-1", "alices-best"
# Nobody asks for these words, so an answer that holds one tells what it should not.
SECRETS = ("row-of-alice", "log-of-alice", "0.4242")
ROWS = [{"prompt": "row-of-alice", "completion": "x"}]
CHAT = [{"role": "user", "content": "hello"}]


@dataclass
class Shared:
    """A stack that two keys share: `alice` has made things, `bob` has not."""

    http: httpx.AsyncClient
    app: Any
    jobs: JobServer
    keys: dict[str, str]

    async def ask(self, who: str, method: str, path: str, **options: Any) -> httpx.Response:
        return await self.http.request(method, path, headers=bearer(self.keys[who]), **options)

    async def json(self, who: str, path: str) -> Any:
        answer = await self.ask(who, "GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    home = tmp_path / "home"
    listed = [{"dataset_id": "everybodys-data", "purpose": "post-training/messages", "source": {"rows": [{"a": 1}]}}]
    add_base(home / "models")
    async with asked_stack(home, ADMINISTRATORS_KEY, datasets=listed) as (http, app):
        jobs = JobServer(home)
        made = {name: ApiKeys(jobs.database).create(name) for name in ("alice", "bob")}
        keys = {"administrator": ADMINISTRATORS_KEY, **{name: key for name, (_, key) in made.items()}}
        await asyncio.sleep(1.0)
        stack = Shared(http, app, jobs, keys)
        await make_alices_things(stack, key_holder(made["alice"][0].id))
        yield stack
        jobs.database.close()


def add_base(models: Path) -> None:
    """A base model as an import leaves it."""
    (models / "base").mkdir(parents=True)
    (models / "base" / "postgrad-model.json").write_text('{"model_id": "base"}')
    (models / "base" / "config.json").write_text("{}")


async def make_alices_things(stack: Shared, alice: Caller) -> None:
    """A data set, a completed job with a checkpoint, and a name for its model."""
    body = {"dataset_id": DATA, "purpose": "post-training/messages", "source": {"type": "rows", "rows": ROWS}}
    assert (await stack.ask("alice", "POST", "/v1/datasets", json=body)).status_code == 200
    assert (await stack.ask("alice", "GET", "/v1/models/base")).status_code == 200
    with acting_as(alice):
        stack.jobs.submit(JOB)
    claimed = stack.jobs.leases.claim("here", (stack.jobs.scheduler.settings.slots[0],), {"torchtune", "provider"})
    owner = claimed.owner if claimed else ""
    stack.jobs.log(JOB, owner, "log-of-alice")
    stack.jobs.step(JOB, owner, 1, loss=0.4242)
    stack.jobs.checkpoint(JOB, owner, 1)
    stack.jobs.finish(JOB, owner)
    with acting_as(STACK), stack.jobs.database.session() as session:
        stack.jobs.models.mark_job_completed(session, JOB)
    settings = SessionSettings(token_sha256="0" * 64, lease_seconds=300, window=4)
    session_spec = make_spec(SESSION, "provider", "base").model_copy(update={"dataset": None, "session": settings})
    with acting_as(alice):
        stack.jobs.store.submit(session_spec, "body", max_queued=10)
    named = {"model_id": ALIAS, "provider_model_id": MODEL}
    assert (await stack.ask("alice", "POST", "/v1/models", json=named)).status_code == 200


# -- every route -----------------------------------------------------------------------------------------------------

PARAMETERS = {
    "job_uuid": JOB,
    "job_id": SESSION,
    "dataset_id": DATA,
    "model_id": MODEL,
    "step": "1",
    "name": "adapter/adapter_config.json",
    "provider_id": "localfs",
    "rows_in_page": "10",
}
TRAINING = {
    "n_epochs": 1,
    "data_config": {"dataset_id": DATA, "batch_size": 1, "shuffle": False, "data_format": "instruct"},
    "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-4, "weight_decay": 0.0, "num_warmup_steps": 0},
}
FIELDS: dict[str, Any] = {
    "job_uuid": "bobs-job",
    "uuid": JOB,
    "job_id": SESSION,
    "dataset_id": DATA,
    "model_id": MODEL,
    "model": MODEL,
    "messages": CHAT,
    "prompt": "hello",
    "content": "hello",
    "rows": [{"prompt": "more"}],
    "training_config": TRAINING,
    "algorithm_config": {"type": "LoRA", "rank": 8},
    "finetuned_model": MODEL,
    "source": {"type": "rows", "rows": [{"a": 1}]},
    "purpose": "post-training/messages",
    "hyperparam_search_config": {},
    "logger_config": {},
}


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    query: dict[str, str]
    body: dict[str, Any] | None

    @property
    def names_alices(self) -> bool:
        said = f"{self.path} {json.dumps(self.query)} {json.dumps(self.body)}"
        return any(name in said for name in (JOB, SESSION, DATA, MODEL))


def operations(app: Any) -> Iterator[Operation]:
    """Every route as the server describes it, asked about Alice's things wherever something is named."""
    document = app.openapi()
    for template, methods in document["paths"].items():
        path = re.sub(r"\{([^}:]*)[^}]*\}", lambda match: PARAMETERS.get(match[1], "x"), template)
        for method, operation in methods.items():
            parameters = [p for p in operation.get("parameters", []) if p["in"] == "query"]
            query = {p["name"]: PARAMETERS[p["name"]] for p in parameters if p["name"] in PARAMETERS}
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            body = None if content is None else filled(content["schema"], document, template)
            yield Operation(method.upper(), path, query, body)


def filled(schema: dict[str, Any], document: dict[str, Any], template: str) -> dict[str, Any]:
    """A body with all the fields of the schema that are known here."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    body = {name: FIELDS[name] for name in schema.get("properties", {}) if name in FIELDS}
    return {**body, "job_uuid": JOB} if "cancel" in template else body


async def test_another_key_is_told_on_every_route_that_there_is_no_such_thing(shared: Shared):
    before = await alices_view(shared)
    told: dict[str, int] = {}
    for operation in operations(shared.app):
        answer = await shared.ask("bob", operation.method, operation.path, params=operation.query, json=operation.body)
        said = f"{operation.method} {operation.path}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code < 500 or answer.status_code == 501, said
        assert not [secret for secret in SECRETS if secret in answer.text], said
        if operation.names_alices:
            told[f"{operation.method} {operation.path}"] = answer.status_code
            assert answer.status_code in (400, 404, 501), said
            if answer.status_code == 400:
                assert "taken" in answer.text or "invalid_field" in answer.text, said
        else:
            assert "alice" not in answer.text, said
    # Each kind of thing was asked for by several routes, and refused because of whose it is.
    assert sum(status == 404 for status in told.values()) >= 40, told
    assert await alices_view(shared) == before


async def alices_view(shared: Shared) -> list[Any]:
    """All that Alice can read of her things."""
    paths = ["/v1alpha/post-training/jobs", f"/v1alpha/post-training/jobs/{JOB}/status", "/v1/datasets", "/v1/models"]
    paths += [f"/v1/datasetio/iterrows/{DATA}", f"/v1alpha/post-training/jobs/{JOB}/logs", f"/v1/models/{ALIAS}"]
    return [await shared.json("alice", path) for path in paths]


async def test_the_owner_gets_all_of_it_on_the_same_routes(shared: Shared):
    seen = 0
    for operation in operations(shared.app):
        if operation.method != "GET" or not operation.names_alices:
            continue
        answer = await shared.ask("alice", "GET", operation.path, params=operation.query)
        assert answer.status_code == 200, (operation.path, answer.text)
        assert answer.content
        seen += 1
    assert seen >= 20
    log = await shared.ask("alice", "GET", f"/v1alpha/post-training/jobs/{JOB}/logs")
    assert "log-of-alice" in log.text


async def test_lists_show_what_is_ones_own_and_what_is_everybodys(shared: Shared):
    lists = {
        "/v1alpha/post-training/jobs": ("job_uuid", {"alice": {JOB, SESSION}, "bob": set()}),
        "/v1/datasets": ("identifier", {"alice": {DATA, "everybodys-data"}, "bob": {"everybodys-data"}}),
        "/v1/models": ("identifier", {"alice": {"base", MODEL, ALIAS}, "bob": {"base"}}),
    }
    for path, (name, expected) in lists.items():
        for who in ("alice", "bob", "administrator"):
            found = {item[name] for item in (await shared.json(who, path))["data"]}
            assert found == expected.get(who, expected["alice"]), (path, who)
    assert (await shared.json("bob", "/v1alpha/post-training/jobs?limit=5"))["data"] == []
    sessions = [(await shared.json(who, "/list_jobs"))["jobs"] for who in ("alice", "bob", "administrator")]
    assert [len(listed) for listed in sessions] == [1, 0, 1]
    behind = await shared.ask("bob", "GET", f"/v1alpha/post-training/jobs?limit=5&after={JOB}")
    assert (behind.status_code, behind.json()["error"]["param"]) == (400, "after")


async def test_an_id_that_another_has_is_taken_and_nothing_else_is_told(shared: Shared):
    data = {"dataset_id": DATA, "purpose": "post-training/messages", "source": {"type": "rows", "rows": ROWS}}
    # The very same request: the same answer as the first time would say that it was guessed rightly.
    same = await shared.ask("bob", "POST", "/v1/datasets", json=data)
    other = await shared.ask("bob", "POST", "/v1/datasets", json={**data, "source": {"rows": [{"a": 1}]}})
    assert same.status_code == 400
    assert same.json() == other.json()
    assert same.json()["error"]["code"] == "conflict"
    assert not [secret for secret in SECRETS if secret in same.text]
    model = await shared.ask("bob", "POST", "/v1/models", json={"model_id": ALIAS, "provider_model_id": "base"})
    assert (model.status_code, model.json()["error"]["code"]) == (400, "conflict")
    assert MODEL not in model.text


async def test_what_is_everybodys_is_changed_by_the_administrator_only(shared: Shared):
    append = ("POST", "/v1/datasetio/append-rows/everybodys-data", {"rows": [{"a": 2}]})
    metadata = ("POST", "/v1/models", {"model_id": "base", "metadata": {"mine": 1}})
    for method, path, body in (
        append,
        metadata,
        ("DELETE", "/v1/datasets/everybodys-data", None),
        ("DELETE", "/v1/models/base", None),
    ):
        refused = await shared.ask("bob", method, path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
        assert refused.headers["x-should-retry"] == "false"
        assert (await shared.ask("administrator", method, path, json=body)).status_code < 300, path
    # To use it, and to register it as it is, is free.
    again = await shared.ask("bob", "POST", "/v1/models", json={"model_id": "base"})
    assert again.status_code in (200, 404)


async def test_the_administrator_sees_and_changes_what_keys_own(shared: Shared):
    assert (await shared.json("administrator", f"/v1/datasetio/iterrows/{DATA}"))["data"] == ROWS
    assert (await shared.json("administrator", f"/v1alpha/post-training/jobs/{JOB}/status"))["status"] == "completed"
    assert (await shared.ask("administrator", "DELETE", f"/v1alpha/post-training/jobs/{JOB}")).status_code == 204
    left = (await shared.json("alice", "/v1alpha/post-training/jobs"))["data"]
    assert [job["job_uuid"] for job in left] == [SESSION]
    # And what it makes is its own.
    body = {"dataset_id": "admins", "purpose": "post-training/messages", "source": {"rows": [{"a": 1}]}}
    assert (await shared.ask("administrator", "POST", "/v1/datasets", json=body)).status_code == 200
    assert (await shared.ask("alice", "GET", "/v1/datasets/admins")).status_code == 404


async def test_requests_at_the_same_time_are_not_taken_for_each_other(shared: Shared):
    async def jobs_of(who: str) -> tuple[str, int]:
        return who, len((await shared.json(who, "/v1/post-training/jobs"))["data"])

    who = list(itertools.islice(itertools.cycle(["alice", "bob", "administrator"]), 150))
    expected = {"alice": 2, "bob": 0, "administrator": 2}
    assert all(count == expected[name] for name, count in await asyncio.gather(*map(jobs_of, who)))


async def test_a_revoked_keys_things_stay_for_the_administrator(shared: Shared):
    key_id = next(row.id for row in ApiKeys(shared.jobs.database).all() if row.name == "alice")
    ApiKeys(shared.jobs.database).revoke(key_id)
    await asyncio.sleep(1.0)
    assert (await shared.ask("alice", "GET", "/v1/models")).status_code == 401
    assert (await shared.json("administrator", f"/v1/datasets/{DATA}"))["identifier"] == DATA


def test_the_health_routes_are_those_that_the_server_keeps_open():
    from distributions.authentication import OPEN_PATHS

    assert HEALTH == OPEN_PATHS


# -- in the store ----------------------------------------------------------------------------------------------------

ALICE, BOB = key_holder("key_a"), key_holder("key_b")


@contextmanager
def refused_as(kind: type[Exception], caller: Caller) -> Iterator[None]:
    with acting_as(caller), pytest.raises(kind):
        yield


def test_a_job_exists_for_its_owner_and_the_administrator(database: Database):
    store = JobStore(database)
    with acting_as(ALICE):
        store.submit(make_spec("a"), "body", max_queued=9)
        assert not store.submit(make_spec("a"), "body", max_queued=9)
        assert store.find_submitted("a", "body")
    for caller in (ALICE, ADMINISTRATOR, STACK):
        with acting_as(caller):
            assert store.get("a").owned_by == "key_a"
            assert [job.job_uuid for job in store.page(order=ListOrder.desc).jobs] == ["a"]
    asks = [store.get, store.newest_event, store.request_cancel, lambda job: store.events(job, 0)]
    asks += [lambda job: store.metrics(job, 0, 9), lambda job: store.last_events(job, 9)]
    asks += [lambda job: store.delete(job, lambda _session: None)]
    for ask in asks:
        with refused_as(JobNotFound, BOB):
            ask("a")
    with acting_as(BOB):
        for body in ("body", "another"):
            with pytest.raises(Conflict) as caught:
                store.submit(make_spec("a"), body, max_queued=9)
            assert caught.value.message == "the id 'a' is taken; choose another job_uuid"
            with pytest.raises(Conflict):
                store.find_submitted("a", body)
        assert store.page().jobs == []
    assert store.get("a").status == JobStatus.scheduled


def test_a_list_of_ones_own_jobs_is_read_from_an_index(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.migrate()
    with database.reading() as session:
        for order in ("", "DESC"):
            query = f"SELECT job_uuid FROM jobs WHERE owned_by = 'k' ORDER BY sequence {order} LIMIT 9"
            plan = " ".join(str(row) for row in session.execute(text(f"EXPLAIN QUERY PLAN {query}")))
            assert "jobs_by_owner" in plan
            assert "TEMP B-TREE" not in plan
    database.close()


async def test_a_data_set_is_its_owners_until_the_run_yaml_lists_it(database: Database, tmp_path: Path):
    catalog = DatasetCatalog(database, tmp_path)
    catalog.attach_sources([LocalFiles("localfs", LocalFSConfig(), [tmp_path])])
    request = RegisterDatasetRequest(dataset_id="d", source=RowsDataSource(rows=ROWS))
    with acting_as(ALICE):
        made = await catalog.register_dataset(request)
        assert catalog.reference("d").dataset_id == "d"
    with refused_as(DatasetNotFound, BOB):
        catalog.reference("d")
    for ask in (catalog.get_dataset("d"), catalog.iterrows("d"), catalog.append_rows("d", ROWS)):
        with refused_as(DatasetNotFound, BOB):
            await ask
    # A listed one is everybody's to read, and stays so when the stack starts again.
    for _ in range(2):
        with acting_as(STACK):
            assert await catalog.register_dataset(request) == made
        with acting_as(BOB):
            assert catalog.reference("d").dataset_id == "d"
            assert await catalog.register_dataset(request) == made
        with refused_as(Forbidden, BOB):
            await catalog.unregister_dataset("d")


async def test_of_those_who_take_an_id_at_once_one_gets_it_and_the_others_hear_that_it_is_taken(
    database: Database, tmp_path: Path
):
    catalog = DatasetCatalog(database, tmp_path)
    catalog.attach_sources([LocalFiles("localfs", LocalFSConfig(), [tmp_path])])
    request = RegisterDatasetRequest(dataset_id="d", source=RowsDataSource(rows=ROWS))

    async def register(caller: Caller) -> str:
        with acting_as(caller):
            try:
                return (await catalog.register_dataset(request)).identifier
            except Conflict as error:
                return error.message

    callers = [key_holder(f"key_{n}") for n in range(8)]
    answers = await asyncio.gather(*map(register, callers))
    assert sorted(answers) == ["d"] + ["the id 'd' is taken: choose another one"] * 7
    assert len(list((tmp_path / "datasets" / "d").iterdir())) == 1


def models_with_jobs(database: Database, home: Path) -> ModelCatalog:
    """A base model, and a completed job on it of each of two owners, Bob's the newer."""
    models, store = ModelCatalog(database, home), JobStore(database)
    with database.session() as session:
        models.add_base(session, "base", home / "models" / "base", {})
    for caller, job in ((ALICE, "a"), (BOB, "b")):
        with acting_as(caller):
            store.submit(make_spec(job), "body", max_queued=9)
        with database.session() as session:
            models.add_checkpoint(
                session,
                identifier=f"base-sft-{job}-0",
                job_uuid=job,
                epoch=0,
                step=1,
                directory=home / "jobs" / job / "checkpoints" / "1",
                model="base",
                base_identifier="base",
                base_dir=home / "models" / "base",
            )
            models.mark_job_completed(session, job)
    return models


def found(models: ModelCatalog, caller: Caller, name: str) -> str:
    with acting_as(caller):
        return models._found(name).identifier


def test_a_jobs_model_is_its_owners_and_the_short_name_means_each_ones_own(database: Database, tmp_path: Path):
    models = models_with_jobs(database, tmp_path)
    assert found(models, ALICE, "base-sft-0") == "base-sft-a-0"
    assert found(models, BOB, "base-sft-0") == "base-sft-b-0"
    assert found(models, ADMINISTRATOR, "base-sft-0") == "base-sft-b-0"
    for caller, others in ((ALICE, "base-sft-b-0"), (BOB, "base-sft-a-0")):
        with refused_as(ModelNotFound, caller):
            models._found(others)
    with acting_as(key_holder("key_c")), pytest.raises(ModelNotFound) as caught:
        models._found("base-sft-0")
    assert "base-sft-a-0" not in caught.value.message


async def test_a_name_that_a_key_gave_takes_nothing_from_the_administrator(database: Database, tmp_path: Path):
    """Neither another name of a base model, nor the short one of a checkpoint, nor a place in the run.yaml."""
    models = models_with_jobs(database, tmp_path)
    with database.session() as session:
        models.add_base(session, "Llama3.2-3B-Instruct", tmp_path / "models" / "llama", {})
    names = ("meta-llama/Llama-3.2-3B-Instruct", "base-sft-0", "free")
    for name in names:
        with acting_as(ALICE):
            await models.register_model(RegisterModelRequest(model_id=name, provider_model_id="base-sft-a-0"))
        assert found(models, ALICE, name) == "base-sft-a-0"
    assert found(models, ADMINISTRATOR, names[0]) == "Llama3.2-3B-Instruct"
    assert found(models, BOB, names[0]) == "Llama3.2-3B-Instruct"
    assert found(models, ADMINISTRATOR, names[1]) == "base-sft-b-0"
    assert found(models, ADMINISTRATOR, names[2]) == "base-sft-a-0"


async def test_each_key_can_register_its_own_checkpoint_under_the_short_name(database: Database, tmp_path: Path):
    """As clients of Llama Stack do after a job, to chat with what it trained."""
    models = models_with_jobs(database, tmp_path)
    request = RegisterModelRequest(model_id="base-sft-0", metadata={"llama_model": "base"})
    for caller, own_checkpoint in ((ALICE, "base-sft-a-0"), (BOB, "base-sft-b-0"), (ALICE, "base-sft-a-0")):
        with acting_as(caller):
            registered = await models.register_model(request)
        assert registered.identifier == "base-sft-0"
        assert found(models, caller, "base-sft-0") == own_checkpoint
    with refused_as(Conflict, BOB):
        await models.register_model(RegisterModelRequest(model_id="base-sft-0", provider_model_id="base"))


def test_an_id_that_another_has_is_refused_whoever_asks(database: Database, tmp_path: Path):
    """As it is to a job that gives a directory and an id for what lies there."""
    models = models_with_jobs(database, tmp_path)
    for name in ("base", "base-sft-a-0"):
        with refused_as(Conflict, BOB):
            models.refuse_hidden(name)
    with acting_as(BOB):
        models.refuse_hidden("free")


async def test_a_name_in_the_run_yaml_shares_a_jobs_model(database: Database, tmp_path: Path):
    models = models_with_jobs(database, tmp_path)
    with acting_as(ALICE):
        await models.register_model(RegisterModelRequest(model_id="mine", provider_model_id="base-sft-a-0"))
    with refused_as(ModelNotFound, BOB):
        models._found("mine")
    for name in ("best", "mine"):
        with acting_as(STACK):
            await models.register_model(RegisterModelRequest(model_id=name, provider_model_id="base-sft-a-0"))
        assert found(models, BOB, name) == "base-sft-a-0"
        with refused_as(Forbidden, BOB):
            await models.unregister_model(name)
    with refused_as(ModelNotFound, BOB):
        models._found("base-sft-a-0")


async def test_nobody_can_take_the_name_of_a_checkpoint_to_come_of_anothers_job(database: Database, tmp_path: Path):
    models = models_with_jobs(database, tmp_path)
    for name in ("base-sft-a-1", "x-sft-a-7", "base-sft-a-step3", "base-dpo-a-1"):
        with refused_as(Conflict, BOB):
            await models.register_model(RegisterModelRequest(model_id=name, provider_model_id="base"))
    with acting_as(BOB):
        for name in ("base-sft-b-1", "base-sft-c-1", "a-sft", "sft-a-1"):
            await models.register_model(RegisterModelRequest(model_id=name, provider_model_id="base"))

"""What goes wrong is told on every dialect's routes in the envelope that its clients read, and never retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from distributions.methods import Methods
from distributions.resolver import plan
from distributions.run_config import StackRunConfig
from distributions.server import create_app
from distributions.stack import build_stack
from post_training.jobs.store import JobStore
from tests.dialect_server import BASE, DialectServer, dialects
from tests.recorded_requests import ADAPTER, FINE_TUNE_0_0_61, FINE_TUNE_CLI, FINE_TUNE_SDK
from tests.tiny_llama import save_tiny_llama

__all__ = ["dialects"]

JOB = {"job_uuid": "no/such"}
UNKNOWN: list[tuple[str, str, dict[str, Any] | None, str]] = [
    *(
        (method, f"/{version}/post-training/{tail}", body, "job_not_found")
        for version in ("alpha", "v1", "v1alpha")
        for method, tail, body in (
            ("GET", "job/status?job_uuid=no/such", None),
            ("GET", "job/artifacts?job_uuid=no/such", None),
            ("POST", "job/cancel", JOB),
        )
    ),
    ("GET", "/alpha/post-training/job/logs?job_uuid=no/such", None, "job_not_found"),
    *(
        (method, f"/{version}/post-training/jobs/no/such/{verb}", None, "job_not_found")
        for version in ("v1", "v1alpha")
        for method, verb in (("GET", "status"), ("GET", "artifacts"), ("GET", "logs"), ("POST", "cancel"))
    ),
    ("GET", "/alpha/datasets/get?dataset_id=no/such", None, "dataset_not_found"),
    ("POST", "/alpha/datasets/unregister", {"dataset_id": "no/such"}, "dataset_not_found"),
    ("GET", "/alpha/datasetio/get-rows-paginated?dataset_id=no/such", None, "dataset_not_found"),
    ("POST", "/alpha/datasetio/append-rows", {"dataset_id": "no/such", "rows": []}, "dataset_not_found"),
    ("GET", "/v1/datasetio/rows?dataset_id=no/such&rows_in_page=1", None, "dataset_not_found"),
    *(
        (method, f"/{version}/{path}/no/such", body, "dataset_not_found")
        for version in ("v1", "v1beta")
        for method, path, body in (
            ("GET", "datasets", None),
            ("DELETE", "datasets", None),
            ("GET", "datasetio/iterrows", None),
            ("POST", "datasetio/append-rows", {"rows": []}),
        )
    ),
    ("GET", "/alpha/models/get?identifier=no/such", None, "model_not_found"),
    ("POST", "/alpha/models/unregister", {"model_id": "no/such"}, "model_not_found"),
    *(
        (method, f"{prefix}/models/no/such", None, "model_not_found")
        for prefix in ("/v1", "/v1/openai/v1")
        for method in ("GET", "DELETE")
    ),
    *(
        ("POST", f"/{version}/inference/chat-completion", body, "model_not_found")
        for version in ("alpha", "v1")
        for body in (
            {"model_id": "no/such", "messages": [{"role": "user", "content": "hi"}]},
            {"model_id": "no/such", "messages": [{"role": "user", "content": "hi"}], "stream": True},
        )
    ),
    ("POST", "/v1/inference/completion", {"model_id": "no/such", "content": "hi"}, "model_not_found"),
    *(
        ("POST", f"{prefix}/completions", {"model": "no/such", "prompt": "hi"}, "model_not_found")
        for prefix in ("/v1", "/v1/openai/v1")
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "code"), UNKNOWN)
def test_what_does_not_exist_is_a_404_on_every_dialects_route(
    dialects: DialectServer, method: str, path: str, body: dict[str, Any] | None, code: str
):
    answer = dialects.http.request(method, path, json=body)
    assert answer.status_code == 404, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == code
    assert "no/such" in error["message"]


OLD = FINE_TUNE_0_0_61
SUBMIT = "post-training/supervised-fine-tune"
INVALID: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("/alpha/" + SUBMIT, OLD | {"job_uuid": "../x"}, ["job_uuid"]),
    ("/alpha/" + SUBMIT, OLD | {"optimizer_config": {"lr": -1}}, ["optimizer_config", "lr"]),
    ("/alpha/" + SUBMIT, OLD | {"optimizer_config": {"lr": 0.1, "lr_min": 0.2}}, ["optimizer_config"]),
    ("/alpha/" + SUBMIT, OLD | {"training_config": {"batch_size": 0}}, ["training_config", "batch_size"]),
    ("/alpha/" + SUBMIT, OLD | {"training_config": {"max_steps": 1}}, ["training_config", "max_steps"]),
    ("/alpha/" + SUBMIT, OLD | {"algorithm": "rlhf"}, ["algorithm"]),
    ("/alpha/" + SUBMIT, OLD | {"algorithm_config": ADAPTER | {"rank": 0}}, ["algorithm_config", "rank"]),
    ("/alpha/" + SUBMIT, OLD | {"logger_config": {"a": 1}}, ["logger_config"]),
    ("/alpha/" + SUBMIT, FINE_TUNE_SDK | {"algorithm_config": ADAPTER | {"rank": 0}}, ["algorithm_config", "rank"]),
    ("/alpha/" + SUBMIT, {"model": "m"}, ["job_uuid"]),
    ("/v1/" + SUBMIT, FINE_TUNE_SDK | {"algorithm_config": ADAPTER | {"rank": 0}}, ["algorithm_config", "rank"]),
    ("/v1/" + SUBMIT, FINE_TUNE_CLI | {"training_config": '{"n_epochs": 0}'}, ["training_config", "n_epochs"]),
    ("/v1alpha/" + SUBMIT, FINE_TUNE_SDK | {"nonsense": 1}, ["nonsense"]),
    ("/v1/datasets", {"dataset_id": "d", "source": {"type": "uri"}}, ["source", "uri"]),
    ("/v1beta/datasets", {"dataset_id": "d"}, ["source"]),
    ("/alpha/datasets/register", {"dataset_id": "d", "url": {"uri": ""}}, ["url", "uri"]),
    ("/v1/inference/chat-completion", {"model_id": BASE, "messages": []}, ["messages"]),
    ("/v1/inference/completion", {"model_id": BASE}, ["content"]),
]


@pytest.mark.parametrize(("path", "body", "where"), INVALID)
def test_an_invalid_field_is_a_400_in_llama_stacks_envelope(
    dialects: DialectServer, path: str, body: dict[str, Any], where: list[str]
):
    before = dict(dialects.ledger.jobs)
    answer = dialects.http.post(path, json=body)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    error = answer.json()["error"]
    assert error["param"] == ".".join(where)
    fault = error["detail"]["errors"][0]
    assert (fault["loc"], set(fault)) == (["body", *where], {"loc", "msg", "type"})
    assert dialects.ledger.jobs == before


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/alpha/" + SUBMIT, OLD | {"algorithm": "full"}, 501, "algorithm"),
        ("/v1/" + SUBMIT, FINE_TUNE_CLI | {"training_config": "{n_epochs: 1}"}, 400, "training_config"),
        ("/v1/models", {"model_id": "x", "metadata": "{"}, 400, "metadata"),
        ("/v1/datasets", {"dataset_id": "d", "url": {"uri": "a.csv"}, "provider_dataset_id": "e"}, 400, None),
        ("/v1/datasets", {"dataset_id": "d", "source": {"rows": [{}]}, "provider_id": "nobody"}, 400, None),
    ],
)
def test_what_a_translation_refuses_is_named(
    dialects: DialectServer, path: str, body: dict[str, Any], status: int, param: str | None
):
    answer = dialects.http.post(path, json=body)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")
    assert answer.json()["error"]["param"] == (param or answer.json()["error"]["param"])
    assert answer.json()["error"]["param"]


@pytest.mark.parametrize("prefix", ["/v1", "/v1/openai/v1"])
def test_openais_client_reads_every_error(dialects: DialectServer, prefix: str):
    client = openai.OpenAI(base_url=f"{dialects.url}{prefix}", api_key="unused", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="no/such") as unknown:
        client.chat.completions.create(model="no/such", messages=messages)
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.chat.completions.create(model=BASE, messages=messages, temperature=3)
    with pytest.raises(openai.NotFoundError, match="no/such") as model:
        client.models.retrieve("no/such")
    for caught, code in ((unknown, "model_not_found"), (wrong, "invalid_field"), (model, "model_not_found")):
        assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
    assert wrong.value.param == "temperature"
    assert BASE in [found.id for found in client.models.list()]
    client.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1alpha/post-training/jobs/j/nonsense"),
        ("GET", "/v1/post-training/jobs/org/j"),
        ("POST", "/v1alpha/post-training/jobs/j/retry"),
        ("HEAD", "/v1alpha/post-training/jobs/j/nonsense"),
        ("GET", "/alpha/post-training/nonsense"),
        ("GET", "/v2/models"),
        ("OPTIONS", "/v2/models"),
        ("OPTIONS", "/nothing"),
    ],
)
def test_a_route_that_does_not_exist_is_a_404(dialects: DialectServer, method: str, path: str):
    answer = dialects.http.request(method, path)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
    assert method == "HEAD" or answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/models", "GET, HEAD, POST, OPTIONS"),
        ("GET", "/v1/post-training/jobs/j/cancel", "POST, DELETE, OPTIONS"),
        ("DELETE", "/v1/chat/completions", "POST, OPTIONS"),
        ("POST", "/v1/datasets/d", "GET, HEAD, DELETE, OPTIONS"),
    ],
)
def test_a_method_that_a_route_does_not_take_is_a_405_that_tells_which_it_takes(
    dialects: DialectServer, method: str, path: str, allowed: str
):
    answer = dialects.http.request(method, path)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (405, "false")
    assert answer.headers["allow"] == allowed


def test_options_tells_the_methods_of_a_path_and_nothing_else(dialects: DialectServer):
    answer = dialects.http.options("/v1/models/acme/tiny")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["allow"] == "GET, HEAD, DELETE, OPTIONS"
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("path", ["/v1/health", "/v1/models", "/openapi.json", "/v1/models/no/such", "/alpha/health"])
def test_head_is_get_without_its_body(dialects: DialectServer, path: str):
    head, get = dialects.http.head(path), dialects.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


async def test_head_of_a_stream_without_end_ends():
    closed = False

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal closed
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-stream", b"1")]})
            while True:
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
        finally:
            closed = True

    class Endless:
        routes = [Route("/events", lambda _: Response(), methods=["POST"])]

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await Methods(endless)({**scope, "app": self}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(Endless()), base_url="http://localhost") as http:
        answer = await asyncio.wait_for(http.head("/events"), 5)
    assert (answer.status_code, answer.headers["x-stream"], answer.content) == (200, "1", b"")
    assert closed


# -- the same id again, over the real job store ------------------------------------------------------------------------


@pytest_asyncio.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, JobStore]]:
    """A stack with torchtune whose scheduler is never started, so that jobs are accepted and stay as they are."""
    providers = {
        "post_training": [{"provider_id": "torchtune", "provider_type": "inline::torchtune"}],
        "datasetio": [{"provider_id": "localfs", "provider_type": "inline::localfs"}],
    }
    config = StackRunConfig.model_validate({"image_name": "jobs", "providers": providers})
    config._environ = {"POSTGRAD_HOME": str(tmp_path / "home")}
    stack = await build_stack(config, plan(config))
    with stack.database.session() as session:
        stack.models.add_base(session, "m", save_tiny_llama(tmp_path / "tiny"), {})
    app = create_app(stack)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for dataset in "dv":
            rows = {"dataset_id": dataset, "source": {"rows": [{"prompt": "a", "completion": "b"}]}}
            assert (await http.post("/v1/datasets", json=rows)).status_code == 200
        yield http, JobStore(stack.database)
    stack.database.close()
    stack.lock.close()


DIALECTS = [
    ("/alpha", FINE_TUNE_0_0_61, "n_iters"),
    ("/alpha", FINE_TUNE_SDK, "max_steps_per_epoch"),
    ("/v1", FINE_TUNE_SDK, "max_steps_per_epoch"),
    ("/v1alpha", FINE_TUNE_SDK, "max_steps_per_epoch"),
]


async def test_the_same_job_from_another_client_answers_as_the_first_time_and_another_one_is_a_400(
    jobs: tuple[httpx.AsyncClient, JobStore],
):
    http, store = jobs
    for prefix, body, _ in [*DIALECTS, ("/v1", FINE_TUNE_CLI, "")]:
        answer = await http.post(f"{prefix}/{SUBMIT}", json=body)
        assert (answer.status_code, answer.json()) == (200, {"job_uuid": "1234"}), answer.text
    stored = store.get("1234").spec
    assert len((await http.get("/v1alpha/post-training/jobs")).json()["data"]) == 1
    for prefix, body, steps in DIALECTS:
        other = body | {"training_config": body["training_config"] | {steps: 11}}
        answer = await http.post(f"{prefix}/{SUBMIT}", json=other)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("conflict", "job_uuid")
    assert store.get("1234").spec == stored


async def test_an_unknown_model_or_data_set_of_a_job_is_a_404_from_every_client(
    jobs: tuple[httpx.AsyncClient, JobStore],
):
    http, _ = jobs
    for prefix, body, steps in DIALECTS:
        answer = await http.post(f"{prefix}/{SUBMIT}", json=body | {"model": "no/such"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        data = {"dataset_id": "no/such"}
        if steps == "n_iters":
            missing = body | data
        else:
            config = body["training_config"]
            missing = body | {"training_config": config | {"data_config": config["data_config"] | data}}
        answer = await http.post(f"{prefix}/{SUBMIT}", json=missing)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "dataset_not_found")

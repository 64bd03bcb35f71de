"""The server over HTTP: routes, envelopes, limits, keys, start, stop."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel

from apis.common import Api
from apis.errors import DataInvalid, JobNotFound, NotSupported, QueueFull, RunConfigInvalid, StackError
from apis.post_training import (
    JobStatus,
    JobSummary,
    ListOrder,
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)
from distributions import stack as stack_module
from distributions.resolver import plan
from distributions.run_config import StackRunConfig
from distributions.server import create_app
from distributions.stack import Stack, build_stack
from post_training.jobs import scheduler
from providers.registry import BUILT_IN
from providers.spec import ProviderDeps, ProviderSpec


class NotebookConfig(BaseModel):
    api_key: str = "sesame"


class Notebook:
    """A post_training provider that writes jobs down and never runs them."""

    def __init__(self) -> None:
        self.jobs: dict[str, SupervisedFineTuneRequest] = {}
        self.life: list[str] = []

    async def start(self) -> None:
        self.life.append("start")

    async def shutdown(self) -> None:
        self.life.append("shutdown")

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        match request.job_uuid:
            case "full":
                raise QueueFull("too many jobs wait")
            case "crash":
                raise RuntimeError("a secret in /etc/passwd")
            case "badrow":
                raise DataInvalid("role is missing", row=3, pointer="/messages/0", param="training_config")
        self.jobs[request.job_uuid] = request
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        raise NotSupported("no provider offers preference optimization")

    def _job(self, job_uuid: str) -> SupervisedFineTuneRequest:
        if job_uuid not in self.jobs:
            raise JobNotFound(f"there is no job {job_uuid!r}", param="job_uuid")
        return self.jobs[job_uuid]

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        at = datetime(2026, 1, 1, tzinfo=UTC)
        jobs = [JobSummary(job_uuid=i, status=JobStatus.scheduled, model="m", created_at=at) for i in self.jobs]
        return ListPostTrainingJobsResponse(data=jobs)

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return PostTrainingJobStatusResponse(job_uuid=self._job(job_uuid).job_uuid, status=JobStatus.scheduled)

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return PostTrainingJobArtifactsResponse(job_uuid=self._job(job_uuid).job_uuid)

    async def cancel_job(self, job_uuid: str) -> None:
        del self.jobs[self._job(job_uuid).job_uuid]

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        return PostTrainingJobLogStream(job_uuid=self._job(job_uuid).job_uuid, log_lines=[])

    async def _not_offered(self, *_: Any, **__: Any) -> Any:
        raise NotSupported("a notebook does not have that")

    delete_job = stream_job_events = get_job_metrics = preflight = list_checkpoint_files = find_checkpoint_file = (
        _not_offered
    )


class Notes:
    """What a test holds in its hands: the client, the app's stack, and the notebook behind it."""

    def __init__(self, http: httpx.AsyncClient, stack: Stack) -> None:
        self.http, self.stack = http, stack
        notebook = stack.impl(Api.post_training)
        self.notebook = notebook if isinstance(notebook, Notebook) else Notebook()


def notebook_spec(monkeypatch: pytest.MonkeyPatch) -> ProviderSpec:
    async def get_provider_impl(config: NotebookConfig, deps: ProviderDeps) -> Notebook:
        return Notebook()

    module = ModuleType("provider_notebook")
    vars(module).update(get_provider_impl=get_provider_impl, NotebookConfig=NotebookConfig)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return ProviderSpec(
        api=Api.post_training,
        provider_type="inline::notebook",
        module=module.__name__,
        config_class=f"{module.__name__}.NotebookConfig",
    )


def notebook_config(home: Path, **sections: Any) -> StackRunConfig:
    providers = {
        "post_training": [{"provider_id": "notebook", "provider_type": "inline::notebook"}],
        "datasetio": [{"provider_id": "localfs", "provider_type": "inline::localfs"}],
    }
    config = StackRunConfig.model_validate({"image_name": "notes", "providers": providers, **sections})
    config._environ = {"POSTGRAD_HOME": str(home)}
    return config


@asynccontextmanager
async def notes_of(
    monkeypatch: pytest.MonkeyPatch, home: Path, key: str | None, **sections: Any
) -> AsyncIterator[Notes]:
    config = notebook_config(home, **sections)
    stack = await build_stack(config, plan(config, [notebook_spec(monkeypatch), *BUILT_IN]))
    app = create_app(stack, key)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield Notes(http, stack)


@pytest_asyncio.fixture
async def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Notes]:
    async with notes_of(monkeypatch, tmp_path / "home", None, server={"max_body_bytes": 4096}) as made:
        yield made


@pytest_asyncio.fixture
async def locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Notes]:
    async with notes_of(monkeypatch, tmp_path / "home", "sesame") as made:
        yield made


def job(uuid: str = "j1", **fields: Any) -> dict[str, Any]:
    return {"job_uuid": uuid, "model": "m", **fields}


# -- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_jobs_are_served_in_both_url_styles_under_both_versions(notes: Notes, version: str):
    base = f"/{version}/post-training"
    body = job("org/j", training_config='{"n_epochs": 2}', algorithm_config={"rank": 4}, checkpoint_dir="null")
    assert (await notes.http.post(f"{base}/supervised-fine-tune", json=body)).json() == {"job_uuid": "org/j"}
    assert notes.notebook.jobs["org/j"].training_config.n_epochs == 2
    assert notes.notebook.jobs["org/j"].checkpoint_dir is None
    assert (await notes.http.get(f"{base}/jobs")).json()["data"][0]["job_uuid"] == "org/j"
    flat, path = f"{base}/job/status?job_uuid=org/j", f"{base}/jobs/org/j/status"
    assert (await notes.http.get(flat)).json() == (await notes.http.get(path)).json()
    flat, path = f"{base}/job/artifacts?job_uuid=org/j", f"{base}/jobs/org/j/artifacts"
    assert (await notes.http.get(flat)).json() == (await notes.http.get(path)).json() != {}
    assert (await notes.http.post(f"{base}/job/cancel", json={"job_uuid": "org/j"})).status_code == 204
    assert notes.notebook.jobs == {}


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_data_sets_are_served_under_both_versions_without_a_source_type(notes: Notes, version: str):
    rows = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(3)]
    made = await notes.http.post(f"/{version}/datasets", json={"dataset_id": "d", "source": {"rows": rows}})
    assert (made.status_code, made.json()["source"]["type"]) == (200, "rows")
    page = (await notes.http.get(f"/{version}/datasetio/iterrows/d?start_index=1&limit=1")).json()
    assert page["data"] == rows[1:2]
    assert (await notes.http.delete(f"/{version}/datasets/d")).status_code == 204


async def test_the_old_row_routes_page_and_append(notes: Notes):
    await notes.http.post("/v1/datasets", json={"dataset_id": "d", "source": {"rows": [{"n": 0}, {"n": 1}, {"n": 2}]}})
    appended = await notes.http.post("/v1/datasetio/rows", json={"dataset_id": "d", "rows": [{"n": 3}]})
    assert appended.status_code == 204
    seen, token = [], ""
    while token is not None:
        params = {"dataset_id": "d", "rows_in_page": 3, "page_token": token}
        page = (await notes.http.get("/v1/datasetio/rows", params=params)).json()
        assert page["total_count"] == len(page["rows"])
        seen, token = seen + page["rows"], page["next_page_token"]
    assert seen == [{"n": n} for n in range(4)]
    refused = await notes.http.get("/v1/datasetio/rows?dataset_id=d&filter_condition=n>1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "filter_condition")


async def test_inspection_tells_version_health_providers_and_routes(notes: Notes):
    assert (await notes.http.get("/v1/version")).json() == {"version": "0.1.0"}
    assert (await notes.http.get("/v1/health")).json() == {"status": "OK"}
    providers = (await notes.http.get("/v1/providers")).json()["data"]
    assert {p["provider_id"]: p["provider_type"] for p in providers} == {
        "localfs": "inline::localfs",
        "notebook": "inline::notebook",
    }
    assert (await notes.http.get("/v1/inspect/providers")).json()["data"] == providers
    routes = (await notes.http.get("/v1/inspect/routes")).json()["data"]
    entry = {
        "route": "/v1alpha/post-training/jobs/{job_uuid}/status",
        "method": "GET",
        "provider_types": ["inline::notebook"],
    }
    assert entry in routes
    assert (await notes.http.get("/v1/providers/nobody")).status_code == 404


async def test_a_stack_whose_store_is_broken_is_not_healthy(notes: Notes, tmp_path: Path):
    notes.stack.database.close()
    for file in (tmp_path / "home").glob("postgrad.db*"):
        file.write_bytes(b"no store" * 1000)
    answer = await notes.http.get("/v1/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    providers = (await notes.http.get("/v1/providers")).json()["data"]
    assert [provider["health"] for provider in providers] == [{"status": "Error"}] * 2


async def test_health_does_not_wait_for_a_store_that_hangs(notes: Notes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("distributions.stack.STORE_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("distributions.stack._reads", lambda database: time.sleep(1) or True)
    began = time.monotonic()
    assert (await notes.http.get("/v1/health")).status_code == 503
    assert time.monotonic() - began < 0.8


async def test_a_providers_secrets_are_not_shown(notes: Notes):
    assert (await notes.http.get("/v1/providers/notebook")).json()["config"] == {"api_key": "********"}


async def test_openapi_shows_the_bodies_and_no_operation_twice(notes: Notes):
    document = (await notes.http.get("/openapi.json")).json()
    for path, model in [
        ("/v1/post-training/supervised-fine-tune", "SupervisedFineTuneRequest"),
        ("/v1/datasets", "RegisterDatasetRequest"),
        ("/v1/post-training/job/cancel", "CancelJobRequest"),
    ]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{model}"}
    ids = [o["operationId"] for operations in document["paths"].values() for o in operations.values()]
    assert len(ids) == len(set(ids))


async def test_an_api_that_is_not_listed_is_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async with notes_of(monkeypatch, tmp_path / "home", None, apis=["datasetio"]) as notes:
        assert (await notes.http.get("/v1/post-training/jobs")).status_code == 404
        assert (await notes.http.get("/v1/datasets")).status_code == 200


# -- errors ----------------------------------------------------------------------------------------------------------


async def test_an_unknown_job_is_404_in_the_envelope_on_every_route(notes: Notes):
    base = "/v1/post-training"
    answers = [
        await notes.http.get(f"{base}/job/status?job_uuid=x"),
        await notes.http.get(f"{base}/job/artifacts?job_uuid=x"),
        await notes.http.post(f"{base}/job/cancel", json={"job_uuid": "x"}),
        await notes.http.get(f"{base}/jobs/x/status"),
        await notes.http.get(f"{base}/jobs/x/logs"),
    ]
    message = "there is no job 'x'"
    for answer in answers:
        assert answer.status_code == 404
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json() == {
            "error": {"code": "job_not_found", "message": message, "param": "job_uuid"},
            "detail": message,
        }


SUBMIT = "/v1/post-training/supervised-fine-tune"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (job(trainin_config={}), "trainin_config", "there is no such field"),
        (job(training_config={"n_epochs": 0}), "training_config.n_epochs", "greater than or equal to 1"),
        (job(training_config={"n_epochs": "many"}), "training_config.n_epochs", "valid integer"),
        (job(algorithm_config={"rank": -1}), "algorithm_config.rank", "greater than or equal to 1"),
        (job(algorithm_config={"type": "LoRA", "rank": -1}), "algorithm_config.rank", "greater than or equal to 1"),
        (job(algorithm_config={"type": "sesame"}), "algorithm_config", "'LoRA', 'Full', 'QAT'"),
        (job(logger_config={"a": 1}), "logger_config", "has no effect"),
        ({"model": "m"}, "job_uuid", "Field required"),
        (job(training_config="{"), "training_config", "does not hold JSON"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(notes: Notes, body: dict[str, Any], param: str, message: str):
    answer = await notes.http.post(SUBMIT, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_field", param)
    assert message in error["message"]
    assert "sesame" not in answer.text
    assert notes.notebook.jobs == {}


async def test_every_invalid_field_is_listed_with_its_place(notes: Notes):
    body = job(training_config={"n_epochs": 0, "seed": -1, "optimizer_config": {"lr": -3.25}})
    answer = await notes.http.post(SUBMIT, json=body)
    faults = answer.json()["error"]["detail"]["errors"]
    assert [fault["loc"] for fault in faults] == [
        ["body", "training_config", "n_epochs"],
        ["body", "training_config", "optimizer_config", "lr"],
        ["body", "training_config", "seed"],
    ]
    assert all(set(fault) == {"loc", "msg", "type"} for fault in faults)
    assert "3.25" not in answer.text


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"in": DEEP}
BAD_METADATA = ['{"x": "\\ud800"}', '{"\\udfff": 1}', '{"x": NaN}', '{"x": [1e999]}', json.dumps(DEEP)]


@pytest.mark.parametrize("metadata", BAD_METADATA, ids=lambda text: text[:20])
async def test_metadata_that_cannot_be_answered_is_refused_and_spoils_no_list(notes: Notes, metadata: str):
    source = '{"type": "rows", "rows": [{"n": 1}]}'
    headers = {"content-type": "application/json"}
    for path, others in (("/v1/datasets", f'"dataset_id": "d", "source": {source}'), ("/v1/models", '"model_id": "m"')):
        body = f'{{{others}, "metadata": {metadata}}}'
        answer = await notes.http.post(path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
        assert (await notes.http.get(path)).json()["data"] == []


@pytest.mark.parametrize("field", ['"provider_id": "\\ud800"', '"provider_model_id": "\\ud800"', '"\\ud800": 1'])
async def test_text_that_is_no_text_is_refused(notes: Notes, field: str):
    headers = {"content-type": "application/json"}
    answer = await notes.http.post("/v1/models", content=f'{{"model_id": "m", {field}}}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_field")


@pytest.mark.parametrize("rows", ['[{"a": "\\ud800"}]', '[{"a": NaN}]', f'[{{"a": {json.dumps(DEEP)}}}]'])
async def test_rows_that_cannot_be_answered_are_refused(notes: Notes, rows: str):
    body = f'{{"dataset_id": "d", "source": {{"type": "rows", "rows": {rows}}}}}'
    answer = await notes.http.post("/v1/datasets", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "data_invalid")
    assert (await notes.http.get("/v1/datasets")).json() == {"data": []}


HUGE = "9" * 30


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/v1/datasetio/iterrows/d?start_index={HUGE}", 400),
        (f"/v1/datasetio/iterrows/d?limit={HUGE}", 400),
        ("/v1/datasetio/iterrows/d?start_index=-1", 400),
        ("/v1/datasetio/iterrows/d?limit=-2", 400),
        (f"/v1/datasetio/iterrows/d?start_index=1&limit={2**63 - 1}", 200),
        (f"/v1/datasetio/iterrows/d?start_index={2**63 - 1}", 200),
        (f"/v1/datasetio/rows?dataset_id=d&page_token={HUGE}", 400),
        (f"/v1/datasetio/rows?dataset_id=d&page_token={HUGE * 200}", 400),
        (f"/v1/datasetio/rows?dataset_id=d&rows_in_page={HUGE}", 400),
        (f"/v1/post-training/jobs/x/logs?after={HUGE}", 400),
        (f"/v1/models/tiny-sft-{HUGE}", 404),
        ("/v1/models/tiny" + "-sft-0" * 5000, 404),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_number_beyond_all_bounds_is_the_clients_fault(notes: Notes, path: str, status: int):
    await notes.http.post("/v1/datasets", json={"dataset_id": "d", "source": {"rows": [{"n": 0}, {"n": 1}]}})
    assert (await notes.http.get(path)).status_code == status


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b'"text"', b"null", b"[1]"])
async def test_a_body_that_is_no_json_object_is_a_400(notes: Notes, body: bytes):
    answer = await notes.http.post(SUBMIT, content=body[:4000], headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_a_body_of_another_type_is_told_which_is_wanted(notes: Notes):
    answer = await notes.http.post(SUBMIT, content=b"a=1", headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("PUT", "/v1/models", 405)])
async def test_an_unknown_route_is_answered_in_the_envelope(notes: Notes, method: str, path: str, status: int):
    answer = await notes.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == {404: "not_found", 405: "method_not_allowed"}[status]
    assert answer.json()["detail"] == answer.json()["error"]["message"]


async def test_a_full_queue_may_be_retried_later(notes: Notes):
    answer = await notes.http.post(SUBMIT, json=job("full"))
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers


async def test_what_nobody_offers_is_501_and_not_retried(notes: Notes):
    answer = await notes.http.post(
        "/v1/post-training/preference-optimize", json={"job_uuid": "j", "finetuned_model": "m"}
    )
    assert answer.status_code == 501
    assert answer.headers["x-should-retry"] == "false"


async def test_an_unforeseen_failure_tells_the_log_and_not_the_client(notes: Notes, caplog: pytest.LogCaptureFixture):
    answer = await notes.http.post(SUBMIT, json=job("crash"))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-should-retry"] == "false"
    assert len(answer.headers["x-trace-id"]) == 32
    assert "secret" not in answer.text
    assert "RuntimeError: a secret in /etc/passwd" in caplog.text


async def test_a_bad_row_is_named_by_number_and_pointer(notes: Notes):
    error = (await notes.http.post(SUBMIT, json=job("badrow"))).json()["error"]
    assert (error["code"], error["row"], error["pointer"]) == ("data_invalid", 3, "/messages/0")


async def test_every_answer_has_a_trace_id_of_its_own(notes: Notes):
    ids = [(await notes.http.get(path)).headers["x-trace-id"] for path in ("/v1/health", "/v1/health", "/nothing")]
    assert len(set(ids)) == 3
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in ids)


async def test_a_body_over_the_limit_is_413_whether_its_length_is_told_or_not(notes: Notes):
    big = json.dumps(job(model="m" * 5000)).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 500):
            yield big[start : start + 500]

    headers = {"content-type": "application/json"}
    for path in (SUBMIT, "/v1/models"):  # one whose body is translated and one whose is not
        for content in (big, in_pieces()):
            answer = await notes.http.post(path, content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


# -- keys and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "sesame", "Basic sesame", "Bearer sesame2"])
async def test_without_the_key_only_health_is_answered(locked: Notes, header: str | None):
    headers = {} if header is None else {"authorization": header}
    for path in ("/v1/models", "/v1/nothing", "/openapi.json"):
        answer = await locked.http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await locked.http.get("/v1/health", headers=headers)).status_code == 200


async def test_with_the_key_everything_is_answered(locked: Notes):
    assert (await locked.http.get("/v1/models", headers={"authorization": "Bearer sesame"})).status_code == 200


# -- building --------------------------------------------------------------------------------------------------------


async def test_the_lifespan_starts_and_stops_the_providers_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async with notes_of(monkeypatch, tmp_path / "home", None) as notes:
        notebook, stack = notes.notebook, notes.stack
        await stack.start()
        assert notebook.life == ["start"]
    await stack.shutdown()
    assert notebook.life == ["start", "shutdown"]


async def test_a_listed_data_set_is_read_by_the_provider_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    providers = {
        "post_training": [{"provider_id": "notebook", "provider_type": "inline::notebook"}],
        "datasetio": [{"provider_id": name, "provider_type": "inline::localfs"} for name in ("first", "second")],
    }
    listed = [{"dataset_id": "d", "source": {"type": "rows", "rows": [{"n": 1}]}, "provider_id": "second"}]
    for _ in range(2):
        async with notes_of(monkeypatch, tmp_path / "home", None, datasets=listed, providers=providers) as notes:
            assert (await notes.http.get("/v1/datasets/d")).json()["provider_id"] == "second"
    listed[0] |= {"dataset_id": "e", "provider_id": "notebook"}
    with pytest.raises(RunConfigInvalid, match=r"datasets\.0: "):
        async with notes_of(monkeypatch, tmp_path / "home", None, datasets=listed, providers=providers):
            pass


async def test_listed_data_sets_are_registered_at_every_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = {"type": "rows", "rows": [{"n": 1}]}
    listed = [{"dataset_id": "d", "source": source}, {"dataset_id": "e", "source": source, "provider_id": "elsewhere"}]
    for _ in range(2):
        async with notes_of(monkeypatch, tmp_path / "home", None, datasets=listed) as notes:
            data = (await notes.http.get("/v1/datasets")).json()["data"]
            assert [d["identifier"] for d in data] == ["d"]


async def test_a_listed_data_set_that_was_edited_keeps_its_stored_form_and_the_server_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for number in (1, 2):
        listed = [{"dataset_id": "d", "source": {"type": "rows", "rows": [{"n": number}]}}]
        async with notes_of(monkeypatch, tmp_path / "home", None, datasets=listed) as notes:
            assert (await notes.http.get("/v1/datasetio/iterrows/d")).json()["data"] == [{"n": 1}]
    assert "datasets.0: the stored one stays" in caplog.text


async def test_a_listed_model_that_is_not_there_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with pytest.raises(RunConfigInvalid, match=r"models\.0: .*nobody"):
        async with notes_of(monkeypatch, tmp_path / "home", None, models=[{"model_id": "nobody"}]):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_store_that_cannot_be_opened_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    store = "postgresql://user:hush@127.0.0.1:1/none"
    with pytest.raises(StackError, match="metadata_store") as caught:
        async with notes_of(monkeypatch, tmp_path / "home", None, metadata_store=store):
            pass
    assert "hush" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_provider_may_take_as_long_to_shut_down_as_jobs_need():
    # Once for the scheduler's thread and once for its workers.
    assert 2 * scheduler.STOP_GRACE_SECONDS < stack_module.PROVIDER_SHUTDOWN_SECONDS


async def test_a_provider_that_hangs_at_shutdown_does_not_keep_the_others_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("distributions.stack.PROVIDER_SHUTDOWN_SECONDS", 0.05)
    async with notes_of(monkeypatch, tmp_path / "home", None) as notes:
        other = next(built for built in notes.stack.providers if built.planned.api is Api.datasetio)
        monkeypatch.setattr(type(other.impl), "shutdown", lambda self: asyncio.sleep(60), raising=False)
        began = time.monotonic()
        await notes.stack.shutdown()
        assert time.monotonic() - began < 5
        assert notes.notebook.life == ["start", "shutdown"]


async def test_a_provider_that_does_not_start_is_named_and_the_others_are_shut_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    async def fail(self: object) -> None:
        raise OSError("no device")

    config = notebook_config(tmp_path / "home")
    stack = await build_stack(config, plan(config, [notebook_spec(monkeypatch), *BUILT_IN]))
    stack.providers.sort(key=lambda built: built.planned.api is not Api.post_training)
    monkeypatch.setattr(type(stack.providers[-1].impl), "start", fail, raising=False)
    with pytest.raises(
        StackError, match=r"providers\.datasetio\.0: provider localfs did not start: OSError: no device"
    ):
        await stack.start()
    assert stack.providers[0].impl.life == ["start", "shutdown"]

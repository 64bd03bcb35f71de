"""Every generation of clients at one server: what each was recorded to send means the same in the typed spec."""

from __future__ import annotations

from typing import Any

import pytest

from apis.post_training import DPOAlignmentConfig, JobStatus, SupervisedFineTuneRequest
from tests.dialect_server import BASE, DialectServer, dialects
from tests.recorded_requests import (
    ADAPTER,
    CALLS,
    DATASETS,
    FINE_TUNE_0_0_61,
    FINE_TUNES,
    PREFERENCES,
)

__all__ = ["dialects"]

SPEC = SupervisedFineTuneRequest.model_validate(
    {
        "job_uuid": "1234",
        "model": "m",
        "training_config": {
            "n_epochs": 1,
            "max_steps_per_epoch": 10,
            "data_config": {"dataset_id": "d", "batch_size": 2, "validation_dataset_id": "v"},
            "optimizer_config": {"lr": 0.0003, "weight_decay": 0.1},
        },
        "algorithm_config": ADAPTER,
    }
)


@pytest.mark.parametrize("client", FINE_TUNES)
def test_a_fine_tuning_request_means_the_same_from_every_client(dialects: DialectServer, client: str):
    prefix, body = FINE_TUNES[client]
    answer = dialects.http.post(f"{prefix}/post-training/supervised-fine-tune", json=body)
    assert (answer.status_code, answer.json()) == (200, {"job_uuid": "1234"})
    assert dialects.job("1234").model_dump(exclude_defaults=True) == SPEC.model_dump(exclude_defaults=True)


@pytest.mark.parametrize("client", PREFERENCES)
def test_a_preference_request_means_the_same_from_every_client(dialects: DialectServer, client: str):
    prefix, body = PREFERENCES[client]
    answer = dialects.http.post(f"{prefix}/post-training/preference-optimize", json=body)
    assert (answer.status_code, answer.json()) == (200, {"job_uuid": "1234"})
    got = dialects.ledger.preferences["1234"]
    assert (got.finetuned_model, got.algorithm_config) == ("m", DPOAlignmentConfig(beta=0.1))
    assert got.training_config.model_dump() == SPEC.training_config.model_dump()


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("lora", {}),
        ("qlora", {"quantize_base": True}),
        ("dora", {"use_dora": True}),
    ],
)
def test_the_oldest_algorithms_are_kinds_of_lora(dialects: DialectServer, algorithm: str, expected: dict[str, bool]):
    submit(dialects, algorithm=algorithm)
    config = dialects.job("old").algorithm_config
    assert config is not None
    assert config.model_dump(exclude_unset=True) == {**ADAPTER, **expected}


def test_the_oldest_rate_falls_to_lr_min(dialects: DialectServer):
    submit(dialects, optimizer_config={"optimizer_type": "sgd", "lr": 0.02, "lr_min": 0.005, "weight_decay": 0.0})
    config = dialects.job("old").training_config.optimizer_config
    assert (config.optimizer_type, config.lr, config.min_lr_ratio) == ("sgd", 0.02, 0.25)


def test_an_old_job_without_validation_iterations_or_model_is_left_to_the_defaults(dialects: DialectServer):
    submit(dialects, validation_dataset_id="", model="", training_config={"n_epochs": 2, "n_iters": 0})
    job = dialects.job("old")
    assert (job.model, job.training_config.max_steps_per_epoch) == (None, None)
    assert job.training_config.data_config is not None
    assert job.training_config.data_config.validation_dataset_id is None


def submit(server: DialectServer, **fields: Any) -> None:
    body = FINE_TUNE_0_0_61 | {"job_uuid": "old"} | fields
    answer = server.http.post("/alpha/post-training/supervised-fine-tune", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("state", "word", "code"),
    [
        (JobStatus.scheduled, "scheduled", None),
        (JobStatus.in_progress, "running", None),
        (JobStatus.completed, "completed", None),
        (JobStatus.failed, "failed", None),
        (JobStatus.cancelled, "failed", "cancelled"),
    ],
)
def test_alpha_tells_a_jobs_state_in_its_own_words(
    dialects: DialectServer, state: JobStatus, word: str, code: str | None
):
    submit(dialects)
    dialects.ledger.states["old"] = state
    status = dialects.http.get("/alpha/post-training/job/status", params={"job_uuid": "old"}).json()
    assert (status["job_uuid"], status["status"], status["checkpoints"]) == ("old", word, [])
    assert (status["error"] or {}).get("code") == code
    assert dialects.http.get("/v1/post-training/job/status?job_uuid=old").json()["status"] == state


def test_alpha_lists_reads_and_cancels_jobs_at_its_own_paths(dialects: DialectServer):
    submit(dialects, job_uuid="org/a")
    jobs = dialects.http.get("/alpha/post-training/jobs", headers={"accept": "application/jsonl"}).json()
    assert {"job_uuid": "org/a"} in jobs
    query = {"job_uuid": "org/a"}
    assert dialects.http.get("/alpha/post-training/job/logs", params=query).json()["log_lines"] == ["accepted"]
    artifacts = dialects.http.get("/alpha/post-training/job/artifacts", params=query).json()
    assert artifacts == {"job_uuid": "org/a", "checkpoints": []}
    assert dialects.http.post("/alpha/post-training/job/cancel", json=query).status_code == 204
    assert dialects.ledger.states["org/a"] is JobStatus.cancelled


@pytest.mark.parametrize("client", DATASETS)
def test_a_data_set_registered_by_any_client_can_be_read_by_all(dialects: DialectServer, client: str):
    path, body = DATASETS[client]
    rows = [{"prompt": p, "completion": c} for p, c in ("ab", "cd", "ef")]
    http = dialects.http
    assert http.post(path, json=body).status_code in (200, 204)
    try:
        pages = [
            http.get("/alpha/datasetio/get-rows-paginated?dataset_id=a%2Fb&rows_in_page=2&page_token=1").json(),
            http.get("/v1/datasetio/rows?dataset_id=a%2Fb&rows_in_page=2&page_token=1").json(),
        ]
        assert [page["rows"] for page in pages] == [rows[1:]] * 2
        for version in ("v1", "v1beta"):
            first = http.get(f"/{version}/datasetio/iterrows/a/b?limit=2&start_index=0").json()
            assert (first["data"], first["has_more"], first["next_start_index"]) == (rows[:2], True, 2)
            last = http.get(f"/{version}/datasetio/iterrows/a/b?limit=2&start_index=2").json()
            assert (last["data"], last["has_more"], last["next_start_index"]) == (rows[2:], False, None)
            assert http.get(f"/{version}/datasets/a/b").json()["provider_id"] == "localfs"
            assert [d["identifier"] for d in http.get(f"/{version}/datasets").json()["data"]] == ["a/b"]
        (listed,) = http.get("/alpha/datasets/list").json()
        assert listed == http.get("/alpha/datasets/get?dataset_id=a%2Fb").json()
        assert (listed["identifier"], listed["type"], listed["dataset_schema"]) == ("a/b", "dataset", {})
        assert http.post(path, json=body).status_code in (200, 204)
    finally:
        assert http.post("/alpha/datasets/unregister", json={"dataset_id": "a/b"}).status_code == 204
    assert http.get("/v1/datasets/a/b").status_code == 404


def test_the_same_data_set_from_another_generation_is_the_same_registration(dialects: DialectServer):
    path, body = DATASETS["0.1.9 to 0.2.23"]
    first = dialects.http.post(path, json=body)
    for client in ("0.0.61", "0.0.63", "0.1.0", "command line 0.2.7", "0.3.5 to 0.7.0"):
        path, body = DATASETS[client]
        assert dialects.http.post(path, json=body).status_code in (200, 204), client
    assert dialects.http.get("/v1/datasets/a/b").json() == first.json()
    assert dialects.http.delete("/v1/datasets/a/b").status_code == 204


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/alpha/datasetio/append-rows", {"dataset_id": "rows", "rows": [{"a": 1}]}),
        ("/v1/datasetio/rows", {"dataset_id": "rows", "rows": [{"a": 1}]}),
        ("/v1/datasetio/append-rows/rows", {"rows": [{"a": 1}]}),
        ("/v1beta/datasetio/append-rows/rows", {"rows": [{"a": 1}]}),
        # 0.6.1 and 0.7.0
        ("/v1beta/datasetio/append-rows/rows", {"dataset_id": "rows", "rows": [{"a": 1}]}),
    ],
)
def test_rows_appended_by_any_client_are_there(dialects: DialectServer, path: str, body: dict[str, Any]):
    made = dialects.http.post("/v1/datasets", json={"dataset_id": "rows", "source": {"rows": [{"a": 0}]}})
    assert made.status_code == 200
    try:
        assert dialects.http.post(path, json=body).status_code == 204
        assert dialects.http.get("/v1/datasetio/iterrows/rows").json()["data"] == [{"a": 0}, {"a": 1}]
    finally:
        dialects.http.delete("/v1/datasets/rows")


def test_rows_can_be_appended_to_what_the_oldest_clients_registered(dialects: DialectServer):
    for client, path in (("0.0.61", "/alpha/datasetio/append-rows"), ("0.1.0", "/v1/datasetio/rows")):
        register, body = DATASETS[client]
        assert dialects.http.post(register, json=body).status_code in (200, 204)
        try:
            more = {"dataset_id": "a/b", "rows": [{"prompt": "g", "completion": "h"}]}
            assert dialects.http.post(path, json=more).status_code == 204
            rows = dialects.http.get("/v1/datasetio/iterrows/a/b").json()["data"]
            assert [row["prompt"] for row in rows] == ["a", "c", "e", "g"]
        finally:
            dialects.http.delete("/v1/datasets/a/b")


def test_rows_for_another_data_set_than_the_paths_are_refused(dialects: DialectServer):
    answer = dialects.http.post("/v1beta/datasetio/append-rows/rows", json={"dataset_id": "other", "rows": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dataset_id")


@pytest.mark.parametrize(("client", "method", "path", "body"), CALLS)
def test_everything_else_that_the_clients_call_answers(
    dialects: DialectServer, client: str, method: str, path: str, body: dict[str, Any] | None
):
    version = {"x-llamastack-client-version": client.split()[-1]}
    answer = dialects.http.request(method, path, json=body, headers=version)
    assert answer.status_code in (200, 204), answer.text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *((f"/alpha/{name}/list", []) for name in ("shields", "memory-banks", "scoring-functions", "eval-tasks")),
        *((f"/v1/{name}", {"data": []}) for name in ("shields", "memory-banks", "eval/benchmarks", "vector_stores")),
        ("/v1alpha/eval/benchmarks", {"data": []}),
    ],
)
def test_lists_of_what_is_not_served_are_empty_in_each_generations_shape(
    dialects: DialectServer, path: str, expected: object
):
    answer = dialects.http.get(path, headers={"accept": "application/jsonl"})
    assert (answer.status_code, answer.json()) == (200, expected)


def test_no_client_version_is_refused(dialects: DialectServer):
    for version in ("0.0.1", "0.2.7", "99.0.0", "not a version"):
        answer = dialects.http.get("/v1/models", headers={"x-llamastack-client-version": version})
        assert answer.status_code == 200


def test_alpha_tells_models_providers_and_routes_as_its_clients_read_them(dialects: DialectServer):
    models = dialects.http.get("/alpha/models/list").json()
    assert [model["identifier"] for model in models if model["identifier"] == BASE] == [BASE]
    assert {"provider_id", "provider_resource_id", "metadata", "type", "model_type"} <= models[0].keys()
    providers = dialects.http.get("/alpha/providers/list").json()
    assert [provider["provider_type"] for provider in providers["post_training"]] == ["inline::notebook"]
    routes = dialects.http.get("/alpha/routes/list").json()
    assert {route["method"] for route in routes["post-training"]} == {"GET", "POST", "DELETE"}


def test_metadata_as_a_json_string_is_metadata(dialects: DialectServer):
    body = {"model_id": "labelled", "provider_model_id": BASE, "metadata": '{"size": 1}'}
    assert dialects.http.post("/v1/models", json=body).status_code == 200
    assert dialects.http.get("/v1/models/labelled").json()["metadata"]["size"] == 1


def test_the_openapi_document_has_one_tag_an_operation_and_marks_the_older_dialects(dialects: DialectServer):
    document = dialects.http.get("/openapi.json").json()
    operations = [(path, operation) for path, methods in document["paths"].items() for operation in methods.values()]
    assert all(len(operation["tags"]) == 1 for _, operation in operations)
    assert {operation["tags"][0] for _, operation in operations} == {
        "post_training",
        "datasets",
        "models",
        "inference",
        "inspect",
        "other",
    }
    ids = [operation["operationId"] for _, operation in operations]
    assert len(ids) == len(set(ids))
    older = {path for path, operation in operations if operation.get("deprecated")}
    assert {path for path in document["paths"] if path.startswith(("/alpha", "/v1/inference", "/v1/openai"))} <= older
    assert {"/v1/post-training/jobs", "/v1/datasets", "/v1alpha/post-training/job/status"} <= older
    current = {"/v1alpha/post-training/jobs", "/v1beta/datasets", "/v1/models", "/v1/chat/completions", "/v1/version"}
    assert older.isdisjoint(current)


def test_the_openapi_document_shows_the_dialects_own_bodies(dialects: DialectServer):
    schemas = dialects.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"algorithm", "optimizer_config", "validation_dataset_id"} <= schemas["AlphaSupervisedFineTuneRequest"][
        "properties"
    ].keys()
    assert {"lr_min"} <= schemas["AlphaOptimizerConfig"]["properties"].keys()
    assert {"model_id", "sampling_params"} <= schemas["ChatCompletionBody"]["properties"].keys()

"""A fault names the field as the client sent it, in each dialect, and always in the shape that its SDK reads."""

from __future__ import annotations

from typing import Any

import pytest

from distributions.dialects.words import param_as_sent, place_as_sent, text_as_sent
from tests.dialect_server import BASE, DialectServer, dialects
from tests.recorded_requests import FINE_TUNE_0_0_61, FINE_TUNE_CLI, FINE_TUNE_SDK

__all__ = ["dialects"]

SUBMIT = "post-training/supervised-fine-tune"
OLD = FINE_TUNE_0_0_61
CHAT: dict[str, Any] = {"model_id": BASE, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model_id": BASE, "content": "hi"}


def sampling(**params: Any) -> dict[str, Any]:
    return CHAT | {"sampling_params": params}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/alpha/inference/chat-completion", sampling(strategy="top_p", temperature=5), "sampling_params.temperature"),
        ("/alpha/inference/chat-completion", sampling(strategy="top_p", top_p="x"), "sampling_params.top_p"),
        ("/alpha/inference/chat-completion", sampling(strategy="greedy", top_k=3), "sampling_params.top_k"),
        ("/alpha/inference/chat-completion", sampling(strategy="top_k"), "sampling_params.top_k"),
        ("/alpha/inference/chat-completion", sampling(strategy="beam"), "sampling_params.strategy"),
        (
            "/v1/inference/chat-completion",
            sampling(strategy={"type": "top_p", "temperature": 5}),
            "sampling_params.strategy.temperature",
        ),
        ("/v1/inference/chat-completion", sampling(stop=["x"] * 17), "sampling_params.stop"),
        ("/v1/inference/chat-completion", sampling(stop=[""]), "sampling_params.stop.0"),
        ("/v1/inference/completion", TEXT | {"sampling_params": {"stop": [""]}}, "sampling_params.stop.0"),
        ("/v1/chat/completions", {"model": BASE, "messages": CHAT["messages"], "stop": ""}, "stop"),
        ("/v1/completions", {"model": BASE, "prompt": ["a"] * 129}, "prompt"),
        ("/v1/datasets", {"dataset_id": "w", "url": {"uri": "s3://b/a.csv"}, "dataset_schema": {}}, "url.uri"),
        ("/alpha/datasets/register", {"dataset_id": "w", "url": "s3://b/a.csv", "dataset_schema": {}}, "url"),
        ("/alpha/datasets/register", {"dataset_id": "w", "url": {"uri": ""}}, "url.uri"),
        ("/alpha/datasets/register", {"dataset_id": "w", "url": {"url": "a"}}, "url"),
        (
            "/v1/datasets",
            {"dataset_id": "w", "url": {"uri": "x"}, "provider_id": "huggingface", "metadata": {"path": "../x"}},
            "metadata.path",
        ),
        ("/v1/datasets", {"dataset_id": "w", "source": {"uri": "s3://b/a.csv"}}, "source.uri"),
        ("/v1/datasets", {"dataset_id": "w", "source": {"rows": [{}]}, "provider_id": "nobody"}, "provider_id"),
        (
            "/v1/datasets",
            {"dataset_id": "w", "source": {"rows": [{}]}, "metadata": {"provider_id": "nobody"}},
            "metadata.provider_id",
        ),
        ("/alpha/" + SUBMIT, OLD | {"training_config": {"batch_size": 70_000}}, "training_config.batch_size"),
        ("/alpha/" + SUBMIT, OLD | {"job_uuid": "badrow"}, "training_config"),
    ],
)
def test_a_fault_names_the_field_as_it_was_sent(dialects: DialectServer, path: str, body: dict[str, Any], param: str):
    answer = dialects.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error["message"]
    if path not in ("/v1/chat/completions", "/v1/completions"):
        places = [".".join(map(str, fault["loc"])) for fault in error["detail"]["errors"]]
        assert places[0] == f"body.{param}"


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("GET", "/alpha/models/get?identifier=no/such", None, "identifier"),
        ("POST", "/alpha/models/unregister", {"model_id": "no/such"}, "model_id"),
        ("GET", "/v1/models/no/such", None, "model_id"),
        ("DELETE", "/v1/openai/v1/models/no/such", None, "model_id"),
        ("POST", "/v1/models", {"model_id": "no/such"}, "model_id"),
        ("POST", "/v1/models", {"model_id": "x", "provider_model_id": "no/such"}, "provider_model_id"),
        ("POST", "/v1/inference/completion", {"model_id": "no/such", "content": "a"}, "model_id"),
        ("POST", "/v1/completions", {"model": "no/such", "prompt": "a"}, "model"),
    ],
)
def test_a_model_that_is_not_there_is_named_by_the_parameter_that_asked_for_it(
    dialects: DialectServer, method: str, path: str, body: dict[str, Any] | None, param: str
):
    answer = dialects.http.request(method, path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)


# What the typed spec or the provider finds, in the words of 0.0.61.
@pytest.mark.parametrize(
    ("spec", "sent"),
    [
        ("training_config.data_config.dataset_id", "dataset_id"),
        ("training_config.data_config.data_format", "dataset_id"),
        ("training_config.data_config.validation_dataset_id", "validation_dataset_id"),
        ("training_config.data_config.batch_size", "training_config.batch_size"),
        ("training_config.max_steps_per_epoch", "training_config.n_iters"),
        ("training_config.optimizer_config.min_lr_ratio", "optimizer_config.lr_min"),
        ("training_config.optimizer_config.lr", "optimizer_config.lr"),
        ("training_config.efficiency_config.fsdp_cpu_offload", "training_config.fsdp_cpu_offload"),
        ("training_config.n_epochs", "training_config.n_epochs"),
        ("algorithm_config.quantize_base", "algorithm"),
        ("job_uuid", "job_uuid"),
    ],
)
def test_what_the_spec_refuses_is_told_in_the_oldest_clients_words(spec: str, sent: str):
    from distributions.dialects.llama_stack_alpha_bodies import AlphaSupervisedFineTuneRequest

    words = AlphaSupervisedFineTuneRequest.model_validate(OLD | {"algorithm": "qlora"}).words()
    assert param_as_sent(spec, words) == sent


def test_only_names_are_changed_in_a_message():
    words = {"model": "model_id", "source.uri": "url.uri", "messages.*.tool_call_id": "messages.*.call_id"}
    assert text_as_sent("the model 'model' has no `model` at source.uri", words) == (
        "the model 'model' has no `model_id` at url.uri"
    )
    steps = {"training_config.max_steps_per_epoch": "training_config.n_iters"}
    quoted = "the model's row 3 has no 'max_steps_per_epoch-1': see training_config.max_steps_per_epoch"
    assert (
        text_as_sent(quoted, steps) == "the model's row 3 has no 'max_steps_per_epoch-1': see training_config.n_iters"
    )
    assert text_as_sent("tool_call_id and my_tool_call_id", words) == "call_id and my_tool_call_id"
    assert place_as_sent(["messages", 3, "tool_call_id"], words) == ["messages", 3, "call_id"]
    assert place_as_sent(["messages", 3, "content"], words) == ["messages", 3, "content"]


@pytest.mark.parametrize(
    ("method", "path", "sent", "place"),
    [
        ("POST", "/v1/" + SUBMIT, {"json": FINE_TUNE_CLI | {"training_config": "{n: 1}"}}, "body.training_config"),
        ("POST", "/v1/" + SUBMIT, {"json": FINE_TUNE_SDK | {"n": 1}}, "body.n"),
        ("POST", "/v1/" + SUBMIT, {"content": b"{"}, "body.1"),
        ("POST", "/v1/" + SUBMIT, {"content": b"\xff\xfe"}, "body.0"),
        ("POST", "/v1/" + SUBMIT, {"content": b"[" * 100_000}, "body"),
        ("POST", "/v1beta/datasets", {"content": b"\x80"}, "body"),
        ("POST", "/v1/models", {"json": {"model_id": "x", "metadata": "{"}}, "body.metadata"),
        ("GET", "/v1/datasetio/rows?dataset_id=d&page_token=x", {}, "query.page_token"),
        ("GET", "/v1/datasetio/rows?dataset_id=d&filter_condition=x", {}, "query.filter_condition"),
        ("GET", "/alpha/datasetio/get-rows-paginated?dataset_id=d&page_token=-1", {}, "query.page_token"),
        ("GET", "/v1/datasetio/iterrows/d?limit=-7", {}, "query.limit"),
        ("GET", "/v1/datasetio/rows", {}, "query.dataset_id"),
        ("GET", "/v1/models", {"headers": {"host": "example.org"}}, "header.Host"),
        ("POST", "/v1beta/datasetio/append-rows/rows", {"json": {"dataset_id": "o", "rows": []}}, "body.dataset_id"),
    ],
)
def test_every_400_has_the_shape_that_llama_stacks_clients_read(
    dialects: DialectServer, method: str, path: str, sent: dict[str, Any], place: str
):
    headers = {"content-type": "application/json"} | sent.pop("headers", {})
    answer = dialects.http.request(method, path, headers=headers, **sent)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), answer.text
    error = answer.json()["error"]
    faults = error["detail"]["errors"]
    assert [set(fault) for fault in faults] == [{"loc", "msg", "type"}] * len(faults)
    assert ".".join(map(str, faults[0]["loc"])) == place
    assert error["message"]
    assert all("parsing the body" not in fault["msg"] for fault in faults)


@pytest.mark.parametrize(
    ("path", "openai"),
    [
        ("/v1/chat/completions", True),
        ("/v1/completions", True),
        ("/v1/openai/v1/chat/completions", True),
        ("/v1/openai/v1/completions", True),
        ("/v1/inference/chat-completion", False),
        ("/v1/inference/completion", False),
        ("/alpha/inference/chat-completion", False),
        ("/alpha/inference/completion", False),
    ],
)
def test_the_inference_routes_answer_in_the_envelope_that_the_documentation_names(
    dialects: DialectServer, path: str, openai: bool
):
    error = dialects.http.post(path, json={"nonsense": 1}).json()["error"]
    assert ("detail" in error, "type" in error) == (not openai, openai)

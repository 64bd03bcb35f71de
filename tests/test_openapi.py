"""The OpenAPI document: complete, true to what is answered, and the same as the one that was agreed on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest

from apis.errors import error_classes
from distributions.openapi import SUMMARIES, TAGS, operations
from tests.public_schema import SNAPSHOT, document, public_schema

# Where each API is at home; every other path of it is there for older clients.
HOMES = {
    "post_training": ("/v1alpha/post-training/",),
    "sft_sessions": ("/submit_job", "/job_status", "/list_jobs", "/cancel_job", "/complete_job", "/resume_job"),
    "datasets": ("/v1beta/",),
    "models": ("/v1/models",),
    "inference": ("/v1/chat/completions", "/v1/completions"),
    "inspect": ("/v1/version", "/v1/health", "/v1/providers", "/v1/inspect/routes", "/v1alpha/admin/"),
    "other": (),
}
# At home, in a form that has been replaced.
REPLACED = ("/v1alpha/post-training/job/",)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return document()


def test_the_public_schema_is_the_one_agreed_on(schema: dict[str, Any]):
    agreed, now = SNAPSHOT.read_text(encoding="utf-8").splitlines(), public_schema(schema)
    changes = "\n".join(difflib.unified_diff(agreed, now, "agreed", "now", lineterm="", n=2))
    assert not changes, f"if this is meant, write it down with `python -m tests.public_schema`:\n{changes}"


def test_every_operation_has_one_api_and_a_summary_of_its_own(schema: dict[str, Any]):
    assert [tag["name"] for tag in schema["tags"]] == list(TAGS)
    assert all(tag["description"] for tag in schema["tags"])
    for path, method, operation in operations(schema):
        assert len(operation["tags"]) == 1, (method, path)
        assert operation["tags"][0] in TAGS, (method, path)
        assert operation["summary"] in SUMMARIES.values(), (method, path, operation["summary"])


def test_every_summary_is_used(schema: dict[str, Any]):
    assert {operation["summary"] for _, _, operation in operations(schema)} == set(SUMMARIES.values())


def test_exactly_the_forms_of_older_clients_are_deprecated(schema: dict[str, Any]):
    for path, method, operation in operations(schema):
        at_home = path.startswith(HOMES[operation["tags"][0]]) and not path.startswith(REPLACED)
        assert operation.get("deprecated", False) is not at_home, (method, path)


def test_every_error_is_described_and_none_of_fastapis_own(schema: dict[str, Any]):
    described = schema["components"]["responses"]
    for path, method, operation in operations(schema):
        errors = {int(status): answer for status, answer in operation["responses"].items() if int(status) >= 400}
        assert {400, 500, 503} <= set(errors), (method, path)
        assert 422 not in errors
        assert (401 in errors) is (path != "/v1/health")
        for answer in errors.values():
            assert described[answer["$ref"].rpartition("/")[2]]["description"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_every_status_that_an_error_of_ours_has_is_described(schema: dict[str, Any]):
    ours = {kind.http_status for kind in error_classes()} - {405}  # of which a document of what there is says nothing
    described = {int(s) for _, _, operation in operations(schema) for s in operation["responses"] if int(s) >= 400}
    assert ours <= described


def test_routes_of_openais_describe_openais_envelope(schema: dict[str, Any]):
    for path, kind in (("/v1/chat/completions", "OpenAIError"), ("/v1beta/datasets", "Error")):
        reference = schema["paths"][path]["post"]["responses"]["400"]["$ref"].rpartition("/")[2]
        answer = schema["components"]["responses"][reference]["content"]["application/json"]["schema"]
        assert answer == {"$ref": f"#/components/schemas/{kind}"}


def limits(node: Any) -> Iterator[Any]:
    """Every limit of an integer, wherever it stands."""
    if isinstance(node, list):
        for item in node:
            yield from limits(item)
    if isinstance(node, dict):
        for value in node.values():
            yield from limits(value)
        if node.get("type") == "integer":
            names = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
            yield from (node[name] for name in names if name in node)


def test_the_limits_of_integers_are_integers_to_the_last_digit(schema: dict[str, Any]):
    assert {type(limit) for limit in limits(schema)} == {int}
    seeds = [
        schema["components"]["schemas"][name]["properties"]["seed"]["anyOf"][0]
        for name in ("ChatCompletionRequest", "TrainingConfig")
    ]
    assert (seeds[0]["minimum"], seeds[0]["maximum"]) == (-(2**63), 2**63 - 1)
    assert seeds[1]["exclusiveMaximum"] == 2**63


def test_a_key_is_said_to_be_sent_as_bearer_and_needed_only_where_there_is_one(schema: dict[str, Any]):
    assert schema["components"]["securitySchemes"] == {"ApiKey": {"type": "http", "scheme": "bearer"}}
    assert schema["security"] == [{}, {"ApiKey": []}]

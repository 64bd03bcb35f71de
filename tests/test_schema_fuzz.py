"""Schemathesis on every operation: whatever is sent, no answer is a fault of the server's or other than described.

$POSTGRAD_FUZZ_EXAMPLES says how many requests each operation gets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzzed_stack import DATASET, ENDED, FILE, MODEL, STEP, WAITING, FuzzedStack, fuzzed_stack
from tests.public_schema import SNAPSHOT

EXAMPLES = int(os.environ.get("POSTGRAD_FUZZ_EXAMPLES", "50"))
METHODS = ("GET ", "POST ", "DELETE ")
OPERATIONS = [
    line.removesuffix(" (deprecated)")
    for line in SNAPSHOT.read_text(encoding="utf-8").splitlines()
    if line.startswith(METHODS)
]
CHECKS: list[Any] = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
DATA: dict[str, Any] = {"dataset_id": DATASET, "batch_size": 1, "shuffle": False}
# Values that mean something here, for fields of these names: what is sent at random gets no further than a lookup.
KNOWN: dict[str, list[Any]] = {
    "job_uuid": [ENDED, WAITING],
    "dataset_id": [DATASET],
    "validation_dataset_id": [None, DATASET],
    "model_id": [MODEL],
    "identifier": [MODEL],
    "provider_model_id": [None, MODEL],
    "provider_id": [None, "torchtune"],
    "model": [MODEL],
    "finetuned_model": [MODEL],
    "step": [STEP],
    "name": [FILE],
    "after": [None, 0],
    "data_config": [DATA],
    "optimizer_config": [{}, {"lr": 1e-3}],
    "efficiency_config": [{}],
    "algorithm_config": [None, {"type": "LoRA", "rank": 4, "alpha": 8}],
    "checkpoint_dir": [None, "tiny"],
    "source": [{"type": "rows", "rows": [{"prompt": "a", "completion": "b"}]}, {"type": "uri", "uri": "rows.jsonl"}],
    "hyperparam_search_config": [{}],
    "logger_config": [{}],
    "max_tokens": [1, 3],
    "messages": [[{"role": "user", "content": "hi"}]],
    "prompt": ["hi"],
    "content": ["hi"],
}

# Of a job: what it needs, or what few values fit.
SUBMITS = ("/supervised-fine-tune", "/preflight")
SUBMITTED = ("model", "algorithm_config", "checkpoint_dir", "hyperparam_search_config", "logger_config")
CONFIGS = ("data_config", "optimizer_config", "efficiency_config")


@dataclass
class Fuzz:
    stack: FuzzedStack
    schema: Any
    session: requests.Session


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    with fuzzed_stack(tmp_path_factory.mktemp("fuzz")) as stack:
        yield Fuzz(stack, schemathesis.openapi.from_dict(stack.app.openapi()), stack.session())


def known(data: st.DataObject, values: dict[str, Any], *, keep: frozenset[str]) -> dict[str, Any]:
    """`values` with some of those fields that have known values set to one."""
    names = sorted(name for name in values if name in KNOWN and name not in keep)
    return {**values, **{name: data.draw(st.sampled_from(KNOWN[name])) for name in names if data.draw(st.booleans())}}


def with_known(data: st.DataObject, case: Case) -> None:
    keep = frozenset({"job_uuid", "dataset_id", "model_id"} if case.method == "DELETE" else ())
    case.path_parameters = known(data, dict(case.path_parameters or {}), keep=keep)
    case.query = known(data, dict(case.query or {}), keep=keep)
    # The one that is asked for by all must not be unregistered.
    keep = keep | (frozenset({"dataset_id", "model_id"}) if "unregister" in case.path else frozenset())
    if isinstance(case.body, dict):
        case.body = known(data, case.body, keep=keep)
        if case.path.endswith(SUBMITS) and data.draw(st.booleans()):
            case.body |= {name: data.draw(st.sampled_from(KNOWN[name])) for name in SUBMITTED}
            if isinstance(training := case.body.get("training_config"), dict):
                training |= {name: data.draw(st.sampled_from(KNOWN[name])) for name in CONFIGS}


def check(case: Case, answer: Any) -> None:
    not_supported = answer.status_code == 501 and answer.json()["error"]["code"] == "not_supported"
    case.validate_response(answer, checks=CHECKS if not_supported else [not_a_server_error, *CHECKS])


@pytest.mark.parametrize("label", OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(fuzz: Fuzz, label: str):
    operation = fuzz.schema.find_operation_by_label(label)
    assert operation is not None, f"{label} is gone: python -m tests.public_schema"
    right, wrong = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @given(case=st.one_of(right, right, wrong), data=st.data())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES <= 50,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        phases=[Phase.generate, Phase.shrink],
    )
    def send(case: Case, data: st.DataObject) -> None:
        with_known(data, case)
        check(case, case.call(base_url="http://localhost", session=fuzz.session))

    send()
    assert fuzz.stack.opened == []

"""Every parameter that a client has may be sent as null, as clients send what their user passed as None.

`data/client_parameters.json` has the parameters of the real clients' methods, from 0.0.61 to 0.7.0 and openai's newest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from apis.common import RequestModel
from apis.inference.models import ChatCompletionRequest, CompletionRequest
from apis.models.models import RegisterModelRequest
from apis.post_training.models import SupervisedFineTuneRequest, TrainingConfig
from distributions.dialects.llama_stack_v1 import (
    translate_dataset_registration,
    translate_preference_optimize,
    translate_supervised_fine_tune,
)
from post_training.job_specs import request_hash

PARAMETERS: dict[str, list[str]] = json.loads((Path(__file__).parent / "data" / "client_parameters.json").read_text())
REQUESTS: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "chat.completions": (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    "completions": (CompletionRequest, {"model": "m", "prompt": "hi"}),
    "models": (RegisterModelRequest, {"model_id": "m"}),
}


@pytest.mark.parametrize("method", REQUESTS)
def test_null_is_taken_for_every_parameter_that_a_client_has(method: str):
    model, needed = REQUESTS[method]
    assert len(PARAMETERS[method]) > 4
    model.model_validate(dict.fromkeys(PARAMETERS[method]) | needed)


def test_what_is_not_supported_is_refused_without_repeating_a_long_value():
    _, needed = REQUESTS["chat.completions"]
    for name in ("functions", "audio", "prediction", "web_search_options"):
        with pytest.raises(ValidationError) as caught:
            ChatCompletionRequest.model_validate({**needed, name: [{"name": "x" * 10_000}]})
        assert "is not supported" in str(caught.value.errors()[0]["msg"])
        assert len(caught.value.errors()[0]["msg"]) < 300


def nulls(value: Any, keep: frozenset[str]) -> Any:
    """The dumped request with null wherever a value is its default, as an SDK sends what nobody has set."""
    if not isinstance(value, dict):
        return value
    return {name: nulls(item, keep) if name in keep else None for name, item in value.items()}


def test_every_parameter_that_may_be_left_out_may_be_null_and_makes_the_same_job():
    given: dict[str, Any] = {
        "job_uuid": "j",
        "training_config": {"data_config": {"dataset_id": "d"}, "optimizer_config": {}, "efficiency_config": {}},
        "algorithm_config": {"type": "LoRA"},
    }
    plain = SupervisedFineTuneRequest.model_validate(given)
    kept = {"job_uuid", "training_config", "data_config", "dataset_id", "optimizer_config", "efficiency_config"}
    kept |= {"algorithm_config", "type", "dtype", "max_grad_norm"}  # null has a meaning of its own for the last two
    with_nulls = SupervisedFineTuneRequest.model_validate(nulls(plain.model_dump(mode="json"), frozenset(kept)))
    assert with_nulls.model_dump() == plain.model_dump()
    assert request_hash(with_nulls) == request_hash(plain)
    for section in ("optimizer_config", "efficiency_config"):
        config = {**given["training_config"], section: None}
        whole = SupervisedFineTuneRequest.model_validate({**given, "training_config": config})
        assert request_hash(whole) == request_hash(plain)


def test_null_keeps_the_meaning_that_a_field_gives_it():
    config = TrainingConfig.model_validate({"max_grad_norm": None})
    assert config.max_grad_norm is None
    with pytest.raises(ValidationError, match="dataset_id"):
        TrainingConfig.model_validate({"data_config": {"dataset_id": None}})


@pytest.mark.parametrize(
    ("translate", "body", "expected"),
    [
        (
            translate_supervised_fine_tune,
            {"model": "", "checkpoint_dir": "", "training_config": {"data_config": {"validation_dataset_id": ""}}},
            {
                "model": None,
                "checkpoint_dir": None,
                "training_config": {"data_config": {"validation_dataset_id": None}},
            },
        ),
        (translate_supervised_fine_tune, {"algorithm_config": {"type": None}}, {"algorithm_config": {"type": "LoRA"}}),
        (
            translate_supervised_fine_tune,
            {"algorithm_config": {"type": None, "quantizer_name": "q"}},
            {"algorithm_config": {"type": "QAT", "quantizer_name": "q"}},
        ),
        (
            translate_preference_optimize,
            {"training_config": '{"data_config": {"validation_dataset_id": ""}}'},
            {"training_config": {"data_config": {"validation_dataset_id": None}}},
        ),
        (
            translate_dataset_registration,
            {"dataset_id": "d", "url": None, "source": {"type": None, "uri": "a.csv", "rows": None}, "metadata": None},
            {"dataset_id": "d", "source": {"type": "uri", "uri": "a.csv"}},
        ),
        (
            translate_dataset_registration,
            {"source": None, "url": {"uri": "a.csv"}, "dataset_schema": None, "provider_id": None},
            {"source": {"type": "uri", "uri": "a.csv"}},
        ),
    ],
)
def test_what_a_client_leaves_empty_is_absent(translate: Any, body: dict[str, Any], expected: dict[str, Any]):
    assert translate(body) == expected


def test_a_switch_that_is_null_is_off_and_makes_the_same_job():
    data: dict[str, Any] = {"dataset_id": "d"}
    plain = {"job_uuid": "j", "training_config": {"data_config": data}, "algorithm_config": {"type": "LoRA"}}
    efficiency = dict.fromkeys(("enable_activation_checkpointing", "memory_efficient_fsdp_wrap", "fsdp_cpu_offload"))
    with_nulls = {
        "job_uuid": "j",
        "training_config": {
            "data_config": {**data, "packed": None, "train_on_input": None},
            "efficiency_config": {**efficiency, "enable_activation_offloading": None},
        },
        "algorithm_config": {"type": "LoRA", "use_dora": None, "quantize_base": None},
    }
    first, again = (SupervisedFineTuneRequest.model_validate(body) for body in (plain, with_nulls))
    assert request_hash(first) == request_hash(again)
    assert again.training_config.data_config is not None
    assert again.training_config.data_config.packed is False

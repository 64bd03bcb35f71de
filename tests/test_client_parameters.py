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
from apis.post_training.models import SupervisedFineTuneRequest
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

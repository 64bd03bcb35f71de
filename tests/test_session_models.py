"""What a session is asked: every key acts or is refused by its name, at the place where the client wrote it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from apis.post_training.models import LoraFinetuningConfig, OptimizerConfig, OptimizerType
from apis.sft_sessions.models import LoraSection, SessionConfig, SubmitJobRequest
from apis.sft_sessions.training_models import (
    Batch,
    ForwardBackwardRequest,
    LoadCheckpointRequest,
    OptimStepRequest,
    SaveCheckpointRequest,
    TokenSequence,
    TrainStepRequest,
    ValidateRequest,
)
from distributions.errors import add_exception_handlers

REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    SubmitJobRequest: {},
    SessionConfig: {},
    LoraSection: {},
    Batch: {"rows": [{}]},
    TrainStepRequest: {"rows": [{}]},
    ForwardBackwardRequest: {"rows": [{}]},
    OptimStepRequest: {},
    ValidateRequest: {"rows": [{}]},
    SaveCheckpointRequest: {},
    LoadCheckpointRequest: {"name": "step5"},
    TokenSequence: {"tokens": [1, 2]},
}
ROWS = [{"text": "a"}]


def faults(kind: type[BaseModel], **fields: Any) -> dict[str, str]:
    """The places of all faults, dotted, and what is said of each."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    return {".".join(map(str, fault["loc"])): fault["msg"] for fault in caught.value.errors()}


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_unknown_key_is_refused_by_its_name(kind: type[BaseModel]):
    kind.model_validate(REQUESTS[kind])
    assert set(faults(kind, **REQUESTS[kind], learning_rte=1, stpe=2)) == {"learning_rte", "stpe"}


# -- OpenTinker's config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        *("temperature", "top_p", "max_new_tokens", "max_prompt_tokens", "algorithm", "adv_estimator", "rollout_n"),
        *("interaction", "multi_turn", "reward", "kl", "agent_num_workers"),
    ],
)
def test_a_key_of_reinforcement_learning_is_named_and_said_to_belong_there(key: str):
    assert "belongs to reinforcement learning" in faults(SessionConfig, **{key: None})[key]


@pytest.mark.parametrize(
    "key",
    [
        *("data_path", "val_data_path", "batch_size", "val_batch_size", "num_epochs", "num_steps"),
        *("save_freq", "test_freq", "logger_backends", "scheduler_url", "scheduler_api_key", "server_url"),
        "wandb_key",
    ],
)
def test_a_key_of_the_client_is_named_and_said_to_stay_there(key: str):
    assert "is the client's own affair" in faults(SessionConfig, **{key: 1})[key]


@pytest.mark.parametrize("key", ["num_workers", "enable_tracing", "weave_project"])
def test_a_key_that_nothing_has_a_use_for_is_refused_with_the_reason(key: str):
    assert "is not taken: " in faults(SessionConfig, **{key: 1})[key]


def test_a_whole_config_of_reinforcement_learning_is_told_of_all_its_keys_at_once():
    config = {
        "project_name": "p",
        "temperature": 0.7,
        "batch_size": 64,
        "tokenizer_path": "t",
        "num_gpus": 4,
        "lora": {"lora_rank": 64},
    }
    found = faults(SubmitJobRequest, config=config)
    assert set(found) == {"config.temperature", "config.batch_size", "config.tokenizer_path", "config.num_gpus"}
    assert "a model brings its own" in found["config.tokenizer_path"]
    assert "beside `config`" in found["config.num_gpus"]


def test_what_opentinkers_clients_always_send_is_taken_and_nothing_else_of_it():
    sent = {"config": {}, "enable_agent_loop": False, "wandb_key": None, "num_gpus": None}
    assert SubmitJobRequest.model_validate(sent) == SubmitJobRequest()
    assert "reinforcement learning" in faults(SubmitJobRequest, enable_agent_loop=True)["enable_agent_loop"]
    assert "stays with the client" in faults(SubmitJobRequest, wandb_key="k")["wandb_key"]
    assert set(faults(SubmitJobRequest, job_type="TRAINING")) == {"job_type"}
    assert SubmitJobRequest.model_validate({"config": None}) == SubmitJobRequest()
    assert set(faults(SubmitJobRequest, config=[])) == {"config"}


# -- the adapter ------------------------------------------------------------------------------------------------------

ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {}),
        ({"lr": 1e-4, "lora_adapter_path": "earlier"}, {}),
        ({"target_modules": None, "lora_rank": None}, {}),
        ({"lora_rank": 64}, {"rank": 64}),
        ({"lora_alpha": 32}, {"alpha": 32}),
        (
            {"target_modules": "all-linear", "exclude_modules": None},
            {"lora_attn_modules": ATTENTION, "apply_lora_to_mlp": True, "apply_lora_to_output": False},
        ),
        (
            {"target_modules": ["q_proj", "o_proj", "lm_head"]},
            {
                "lora_attn_modules": ["q_proj", "output_proj"],
                "apply_lora_to_mlp": False,
                "apply_lora_to_output": True,
            },
        ),
        (
            {"exclude_modules": ["gate_proj", "up_proj", "down_proj", "k_proj"]},
            {
                "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
                "apply_lora_to_mlp": False,
                "apply_lora_to_output": False,
            },
        ),
        (
            {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
            {"lora_attn_modules": [], "apply_lora_to_mlp": True, "apply_lora_to_output": False},
        ),
    ],
)
def test_a_lora_section_says_what_it_was_given_and_leaves_the_rest_to_the_adapter_gone_on_from(
    section: dict[str, Any], expected: dict[str, Any]
):
    algorithm = LoraSection.model_validate(section).as_algorithm()
    assert algorithm.model_dump(exclude_unset=True) == expected


def test_a_lora_section_that_says_nothing_is_the_default_adapter():
    section = LoraSection()
    explicit = LoraSection(lora_rank=section.lora_rank, lora_alpha=section.lora_alpha, target_modules="all-linear")
    assert section.as_algorithm() == LoraFinetuningConfig() == explicit.as_algorithm()


@pytest.mark.parametrize(
    ("section", "place", "reason"),
    [
        ({"lora_rank": 0}, "lora_rank", "full fine-tuning, which is not offered"),
        ({"lora_rank": True}, "lora_rank", "must be a number, not true"),
        ({"lora_rank": 10**30}, "lora_rank", "less than or equal to 4096"),
        ({"lora_rank": -1}, "lora_rank", "greater than or equal to 1"),
        ({"lora_alpha": False}, "lora_alpha", "must be a number, not false"),
        ({"lr": math.nan}, "lr", ""),
        ({"lr": math.inf}, "lr", ""),
        ({"target_modules": "q_proj"}, "target_modules", "must be 'all-linear' or a list"),
        ({"target_modules": 5}, "target_modules", "must be 'all-linear' or a list"),
        ({"target_modules": ["query"]}, "target_modules", "no layer is called 'query'"),
        ({"target_modules": []}, "", "names no layer"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "", "takes away all"),
        ({"target_modules": ["q_proj", "up_proj"]}, "", "together or not at all, not ['up_proj'] alone"),
        ({"exclude_modules": ["query"]}, "exclude_modules", "no layer is called 'query'"),
        ({"lora_adapter_path": "../up"}, "lora_adapter_path", "not a valid id"),
    ],
)
def test_a_lora_section_that_cannot_be_is_told_where(section: dict[str, Any], place: str, reason: str):
    found = faults(LoraSection, **section)
    assert set(found) == {place}
    assert reason in found[place]


# -- the rest of the config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "place", "reason"),
    [
        ({"total_steps": True}, "total_steps", "must be a number, not true"),
        ({"total_steps": 0}, "total_steps", "greater than or equal to 1"),
        ({"total_steps": 10**30}, "total_steps", "less than or equal to 9223372036854775807"),
        ({"total_steps": 1.5}, "total_steps", ""),
        ({"window": True}, "window", "must be a number, not true"),
        ({"window": -1}, "window", ""),
        ({"window": 257}, "window", ""),
        ({"lease_seconds": math.nan}, "lease_seconds", ""),
        ({"lease_seconds": 0.5}, "lease_seconds", ""),
        ({"lease_seconds": True}, "lease_seconds", "must be a number, not true"),
        ({"max_grad_norm": math.inf}, "max_grad_norm", ""),
        ({"seed": 2**63}, "seed", ""),
        ({"max_seq_len": 7}, "max_seq_len", ""),
        ({"on_overlength": "drop"}, "on_overlength", "'truncate' or 'error'"),
        ({"columns": {"question": "q"}}, "columns", "no data format here reads 'question'"),
        ({"data_format": "text", "columns": {"prompt": "q"}}, "columns", "reads 'prompt'"),
        ({"data_format": "csv"}, "data_format", ""),
        ({"project_name": "p" * 256}, "project_name", ""),
        ({"experiment_name": "\ud800"}, "experiment_name", ""),
        ({"columns": {"prompt": "\ud800"}}, "columns", "surrogate"),
        ({"model": "a b"}, "model", "not a valid id"),
        ({"lora": {}, "algorithm_config": {}}, "", "lora or algorithm_config, not both"),
        ({"lora": {"lr": 1e-3}, "optimizer_config": {"lr": 1e-3}}, "", "not both"),
        ({"model": "m", "lora": {"lora_adapter_path": "a"}}, "", "model or lora.lora_adapter_path, not both"),
        ({"optimizer_config": {"lr_schedule": "cosine"}}, "", "falls until total_steps"),
        ({"optimizer_config": {"min_lr_ratio": 0.1}}, "", "no effect without total_steps"),
        ({"optimizer_config": {"lr": 1e-3, "lrr": 1}}, "optimizer_config.lrr", ""),
        ({"algorithm_config": {"type": "QAT"}}, "algorithm_config.type", ""),
    ],
)
def test_a_config_that_cannot_be_is_told_where(config: dict[str, Any], place: str, reason: str):
    found = faults(SubmitJobRequest, config=config)
    where = ".".join(filter(None, ("config", place)))
    assert set(found) == {where}
    assert reason in found[where]


def test_a_config_that_fits_is_kept_as_it_is():
    config = SessionConfig.model_validate(
        {
            "columns": {"prompt": "q"},
            "total_steps": 100,
            "optimizer_config": {"optimizer_type": "sgd", "lr": 0.1, "lr_schedule": "linear"},
            "window": 0,
        }
    )
    assert config.optimizer_config == OptimizerConfig(optimizer_type=OptimizerType.sgd, lr=0.1, lr_schedule="linear")
    assert (config.columns, config.total_steps, config.window) == ({"prompt": "q"}, 100, 0)


# -- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        ({}, "", "exactly one form"),
        ({"rows": ROWS, "batch_data": {}}, "", "exactly one form"),
        ({"rows": []}, "rows", "at least 1"),
        ({"rows": [5]}, "rows.0", ""),
        ({"sequences": [{"tokens": [1, True]}]}, "sequences.0.tokens.1", "valid integer"),
        ({"sequences": [{"tokens": [1, 2.0]}]}, "sequences.0.tokens.1", "valid integer"),
        ({"sequences": [{"tokens": ["1", 2]}]}, "sequences.0.tokens.0", "valid integer"),
        ({"sequences": [{"tokens": "12"}]}, "sequences.0.tokens", "a list of numbers, or an array"),
        ({"sequences": [{"tokens": None}]}, "sequences.0.tokens", "a list of numbers, or an array"),
        ({"sequences": [{"tokens": [1, 2], "weights": [0, True]}]}, "sequences.0.weights.1", "valid number"),
        ({"sequences": [{"tokens": [1, 2], "weights": [0, 10**400]}]}, "sequences.0.weights.1", ""),
        ({"sequences": [{"tokens": [1, 2], "labels": [1, None]}]}, "sequences.0.labels.1", "valid integer"),
        ({"sequences": [{"tokens": [1, 2], "labels": [1, 2], "weights": [0, 1]}]}, "sequences.0", "not both"),
        ({"rows": ROWS, "step": 0}, "step", "greater than or equal to 1"),
        ({"rows": ROWS, "step": True}, "step", "must be a number, not true"),
        ({"rows": ROWS, "step": 1.5}, "step", ""),
        ({"rows": ROWS, "step": 2**63}, "step", "less than or equal to"),
        ({"rows": ROWS, "lr": math.nan}, "lr", ""),
        ({"rows": ROWS, "lr": -1e-9}, "lr", "greater than or equal to 0"),
        ({"rows": ROWS, "lr": True}, "lr", "must be a number, not true"),
        ({"rows": ROWS, "cursor": {"at": math.inf}}, "cursor", "no JSON form"),
        ({"rows": ROWS, "cursor": {"at": "\ud800"}}, "cursor", "surrogate"),
        ({"rows": ROWS, "cursor": [1]}, "cursor", ""),
    ],
)
def test_a_call_that_cannot_be_is_told_where(fields: dict[str, Any], place: str, reason: str):
    found = faults(TrainStepRequest, **fields)
    assert set(found) == {place}
    assert reason in found[place]


@pytest.mark.parametrize(
    ("array", "places"),
    [
        ({}, {"dtype", "shape", "data"}),
        ({"dtype": "int8", "shape": [1], "data": ""}, {"dtype"}),
        ({"dtype": "int32", "shape": [1, 1], "data": ""}, {"shape"}),
        ({"dtype": "int32", "shape": [-1], "data": ""}, {"shape.0"}),
        ({"dtype": "int32", "shape": [True], "data": ""}, {"shape.0"}),
        ({"dtype": "int32", "shape": [10**30], "data": ""}, {"shape.0"}),
        ({"dtype": "int32", "shape": 1, "data": ""}, {"shape"}),
        ({"dtype": "int32", "shape": [1], "data": 5}, {"data"}),
        ({"dtype": "int32", "shape": [1], "data": "", "device": "cpu"}, {"device"}),
    ],
)
def test_an_array_is_told_of_its_own_faults_alone(array: dict[str, Any], places: set[str]):
    found = faults(Batch, sequences=[{"tokens": [1, 2]}, {"tokens": [1, 2], "weights": array}])
    assert set(found) == {f"sequences.1.weights.{place}" for place in places}


def test_a_warm_up_may_begin_at_a_rate_of_0():
    assert OptimStepRequest.model_validate({"lr": 0.0}).lr == 0.0


def test_a_cursor_that_no_answer_could_hold_is_refused():
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"in": nested}
    assert "nested too deeply" in faults(SaveCheckpointRequest, cursor=nested)["cursor"]


@pytest.mark.parametrize("name", ["", "a-b", "a/b", "../a", ".a", "a b", "é", "a" * 65, "a\n"])
def test_a_checkpoints_name_is_part_of_an_id(name: str):
    assert set(faults(SaveCheckpointRequest, name=name)) == {"name"}
    assert set(faults(LoadCheckpointRequest, name=name)) == {"name"}
    assert SaveCheckpointRequest(name="best_1.5").name == "best_1.5"


@pytest.mark.parametrize("kind", [SaveCheckpointRequest, ValidateRequest])
def test_a_step_to_wait_for_is_a_step(kind: type[BaseModel]):
    for value in (-1, True, 2**63):
        assert set(faults(kind, **REQUESTS[kind], after_step=value)) == {"after_step"}


# -- over HTTP --------------------------------------------------------------------------------------------------------


def test_an_answer_names_the_key_as_its_param():
    app = FastAPI()
    add_exception_handlers(app)
    app.add_api_route("/submit_job", _submit, methods=["POST"])
    app.add_api_route("/train_step", _train, methods=["POST"])
    with TestClient(app) as client:
        answer = client.post("/submit_job", json={"config": {"temperature": 0.7, "rollout_n": 5}})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "config.temperature"
        assert "reinforcement learning" in answer.json()["error"]["message"]
        assert [fault["loc"] for fault in answer.json()["error"]["detail"]["errors"]] == [
            ["body", "config", "temperature"],
            ["body", "config", "rollout_n"],
        ]
        answer = client.post("/train_step", json={"sequences": [{"tokens": {"dtype": "int32", "shape": [1]}}]})
        assert answer.json()["error"]["param"] == "sequences.0.tokens.data"
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    step = schemas["TrainStepRequest"]["properties"]["step"]["anyOf"][0]
    assert (step["type"], step["minimum"], step["maximum"]) == ("integer", 1, pytest.approx(2**63))
    forms = schemas["TokenSequence"]["properties"]["tokens"]["anyOf"]
    assert forms == [{"type": "array", "items": {"type": "integer"}}, {"$ref": "#/components/schemas/ArrayData"}]


async def _submit(request: SubmitJobRequest) -> SubmitJobRequest:
    return request


async def _train(request: TrainStepRequest) -> dict[str, str]:
    return {"status": str(request.step)}

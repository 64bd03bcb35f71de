"""What Llama Stack's own tests of post-training went through, written anew, by its client 0.2.7.

Also those that it had and did not run: list, status and artifacts after a job. Its cases of environment variables in a
run.yaml are in `tests/test_environment.py`.
"""

from __future__ import annotations

import base64
import importlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from llama_stack_client import APIStatusError, BadRequestError, LlamaStackClient, NotFoundError
from pydantic import BaseModel

from apis.errors import InvalidField
from post_training.jobs.devices import slots_of
from providers.registry import BUILT_IN
from providers.spec import ProviderSpec
from tests.clients.conftest import Served
from tests.clients.recorder import recording
from tests.clients.task import BASE

LORA: Any = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 8,
    "alpha": 16,
}
OPTIMIZER = {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.01, "num_warmup_steps": 0}
PURPOSE = "post-training/messages"


def instruct(question: str, answer: str) -> dict[str, str]:
    return {
        "chat_completion_input": json.dumps([{"role": "user", "content": question}]),
        "expected_answer": answer,
    }


ROWS = [instruct(f"What comes after {n}?", f"{n + 1} comes next.") for n in range(8)]


@pytest.fixture(scope="module")
def client(stack: Served) -> Iterator[LlamaStackClient]:
    with LlamaStackClient(base_url=stack.url, max_retries=0) as made:
        yield made


def register(client: LlamaStackClient, dataset_id: str, rows: list[dict[str, str]] = ROWS) -> None:
    source: Any = {"type": "rows", "rows": rows}
    client.datasets.register(purpose=PURPOSE, source=source, dataset_id=dataset_id)


def training(dataset_id: str, **data: Any) -> Any:
    data_config = {"dataset_id": dataset_id, "batch_size": 1, "shuffle": False, "data_format": "instruct", **data}
    return {
        "n_epochs": 1,
        "max_steps_per_epoch": 1,
        "gradient_accumulation_steps": 1,
        "data_config": data_config,
        "optimizer_config": OPTIMIZER,
    }


def submit(client: LlamaStackClient, job_uuid: str, dataset_id: str, **data: Any) -> Any:
    return client.post_training.supervised_fine_tune(
        job_uuid=job_uuid,
        model=BASE,
        training_config=training(dataset_id, **data),
        algorithm_config=LORA,
        hyperparam_search_config={},
        logger_config={},
    )


def ended(client: LlamaStackClient, job_uuid: str) -> Any:
    """The status once it is terminal; upstream's own loop knew one such status, and ran on when a job had failed."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = client.post_training.job.status(job_uuid=job_uuid)
        assert status.status in ("scheduled", "in_progress", "completed", "failed")
        if status.status in ("completed", "failed"):
            return status
        time.sleep(0.1)
    raise AssertionError(f"{job_uuid} did not end")


@pytest.fixture(scope="module")
def job(client: LlamaStackClient) -> str:
    """Upstream's job 1234: one epoch of one step, validated."""
    register(client, "alpaca")
    register(client, "alpaca-held-out", ROWS[:2])
    assert submit(client, "1234", "alpaca", validation_dataset_id="alpaca-held-out").job_uuid == "1234"
    assert ended(client, "1234").status == "completed"
    return "1234"


# -- a fine-tuning from registration to artifacts ---------------------------------------------------------------------


def test_the_job_is_listed(client: LlamaStackClient, job: str):
    assert job in [one.job_uuid for one in client.post_training.job.list()]


def test_the_status_has_the_checkpoint_of_the_epoch_with_its_metrics(client: LlamaStackClient, job: str):
    status = client.post_training.job.status(job_uuid=job)
    assert (status.job_uuid, status.status) == (job, "completed")
    assert status.scheduled_at
    assert status.started_at
    assert status.completed_at
    assert status.scheduled_at < status.started_at < status.completed_at
    (checkpoint,) = status.checkpoints
    assert isinstance(checkpoint, dict)
    assert checkpoint["training_metrics"].keys() >= {"epoch", "train_loss", "validation_loss", "perplexity"}


def test_the_artifacts_are_one_adapter_that_lies_where_its_path_says(client: LlamaStackClient, stack: Served, job: str):
    artifacts = client.post_training.job.artifacts(job_uuid=job)
    (checkpoint,) = artifacts.checkpoints
    assert isinstance(checkpoint, dict)
    # Upstream's id had no job in it, so the next job on the same model wrote over this one's.
    assert checkpoint["identifier"] == f"{BASE}-sft-1234-0"
    assert (checkpoint["epoch"], checkpoint["post_training_job_id"]) == (0, "1234")
    assert (stack.home / str(checkpoint["path"]) / "adapter" / "adapter_model.safetensors").is_file()


def test_the_checkpoint_is_asked_on_the_same_server_by_its_own_id_and_by_upstreams(client: LlamaStackClient, job: str):
    messages: Any = [{"role": "user", "content": "What comes after 3?"}]
    sampling: Any = {"strategy": {"type": "greedy"}, "max_tokens": 8}
    # The second is whichever job on this model completed last.
    for model in (f"{BASE}-sft-{job}-0", f"{BASE}-sft-0"):
        answer = client.inference.chat_completion(model_id=model, messages=messages, sampling_params=sampling)
        assert answer.completion_message.role == "assistant"
        assert answer.completion_message.content
        assert answer.completion_message.stop_reason in ("end_of_turn", "out_of_tokens")


def test_the_model_may_be_registered_as_upstreams_guide_says(client: LlamaStackClient, job: str):
    model = client.models.register(
        model_id=f"{BASE}-sft-{job}-0", provider_model_id=f"{BASE}-sft-{job}-0", metadata={"llama_model": BASE}
    )
    assert model.identifier == f"{BASE}-sft-{job}-0"


def test_a_preference_job_is_refused_once_and_as_not_supported(stack: Served, job: str):
    with recording(stack.url, {}) as recorder, LlamaStackClient(base_url=recorder.url) as client:
        with pytest.raises(APIStatusError) as refused:
            client.post_training.preference_optimize(
                job_uuid="preferred",
                finetuned_model=BASE,
                algorithm_config={"beta": 0.1, "loss_type": "sigmoid"},  # type: ignore[typeddict-unknown-key]
                training_config=training("alpaca"),
                hyperparam_search_config={},
                logger_config={},
            )
        assert refused.value.status_code == 501
        assert len(recorder.recorded()) == 1


# -- jobs, as its scheduler was tested --------------------------------------------------------------------------------


def test_an_unknown_device_is_refused_by_its_name():
    with pytest.raises(InvalidField, match="'slurm' is no device"):
        slots_of(["slurm"])


def test_an_unknown_job_is_not_found_whatever_is_asked_of_it(client: LlamaStackClient):
    for verb in (client.post_training.job.status, client.post_training.job.artifacts, client.post_training.job.cancel):
        with pytest.raises(NotFoundError, match="unheard-of"):
            verb(job_uuid="unheard-of")


def test_a_job_that_fails_says_why_first_in_its_status_then_in_its_log_and_the_next_one_runs(
    client: LlamaStackClient, stack: Served
):
    register(client, "cut")
    # No answer is within the first tokens of a row, so there is nothing to learn.
    submit(client, "fails", "cut", max_seq_len=8)
    submit(client, "goes-on", "cut")
    failed = ended(client, "fails")
    assert failed.status == "failed"
    assert "no supervised token" in failed.error["message"]
    assert any("no supervised token" in line for line in stack.client.post_training.logs("fails").log_lines)
    assert ended(client, "goes-on").status == "completed"


def test_an_id_in_use_is_refused_for_another_job_and_the_first_stays(client: LlamaStackClient, job: str):
    before = client.post_training.job.status(job_uuid=job)
    with pytest.raises(BadRequestError, match=job):
        submit(client, job, "alpaca")
    assert client.post_training.job.status(job_uuid=job) == before


# -- data sets --------------------------------------------------------------------------------------------------------


def as_csv() -> str:
    lines = ["input,answer", *(f"question {n},answer {n}" for n in range(5))]
    return "data:text/csv;base64," + base64.b64encode("\n".join(lines).encode()).decode()


SOURCES: dict[str, Any] = {
    "rows": {"type": "rows", "rows": [{"input": f"question {n}", "answer": f"answer {n}"} for n in range(5)]},
    "data-uri": {"type": "uri", "uri": as_csv()},
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_data_set_is_registered_read_page_by_page_listed_and_unregistered(client: LlamaStackClient, kind: str):
    made = client.datasets.register(purpose="eval/messages-answer", source=SOURCES[kind], dataset_id=f"test-{kind}")
    assert (made.identifier, made.provider_id, made.purpose) == (f"test-{kind}", "localfs", "eval/messages-answer")
    assert made.source.type == SOURCES[kind]["type"]
    page = client.datasets.iterrows(dataset_id=f"test-{kind}", limit=2)
    assert [row["input"] for row in page.data] == ["question 0", "question 1"]
    whole = client.datasets.iterrows(dataset_id=f"test-{kind}")
    assert [row["answer"] for row in whole.data] == [f"answer {n}" for n in range(5)]
    assert f"test-{kind}" in [one.identifier for one in client.datasets.list()]
    client.datasets.unregister(f"test-{kind}")
    assert f"test-{kind}" not in [one.identifier for one in client.datasets.list()]


def test_a_data_set_of_the_hub_is_refused_by_a_stack_without_it(client: LlamaStackClient):
    with pytest.raises(BadRequestError, match="Hugging Face hub are not read by this server"):
        client.datasets.register(
            purpose="eval/messages-answer",
            source={"type": "uri", "uri": "huggingface://datasets/some/data?split=train"},
        )


# -- providers --------------------------------------------------------------------------------------------------------


def test_the_provider_of_post_training_is_listed_and_found_by_its_id(client: LlamaStackClient):
    (listed,) = [one for one in client.providers.list() if one.api == "post_training"]
    assert (listed.provider_id, listed.provider_type) == ("torchtune", "inline::torchtune")
    assert client.providers.retrieve("torchtune").provider_type == "inline::torchtune"


# A remote provider needs to be told where the other server is.
WITH_DEFAULTS = [spec for spec in BUILT_IN if spec.provider_type != "remote::llama-stack"]


@pytest.mark.parametrize("spec", WITH_DEFAULTS, ids=lambda spec: spec.provider_type)
def test_every_provider_can_be_configured_by_nothing(spec: ProviderSpec):
    module, name = spec.config_class.rsplit(".", 1)
    config = getattr(importlib.import_module(module), name).model_validate({})
    assert isinstance(config, BaseModel)
    assert type(config).model_validate(config.model_dump()) == config

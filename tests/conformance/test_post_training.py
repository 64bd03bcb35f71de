"""The promises of `apis.post_training.PostTraining`, over HTTP, for every provider."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from apis.errors import Conflict, DataInvalid, InvalidField, JobNotFound, NotSupported
from apis.post_training.models import JobEvent, JobEventKind, JobStatus, PostTrainingJobStatusResponse
from post_training.client import StackClient
from tests.conformance.stack import ConformanceStack
from tests.faults.harness import MODEL, request, rows, until, wait

STEPS, EPOCHS = 30, 2
ADAPTER = "adapter/adapter_model.safetensors"
Calm = PostTrainingJobStatusResponse


def moves(client: StackClient, job_uuid: str) -> list[str]:
    """The states that the job went through, as its events tell them."""
    told = [event for event in client.post_training.events(job_uuid) if event.kind is JobEventKind.status]
    return [event.data["status"] for event in told if event.data]


def submit(stack: ConformanceStack, job_uuid: str, **training: Any) -> None:
    stack.client.post_training.supervised_fine_tune(**request(job_uuid, **training))


def status_of(stack: ConformanceStack, job_uuid: str) -> PostTrainingJobStatusResponse:
    return stack.client.post_training.status(job_uuid)


def at_step(stack: ConformanceStack, job_uuid: str, step: int) -> Callable[[], bool]:
    def reached() -> bool:
        progress = status_of(stack, job_uuid).progress
        return progress is not None and progress.step >= step

    return reached


def hashes(stack: ConformanceStack, status: PostTrainingJobStatusResponse) -> list[str]:
    """sha256 of the adapter of each checkpoint."""
    client = stack.client.post_training
    found = [client.checkpoint_files(status.job_uuid, checkpoint.step) for checkpoint in status.checkpoints]
    return [file.sha256 for files in found for file in files if file.name == ADAPTER]


# -- states -----------------------------------------------------------------------------------------------------------


def test_a_job_goes_through_its_states_once_and_in_order(stack: ConformanceStack, calm: Calm):
    assert moves(stack.client, "calm") == ["scheduled", "in_progress", "completed"]
    times = [calm.scheduled_at, calm.started_at, calm.completed_at]
    assert times == sorted(time for time in times if time)
    assert (calm.attempt, calm.error) == (1, None)
    assert calm.progress is not None
    assert (calm.progress.step, calm.progress.total_steps) == (STEPS, STEPS)


def test_a_finished_job_stays_as_it_is_when_it_is_cancelled(stack: ConformanceStack, calm: Calm):
    stack.client.post_training.cancel("calm")
    assert status_of(stack, "calm") == calm


def test_a_waiting_job_is_cancelled_before_it_begins_and_a_running_one_within_ten_seconds(stack: ConformanceStack):
    submit(stack, "running", n_epochs=10_000)
    until(at_step(stack, "running", 2))
    submit(stack, "waiting")
    waiting = status_of(stack, "waiting")
    assert (waiting.status, waiting.queue_position) == (JobStatus.scheduled, 0)
    stack.client.post_training.cancel("waiting")
    assert status_of(stack, "waiting").status is JobStatus.cancelled
    stack.client.post_training.cancel("running")
    assert wait(stack.client, "running", 10).status is JobStatus.cancelled
    assert moves(stack.client, "waiting") == ["scheduled", "cancelled"]
    assert moves(stack.client, "running") == ["scheduled", "in_progress", "cancelled"]
    stack.client.post_training.cancel("running")
    for job_uuid in ("running", "waiting"):
        ended = status_of(stack, job_uuid)
        assert ended.status is JobStatus.cancelled
        assert ended.completed_at is not None


def test_a_bad_row_among_few_is_refused_by_its_number_before_there_is_a_job(stack: ConformanceStack):
    stack.register("one-bad", [*rows(3), {"prompt": "Say red", "completion": 7}])
    with pytest.raises(DataInvalid, match=r"row 3, /completion"):
        submit(stack, "one-bad", data_config={"dataset_id": "one-bad"})
    with pytest.raises(JobNotFound):
        status_of(stack, "one-bad")


def test_a_bad_row_among_many_fails_the_job_by_its_number(stack: ConformanceStack):
    stack.register("many", [*rows(1003), {"prompt": "Say red", "completion": 7}])
    submit(stack, "many", data_config={"dataset_id": "many"})
    failed = wait(stack.client, "many")
    assert moves(stack.client, "many") == ["scheduled", "in_progress", "failed"]
    assert failed.error is not None
    assert failed.error.code == "data_invalid"
    assert "row 1003, /completion" in failed.error.message
    assert failed.checkpoints == []


# -- requests ---------------------------------------------------------------------------------------------------------


def test_the_same_submit_again_is_the_same_job_and_another_body_is_refused(stack: ConformanceStack, calm: Calm):
    assert stack.client.post_training.supervised_fine_tune(**request("calm")).job_uuid == "calm"
    with pytest.raises(Conflict, match="calm"):
        submit(stack, "calm", seed=1)
    assert [job.job_uuid for job in stack.client.post_training.jobs()].count("calm") == 1
    assert status_of(stack, "calm") == calm


@pytest.mark.parametrize(
    "path",
    [
        ("colour",),
        ("training_config", "colour"),
        ("training_config", "data_config", "colour"),
        ("training_config", "optimizer_config", "colour"),
        ("algorithm_config", "colour"),
    ],
)
def test_an_unknown_field_is_refused_by_its_name(stack: ConformanceStack, path: tuple[str, ...]):
    body = request("unknown-field")
    section = body
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = "blue"
    answer = httpx.post(f"{stack.url}/v1alpha/post-training/supervised-fine-tune", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == ".".join(path)
    with pytest.raises(JobNotFound):
        status_of(stack, "unknown-field")


def test_an_unknown_model_or_data_set_is_not_found(stack: ConformanceStack):
    for change, named in (({"model": "no-such-model"}, "no-such-model"), ({}, "no-such-rows")):
        body = {**request("nowhere", data_config={"dataset_id": "no-such-rows" if not change else "rows"}), **change}
        answer = httpx.post(f"{stack.url}/v1alpha/post-training/supervised-fine-tune", json=body)
        assert answer.status_code == 404
        assert named in answer.json()["error"]["message"]


def test_no_verb_finds_a_job_that_is_not_there(stack: ConformanceStack):
    client = stack.client.post_training
    verbs: list[Callable[[], Any]] = [
        lambda: client.status("nobody"),
        lambda: client.artifacts("nobody"),
        lambda: client.cancel("nobody"),
        lambda: client.delete("nobody"),
        lambda: client.logs("nobody"),
        lambda: client.metrics("nobody"),
        lambda: next(client.events("nobody")),
        lambda: client.checkpoint_files("nobody", 1),
    ]
    for verb in verbs:
        with pytest.raises(JobNotFound, match="nobody"):
            verb()


def test_a_preflight_says_what_the_job_then_does(stack: ConformanceStack, calm: Calm):
    body = request("calm")
    del body["job_uuid"]
    told = stack.client.post_training.preflight(**body)
    assert told.total_steps == STEPS
    assert calm.report is not None
    assert told.dataset.rows == calm.report["dataset"]["rows"] == 60
    assert told.dataset.supervised_tokens == calm.report["dataset"]["supervised_tokens"]


def test_a_provider_does_what_it_says_and_refuses_the_rest_without_being_asked_again(stack: ConformanceStack):
    can = stack.capabilities()
    assert "supervised_fine_tune" in can
    if "preference_optimize" not in can:
        with pytest.raises(NotSupported, match="preference"):
            stack.client.post_training.preference_optimize(
                job_uuid="preferences", finetuned_model=MODEL, training_config={"data_config": {"dataset_id": "rows"}}
            )
    if "LoRA" in can and "DoRA" not in can:
        body = request("dora")
        with pytest.raises(InvalidField, match="use_dora"):
            stack.client.post_training.supervised_fine_tune(
                **{**body, "algorithm_config": {**body["algorithm_config"], "use_dora": True}}
            )


# -- what is told -----------------------------------------------------------------------------------------------------


def test_a_stream_of_events_can_be_cut_anywhere_and_read_on(stack: ConformanceStack, calm: Calm):
    told: list[JobEvent] = list(stack.client.post_training.events("calm"))
    ids = [event.id for event in told]
    assert ids == sorted(set(ids))
    for cut in (0, 1, len(told) // 2, len(told) - 1):
        assert list(stack.client.post_training.events("calm", after=ids[cut])) == told[cut + 1 :]
    steps = [event.step for event in told if event.kind is JobEventKind.step]
    assert steps == list(range(1, STEPS + 1))
    stream = httpx.get(f"{stack.url}/v1alpha/post-training/jobs/calm/events", params={"after": ids[-1]}).text
    names = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event: ")]
    assert names == ["end"]


def test_metrics_and_logs_tell_each_step_once_and_can_be_read_on(stack: ConformanceStack, calm: Calm):
    metrics = stack.client.post_training.metrics("calm")
    assert [metric.step for metric in metrics.data] == list(range(1, STEPS + 1))
    assert all(metric.loss is not None and metric.supervised_tokens for metric in metrics.data)
    assert stack.client.post_training.metrics("calm", after_step=20).data == metrics.data[20:]
    logs = stack.client.post_training.logs("calm")
    assert stack.client.post_training.logs("calm", logs.next).log_lines == []
    assert stack.client.post_training.logs("calm", tail=3).log_lines == logs.log_lines[-3:]
    assert str(stack.home) not in "\n".join(logs.log_lines)


# -- artifacts --------------------------------------------------------------------------------------------------------


def test_every_checkpoint_loads_in_plain_peft_and_has_learned(stack: ConformanceStack, calm: Calm, tmp_path: Path):
    assert [(c.epoch, c.step, c.identifier) for c in calm.checkpoints] == [
        (0, STEPS // EPOCHS, f"{MODEL}-sft-calm-0"),
        (1, STEPS, f"{MODEL}-sft-calm-1"),
    ]
    losses = [_loss(AutoModelForCausalLM.from_pretrained(stack.base, dtype=torch.float32), stack.base)]
    for checkpoint in calm.checkpoints:
        folder = stack.client.post_training.download_checkpoint(
            "calm", checkpoint.step, tmp_path / f"{checkpoint.step}"
        )
        assert all(tensor.isfinite().all() for tensor in load_file(folder / "adapter_model.safetensors").values())
        base = AutoModelForCausalLM.from_pretrained(stack.base, dtype=torch.float32)
        losses.append(_loss(PeftModel.from_pretrained(base, str(folder)), stack.base))
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.9 * losses[0]


@torch.no_grad()
def _loss(model: torch.nn.Module, base: Path) -> float:
    """Mean loss of the answers of some training rows, in nats, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    losses = []
    for row in rows(5):
        asked = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        answer = tokenizer(row["completion"], add_special_tokens=False, return_tensors="pt").input_ids
        logits = model(input_ids=torch.cat([prompt, answer], 1)).logits[0, prompt.shape[1] - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, answer[0]))
    return float(torch.stack(losses).mean())


def test_jobs_never_share_an_artifact_and_the_same_training_gives_the_same_bytes(
    stack: ConformanceStack, calm: Calm, again: Calm
):
    for name in ("identifier", "path"):
        values = [getattr(checkpoint, name) for checkpoint in [*calm.checkpoints, *again.checkpoints]]
        assert len(set(values)) == len(values) == 2 * EPOCHS
    assert len(hashes(stack, calm)) == EPOCHS
    assert hashes(stack, calm) == hashes(stack, again)


def test_a_job_is_deleted_once_it_has_ended_with_all_that_it_made_and_nothing_else(
    stack: ConformanceStack, calm: Calm, again: Calm
):
    before = hashes(stack, calm)
    submit(stack, "running-on", n_epochs=10_000)
    with pytest.raises(Conflict, match="running-on"):
        stack.client.post_training.delete("running-on")
    stack.client.post_training.cancel("running-on")
    stack.client.post_training.delete("again")
    with pytest.raises(JobNotFound):
        status_of(stack, "again")
    with pytest.raises(JobNotFound):
        stack.client.post_training.checkpoint_files("again", STEPS)
    assert "again" not in [job.job_uuid for job in stack.client.post_training.jobs()]
    assert not (stack.home / "jobs" / "again").exists()
    assert hashes(stack, calm) == before


# -- what happens to machines -----------------------------------------------------------------------------------------


def test_a_job_whose_worker_is_killed_goes_on_and_ends_in_the_same_bytes(stack: ConformanceStack, calm: Calm):
    submit(stack, "killed")
    until(at_step(stack, "killed", 5))
    assert stack.kill_worker("killed")
    killed = wait(stack.client, "killed")
    assert killed.status is JobStatus.completed, killed.error
    assert killed.attempt == 2
    assert moves(stack.client, "killed") == ["scheduled", "in_progress", "scheduled", "in_progress", "completed"]
    assert hashes(stack, killed) == hashes(stack, calm)


def test_a_server_that_is_killed_loses_no_job_and_no_event(stack: ConformanceStack, calm: Calm):
    submit(stack, "outlives", n_epochs=4)
    until(at_step(stack, "outlives", 3))
    jobs = [job.job_uuid for job in stack.client.post_training.jobs()]
    told = list(stack.client.post_training.events("calm"))
    stack.restart_after_kill()
    assert [job.job_uuid for job in stack.client.post_training.jobs()] == jobs
    assert status_of(stack, "calm") == calm
    assert list(stack.client.post_training.events("calm")) == told
    ended = wait(stack.client, "outlives")
    assert ended.status is JobStatus.completed, ended.error
    steps = [metric.step for metric in stack.client.post_training.metrics("outlives").data]
    assert steps == list(range(1, 2 * STEPS + 1))

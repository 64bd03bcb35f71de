"""Whole jobs on a served stack with a tiny random model: every verb, every way a job can end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from apis.errors import Conflict, InvalidField
from apis.post_training.models import JobStatus, PostTrainingJobStatusResponse
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from post_training.jobs.database import Database
from post_training.jobs.devices import visible_gpus
from post_training.jobs.leases import Leases
from post_training.jobs.store import JobStore
from providers.torchtune.config import TorchtunePostTrainingConfig
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama

MODEL = "tiny"
WORDS = ["red", "brown", "quick", "lazy", "old", "slow", "town", "sea", "tree", "books"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", context=256)


def make_home(folder: Path, tiny: Path) -> Path:
    home = folder / "home"
    import_model(str(tiny), MODEL, home)
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    return make_home(tmp_path_factory.mktemp("stack"), tiny)


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[StackClient]:
    with served(home) as (url, _), StackClient(url) as made:
        yield made


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Say {WORDS[n % 10]} {n}", "completion": f"The {WORDS[(n + 3) % 10]} hen."} for n in range(count)
    ]


def request(job_uuid: str, dataset: str, **training: Any) -> dict[str, Any]:
    training = {"n_epochs": 2, "dtype": "fp32", **training}
    data = {"dataset_id": dataset, "batch_size": 4, **training.pop("data_config", {})}
    return {
        "job_uuid": job_uuid,
        "model": MODEL,
        "training_config": {**training, "data_config": data},
        "algorithm_config": {"type": "LoRA", "rank": 6, "alpha": 12},
    }


def submit(client: StackClient, job_uuid: str, count: int, **training: Any) -> None:
    client.datasets.register({"type": "rows", "rows": rows(count)}, dataset_id=f"{job_uuid}-data")
    client.post_training.supervised_fine_tune(**request(job_uuid, f"{job_uuid}-data", **training))


def until(client: StackClient, job_uuid: str, reached: Any, seconds: float = 120) -> PostTrainingJobStatusResponse:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = client.post_training.status(job_uuid)
        if reached(status):
            return status
        assert not status.status.terminal, status
        time.sleep(0.05)
    raise AssertionError(f"{job_uuid} is {client.post_training.status(job_uuid)}")


def training_started(status: PostTrainingJobStatusResponse) -> bool:
    return status.progress is not None and status.progress.step > 2


def adapter_of(home: Path, path: str) -> dict[str, torch.Tensor]:
    return load_file(home / path / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(client: StackClient) -> PostTrainingJobStatusResponse:
    client.datasets.register({"type": "rows", "rows": rows(5)}, dataset_id="held-out")
    submit(client, "first", 24, data_config={"validation_dataset_id": "held-out"})
    return client.post_training.wait("first", poll_seconds=0.2, timeout=240)


def test_a_job_completes_with_a_checkpoint_and_metrics_for_each_epoch(trained: PostTrainingJobStatusResponse):
    assert trained.status is JobStatus.completed, trained.error
    assert [c.identifier for c in trained.checkpoints] == ["tiny-sft-first-0", "tiny-sft-first-1"]
    assert [(c.epoch, c.step) for c in trained.checkpoints] == [(0, 6), (1, 12)]
    metrics = [c.training_metrics for c in trained.checkpoints]
    assert all(m and m.validation_loss and m.perplexity for m in metrics)
    losses = [m.train_loss for m in metrics if m]
    assert losses[1] < losses[0]
    progress = trained.progress
    assert progress is not None
    assert (progress.step, progress.total_steps, progress.skipped_steps) == (12, 12, 0)
    assert trained.report is not None
    assert trained.report["dataset"]["rows"] == 24
    assert progress.supervised_tokens_seen == 2 * trained.report["dataset"]["supervised_tokens"]
    assert trained.resources_allocated is not None
    assert trained.resources_allocated["device"] == "cpu"
    times = [trained.scheduled_at, trained.started_at, trained.completed_at]
    assert times == sorted(time for time in times if time)


def test_the_adapter_loads_in_plain_peft_and_changes_the_model(
    home: Path, tiny: Path, trained: PostTrainingJobStatusResponse
):
    folder = home / trained.checkpoints[-1].path / "adapter"
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, folder)(ids).logits
    assert float((after - before).norm() / before.norm()) > 1e-3
    assert not list(folder.parent.rglob("*.pt")) + list(folder.parent.rglob("*.bin"))


def test_a_checkpoint_is_served_under_its_id_and_under_upstreams(
    client: StackClient, trained: PostTrainingJobStatusResponse
):
    ask = {"messages": [{"role": "user", "content": "Say red 0"}], "temperature": 0, "max_tokens": 12}
    answers = {
        model: client.inference.chat_completion(model=model, **ask).choices[0].message.content
        for model in (MODEL, "tiny-sft-first-1", "tiny-sft-1")
    }
    assert answers["tiny-sft-first-1"] == answers["tiny-sft-1"]
    assert answers["tiny-sft-first-1"] != answers[MODEL]
    assert {m.identifier for m in client.models.list()} >= {MODEL, "tiny-sft-first-0", "tiny-sft-first-1"}


def test_logs_tell_the_run_without_a_path_of_the_server(
    client: StackClient, home: Path, trained: PostTrainingJobStatusResponse
):
    lines = client.post_training.logs("first").log_lines
    text = "\n".join(lines)
    for expected in (
        "scheduled: submitted",
        "step 1/12 loss",
        "validation after epoch 1",
        "completed: all epochs done",
    ):
        assert expected in text
    assert str(home) not in text
    whole = client.post_training.logs("first")
    assert client.post_training.logs("first", after=whole.next).log_lines == []


def test_training_goes_on_from_a_checkpoint_exactly(
    client: StackClient, home: Path, trained: PostTrainingJobStatusResponse
):
    body = request("again", "first-data", n_epochs=1, optimizer_config={"lr": 1e-30}, dtype="bf16")
    body |= {"model": "tiny-sft-first-1", "algorithm_config": {"type": "LoRA"}}
    with pytest.raises(InvalidField, match="rank is 6, the request asks for 32"):
        client.post_training.supervised_fine_tune(**{**body, "algorithm_config": {"type": "LoRA", "rank": 32}})
    client.post_training.supervised_fine_tune(**body)
    client.post_training.supervised_fine_tune(**body)
    with pytest.raises(Conflict, match="another rank"):
        # The default's value, but not what was left out: that is the adapter's 6.
        client.post_training.supervised_fine_tune(**{**body, "algorithm_config": {"type": "LoRA", "rank": 16}})
    status = client.post_training.wait("again", poll_seconds=0.2, timeout=120)
    assert status.status is JobStatus.completed, status.error
    assert status.checkpoints[0].identifier == "tiny-sft-first-1-sft-again-0"
    before = adapter_of(home, trained.checkpoints[-1].path)
    after = adapter_of(home, status.checkpoints[0].path)
    # A rate of 1e-30 moves nothing, so what was read is what is written, unrounded by the bf16 model between.
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_same_submit_again_is_the_same_job_and_another_body_is_refused(
    client: StackClient, trained: PostTrainingJobStatusResponse
):
    body = request("first", "first-data", data_config={"validation_dataset_id": "held-out"})
    assert client.post_training.supervised_fine_tune(**body).job_uuid == "first"
    other = httpx.post(
        f"{client.base_url}/v1alpha/post-training/supervised-fine-tune", json=request("first", "held-out")
    )
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "conflict"
    assert other.headers["x-should-retry"] == "false"
    assert [job.job_uuid for job in client.post_training.jobs()].count("first") == 1


def test_a_running_job_is_cancelled_a_waiting_one_runs_next_and_submits_stay_fast(client: StackClient, home: Path):
    submit(client, "long", 3000, n_epochs=50)
    until(client, "long", training_started)
    durations = []
    for number in range(10):
        start = time.monotonic()
        client.post_training.supervised_fine_tune(**request(f"waits-{number}", "long-data", max_steps_per_epoch=1))
        durations.append(time.monotonic() - start)
    assert sorted(durations)[-1] < 0.3
    waiting = client.post_training.status("waits-1")
    assert (waiting.status, waiting.queue_position) == (JobStatus.scheduled, 1)
    assert waiting.waiting_reason
    for number in range(1, 10):
        client.post_training.cancel(f"waits-{number}")
        assert client.post_training.status(f"waits-{number}").status is JobStatus.cancelled

    start = time.monotonic()
    client.post_training.cancel("long")
    cancelled = client.post_training.wait("long", poll_seconds=0.1, timeout=30)
    assert time.monotonic() - start < 6
    assert (cancelled.status, cancelled.error) == (JobStatus.cancelled, None)
    client.post_training.cancel("long")
    assert client.post_training.status("long").completed_at == cancelled.completed_at
    assert until(client, "waits-0", lambda s: s.status is JobStatus.completed).checkpoints
    assert not list((home / "jobs" / "long").rglob(".*tmp*"))


def test_a_worker_killed_as_often_as_its_job_allows_fails_it_with_the_reason_and_the_next_one_runs(
    client: StackClient, home: Path
):
    submit(client, "victim", 3000, n_epochs=50, max_attempts=1)
    until(client, "victim", training_started)
    os.kill(worker_pid(home, "victim"), signal.SIGKILL)
    status = client.post_training.wait("victim", poll_seconds=0.1, timeout=20)
    assert status.status is JobStatus.failed
    assert status.error is not None
    assert (status.error.code, "SIGKILL" in status.error.message) == ("worker_died", True)
    assert (status.attempt, status.lost_attempts, status.max_attempts) == (1, 1, 1)
    submit(client, "after", 4, n_epochs=1)
    assert client.post_training.wait("after", timeout=120).status is JobStatus.completed


def worker_pid(home: Path, job_uuid: str) -> int:
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    found = {lease.job_uuid: lease.pid for lease in Leases(database).held()}[job_uuid]
    database.close()
    assert found is not None
    return found


def test_rows_without_a_supervised_token_fail_the_job_before_a_step(client: StackClient):
    client.datasets.register({"type": "rows", "rows": rows(4)}, dataset_id="cut")
    client.post_training.supervised_fine_tune(**request("cut", "cut", data_config={"max_seq_len": 8}))
    status = client.post_training.wait("cut", timeout=60)
    assert status.status is JobStatus.failed
    assert status.error is not None
    assert status.error.code == "data_invalid"
    assert "no supervised token" in status.error.message
    assert not status.checkpoints


def test_a_run_without_one_finite_step_fails_and_leaves_no_checkpoint(client: StackClient, home: Path, tiny: Path):
    # A base whose last norm is enormous: the network is sound, its loss overflows at every step.
    broken = shutil.copytree(tiny, home.parent / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    import_model(str(broken), "broken", home)
    client.datasets.register({"type": "rows", "rows": rows(80)}, dataset_id="overflow")
    client.post_training.supervised_fine_tune(**{**request("overflow", "overflow"), "model": "broken"})
    status = client.post_training.wait("overflow", timeout=120)
    assert status.status is JobStatus.failed
    assert status.error is not None
    assert status.error.code == "non_finite_loss"
    assert status.progress is not None
    assert status.progress.skipped_steps == 10
    assert not status.checkpoints


def test_a_base_model_is_trained_by_its_directory(client: StackClient):
    client.datasets.register({"type": "rows", "rows": rows(4)}, dataset_id="by-directory")
    body = {**request("by-directory", "by-directory", n_epochs=1), "model": None, "checkpoint_dir": "tiny"}
    client.post_training.supervised_fine_tune(**body)
    status = client.post_training.wait("by-directory", timeout=120)
    assert status.status is JobStatus.completed, status.error
    assert status.checkpoints[0].identifier == "tiny-sft-by-directory-0"
    with pytest.raises(InvalidField, match="lies elsewhere"):
        client.post_training.supervised_fine_tune(
            **{**request("mixed", "by-directory"), "model": "tiny-sft-by-directory-0", "checkpoint_dir": "tiny"}
        )


def test_a_job_whose_checkpoints_could_not_have_their_names_is_refused_at_once(
    client: StackClient, trained: PostTrainingJobStatusResponse
):
    client.models.register("tiny-sft-named-1", provider_model_id=MODEL)
    with pytest.raises(Conflict, match="tiny-sft-named-1"):
        client.post_training.supervised_fine_tune(**request("named", "first-data"))
    # Both would make tiny-sft-first-1-sft-z-0.
    client.post_training.supervised_fine_tune(**request("first-1-sft-z", "first-data"))
    client.post_training.cancel("first-1-sft-z")
    with pytest.raises(Conflict, match="first-1-sft-z"):
        client.post_training.supervised_fine_tune(**{**request("z", "first-data"), "model": "tiny-sft-first-1"})


def test_a_verification_that_is_cut_short_is_made_again_and_nothing_unproven_is_listed_meanwhile(
    client: StackClient, home: Path
):
    submit(client, "cut-short", 4, n_epochs=1)
    until(client, "cut-short", lambda s: s.progress is not None and s.progress.phase == "verify")
    os.kill(worker_pid(home, "cut-short"), signal.SIGKILL)
    seen = until(client, "cut-short", lambda s: s.attempt == 2)
    assert not seen.checkpoints
    status = client.post_training.wait("cut-short", poll_seconds=0.1, timeout=60)
    assert (status.status, status.attempt) == (JobStatus.completed, 2)
    assert [checkpoint.step for checkpoint in status.checkpoints] == [1]
    assert {path.name for path in (home / "jobs" / "cut-short" / "checkpoints").iterdir()} == {"1"}


def test_a_kind_of_device_that_the_stack_lacks_is_refused_and_one_that_it_has_is_waited_for(client: StackClient):
    there, missing = ("cuda", "cpu") if visible_gpus() else ("cpu", "cuda")
    submit(client, "fits", 4, n_epochs=1, device=there)
    with pytest.raises(InvalidField, match=f"no {missing} device is configured here") as refused:
        client.post_training.supervised_fine_tune(**request("fits-not", "fits-data", device=missing))
    assert refused.value.param == "training_config.device"
    status = client.post_training.wait("fits", timeout=120)
    assert status.status is JobStatus.completed, status.error
    assert (status.resources_allocated or {})["device"].startswith(there)


def test_fewer_rows_than_a_batch_still_make_a_step(client: StackClient):
    submit(client, "small", 3, n_epochs=1, data_config={"batch_size": 64})
    status = client.post_training.wait("small", timeout=120)
    assert status.status is JobStatus.completed, status.error
    assert status.progress is not None
    assert status.progress.step == 1


def test_a_stopped_server_gives_the_job_back_and_the_next_one_ends_it_with_the_same_bytes(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    training: dict[str, Any] = {"n_epochs": 2, "optimizer_config": {"num_warmup_steps": 5}}
    with served(home) as (url, process), StackClient(url) as client:
        submit(client, "calm", 400, **training)
        calm = client.post_training.wait("calm", timeout=200)
        client.post_training.supervised_fine_tune(**request("disturbed", "calm-data", **training))
        # In the second epoch; the first one's checkpoint may still be in its verification.
        until(client, "disturbed", lambda s: s.progress and s.progress.step > 102 and s.progress.phase == "train")
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)  # an impatient user; the worker is saving
        assert process.wait(30) == 0
    stored = JobStore(Database(f"sqlite:///{home / 'postgrad.db'}")).get("disturbed")
    assert (stored.status, stored.attempt) == ("scheduled", 1)
    with served(home) as (url, _), StackClient(url) as client:
        disturbed = client.post_training.wait("disturbed", timeout=200)
    assert (disturbed.status, disturbed.attempt) == (JobStatus.completed, 2)
    assert [c.step for c in disturbed.checkpoints] == [c.step for c in calm.checkpoints]
    assert [c.training_metrics for c in disturbed.checkpoints] == [c.training_metrics for c in calm.checkpoints]
    expected = adapter_of(home, calm.checkpoints[-1].path)
    actual = adapter_of(home, disturbed.checkpoints[-1].path)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_job_that_is_cancelled_while_the_server_stops_keeps_nothing_to_go_on_from(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, process), StackClient(url) as client:
        submit(client, "unwanted", 400, save_every_n_steps=2)
        until(client, "unwanted", training_started)
        client.post_training.cancel("unwanted")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    store = JobStore(Database(f"sqlite:///{home / 'postgrad.db'}"))
    stored = store.get("unwanted")
    assert (stored.status, store.recorded_steps("unwanted")) == ("cancelled", frozenset())
    assert list((home / "jobs" / "unwanted" / "checkpoints").iterdir()) == []
    store.database.close()


def test_a_killed_server_loses_no_job_and_the_running_one_ends_by_itself(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, process), StackClient(url) as client:
        submit(client, "running", 400, n_epochs=2)
        until(client, "running", training_started)
        for number in range(5):
            client.post_training.supervised_fine_tune(**request(f"job-{number}", "running-data", max_steps_per_epoch=1))
        process.kill()
        process.wait()
    with served(home) as (url, _), StackClient(url) as client:
        assert [job.job_uuid for job in client.post_training.jobs()] == ["running", *(f"job-{n}" for n in range(5))]
        for number in range(5):
            client.post_training.cancel(f"job-{number}")
        status = client.post_training.wait("running", timeout=120)
        assert (status.status, status.attempt) == (JobStatus.completed, 1)


def postgrad(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).parent / "postgrad")
    command = [program, "--endpoint", url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_command_line_trains_a_file_follows_it_and_lists_what_came_of_it(client: StackClient, tmp_path: Path):
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(8)))
    submit = ["post_training", "supervised_fine_tune", "--model", MODEL, "--dataset", str(file), "--epochs", "1"]
    done = postgrad(client.base_url, *submit, "--job-uuid", "by-hand", "--batch-size", "4", "--rank", "4", "--follow")
    assert done.returncode == 0, done.stderr
    assert "by-hand" in done.stdout.splitlines()[0]
    assert "\x1b[" not in done.stdout
    artifacts = json.loads(postgrad(client.base_url, "post_training", "artifacts", "by-hand", "--json").stdout)
    assert [c["identifier"] for c in artifacts["checkpoints"]] == ["tiny-sft-by-hand-0"]

    failed = postgrad(client.base_url, *submit, "--job-uuid", "too-short", "--max-seq-len", "8", "--follow")
    assert failed.returncode == 1
    assert "data_invalid" in failed.stderr


def test_meta_format_boots_with_one_warning_and_means_adapter_and_merged(tmp_path: Path):
    run_yaml = tmp_path / "run.yaml"
    run_yaml.write_text(
        "version: 2\nimage_name: old\napis: [post_training, datasetio]\nproviders:\n"
        "  datasetio: [{provider_id: localfs, provider_type: 'inline::localfs'}]\n  post_training:\n"
        "  - {provider_id: tt, provider_type: 'inline::torchtune', config: {checkpoint_format: meta}}\n"
    )
    log = tmp_path / "log"
    with log.open("w") as errors, served(tmp_path / "home", stack=str(run_yaml), stderr=errors) as (url, _):
        config = httpx.get(f"{url}/v1/providers/tt").json()["config"]
    assert config["checkpoint_format"] == "meta"
    assert log.read_text().count("checkpoint_format: meta") == 1
    assert TorchtunePostTrainingConfig(checkpoint_format="meta").forms == ("adapter", "merged")
    assert TorchtunePostTrainingConfig(checkpoint_format="huggingface").forms == ("adapter",)

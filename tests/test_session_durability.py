"""What is left of a session when its client, its worker or its server goes: all that was said to be durable."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from post_training.client import StackClient
from post_training.jobs.database import Database
from post_training.jobs.tables import LeaseRow
from post_training.processes import process_identity
from tests.served_stack import run_yaml_with, served
from tests.session_stack import MODEL, adapter, attached, done, make_home, opened, refused, rows, until

STEPS = 6
BATCHES = [rows(3, 3 * index) for index in range(STEPS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def scheduler(home: Path) -> Iterator[httpx.Client]:
    with (
        served(home, stack=run_yaml_with(home.parent, jobs={"devices": ["cpu", "cpu"], "warm_seconds": 300})) as (
            url,
            _,
        ),
        httpx.Client(base_url=url, timeout=60) as made,
    ):
        yield made


def train(client: httpx.Client, first: int, last: int) -> None:
    for number in range(first, last + 1):
        done(client.post("/train_step", json={"rows": BATCHES[number - 1], "step": number, "cursor": {"at": number}}))


def completed(scheduler: httpx.Client, job_id: str) -> None:
    done(scheduler.post(f"/complete_job/{job_id}"))
    deadline = time.monotonic() + 60
    while scheduler.get(f"/job_status/{job_id}").json()["status"] != "COMPLETED":
        assert time.monotonic() < deadline, scheduler.get(f"/job_status/{job_id}").json()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(scheduler: httpx.Client, home: Path) -> bytes:
    with opened(scheduler, "undisturbed") as client:
        train(client, 1, STEPS)
    completed(scheduler, "undisturbed")
    return adapter(home, "undisturbed", STEPS)


def test_a_session_and_a_whole_job_on_the_same_rows_in_the_same_order_end_in_the_same_bytes(
    scheduler: httpx.Client, home: Path, undisturbed: bytes
) -> None:
    with StackClient(str(scheduler.base_url)) as client:
        data = "".join(json.dumps(row) + "\n" for batch in BATCHES for row in batch)
        (home / "rows.jsonl").write_text(data)
        client.datasets.register(
            purpose="post-training/messages",
            source={"type": "rows", "rows": [row for batch in BATCHES for row in batch]},
            dataset_id="same",
        )
        client.post_training.supervised_fine_tune(
            job_uuid="whole",
            model=MODEL,
            algorithm_config={"type": "LoRA"},
            training_config={
                "n_epochs": 1,
                "dtype": "fp32",
                "data_config": {"dataset_id": "same", "batch_size": 3, "shuffle": False},
                "optimizer_config": {"lr": 1e-2, "lr_schedule": "constant", "num_warmup_steps": 0},
            },
        )
        deadline = time.monotonic() + 90
        while (status := client.post_training.status("whole")).status != "completed":
            assert status.status != "failed", status.error
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert adapter(home, "whole", STEPS) == undisturbed


def test_a_killed_worker_loses_only_what_was_not_durable_and_the_rest_sent_again_ends_in_the_same_bytes(
    scheduler: httpx.Client, home: Path, undisturbed: bytes
) -> None:
    with opened(scheduler, "killed", save_every_n_steps=2) as client:
        train(client, 1, 5)
        assert done(client.get("/status"))["last_durable_step"] == 4
    kill_worker(home, "killed")
    wait_for_attempt(scheduler, 2, "killed")
    with attached(scheduler, "killed") as client:
        status = done(client.get("/status"))
        assert (status["last_durable_step"], status["next_step"], status["cursor"]) == (4, 5, {"at": 4})
        replay = client.post("/train_step", json={"rows": BATCHES[3], "step": 4, "cursor": {"at": 4}})
        assert done(replay)["step"] == 4  # answered from before the kill
        refused(client.post("/train_step", json={"rows": BATCHES[0], "step": 4}), "conflict")
        train(client, 5, STEPS)
    completed(scheduler, "killed")
    assert adapter(home, "killed", STEPS) == undisturbed


def test_a_training_server_that_is_killed_is_started_again_and_nothing_that_was_done_is_lost(
    scheduler: httpx.Client, home: Path, undisturbed: bytes
) -> None:
    with opened(scheduler, "server") as client:
        train(client, 1, 3)
    before = until(scheduler, "server", "RUNNING")["server_url"]
    os.kill(server_of(home, "server"), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while until(scheduler, "server", "RUNNING")["server_url"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with attached(scheduler, "server") as client:
        assert done(client.get("/status"))["next_step"] == 4  # though no checkpoint held it
        replay = client.post("/train_step", json={"rows": BATCHES[2], "step": 3, "cursor": {"at": 3}})
        assert done(replay)["step"] == 3
        train(client, 4, STEPS)
    completed(scheduler, "server")
    assert adapter(home, "server", STEPS) == undisturbed
    assert scheduler.get("/v1alpha/post-training/jobs/server/status").json()["attempt"] == 1


@pytest.mark.parametrize("state", ["runs", "hangs"])
def test_a_training_server_does_not_outlive_its_worker(scheduler: httpx.Client, home: Path, state: str) -> None:
    job_id = f"server-{state}"
    opened(scheduler, job_id).close()
    server = server_of(home, job_id)
    identity = process_identity(server)
    assert identity is not None
    if state == "hangs":
        os.kill(server, signal.SIGSTOP)
    kill_worker(home, job_id)
    deadline = time.monotonic() + 10
    while process_identity(server) == identity:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done(scheduler.delete(f"/cancel_job/{job_id}"))


def test_a_silent_client_loses_its_device_and_resumes_by_id_with_its_cursor_to_the_same_bytes(
    scheduler: httpx.Client, home: Path, undisturbed: bytes
) -> None:
    with opened(scheduler, "silent", lease_seconds=1) as client:
        train(client, 1, 3)
    status = until_paused(scheduler, "silent")
    assert status["status"] == "QUEUED"
    assert status["last_durable_step"] == 3
    assert "silent for 1 s" in status["message"]
    job = scheduler.get("/v1alpha/post-training/jobs/silent/status").json()
    assert job["status"] == "scheduled"
    assert "resumes" in job["waiting_reason"]
    done(scheduler.post("/resume_job/silent"))
    with attached(scheduler, "silent") as client:
        status = done(client.get("/status"))
        assert (status["next_step"], status["cursor"]) == (4, {"at": 3})
        train(client, 4, STEPS)
        done(client.post("/complete"))
    assert adapter(home, "silent", STEPS) == undisturbed
    refused(scheduler.post("/resume_job/silent"), "conflict")


def test_a_session_that_its_client_pauses_gives_its_device_back_at_once(scheduler: httpx.Client) -> None:
    with opened(scheduler, "paused") as client:
        train(client, 1, 2)
        assert "step 2" in done(client.post("/pause"))["message"]
    status = scheduler.get("/job_status/paused").json()
    assert (status["status"], status["paused"], status["last_durable_step"]) == ("QUEUED", True, 2)
    assert "paused by its client" in status["message"]
    done(scheduler.post("/resume_job/paused"))
    with attached(scheduler, "paused") as client:
        assert done(client.get("/status"))["next_step"] == 3
    done(scheduler.delete("/cancel_job/paused"))


def test_a_stopped_server_saves_a_session_and_the_next_one_goes_on_with_it(tmp_path: Path, undisturbed: bytes) -> None:
    home = make_home(tmp_path)
    with (
        served(home) as (url, _),
        httpx.Client(base_url=url, timeout=60) as scheduler,
        opened(scheduler, "stopped") as client,
    ):
        train(client, 1, 3)
    with served(home) as (url, _), httpx.Client(base_url=url, timeout=60) as scheduler:
        with attached(scheduler, "stopped") as client:
            assert done(client.get("/status"))["next_step"] == 4
            train(client, 4, STEPS)
        completed(scheduler, "stopped")
    assert adapter(home, "stopped", STEPS) == undisturbed


def test_gradients_that_wait_are_lost_with_the_process_and_their_calls_are_asked_for_again(
    scheduler: httpx.Client, home: Path
) -> None:
    with opened(scheduler, "waiting") as client:
        train(client, 1, 1)
        for number in (2, 3):
            done(client.post("/forward_backward", json={"rows": BATCHES[number], "step": number}))
        answer = done(client.post("/save_checkpoint", json={"name": "between"}))
        assert (answer["checkpoint"]["step"], answer["checkpoint"]["global_steps"]) == (1, 1)
        assert done(client.get("/status"))["last_durable_step"] == 1
        refused(client.post("/train_step", json={"rows": BATCHES[0], "step": 4}), "conflict")
        whole = done(client.post("/optim_step", json={"step": 4}))
    kill_worker(home, "waiting")
    wait_for_attempt(scheduler, 2, "waiting")
    with attached(scheduler, "waiting") as client:
        assert done(client.get("/status"))["next_step"] == 2
        for number in (2, 3):
            done(client.post("/forward_backward", json={"rows": BATCHES[number], "step": number}))
        again = done(client.post("/optim_step", json={"step": 4}))
        assert {**again, "seconds": 0, "tokens_per_second": 0} == {**whole, "seconds": 0, "tokens_per_second": 0}
        scheduler.delete("/cancel_job/waiting")


def test_gradients_of_two_calls_make_the_update_that_one_call_with_all_rows_makes(scheduler: httpx.Client) -> None:
    with opened(scheduler, "one") as one, opened(scheduler, "two") as two:
        done(one.post("/train_step", json={"rows": [*BATCHES[0], *BATCHES[1][:1]]}))
        done(two.post("/forward_backward", json={"rows": BATCHES[0]}))
        done(two.post("/forward_backward", json={"rows": BATCHES[1][:1]}))
        done(two.post("/optim_step", json={}))
        losses = [done(each.post("/validate", json={"rows": BATCHES[2]}))["loss"] for each in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for job_id in ("one", "two"):
        scheduler.delete(f"/cancel_job/{job_id}")


def test_a_checkpoint_is_verified_served_as_a_model_and_computes_what_was_validated(
    scheduler: httpx.Client, home: Path
) -> None:
    with opened(scheduler, "saved") as client:
        train(client, 1, 3)
        answer = done(client.post("/save_checkpoint", json={"name": "best", "validation_loss": 0.25}))
        assert answer["checkpoint"]["state"] == "ready"
        assert done(client.post("/save_checkpoint", json={"name": "best"})) == answer
        refused(client.post("/save_checkpoint", json={"name": "other"}), "conflict")
        loss = done(client.post("/validate", json={"sequences": [{"tokens": [5, 6, 7, 8, 9]}]}))["loss"]
        train(client, 4, 5)
        refused(client.post("/save_checkpoint", json={"name": "best"}), "conflict")
        back = done(client.post("/load_checkpoint", json={"name": "best", "step": 6}))
        assert (back["step"], back["global_steps"]) == (6, 3)
        assert done(client.post("/validate", json={"sequences": [{"tokens": [5, 6, 7, 8, 9]}]}))["loss"] == loss
        refused(client.post("/load_checkpoint", json={"name": "none"}), "checkpoint_not_found", 404)
    assert scheduler.get("/v1/models/tiny-sft-saved-best").status_code == 200
    asked = {"model": "tiny-sft-saved-best", "prompt": "say red", "max_tokens": 3, "temperature": 0}
    assert done(scheduler.post("/v1/completions", json=asked))["choices"][0]["text"]
    artifacts = scheduler.get("/v1alpha/post-training/jobs/saved/artifacts").json()["checkpoints"]
    assert artifacts[0]["training_metrics"]["validation_loss"] == 0.25
    base = AutoModelForCausalLM.from_pretrained(home / "models" / MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, home / "jobs/saved/checkpoints/3/adapter")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert model(ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-5)
    completed(scheduler, "saved")


def test_a_default_name_is_free_after_going_back_to_a_checkpoint(scheduler: httpx.Client) -> None:
    with opened(scheduler, "back") as client:
        train(client, 1, 2)
        assert done(client.post("/save_checkpoint", json={}))["checkpoint"]["name"] == "step2"
        train(client, 3, 3)
        done(client.post("/load_checkpoint", json={"name": "step2", "step": 4}))
        assert done(client.post("/save_checkpoint", json={}))["checkpoint"]["name"] == "step2_call4"
        done(client.post("/load_checkpoint", json={"name": "step2", "step": 5}))
    completed(scheduler, "back")
    names = [
        each["identifier"] for each in scheduler.get("/v1alpha/post-training/jobs/back/artifacts").json()["checkpoints"]
    ]
    assert names == ["tiny-sft-back-step2", "tiny-sft-back-step2_call4", "tiny-sft-back-step2_call5"]


def test_a_session_that_is_to_be_completed_is_not_left_paused(scheduler: httpx.Client) -> None:
    with opened(scheduler, "both") as client:
        train(client, 1, 2)
        done(scheduler.post("/complete_job/both"))
        client.post("/pause")
    completed(scheduler, "both")


def test_a_request_that_stops_coming_does_not_hold_the_device(scheduler: httpx.Client) -> None:
    with opened(scheduler, "half", lease_seconds=1) as client:
        train(client, 1, 1)
        url = client.base_url
        token = httpx.URL(scheduler.get("/job_status/half").json()["server_url"]).password
        head = f"POST /api/v1/train_step HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {token}\r\n"
        with socket.create_connection((url.host, url.port)) as half:
            half.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
            assert until_paused(scheduler, "half")["last_durable_step"] == 1
    done(scheduler.delete("/cancel_job/half"))


def test_a_session_that_trained_nothing_cannot_be_completed_with_success(scheduler: httpx.Client) -> None:
    with opened(scheduler, "nothing") as client:
        refused(client.post("/save_checkpoint", json={}), "bad_request")
        scheduler.post("/complete_job/nothing")
        deadline = time.monotonic() + 30
        while (status := scheduler.get("/job_status/nothing").json())["status"] != "FAILED":
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
    assert "before any step" in status["error_message"]


def test_a_cancelled_session_frees_its_device_and_keeps_what_was_announced(scheduler: httpx.Client, home: Path) -> None:
    with opened(scheduler, "cancelled") as client:
        train(client, 1, 2)
        done(client.post("/save_checkpoint", json={"name": "kept"}))
        train(client, 3, 3)
        assert done(scheduler.delete("/cancel_job/cancelled"))["job_id"] == "cancelled"
        deadline = time.monotonic() + 30
        while scheduler.get("/job_status/cancelled").json()["status"] != "CANCELLED":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert scheduler.get("/v1/models/tiny-sft-cancelled-kept").status_code == 200
    assert [path.name for path in (home / "jobs/cancelled/checkpoints").iterdir()] == ["2"]


def test_health_is_answered_soon_while_steps_and_saves_run(scheduler: httpx.Client) -> None:
    with opened(scheduler, "healthy") as client:
        ended = threading.Event()

        def work() -> None:
            many = [{"tokens": list(range(5, 200))}] * 64
            for _ in range(4):
                done(client.post("/train_step", json={"sequences": many}))
            done(client.post("/save_checkpoint", json={}))
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        times = []
        with httpx.Client(base_url=client.base_url.copy_with(userinfo=b"")) as looker:
            while not ended.is_set() and thread.is_alive():
                began = time.perf_counter()
                assert looker.get("/health").status_code == 200
                times.append(time.perf_counter() - began)
                time.sleep(0.01)
        thread.join()
        assert ended.is_set()
    assert len(times) > 20
    # The bound of a quiet machine is 0.05 s (benchmarks/sessions.py); tests share theirs.
    assert statistics.quantiles(times, n=100)[97] < 0.5
    scheduler.delete("/cancel_job/healthy")


def kill_worker(home: Path, job_id: str) -> None:
    os.kill(worker_of(home, job_id), signal.SIGKILL)


def server_of(home: Path, job_id: str) -> int:
    """The process of a session's training server."""
    found = [
        int(child)
        for task in Path(f"/proc/{worker_of(home, job_id)}/task").iterdir()
        for child in (task / "children").read_text().split()
        if b"session_server" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(found) == 1
    return found[0]


def worker_of(home: Path, job_id: str) -> int:
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    with database.reading() as session:
        lease = session.get_one(LeaseRow, job_id)
    database.close()
    assert lease.pid is not None
    return lease.pid


def wait_for_attempt(scheduler: httpx.Client, attempt: int, job_id: str) -> None:
    deadline = time.monotonic() + 60
    while scheduler.get(f"/v1alpha/post-training/jobs/{job_id}/status").json()["attempt"] < attempt:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_paused(scheduler: httpx.Client, job_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (status := scheduler.get(f"/job_status/{job_id}").json())["paused"]:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status

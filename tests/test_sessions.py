"""Sessions on a served stack: a client drives training step by step, and each step is done exactly once."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests

from tests.served_stack import run_yaml_with, served
from tests.session_stack import CONFIG, MODEL, done, make_home, opened, refused, rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def scheduler(home: Path) -> Iterator[httpx.Client]:
    two = run_yaml_with(home.parent, jobs={"devices": ["cpu", "cpu"]})
    with served(home, stack=two) as (url, _), httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def session(scheduler: httpx.Client) -> Iterator[httpx.Client]:
    with opened(scheduler, "shared", window=2) as client:
        yield client
    scheduler.delete("/cancel_job/shared")


def test_a_replayed_step_is_answered_as_the_first_time_and_trains_nothing(session: httpx.Client) -> None:
    number = done(session.get("/status"))["next_step"]
    body = {"rows": rows(4), "step": number}
    first = done(session.post("/train_step", json=body))
    assert done(session.post("/train_step", json=body)) == first
    assert done(session.get("/status"))["next_step"] == number + 1


def test_another_body_under_a_number_that_was_used_is_refused(session: httpx.Client) -> None:
    number = done(session.get("/status"))["next_step"]
    done(session.post("/train_step", json={"rows": rows(2), "step": number}))
    assert refused(session.post("/train_step", json={"rows": rows(3), "step": number}), "conflict")["param"] == "step"
    refused(session.post("/forward_backward", json={"rows": rows(2), "step": number}), "conflict")


def test_a_number_beyond_the_window_is_refused_and_one_within_it_waits_for_those_before(session: httpx.Client) -> None:
    number = done(session.get("/status"))["next_step"]
    refused(session.post("/train_step", json={"rows": rows(1), "step": number + 3}), "invalid_field")
    with ThreadPoolExecutor() as pool:
        ahead = pool.submit(session.post, "/train_step", json={"rows": rows(1, 5), "step": number + 1})
        time.sleep(0.5)
        assert not ahead.done()
        assert done(session.post("/train_step", json={"rows": rows(1), "step": number}))["step"] == number
        assert done(ahead.result())["step"] == number + 1


def test_calls_without_a_number_are_done_in_the_order_they_come(session: httpx.Client) -> None:
    number = done(session.get("/status"))["next_step"]
    answers = [done(session.post("/train_step", json={"rows": rows(1, i)}))["step"] for i in range(3)]
    assert answers == [number, number + 1, number + 2]


def test_a_bad_row_is_refused_by_its_number_and_its_step_number_is_free_again(session: httpx.Client) -> None:
    number = done(session.get("/status"))["next_step"]
    bad = [*rows(1), {"prompt": "no answer", "completion": 3}]
    error = refused(session.post("/train_step", json={"rows": bad, "step": number}), "data_invalid")
    assert error["row"] == 1
    assert done(session.post("/train_step", json={"rows": rows(1), "step": number}))["step"] == number


def tensor(array: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    shape = list(array.shape)
    return {
        "__type__": "torch.Tensor",
        "__dtype__": "torch.int64",
        "__shape__": shape,
        "__device__": "cpu",
        "__data__": data,
    }


def test_three_forms_of_one_batch_give_the_same_loss(session: httpx.Client) -> None:
    plain = done(session.post("/validate", json={"rows": rows(3)}))
    tokens = [[5, 6, 7, 8], [9, 10, 11]]
    as_lists = {"sequences": [{"tokens": row, "labels": [-100, *row[1:]]} for row in tokens]}
    padded = np.zeros((2, 4), np.int64)
    mask = np.zeros((2, 4), np.int64)
    for index, row in enumerate(tokens):
        padded[index, : len(row)], mask[index, : len(row)] = row, 1

    proto = {
        "batch": {"input_ids": tensor(padded), "attention_mask": tensor(mask)},
        "non_tensor_batch": {},
        "meta_info": {},
    }
    by_lists = done(session.post("/validate", json=as_lists))
    assert done(session.post("/validate", json={"batch_data": proto}))["loss"] == by_lists["loss"]
    assert by_lists["supervised_tokens"] == 5
    assert plain["supervised_tokens"] > 3


def test_who_has_no_token_or_another_is_turned_away_and_health_is_open(
    scheduler: httpx.Client, session: httpx.Client
) -> None:
    with httpx.Client(base_url=session.base_url.copy_with(userinfo=b"")) as stranger:
        assert done(stranger.get("/health"))["status"] == "healthy"
        refused(stranger.get("/status"), "unauthorized", 401)
        refused(stranger.post("/train_step", json={"rows": rows(1)}), "unauthorized", 401)
        refused(stranger.get("/status", headers={"authorization": "Bearer nonsense"}), "unauthorized", 401)
        token = str(httpx.URL(scheduler.get("/job_status/shared").json()["server_url"]).password)
        assert done(stranger.get("/status", headers={"authorization": f"Bearer {token}"}))["job_id"] == "shared"
    assert "@" not in next(
        j["server_url"] for j in scheduler.get("/list_jobs").json()["jobs"] if j["job_id"] == "shared"
    )


def test_an_unknown_key_of_a_config_is_refused_by_its_name(scheduler: httpx.Client) -> None:
    error = refused(scheduler.post("/submit_job", json={"config": {**CONFIG, "rollout_n": 5}}), "invalid_field")
    assert error["param"] == "config.rollout_n"
    error = refused(scheduler.post("/submit_job", json={"config": {**CONFIG, "max_seq_len": 999}}), "invalid_field")
    assert error["param"] == "config.max_seq_len"


def test_more_devices_than_there_are_is_refused_at_once(scheduler: httpx.Client) -> None:
    error = refused(scheduler.post("/submit_job", json={"config": CONFIG, "num_gpus": 4}), "invalid_field")
    assert error["param"] == "num_gpus"


def test_a_submit_that_is_sent_again_opens_one_session(scheduler: httpx.Client) -> None:
    body = {"job_id": "twice", "config": CONFIG}
    for _ in range(2):
        assert done(scheduler.post("/submit_job", json=body))["job_id"] == "twice"
    assert [job["job_id"] for job in scheduler.get("/list_jobs").json()["jobs"]].count("twice") == 1
    refused(scheduler.post("/submit_job", json={"job_id": "twice", "config": {**CONFIG, "seed": 9}}), "conflict")
    assert done(scheduler.delete("/cancel_job/twice"))["status"] in ("CANCELLED", "RUNNING", "STARTING")


def test_a_body_that_is_too_large_is_refused_as_such_and_an_unknown_field_by_its_name(session: httpx.Client) -> None:
    refused(session.post("/train_step", content=b" " * (64 * 2**20 + 1)), "too_large", 413)
    error = refused(session.post("/train_step", json={"rows": rows(1), "learning_rate": 1}), "invalid_field")
    assert (error["param"], error["detail"]["errors"][0]["loc"]) == ("learning_rate", ["body", "learning_rate"])
    refused(session.post("/train_step", json={"rows": rows(1), "sequences": [{"tokens": [1, 2]}]}), "invalid_field")
    refused(session.post("/train_step", content=b"{"), "invalid_field")
    refused(session.get("/nothing"), "not_found", 404)
    refused(session.get("/train_step"), "method_not_allowed", 405)


def test_a_client_of_opentinkers_drives_a_session_as_it_always_did(scheduler: httpx.Client) -> None:
    """By the library and with the bodies that its SchedulerClient and HTTPTrainingClient use, without step numbers."""
    root = str(scheduler.base_url).rstrip("/")
    always = {"enable_agent_loop": False, "wandb_key": None, "num_gpus": None}
    config = {"model": MODEL, "lora": {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lr": 3e-3}}
    with requests.Session() as client:
        submitted = client.post(f"{root}/submit_job", json={"config": config, **always}, timeout=60)
        submitted.raise_for_status()
        job_id = submitted.json()["job_id"]
        while (status := client.get(f"{root}/job_status/{job_id}", timeout=60).json())["status"] != "RUNNING":
            assert status["status"] not in ("FAILED", "CANCELLED"), status
            time.sleep(0.1)
        server = f"{status['server_url'].rstrip('/')}/api/v1"
        ids = np.arange(5, 21, dtype=np.int64).reshape(2, 8)
        batch = {"batch": {"input_ids": tensor(ids), "attention_mask": tensor(np.ones_like(ids))}}
        data = {"batch_data": {**batch, "non_tensor_batch": {}, "meta_info": {}}}
        steps = [client.post(f"{server}/train_step", json=data, timeout=60).json() for _ in range(2)]
        assert [(step["status"], step["global_steps"]) for step in steps] == [("success", 1), ("success", 2)]
        assert steps[1]["metrics"]["train/loss"] < steps[0]["metrics"]["train/loss"]
        assert client.post(f"{server}/validate", json=data, timeout=60).json()["status"] == "success"
        saved = client.post(f"{server}/save_checkpoint", json={}, timeout=60).json()
        assert (saved["status"], saved["result"]["global_steps"]) == ("success", 2)
        client.post(f"{root}/complete_job/{job_id}", timeout=60).raise_for_status()
        while client.get(f"{root}/job_status/{job_id}", timeout=60).json()["status"] != "COMPLETED":
            time.sleep(0.1)


def test_unknown_sessions_and_whole_jobs_are_not_found(scheduler: httpx.Client) -> None:
    for call in (
        scheduler.get("/job_status/none"),
        scheduler.delete("/cancel_job/none"),
        scheduler.post("/complete_job/none"),
    ):
        refused(call, "job_not_found", 404)

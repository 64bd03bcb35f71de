"""Many clients at once with one id."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import httpx

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from tests.faults.harness import assert_ended_once, make_home, register_rows, request, wait
from tests.served_stack import run_yaml_with, served

SUBMIT = "/v1alpha/post-training/supervised-fine-tune"


def in_parallel(url: str, bodies: list[dict[str, object]]) -> list[httpx.Response]:
    answers: list[httpx.Response] = []
    together = threading.Barrier(len(bodies))

    def send(body: dict[str, object]) -> None:
        together.wait()
        answers.append(httpx.post(url + SUBMIT, json=body, timeout=60))

    threads = [threading.Thread(target=send, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_fifty_bodies_under_one_id_have_one_winner_which_completes_and_fifty_equal_ones_are_one_job(
    tmp_path: Path, tiny: Path
):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client, 8)
        different = [request("contested", n_epochs=1, seed=seed) for seed in range(50)]
        answers = in_parallel(url, different)
        assert Counter(answer.status_code for answer in answers) == {200: 1, 400: 49}
        assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 400} == {"conflict"}
        assert {a.headers["x-should-retry"] for a in answers if a.status_code == 400} == {"false"}

        same = in_parallel(url, [request("replayed", n_epochs=1)] * 50)
        assert Counter(answer.status_code for answer in same) == {200: 50}
        assert {answer.text for answer in same} == {'{"job_uuid":"replayed"}'}

        assert [job.job_uuid for job in client.post_training.jobs()] == ["contested", "replayed"]
        for name in ("contested", "replayed"):
            assert wait(client, name).status is JobStatus.completed
    for name in ("contested", "replayed"):
        assert assert_ended_once(home, name) == 1


def test_a_full_queue_says_when_to_come_back(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    run_yaml = run_yaml_with(tmp_path, jobs={"max_queued": 2, "devices": ["cpu"]})
    with served(home, stack=run_yaml) as (url, _), StackClient(url) as client:
        register_rows(client, 2000)
        client.post_training.supervised_fine_tune(**request("running", n_epochs=100))
        while client.post_training.status("running").status is JobStatus.scheduled:
            pass
        answers = [httpx.post(url + SUBMIT, json=request(f"job-{number}")) for number in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "queue_full"
        assert int(answers[2].headers["retry-after"]) > 0
        assert "x-should-retry" not in answers[2].headers
        client.post_training.cancel("job-0")
        assert httpx.post(url + SUBMIT, json=request("job-2")).status_code == 200
        client.post_training.cancel("running")

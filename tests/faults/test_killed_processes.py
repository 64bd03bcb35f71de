"""SIGKILL, at any moment, to any process: no job is lost, none runs twice, and the bytes come out the same."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from tests.faults.conftest import Calm
from tests.faults.harness import (
    assert_ended_once,
    assert_equal_results,
    assert_nothing_partial,
    make_home,
    register_rows,
    repeated,
    request,
    result,
    until,
    wait,
    worker_pid,
)
from tests.served_stack import served

INJECTED = os.pathsep.join(filter(None, (str(Path(__file__).parent / "injected"), os.environ.get("PYTHONPATH"))))
pytestmark = pytest.mark.timeout(3600 if os.environ.get("POSTGRAD_LONG_FAULTS") else 400)


def test_every_submit_that_was_answered_is_there_after_a_kill(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    count = repeated(6, 100)
    with served(home) as (url, process), StackClient(url) as client:
        register_rows(client, 1000)
        client.post_training.supervised_fine_tune(**request("busy", n_epochs=1000))
        pid = until(lambda: worker_pid(home, "busy"))
        process.kill()
    for number in range(count):
        with served(home) as (url, process), StackClient(url) as client:
            client.post_training.supervised_fine_tune(**request(f"job-{number}"))
            process.kill()
            process.wait()
    with served(home) as (url, _), StackClient(url) as client:
        jobs = client.post_training.jobs()
        assert [job.job_uuid for job in jobs] == ["busy", *(f"job-{number}" for number in range(count))]
        assert [job.status for job in jobs] == [JobStatus.in_progress] + [JobStatus.scheduled] * count
        assert worker_pid(home, "busy") == pid, "it went on through every kill"
        assert client.post_training.status("busy").attempt == 1
        client.post_training.cancel("busy")
        assert wait(client, "busy", 20).status is JobStatus.cancelled


def test_a_job_whose_worker_is_killed_at_a_random_moment_ends_once_with_the_bytes_of_an_undisturbed_run(
    tmp_path: Path, tiny: Path, calm: Calm
):
    home = make_home(tmp_path, tiny)
    draw = random.Random(20261130)
    attempts = []
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client)
        for number in range(repeated(3, 20)):
            name = f"killed-{number}"
            client.post_training.supervised_fine_tune(**request(name))
            pid = until(lambda name=name: worker_pid(home, name))
            time.sleep(draw.uniform(0, 0.9 * calm.seconds))
            if worker_pid(home, name) == pid:
                os.kill(pid, signal.SIGKILL)
            assert wait(client, name).status is JobStatus.completed
            attempts.append(assert_ended_once(home, name))
            assert_equal_results(result(home, name), calm.result)
            assert_nothing_partial(home, name)
    assert 2 in attempts, "no kill met a running job"


def test_a_job_killed_again_and_again_goes_on_from_checkpoint_to_checkpoint(tmp_path: Path, tiny: Path, calm: Calm):
    home = make_home(tmp_path, tiny)
    draw = random.Random(7)
    kills = repeated(4, 20)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("hunted", max_attempts=25))
        for _ in range(kills):
            pid = until(lambda: worker_pid(home, "hunted"))
            time.sleep(draw.uniform(0, 0.35 * calm.seconds))
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: worker_pid(home, "hunted") != pid)
        assert wait(client, "hunted").status is JobStatus.completed
    assert assert_ended_once(home, "hunted") == kills + 1
    assert_equal_results(result(home, "hunted"), calm.result)
    assert_nothing_partial(home, "hunted")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 7])
def test_server_and_worker_killed_at_the_rename_of_a_checkpoint_lose_nothing(
    tmp_path: Path, tiny: Path, calm: Calm, when: str, number: int
):
    """The 7th is that of an epoch's end, which is verified and announced after it."""
    home = make_home(tmp_path, tiny)
    marker = tmp_path / "died"
    injected: dict[str, Any] = {"PYTHONPATH": INJECTED, "POSTGRAD_TEST_DIE": f"{when}:{number}:{marker}"}
    with served(home, **injected) as (url, process), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("cut"))
        assert process.wait(120) == -signal.SIGKILL
    assert marker.exists()
    with served(home) as (url, _), StackClient(url) as client:
        assert wait(client, "cut").status is JobStatus.completed
    assert assert_ended_once(home, "cut") == 2
    assert_equal_results(result(home, "cut"), calm.result)
    assert_nothing_partial(home, "cut")

"""The API while a job uses every core, and while its store is someone else's for a while."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from tests.faults.conftest import Calm
from tests.faults.harness import (
    assert_ended_once,
    assert_equal_results,
    make_home,
    register_rows,
    repeated,
    request,
    result,
    until,
    wait,
)
from tests.served_stack import PROGRAM, TEMPLATE, served

pytestmark = pytest.mark.timeout(300)


def percentile_99(durations: list[float]) -> float:
    return sorted(durations)[int(0.99 * len(durations))]


def test_health_list_and_status_answer_within_100_ms_while_a_job_trains_on_every_core(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    with served(home, OMP_NUM_THREADS=str(os.cpu_count())) as (url, _), StackClient(url) as client:
        register_rows(client, 2000)
        client.post_training.supervised_fine_tune(**request("busy", n_epochs=100, save_every_n_steps=50))
        until(lambda: (p := client.post_training.status("busy").progress) and p.step > 5)
        paths = ["/v1/health", "/v1alpha/post-training/jobs", "/v1alpha/post-training/jobs/busy/status"]
        durations: list[float] = []
        with httpx.Client(base_url=url) as http:
            for number in range(repeated(200, 2000) * len(paths)):
                start = time.perf_counter()
                assert http.get(paths[number % len(paths)]).status_code == 200
                durations.append(time.perf_counter() - start)
                time.sleep(0.01)
        assert client.post_training.status("busy").status is JobStatus.in_progress
        client.post_training.cancel("busy")
        wait(client, "busy", 20)
    print(f"p50 {1000 * sorted(durations)[len(durations) // 2]:.1f} ms, p99 {1000 * percentile_99(durations):.1f} ms")
    assert percentile_99(durations) < 0.1


def test_a_store_that_another_process_locks_for_ten_seconds_costs_time_and_nothing_else(
    tmp_path: Path, tiny: Path, calm: Calm
):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("held"))
        until(lambda: (p := client.post_training.status("held").progress) and p.step > 5, every=0.01)
        thief = sqlite3.connect(home / "postgrad.db", isolation_level=None)
        thief.execute("BEGIN IMMEDIATE")
        answered: list[float] = []

        def submit() -> None:
            start = time.monotonic()
            client.post_training.supervised_fine_tune(**request("meanwhile", n_epochs=1))
            answered.append(time.monotonic() - start)

        submitting = threading.Thread(target=submit)
        submitting.start()
        until_time = time.monotonic() + 10
        while time.monotonic() < until_time:
            # Readers do not wait.
            assert client.post_training.status("held").status is JobStatus.in_progress
            time.sleep(0.2)
        thief.execute("ROLLBACK")
        thief.close()
        submitting.join(30)
        assert answered, "the submit waited and was accepted"
        assert wait(client, "held").status is JobStatus.completed
        assert wait(client, "meanwhile").status is JobStatus.completed
    assert assert_ended_once(home, "held") == 1
    assert_equal_results(result(home, "held"), calm.result)


def on_a_read_only_mount(folder: Path, command: list[str]) -> list[str]:
    """`command`, run where `folder` is mounted read-only and nothing else is changed."""
    mounted = f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "$@"'
    options = ["-m"] if os.geteuid() == 0 else ["-r", "-m"]
    return ["unshare", *options, "sh", "-c", mounted, "sh", *command]


def test_a_store_on_a_read_only_mount_is_said_so_and_nothing_is_lost(tmp_path: Path, tiny: Path):
    home = make_home(tmp_path, tiny)
    works = (
        shutil.which("unshare") and subprocess.run(on_a_read_only_mount(home, ["true"]), check=False).returncode == 0
    )
    if not works:
        pytest.skip("this system does not let the tests mount a folder read-only")
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client, 4)
        client.post_training.supervised_fine_tune(**request("before", n_epochs=1))
        assert wait(client, "before").status is JobStatus.completed
    command = [sys.executable, "-c", PROGRAM, "run", TEMPLATE, "--port", "0"]
    refused = subprocess.run(
        on_a_read_only_mount(home, command),
        cwd=tmp_path,
        env={**os.environ, "POSTGRAD_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "cannot be written to: set $POSTGRAD_HOME" in refused.stderr
    with served(home) as (url, _), StackClient(url) as client:
        assert client.post_training.status("before").status is JobStatus.completed

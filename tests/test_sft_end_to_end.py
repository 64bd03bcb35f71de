"""`SFTClient.fit` against a real stack: it ends in the bytes of a whole job, whatever is killed in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from apis.errors import JobNotFound
from post_training.client import SFTClient, StackClient
from tests.served_stack import run_yaml_with, served
from tests.session_stack import CONFIG, MODEL, adapter, make_home, rows
from tests.test_session_durability import kill_worker

STEPS = 30
DATA = rows(3 * STEPS)
FIT: dict[str, Any] = {"batch_size": 3, "epochs": 1, "save_every": 10}
REPOSITORY = Path(__file__).parents[1]
SCRIPT = """
import json, sys
from post_training.client import SFTClient
url, job_id, rows, config, fit, resume = (json.loads(word) for word in sys.argv[1:])
with SFTClient(url) as client:
    if resume:
        result = client.fit(rows, **fit, resume=job_id)
    else:
        client.submit(job_id=job_id, **config)
        print("began", flush=True)
        result = client.fit(rows, **fit)
print("ended", len(result.losses), flush=True)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("fit"))


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with served(home, stack=run_yaml_with(home.parent, jobs={"devices": ["cpu"]})) as (url, _):
        yield url


@pytest.fixture(scope="module")
def undisturbed(url: str, home: Path) -> bytes:
    with SFTClient(url) as client:
        client.submit(job_id="undisturbed", **CONFIG)
        result = client.fit(DATA, **FIT)
        assert len(result.losses) == STEPS
        assert client.job_status().status == "COMPLETED"
    return adapter(home, "undisturbed", STEPS)


def whole_job(client: StackClient, job_uuid: str, data: list[dict[str, str]]) -> None:
    client.datasets.register({"type": "rows", "rows": data}, dataset_id=job_uuid)
    client.post_training.supervised_fine_tune(
        job_uuid=job_uuid,
        model=MODEL,
        algorithm_config={"type": "LoRA"},
        training_config={
            "n_epochs": 1,
            "dtype": "fp32",
            "data_config": {"dataset_id": job_uuid, "batch_size": 3, "shuffle": False},
            "optimizer_config": {"lr": 1e-2, "lr_schedule": "constant", "num_warmup_steps": 0},
        },
    )
    client.post_training.wait(job_uuid, poll_seconds=0.1, timeout=90, raise_on_failure=True)


@contextmanager
def script(url: str, job_id: str, *, resume: bool = False, **config: Any) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own."""
    words = [json.dumps(word) for word in (url, job_id, DATA, {**CONFIG, **config}, FIT, resume)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", SCRIPT, *words]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_step(url: str, job_id: str, step: int) -> None:
    deadline = time.monotonic() + 90
    with StackClient(url) as client:
        while not _has_step(client, job_id, step):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _has_step(client: StackClient, job_id: str, step: int) -> bool:
    try:
        return bool(client.post_training.metrics(job_id, step - 1).data)
    except JobNotFound:
        return False  # its client is still about to submit it


def test_fit_ends_in_the_bytes_of_a_whole_job(url: str, home: Path, undisturbed: bytes) -> None:
    with StackClient(url) as client:
        whole_job(client, "whole", DATA)
    assert adapter(home, "whole", STEPS) == undisturbed


def test_after_its_client_was_killed_the_device_is_free_and_a_second_run_resumes_to_the_same_bytes(
    url: str, home: Path, undisturbed: bytes
) -> None:
    with script(url, "orphan", lease_seconds=2):
        wait_for_step(url, "orphan", 6)
    with StackClient(url) as client:
        whole_job(client, "next", DATA[:3])  # on the one device there is
    with SFTClient(url) as client:
        status = client.job_status("orphan")
        assert status.paused
        assert status.last_durable_step is not None
        assert 6 <= status.last_durable_step < STEPS
    with script(url, "orphan", resume=True) as second:
        assert "ended" in second.communicate(timeout=120)[0]
    assert adapter(home, "orphan", STEPS) == undisturbed


def test_after_its_worker_was_killed_fit_goes_on_to_the_same_bytes(url: str, home: Path, undisturbed: bytes) -> None:
    with script(url, "killed") as running:
        wait_for_step(url, "killed", 13)
        kill_worker(home, "killed")
        assert "ended 30" in running.communicate(timeout=120)[0]
    assert adapter(home, "killed", STEPS) == undisturbed


def test_after_the_server_and_its_worker_were_killed_fit_goes_on_with_the_next_server_to_the_same_bytes(
    tmp_path: Path, undisturbed: bytes
) -> None:
    home, port = make_home(tmp_path), str(free_port())
    with script(f"http://127.0.0.1:{port}", "moved") as running:
        with served(home, "--port", port) as (url, server):
            wait_for_step(url, "moved", 13)
            server.kill()
            kill_worker(home, "moved")
            server.wait()
        with served(home, "--port", port):
            assert "ended 30" in running.communicate(timeout=150)[0]
    assert adapter(home, "moved", STEPS) == undisturbed


def test_ctrl_c_saves_and_the_same_fit_can_be_resumed(url: str, home: Path, undisturbed: bytes) -> None:
    with script(url, "interrupted") as running:
        wait_for_step(url, "interrupted", 4)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) != 0
    with SFTClient(url) as client:
        status = client.job_status("interrupted")
        assert status.paused
        assert (status.last_durable_step or 0) >= 4
        result = client.fit(DATA, **FIT, resume="interrupted")
    assert result.total_steps == STEPS
    assert adapter(home, "interrupted", STEPS) == undisturbed


def test_two_clients_at_once_each_get_their_turn_on_one_device(url: str) -> None:
    done: list[str] = []

    def run(job_id: str) -> None:
        with SFTClient(url) as client:
            client.submit(job_id=job_id, **CONFIG)
            client.fit(DATA[:6], batch_size=3)
            done.append(job_id)

    threads = [threading.Thread(target=run, args=(f"turn-{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(done) == ["turn-0", "turn-1"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

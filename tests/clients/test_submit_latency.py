"""A submit answers at once, whatever the machine does: timed while a job trains on every core."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from tests.clients.matrix import ALL
from tests.faults.harness import make_home, register_rows, request, until, wait
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama

SUBMITS = 500 if ALL else 50
PATHS = ("/v1/post-training/supervised-fine-tune", "/v1alpha/post-training/supervised-fine-tune")


@pytest.mark.timeout(300)
def test_ninety_nine_of_a_hundred_submits_answer_within_300_ms_while_a_job_trains_on_every_core(tmp_path: Path):
    tiny = save_tiny_llama(tmp_path / "model" / "tiny", context=256)
    home = make_home(tmp_path, tiny)
    with served(home, OMP_NUM_THREADS=str(os.cpu_count())) as (url, _), StackClient(url) as client:
        register_rows(client, 2000)
        client.post_training.supervised_fine_tune(**request("busy", n_epochs=100))
        until(lambda: (p := client.post_training.status("busy").progress) and p.step > 5)
        durations = submit_and_cancel(url, [request(f"job-{number}", n_epochs=1) for number in range(SUBMITS)])
        assert client.post_training.status("busy").status is JobStatus.in_progress
        client.post_training.cancel("busy")
        wait(client, "busy", 20)
    ordered = sorted(durations)
    print(f"p50 {1000 * ordered[len(ordered) // 2]:.1f} ms, p99 {1000 * ordered[int(0.99 * len(ordered))]:.1f} ms")
    assert ordered[int(0.99 * len(ordered))] < 0.3


def submit_and_cancel(url: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds of each submit. Each job is cancelled in turn, so that the queue does not fill."""
    durations: list[float] = []
    with httpx.Client(base_url=url) as http:
        for number, body in enumerate(bodies):
            begun = time.perf_counter()
            answer = http.post(PATHS[number % len(PATHS)], json=body)
            durations.append(time.perf_counter() - begun)
            assert answer.status_code == 200, answer.text
            assert http.post("/v1/post-training/job/cancel", json={"job_uuid": body["job_uuid"]}).status_code < 300
    return durations

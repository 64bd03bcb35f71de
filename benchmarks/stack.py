"""A stack as users run it, with a real model and data set in it, to be measured from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from apis.post_training.models import JobEvent
from benchmarks.workspace import data_rows
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from tests.served_stack import run_yaml_with, served

MODEL = "model"
DATASET = "rows"
JOBS = "/v1alpha/post-training/jobs"
SUBMIT = "/v1alpha/post-training/supervised-fine-tune"


@dataclass(frozen=True)
class Stack:
    """A running stack.

    Attributes:
        started: seconds from starting the process to its first answer.
        pid: of the server.
    """

    url: str
    pid: int
    started: float
    home: Path
    client: StackClient

    def register(self, rows: int) -> None:
        """Register the first so many rows as the data set `DATASET`."""
        _, found = data_rows(rows)
        self.client.datasets.register({"type": "rows", "rows": found}, dataset_id=DATASET)


def make_home(folder: Path, model_dir: Path) -> Path:
    """A state folder with the base model `MODEL` in it."""
    home = folder / "home"
    import_model(str(model_dir), MODEL, home)
    return home


@contextmanager
def running(home: Path, threads: int, log: Path, **jobs: Any) -> Iterator[Stack]:
    """Serve the template on `home`; `jobs` are settings of its section of that name."""
    sections = {"jobs": {"devices": ["cpu"], "max_queued": 100_000, **jobs}}
    stack = run_yaml_with(home.parent, **sections)
    began = time.perf_counter()
    with (
        log.open("a") as errors,
        served(home, stack=stack, stderr=errors, OMP_NUM_THREADS=str(threads)) as (url, process),
        StackClient(url, timeout=600) as client,
    ):
        assert httpx.get(f"{url}/v1/health").status_code == 200
        yield Stack(url, process.pid, time.perf_counter() - began, home, client)


def request(
    job_uuid: str, *, dataset: str = DATASET, epochs: int = 1, batch: int = 4, rank: int = 16, **training: Any
) -> dict[str, Any]:
    """A job over a data set as the training benchmark trains: LoRA on all linear layers, bf16."""
    config = {
        "n_epochs": epochs,
        "dtype": "bf16",
        **training,
        "data_config": {"dataset_id": dataset, "batch_size": batch, "shuffle": False, "max_seq_len": 512},
    }
    algorithm = {
        "type": "LoRA",
        "rank": rank,
        "alpha": 2 * rank,
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
    }
    return {"job_uuid": job_uuid, "model": MODEL, "training_config": config, "algorithm_config": algorithm}


def first_event(stack: Stack, job_uuid: str, wanted: Callable[[JobEvent], bool]) -> JobEvent:
    """Wait for an event. Raises RuntimeError where the job ends without one."""
    for event in stack.client.post_training.events(job_uuid):
        if wanted(event):
            return event
    raise RuntimeError(f"job {job_uuid} ended: {stack.client.post_training.status(job_uuid).error}")


def resident(pid: int, field: str = "VmRSS") -> int:
    """Bytes of a process's memory; `VmHWM` for the most it had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no {field}")


def descendants(pid: int) -> list[tuple[int, str]]:
    """Processes started by this one and theirs, with their command lines."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found += [(child, command), *descendants(child)]
    return found


def timed(times: int, call: Callable[[int], httpx.Response], pause: float = 0.0) -> list[float]:
    """Seconds of each call, which must be answered with success; one more, numbered -1, goes before and counts not."""
    call(-1).raise_for_status()
    durations = []
    for number in range(times):
        began = time.perf_counter()
        answer = call(number)
        durations.append(time.perf_counter() - began)
        answer.raise_for_status()
        time.sleep(pause)
    return durations


def quantile(durations: list[float], share: float) -> float:
    """The nearest-rank quantile."""
    ordered = sorted(durations)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latencies(durations: list[float]) -> list[str]:
    """Cells with median, 99th percentile and maximum in milliseconds, and the number of calls."""
    cells = [f"{1000 * value:.1f}" for value in (quantile(durations, 0.5), quantile(durations, 0.99), max(durations))]
    return [*cells, str(len(durations))]


def offline() -> None:
    """Processes that are started from here look for nothing on the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"

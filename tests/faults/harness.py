"""What fault tests share: a small real job that takes a few seconds, and ways to disturb it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from apis.post_training.models import PostTrainingJobStatusResponse
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from post_training.jobs.database import Database
from post_training.jobs.leases import Leases
from post_training.jobs.store import JobStore

LONG = bool(os.environ.get("POSTGRAD_LONG_FAULTS"))
"""The long forms, as `make test-faults` runs them."""
MODEL = "tiny"
WORDS = ["red", "brown", "quick", "lazy", "old", "slow", "town", "sea", "tree", "books"]


def repeated(short: int, long: int) -> int:
    """How often a fault is tried: `short` times in the ordinary tests, `long` times under `make test-faults`."""
    return long if LONG else short


def make_home(folder: Path, tiny: Path) -> Path:
    home = folder / "home"
    import_model(str(tiny), MODEL, home)
    return home


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Say {WORDS[n % 10]} {n}", "completion": f"The {WORDS[(n + 3) % 10]} hen."} for n in range(count)
    ]


def register_rows(client: StackClient, count: int = 100) -> None:
    client.datasets.register({"type": "rows", "rows": rows(count)}, dataset_id="rows")


def request(job_uuid: str, **training: Any) -> dict[str, Any]:
    """50 steps in two epochs, with checkpoints inside each."""
    data = {"dataset_id": "rows", "batch_size": 4, **training.pop("data_config", {})}
    config = {"n_epochs": 2, "dtype": "fp32", "save_every_n_steps": 4, **training, "data_config": data}
    algorithm = {"type": "LoRA", "rank": 6, "alpha": 12}
    return {"job_uuid": job_uuid, "model": MODEL, "training_config": config, "algorithm_config": algorithm}


def worker_pid(home: Path, job_uuid: str) -> int | None:
    """The process that runs the job now, None where there is none or it has not said so yet."""
    store = open_store(home)
    held = {lease.job_uuid: lease for lease in Leases(store.database).held()}
    store.database.close()
    return held[job_uuid].pid if job_uuid in held else None


def until(reached: Callable[[], Any], seconds: float = 60, every: float = 0.02) -> Any:
    """What `reached` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (result := reached()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every)
    return result


def open_store(home: Path) -> JobStore:
    return JobStore(Database(f"sqlite:///{home / 'postgrad.db'}"))


def wait(client: StackClient, job_uuid: str, seconds: float = 240) -> PostTrainingJobStatusResponse:
    return client.post_training.wait(job_uuid, poll_seconds=0.1, timeout=seconds)


def result(home: Path, job_uuid: str) -> dict[str, Any]:
    """All that a job came to and that no disturbance may change."""
    store = open_store(home)
    checkpoints = store.checkpoints(job_uuid)
    series = [
        (e.step, e.data["loss"], e.data["lr"], e.data["grad_norm"]) for e in store.metrics(job_uuid, 0, 9999) if e.data
    ]
    job = store.get(job_uuid)
    seen = job.progress or {}
    store.database.close()
    return {
        "checkpoints": [(row.epoch, row.step, row.metrics) for row in checkpoints],
        "series": series,
        "seen": {name: seen[name] for name in ("step", "tokens_seen", "supervised_tokens_seen", "skipped_steps")},
        "adapters": [(home / row.path / "adapter" / "adapter_model.safetensors").read_bytes() for row in checkpoints],
    }


def assert_equal_results(disturbed: dict[str, Any], calm: dict[str, Any]) -> None:
    for part in ("series", "checkpoints", "seen", "adapters"):
        assert disturbed[part] == calm[part], part


def assert_ended_once(home: Path, job_uuid: str) -> int:
    """The job completed, in one terminal move, and no attempt began before the one before had ended.

    Returns:
        how many attempts it took.
    """
    store = open_store(home)
    moves = [move.new for move in store.transitions(job_uuid)]
    attempt = store.get(job_uuid).attempt
    store.database.close()
    assert moves == ["scheduled", "in_progress"] * attempt + ["completed"], moves
    return attempt


def assert_nothing_partial(home: Path, job_uuid: str) -> None:
    """On disk are the announced checkpoints and nothing else."""
    store = open_store(home)
    announced = {str(row.step) for row in store.checkpoints(job_uuid)}
    store.database.close()
    assert {path.name for path in (home / "jobs" / job_uuid / "checkpoints").iterdir()} == announced


def assert_loads(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert tensors
    assert all(tensor.isfinite().all() for tensor in tensors.values())

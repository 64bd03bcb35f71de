"""Sessions of a served stack as tests open and drive them, by plain HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from post_training.catalog.importing import import_model
from tests.tiny_llama import save_tiny_llama

MODEL = "tiny"
WORDS = ["red", "brown", "quick", "lazy", "old", "slow", "town", "sea", "tree", "books"]
CONFIG = {"model": MODEL, "dtype": "fp32", "optimizer_config": {"lr": 1e-2}}
SECONDS = 90.0


def rows(count: int, first: int = 0) -> list[dict[str, str]]:
    texts = [WORDS[i % 10] + " " + WORDS[i // 10 % 10] for i in range(first, first + count)]
    return [{"prompt": f"say {text}", "completion": text} for text in texts]


def opened(scheduler: httpx.Client, job_id: str, **config: Any) -> httpx.Client:
    """Open a session and give a client of its training server."""
    answer = scheduler.post("/submit_job", json={"job_id": job_id, "config": {**CONFIG, **config}})
    assert answer.status_code == 200, answer.text
    return attached(scheduler, job_id)


def attached(scheduler: httpx.Client, job_id: str) -> httpx.Client:
    status = until(scheduler, job_id, "RUNNING")
    return httpx.Client(base_url=status["server_url"] + "/api/v1", timeout=60)


def until(scheduler: httpx.Client, job_id: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        status: dict[str, Any] = scheduler.get(f"/job_status/{job_id}").json()
        if status["status"] == state:
            return status
        assert status["status"] not in ("FAILED", "COMPLETED", "CANCELLED"), status
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def done(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, code: str, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == code, error
    return error


def adapter(home: Path, job_id: str, number: int) -> bytes:
    """What a checkpoint trained, as it lies on disk."""
    return (home / f"jobs/{job_id}/checkpoints/{number}/adapter/adapter_model.safetensors").read_bytes()


def make_home(folder: Path) -> Path:
    """A state folder with the model that sessions train."""
    tiny = save_tiny_llama(folder / "model" / MODEL, context=256)
    import_model(str(tiny), MODEL, folder / "home")
    return folder / "home"

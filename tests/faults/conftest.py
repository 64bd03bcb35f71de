"""Fixtures of the fault tests: a tiny model, and the run that nobody disturbed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from tests.faults.harness import make_home, register_rows, request, result, wait
from tests.served_stack import served
from tests.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", context=256)


@dataclass(frozen=True)
class Calm:
    """The undisturbed run: how long it took, in seconds, and what came of it."""

    seconds: float
    result: dict[str, Any]


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Calm:
    home = make_home(tmp_path_factory.mktemp("calm"), tiny)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client)
        start = time.monotonic()
        client.post_training.supervised_fine_tune(**request("calm"))
        status = wait(client, "calm")
        assert status.status is JobStatus.completed, status.error
        return Calm(time.monotonic() - start, result(home, "calm"))

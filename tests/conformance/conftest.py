"""One stack for each provider under test, and the job that nobody disturbs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apis.post_training.models import JobStatus, PostTrainingJobStatusResponse
from tests.conformance.stack import ConformanceStack, conformance_stack
from tests.conformance.targets import TARGETS, Target, fresh_environment, named
from tests.faults.harness import request as job_request
from tests.faults.harness import wait


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    options = metafunc.config.getoption("--provider")
    model = metafunc.config.getoption("--provider-model")
    targets = [named(option, model) for option in options] if options else list(TARGETS)
    metafunc.parametrize("target", targets, ids=[target.provider_type for target in targets], scope="session")


@pytest.fixture(scope="session")
def stack(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConformanceStack]:
    folder = tmp_path_factory.mktemp("conformance")
    python = Path(sys.executable) if target.source is None else fresh_environment(folder / "venv", target.source)
    with conformance_stack(target, folder, python) as made:
        yield made


@pytest.fixture(scope="session")
def calm(stack: ConformanceStack) -> PostTrainingJobStatusResponse:
    """A job of 30 steps in two epochs, once it is over."""
    return _completed(stack, "calm")


@pytest.fixture(scope="session")
def again(stack: ConformanceStack, calm: PostTrainingJobStatusResponse) -> PostTrainingJobStatusResponse:
    """The same job under another id, after `calm`."""
    return _completed(stack, "again")


def _completed(stack: ConformanceStack, job_uuid: str) -> PostTrainingJobStatusResponse:
    stack.client.post_training.supervised_fine_tune(**job_request(job_uuid))
    status = wait(stack.client, job_uuid)
    assert status.status is JobStatus.completed, status.error
    return status

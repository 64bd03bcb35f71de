"""A stack of every API in a thread, for tests of the dialects: jobs are written down, everything else is real."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn

from apis.common import Api
from apis.post_training import (
    JobStatus,
    PostTrainingJob,
    PostTrainingJobLogStream,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)
from distributions.resolver import plan
from distributions.server import create_app
from distributions.stack import build_stack
from post_training.catalog.models import ModelCatalog
from providers.registry import BUILT_IN
from tests.test_stack_server import Notebook, notebook_config, notebook_spec
from tests.tiny_llama import save_tiny_llama

BASE = "acme/tiny"


class Ledger(Notebook):
    """A notebook that also writes preference jobs down, and whose jobs are in the state that a test gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.preferences: dict[str, PreferenceOptimizeRequest] = {}
        self.states: dict[str, JobStatus] = {}

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        self.preferences[request.job_uuid] = request
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        status = self.states.get(self._job(job_uuid).job_uuid, JobStatus.scheduled)
        return PostTrainingJobStatusResponse(job_uuid=job_uuid, status=status)

    async def cancel_job(self, job_uuid: str) -> None:
        self.states[self._job(job_uuid).job_uuid] = JobStatus.cancelled

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        return PostTrainingJobLogStream(job_uuid=self._job(job_uuid).job_uuid, log_lines=["accepted"], next=1)


@dataclass
class DialectServer:
    url: str
    http: httpx.Client
    ledger: Ledger

    def job(self, job_uuid: str) -> SupervisedFineTuneRequest:
        """The job as the provider got it."""
        return self.ledger.jobs[job_uuid]


@contextmanager
def running(home: Path) -> Iterator[DialectServer]:
    """Serve until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.test_stack_server.Notebook", Ledger)
        config = notebook_config(home)
        inference = {"device": "cpu", "dtype": "fp32", "threads": 1}
        sections = config.model_dump(mode="json")
        sections["providers"]["inference"] = [
            {"provider_id": "transformers", "provider_type": "inline::transformers", "config": inference}
        ]
        environ = config.environ
        config = type(config).model_validate(sections)
        config._environ = dict(environ)
        stack = asyncio.run(build_stack(config, plan(config, [notebook_spec(patch), *BUILT_IN])))
    _register_base(stack.models, home)
    ledger = stack.impl(Api.post_training)
    assert isinstance(ledger, Ledger)
    settings = uvicorn.Config(create_app(stack), log_level="warning", ws="none")
    with _serving(settings) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield DialectServer(url, http, ledger)


def _register_base(models: ModelCatalog, home: Path) -> None:
    with models.database.session() as session:
        models.add_base(session, BASE, save_tiny_llama(home / "tiny"), {})


@contextmanager
def _serving(config: uvicorn.Config) -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DialectServer]:
    with running(tmp_path_factory.mktemp("dialects") / "home") as server:
        yield server

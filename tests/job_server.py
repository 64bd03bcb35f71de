"""The job routes over a real store behind real HTTP. No worker runs: a test writes what one would.

python -m tests.job_server HOME PORT     the same as a process of its own
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import apis.models.routes
import apis.post_training.routes
from apis.post_training.models import JobError, JobStatus, LoraFinetuningConfig
from distributions.errors import CatchAll, add_exception_handlers
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog, checkpoint_identifier
from post_training.checkpoints.layout import CheckpointWriter, Manifest, checkpoints_root, clean_partial
from post_training.job_specs import ProviderProfile
from post_training.jobs.database import Database
from post_training.jobs.devices import Slot
from post_training.jobs.launchers.local import LocalLauncher
from post_training.jobs.leases import Leases
from post_training.jobs.scheduler import Scheduler, SchedulerSettings
from post_training.jobs.spec import WorkerSettings
from post_training.jobs.store import JobStore
from post_training.jobs.tables import CheckpointRow
from post_training.service import JobService
from tests.in_memory_stack import serving
from tests.test_job_store import CPU, PROVIDER, make_spec

JOBS = "/v1alpha/post-training/jobs"
ADAPTER = {
    "adapter/adapter_config.json": b'{"r": 16}',
    "adapter/adapter_model.safetensors": bytes(range(256)) * 700,
    "training_state/state.json": b"{}",
}


@cache
def _empty_store() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/postgrad.db")
        database.migrate()
        database.close()
        return Path(folder, "postgrad.db").read_bytes()


class JobServer:
    """One state folder, and every part of a server but its scheduler's thread.

    Attributes:
        requests: method, path and Range header of each request, oldest first.
        cut_after: lengths at which the next bodies are cut off, oldest first.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.url = home, ""
        if not (home / "postgrad.db").exists():
            (home / "postgrad.db").write_bytes(_empty_store())
        self.database = Database(f"sqlite:///{home / 'postgrad.db'}")
        self.store, self.leases = JobStore(self.database), Leases(self.database)
        self.models = ModelCatalog(self.database, home)
        self.scheduler = Scheduler(
            self.store,
            LocalLauncher(self.database.url, home),
            lambda job_uuid: checkpoints_root(home, job_uuid).parent,
            lambda job_uuid: clean_partial(checkpoints_root(home, job_uuid), self.store.recorded_steps(job_uuid)),
            SchedulerSettings(slots=(CPU,)),
        )
        self.scheduler.serve(PROVIDER)
        profile = ProviderProfile(
            PROVIDER,
            lambda _request, _model: LoraFinetuningConfig(),
            lambda _model: 3e-4,
            WorkerSettings(model_module="none"),
        )
        datasets = DatasetCatalog(self.database, home)
        self.service = JobService(self.database, home, self.models, datasets, profile, self.scheduler)
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut_after: list[int] = []
        self._slots = 0

    def app(self) -> ASGIApp:
        app = FastAPI()
        add_exception_handlers(app)
        app.include_router(apis.post_training.routes.create_router(self.service), prefix="/v1alpha")
        app.include_router(apis.models.routes.create_router(self.models), prefix="/v1")
        app.add_middleware(CatchAll)

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.requests.append((scope["method"], scope["path"], headers.get("range")))
            await app(scope, receive, self._cutting(send))

        return watched

    def _cutting(self, send: Send) -> Send:
        """`send`, which breaks the connection where a cut is due in the body of a file."""
        left, is_file = None, False

        async def cut(message: Message) -> None:
            nonlocal left, is_file
            if message["type"] == "http.response.start":
                is_file = any(name == b"repr-digest" for name, _ in message["headers"])
                left = self.cut_after.pop(0) if is_file and self.cut_after else None
            elif left is not None:
                body = message.get("body", b"")
                if len(body) > left:
                    await send({**message, "body": body[:left], "more_body": True})
                    raise ConnectionAbortedError("the test cuts here")
                left -= len(body)
            await send(message)

        return cut

    # -- what a client and a worker would do ---------------------------------------------------------------------

    def submit(self, job_uuid: str, *, model: str = "base", **training: Any) -> None:
        self.store.submit(make_spec(job_uuid, PROVIDER, model, **training), "body", max_queued=1000)

    def claim(self, job_uuid: str) -> str:
        """Submit a job and take it up; gives its owner token."""
        self.submit(job_uuid)
        self._slots += 1
        claimed = self.leases.claim("here", (Slot(f"cpu:{self._slots}", "cpu", "cpu"),), {PROVIDER})
        assert claimed is not None
        assert claimed.job_uuid == job_uuid
        return claimed.owner

    def log(self, job_uuid: str, owner: str, message: str) -> None:
        self.leases.update(job_uuid, owner, message=message)

    def step(self, job_uuid: str, owner: str, step: int, **numbers: Any) -> None:
        data = {"step": step, "epoch": 0, "loss": 1 / step, "lr": 1e-4, "grad_norm": 0.5, "tokens": 10, **numbers}
        self.leases.update(job_uuid, owner, message=f"step {step}", step=step, data=data)

    def finish(self, job_uuid: str, owner: str, status: JobStatus = JobStatus.completed) -> None:
        error = JobError(code="disk_full", message="no space") if status is JobStatus.failed else None
        self.leases.finish(job_uuid, owner, status, "done", error=error)

    def checkpoint(
        self, job_uuid: str, owner: str, step: int, files: dict[str, bytes] | None = None, *, announced: bool = True
    ) -> Path:
        """Write and record a checkpoint, and announce it as the model `base-sft-<job>-<step>`."""
        identifier = checkpoint_identifier("base", job_uuid, step)
        with CheckpointWriter(self.home, job_uuid, step) as writer:
            for name, content in (files or ADAPTER).items():
                (writer.directory / name).parent.mkdir(parents=True, exist_ok=True)
                (writer.directory / name).write_bytes(content)
            now = datetime.now(UTC)
            names = {"identifier": identifier, "job_uuid": job_uuid, "model": "base", "base_model": "base"}
            told = {**names, "epoch": step, "step": step, "created_at": now}
            directory = writer.commit(Manifest.model_validate(told))
        path = directory.relative_to(self.home).as_posix()
        row = CheckpointRow(job_uuid=job_uuid, epoch=step, step=step, path=path, created_at=now, metrics=None)
        self.leases.record_checkpoint(owner, row)
        if announced:
            self._announce(job_uuid, owner, step, identifier, directory)
        return directory

    def _announce(self, job_uuid: str, owner: str, step: int, identifier: str, directory: Path) -> None:
        def register(session: Any, _row: CheckpointRow) -> None:
            self.models.add_checkpoint(
                session,
                identifier=identifier,
                job_uuid=job_uuid,
                epoch=step,
                step=step,
                directory=directory,
                model="base",
                base_identifier="base",
                base_dir=self.home / "models" / "base",
            )

        self.leases.announce(job_uuid, owner, step, identifier, None, register)


@contextmanager
def job_server(home: Path) -> Iterator[JobServer]:
    """Serve a state folder in a thread, until the block ends."""
    server = JobServer(home)
    try:
        with serving(server.app()) as server.url:
            yield server
    finally:
        server.database.close()


def main() -> None:
    server = JobServer(Path(sys.argv[1]))
    config = uvicorn.Config(
        server.app(),
        port=int(sys.argv[2]),
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run()
    server.database.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()

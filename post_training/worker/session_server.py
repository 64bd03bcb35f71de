"""The training server of one session: HTTP in a thread of the worker, which does the calls in its main thread.

It answers looks (`health`, `status`, `checkpoints`) by itself, so they take no turn. Batches are read, checked and
tokenized here, while the model computes the steps before.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from apis.errors import BadRequest
from apis.sft_sessions.training_models import (
    Batch,
    CallResponse,
    EndResponse,
    ForwardBackwardRequest,
    ForwardBackwardResponse,
    HealthResponse,
    ListCheckpointsResponse,
    LoadCheckpointRequest,
    OptimStepRequest,
    SaveCheckpointRequest,
    SaveCheckpointResponse,
    SessionCheckpoint,
    TrainingStatusResponse,
    TrainStepRequest,
    TrainStepResponse,
    ValidateRequest,
    ValidateResponse,
)
from post_training.catalog.keys import ApiKeys
from post_training.data.chat import ChatTokenizer
from post_training.data.planning import max_seq_len
from post_training.data.session_batches import BatchReader
from post_training.data.token_rows import row_bytes
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec
from post_training.listening import listen, url_of
from post_training.worker.session_calls import Answer, Call
from post_training.worker.session_http import OwnersKey, Presence, create_app
from post_training.worker.session_state import Session
from post_training.worker.session_work import LoadWork, SaveWork, StepWork, UpdateWork, told

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
STOP_SECONDS = 5.0
SWITCH_SECONDS = 0.0005


class SessionServer:
    """A running training server.

    Attributes:
        url: where it answers.
    """

    def __init__(self, url: str, presence: Presence, key: OwnersKey) -> None:
        self.url = url
        self._presence = presence
        self._key = key

    def silent_for(self) -> float:
        """Seconds since the client's last call was answered; 0 while one is open."""
        return self._presence.silent_for()

    def revoked(self) -> bool:
        """Whether the API key that the session belongs to was revoked, to within a second."""
        return not self._key.good()


@contextmanager
def launch_sft_server(session: Session) -> Iterator[SessionServer]:
    """Serve a session on a free port of its host until the block ends.

    Raises:
        OSError: the host is no address of this machine.
        RuntimeError: the server did not start in time.
    """
    settings = session.spec.session
    assert settings is not None
    presence = Presence()
    store = session.lease.store
    key = OwnersKey(store.get(session.spec.job_uuid).owned_by, ApiKeys(store.database).is_live)
    app = create_app(SessionCalls(session), settings.token_sha256, presence, key)
    listener = listen(settings.host, 0)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # a log of the job tells of the job
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(STOP_SECONDS),
        )
    )
    # The main thread takes the interpreter back between two operations of the model; by default it would wait up to
    # 5 ms for it each time while a batch is read here.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = threading.Thread(target=server.run, args=([listener],), name="training-server", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield SessionServer(_url(listener), presence, key)
    finally:
        server.should_exit = True
        thread.join(STOP_SECONDS + 1)
        listener.close()
        sys.setswitchinterval(interval)


def _url(listener: socket.socket) -> str:
    """Where clients find it: of a server on all addresses, by the one under which other machines know this one."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostbyname(socket.gethostname())
    return url_of(host, port)


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the training server did not start")
        time.sleep(0.005)


class SessionCalls:
    """Implements apis.sft_sessions.TrainingServer: turns requests into calls of the session's queue."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls = session.calls
        self._reader = _reader_of(session.spec)
        # One at a time: reading batches beside each other would only take the processor from the model.
        self._reading = anyio.CapacityLimiter(1)

    async def health(self) -> HealthResponse:
        return HealthResponse()

    async def status(self) -> TrainingStatusResponse:
        spec, settings = self._session.spec, self._session.spec.session
        assert settings is not None
        return TrainingStatusResponse(
            job_id=spec.job_uuid,
            model=spec.model.identifier,
            window=settings.window,
            lease_seconds=settings.lease_seconds,
            **self._session.status(),
        )

    async def heartbeat(self) -> TrainingStatusResponse:
        return await self.status()

    async def train_step(self, request: TrainStepRequest) -> TrainStepResponse:
        return TrainStepResponse(**await self._step("train_step", request, request.lr))

    async def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResponse:
        return ForwardBackwardResponse(**await self._step("forward_backward", request, None))

    async def optim_step(self, request: OptimStepRequest) -> TrainStepResponse:
        digest = _digest("optim_step", [], [request.lr, request.cursor])
        work = UpdateWork(request.lr, request.cursor)
        return TrainStepResponse(**await self._changing("optim_step", work, request.step, digest))

    async def validate(self, request: ValidateRequest) -> ValidateResponse:
        rows = await self._read(request)
        return ValidateResponse(**await self._answer(self._looking("validate", StepWork(rows), request.after_step)))

    async def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        work = SaveWork(request.name, request.cursor, request.validation_loss, request.wait)
        return SaveCheckpointResponse(**await self._answer(self._looking("save_checkpoint", work, request.after_step)))

    async def load_checkpoint(self, request: LoadCheckpointRequest) -> CallResponse:
        digest = _digest("load_checkpoint", [], [request.name, request.optimizer, request.cursor])
        work = LoadWork(request.name, request.optimizer, request.cursor)
        return CallResponse(**await self._changing("load_checkpoint", work, request.step, digest))

    async def checkpoints(self) -> ListCheckpointsResponse:
        rows = await anyio.to_thread.run_sync(self._session.rows)
        named = [told(self._session, row) for row in rows if row.name is not None]
        return ListCheckpointsResponse(checkpoints=[SessionCheckpoint.model_validate(each) for each in named])

    async def complete(self) -> EndResponse:
        return EndResponse(**await self._answer(self._looking("complete", None, None)))

    async def pause(self) -> EndResponse:
        return EndResponse(**await self._answer(self._looking("pause", None, None)))

    async def _step(self, kind: str, request: ForwardBackwardRequest, lr: float | None) -> Answer:
        self._calls.check(request.step)  # before the work of reading the batch
        try:
            rows = await self._read(request)
        except BadRequest:
            self._calls.refused(request.step)
            raise
        digest = _digest(kind, rows, [lr, request.cursor])
        return await self._changing(kind, StepWork(rows, lr, request.cursor), request.step, digest)

    async def _read(self, batch: Batch) -> list[TokenizedRow]:
        return await anyio.to_thread.run_sync(self._reader.read, batch, limiter=self._reading)

    async def _changing(self, kind: str, work: Any, number: int | None, digest: str) -> Answer:
        return await self._answer(Call(kind, work, changes=True, number=number, digest=digest))

    def _looking(self, kind: str, work: Any, after: int | None) -> Call:
        return Call(kind, work, changes=False, after=after or 0)

    async def _answer(self, call: Call) -> Answer:
        answer: Future[Answer] = self._calls.submit(call)
        # Shielded: the call is done once, whether or not whoever sent it still waits.
        return await asyncio.shield(asyncio.wrap_future(answer))


def _reader_of(spec: JobSpec) -> BatchReader:
    base, data = Path(spec.model.base_dir), spec.training_config.data_config
    assert data is not None  # sessions.py fills it in
    config: dict[str, Any] = json.loads((base / "config.json").read_bytes())
    return BatchReader(
        ChatTokenizer.from_dir(base, now=spec.created_at),
        data_format=data.data_format,
        columns=data.columns,
        train_on_input=bool(data.train_on_input),
        max_seq_len=max_seq_len(spec),
        on_overlength="error" if data.on_overlength == "error" else "truncate",
        vocab_size=config["vocab_size"],
    )


def _digest(kind: str, rows: Sequence[TokenizedRow], rest: Any) -> str:
    """What tells whether two calls are the same: of what they mean, not of how it was written."""
    digest = hashlib.sha256(kind.encode())
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row_bytes(row))
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()

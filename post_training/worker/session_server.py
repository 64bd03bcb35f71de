"""The training server of one session, a process of its own beside the worker that does the calls.

    python -m post_training.worker.session_server      (started by `session_process.py`, joined to it by a socket)

It parses, checks and tokenizes batches while the model computes the steps before, without taking the interpreter from
the thread that drives the model: in one process a step of a tenth of a second took a fifth longer. No torch here.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as AnswerTimeout
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from apis.errors import BadRequest, Unavailable
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
from post_training.data.chat import ChatTokenizer
from post_training.data.planning import max_seq_len
from post_training.data.session_batches import BatchReader
from post_training.data.token_rows import row_bytes
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec
from post_training.listening import listen, url_of
from post_training.processes import kill_with_parent
from post_training.worker.session_calls import Answer, refuse_far
from post_training.worker.session_http import Presence, create_app
from post_training.worker.session_keys import OwnersKey
from post_training.worker.session_link import Link
from post_training.worker.session_messages import (
    LINK_VARIABLE,
    STOP_SECONDS,
    LoadWork,
    Opening,
    SaveWork,
    StepWork,
    UpdateWork,
    decode,
    encode,
)

KEY_SECONDS = 5.0
"""The longest wait for what the worker says of the owner's key; one that it does not tell of in time counts as good."""


class SessionCalls:
    """Implements apis.sft_sessions.TrainingServer: turns requests into calls that the worker does."""

    def __init__(self, opening: Opening, link: Link) -> None:
        settings = opening.spec.session
        assert settings is not None
        self._settings = settings
        self._spec = opening.spec
        self._link = link
        self._done = opening.done
        self._reader = _reader_of(opening.spec)
        # One at a time: reading batches beside each other would only take the processor from the model.
        self._reading = anyio.CapacityLimiter(1)

    async def health(self) -> HealthResponse:
        return HealthResponse()

    async def status(self) -> TrainingStatusResponse:
        return TrainingStatusResponse(
            job_id=self._spec.job_uuid,
            model=self._spec.model.identifier,
            window=self._settings.window,
            lease_seconds=self._settings.lease_seconds,
            **await self._ask("status"),
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
        return ValidateResponse(**await self._looking("validate", StepWork(rows), request.after_step))

    async def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        work = SaveWork(request.name, request.cursor, request.validation_loss, request.wait)
        return SaveCheckpointResponse(**await self._looking("save_checkpoint", work, request.after_step))

    async def load_checkpoint(self, request: LoadCheckpointRequest) -> CallResponse:
        digest = _digest("load_checkpoint", [], [request.name, request.optimizer, request.cursor])
        work = LoadWork(request.name, request.optimizer, request.cursor)
        return CallResponse(**await self._changing("load_checkpoint", work, request.step, digest))

    async def checkpoints(self) -> ListCheckpointsResponse:
        named = await self._ask("checkpoints")
        return ListCheckpointsResponse(checkpoints=[SessionCheckpoint.model_validate(each) for each in named])

    async def complete(self) -> EndResponse:
        return EndResponse(**await self._looking("complete", None, None))

    async def pause(self) -> EndResponse:
        return EndResponse(**await self._looking("pause", None, None))

    async def _step(self, kind: str, request: ForwardBackwardRequest, lr: float | None) -> Answer:
        if request.step is not None:  # before the work of reading the batch
            refuse_far(request.step, self._done, self._settings.window)
        try:
            rows = await self._read(request)
        except BadRequest:
            await self._ask("refused", request.step)
            raise
        digest = _digest(kind, rows, [lr, request.cursor])
        return await self._changing(kind, StepWork(rows, lr, request.cursor), request.step, digest)

    async def _read(self, batch: Batch) -> list[TokenizedRow]:
        return await anyio.to_thread.run_sync(self._reader.read, batch, limiter=self._reading)

    async def _changing(self, kind: str, work: Any, number: int | None, digest: str) -> Answer:
        answer: Answer = await self._ask("change", kind, work, number, digest)
        self._done = max(self._done, answer["step"])
        return answer

    async def _looking(self, kind: str, work: Any, after: int | None) -> Answer:
        return await self._ask("look", kind, work, after or 0)

    async def _ask(self, kind: str, *arguments: Any) -> Any:
        # Shielded: the call is done once, whether or not whoever sent it still waits.
        return await asyncio.shield(asyncio.wrap_future(self._link.ask(kind, *arguments)))


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


# -- the process ------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Serves `config.app`. Ends when the worker says so, and not by signals: the worker gets those, and saves first."""

    def __init__(self) -> None:
        super().__init__(
            uvicorn.Config(
                "",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(STOP_SECONDS),
            )
        )

    def stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        yield


def main() -> None:
    kill_with_parent()
    logging.basicConfig(
        level=os.environ.get("LOG_LEVEL", "INFO").upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # a log of the job tells of the job
    connection = Connection(int(os.environ.pop(LINK_VARIABLE)))
    opening: Opening = decode(connection.recv_bytes())
    settings = opening.spec.session
    assert settings is not None
    try:
        listener = listen(settings.host, 0)
    except OSError as error:
        fault = Unavailable(f"a training server cannot listen on {settings.host!r}: {error.strerror}")
        connection.send_bytes(encode(fault))
        return
    connection.send_bytes(encode(_url(listener)))
    presence, server = Presence(), _Server()
    # Without the worker there is nothing to serve: it has died.
    link = Link(connection, {"silent": presence.silent_for, "stop": server.stop}, on_end=lambda: os._exit(1))
    key = _owners_key(opening, link)
    server.config.app = create_app(SessionCalls(opening, link), settings.token_sha256, presence, key)
    server.run([listener])


def _owners_key(opening: Opening, link: Link) -> OwnersKey:
    def is_live(_owner: str) -> bool:
        try:
            return link.ask("live").result(KEY_SECONDS)
        except AnswerTimeout:
            return True

    return OwnersKey("owner" if opening.owned else None, is_live)


def _url(listener: socket.socket) -> str:
    """Where clients find it: of a server on all addresses, by the one under which other machines know this one."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostbyname(socket.gethostname())
    return url_of(host, port)


if __name__ == "__main__":
    main()

"""What the contract server is made of: weights of exact arithmetic, and apps on ports that can be killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from apis.sft_sessions.training_models import Batch

INITIAL = hashlib.sha256(b"initial weights").hexdigest()


def folded(weights: str, batches: list[bytes]) -> str:
    """The weights after one optimizer step on the gradients of these batches."""
    return hashlib.sha256(b"\n".join([weights.encode(), *batches])).hexdigest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()


def batch_bytes(batch: Batch) -> bytes:
    return canonical(batch.model_dump(mode="json", include={"rows", "sequences", "batch_data"}, exclude_none=True))


def rows_after(batches: list[list[dict[str, Any]]]) -> str:
    """The weights that training on these batches of rows, in this order, ends with."""
    weights = INITIAL
    for rows in batches:
        weights = folded(weights, [canonical({"rows": rows})])
    return weights


@dataclass
class Weights:
    """All that a checkpoint holds."""

    weights: str = INITIAL
    number: int = 0
    global_steps: int = 0
    cursor: dict[str, Any] | None = None
    pending: list[bytes] = field(default_factory=list)

    def copy(self) -> Weights:
        return Weights(self.weights, self.number, self.global_steps, self.cursor, list(self.pending))


class Served:
    """An app on a free port of this machine, within a running event loop."""

    def __init__(self, app: ASGIApp, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, interface="asgi3", lifespan="off", log_level="critical"))
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def started(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.001)

    def kill(self) -> None:
        """Drop every connection without an answer, and listen no more."""
        if self._socket.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._drop()
        # Not at once: asyncio is not made for a server that closes while it accepts.
        loop.call_later(0.02, self._close)

    def _close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        for listening in self._server.servers:
            listening.close()
        self._socket.close()
        self._drop()

    def _drop(self) -> None:
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

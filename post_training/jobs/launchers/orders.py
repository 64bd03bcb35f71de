"""What a server and its workers say to each other: one JSON line for each job, one word back for each change.

A worker reads orders from standard input and answers `TAKEN` and, once it could do another job, `IDLE`. Secrets (the
store's URL, the owner token) travel this way, where neither `ps` nor the environment shows them. Everything else about
a job goes through the store, so a worker whose server is gone trains on; it ends when it would wait for an order.
"""

from __future__ import annotations

import os
import select
import time
from typing import Literal

from pydantic import BaseModel, ConfigDict

TAKEN, IDLE = "taken", "idle"
Word = Literal["taken", "idle"]
_CHUNK = 65536


class Order(BaseModel):
    """One attempt of one job.

    Attributes:
        database_url, job_uuid, owner: the store, the job in it, and the token of the lease on it.
        device: PyTorch's name of the one to run on.
        model_module: the job's, so that its import may begin before the job is read.
        log: the file that all output goes to.
        warm_seconds: how long to wait for another order after this one.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    database_url: str
    job_uuid: str
    owner: str
    device: str | None = None
    model_module: str
    log: str
    warm_seconds: float = 0.0

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Lines:
    """Reads lines from a pipe, as long as one cares to wait.

    Attributes:
        ended: the other side is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()  # select() ends at descriptor 1023, and a server may have more
        self._poll.register(descriptor, select.POLLIN)
        self._rest = b""
        self.ended = False

    def next(self, timeout: float | None) -> bytes | None:
        """The next line; None where none came in so many seconds (None: ever) or the pipe has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if self.ended or not self._poll.poll(left):
                return None
            chunk = os.read(self._descriptor, _CHUNK)
            self.ended = not chunk
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

"""A session's training server as its worker sees it: a process that is started early, opened, and started again if it
dies."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as AnswerTimeout
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from apis.errors import PostgradError, Unavailable
from post_training.catalog.keys import ApiKeys
from post_training.processes import python_module, torch_environment
from post_training.worker.session_calls import Answer, Call
from post_training.worker.session_keys import OwnersKey
from post_training.worker.session_link import Link
from post_training.worker.session_messages import LINK_VARIABLE, STOP_SECONDS, Opening, decode, encode
from post_training.worker.session_state import Session
from post_training.worker.session_work import told

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
START_TRIES = 3
LOOK_SECONDS = 1.0
HUNG_SECONDS = 30.0
"""A server that says nothing for so long is replaced. It needs a few seconds where it reads the largest body."""


class SessionServer:
    """The process, started now so that it is ready when the model is. A context: it ends with it.

    Attributes:
        url: where it answers, once it is open.
    """

    def __init__(self) -> None:
        self.url = ""
        self._link: Link | None = None
        self._question: Future[float] | None = None
        self._asked_at = 0.0
        self._start()

    def __enter__(self) -> SessionServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def open(self, session: Session) -> None:
        """Serve the session.

        Raises:
            Unavailable: it cannot listen there, or did not start in time.
        """
        store, spec = session.lease.store, session.spec
        key = OwnersKey(store.get(spec.job_uuid).owned_by, ApiKeys(store.database).is_live)
        opening = Opening(spec, key.is_key, session.calls.done)
        for _ in range(START_TRIES):
            if (url := self._opened(opening)) is not None:
                break
            self._start_anew()
        else:
            raise Unavailable(f"the session's training server did not start in {START_TRIES} tries; see the job's log")
        self.url, self._key = url, key
        self._link = Link(self._connection, _Handlers(session, key).by_name(), on_end=lambda: None)

    def _opened(self, opening: Opening) -> str | None:
        """Its address, None where it died or says nothing. Raises what it says of why it cannot serve."""
        try:
            self._connection.send_bytes(encode(opening))
            answer = decode(self._connection.recv_bytes()) if self._connection.poll(START_SECONDS) else None
        except (OSError, EOFError):
            return None
        if isinstance(answer, PostgradError):
            raise answer
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, and has not been asked in vain for too long."""
        waits = self._question is not None and not self._question.done()
        hung = waits and time.monotonic() - self._asked_at > HUNG_SECONDS
        return self._process.poll() is None and not hung

    def start_again(self, session: Session) -> None:
        """Another process, at another address, after this one died or hung. Raises as `open`."""
        self._start_anew()
        self.open(session)

    def silent_for(self) -> float:
        """Seconds since the client's last call was answered; 0 while one is open."""
        assert self._link is not None
        if self._question is None or self._question.done():
            self._question, self._asked_at = self._link.ask("silent"), time.monotonic()
        try:
            return self._question.result(LOOK_SECONDS)
        except (AnswerTimeout, Unavailable):
            return 0.0  # it reads what somebody has sent, or is gone, which is not the client's fault

    def revoked(self) -> bool:
        """Whether the API key that the session belongs to was revoked, to within a second."""
        return not self._key.good()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                python_module("post_training.worker.session_server"),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Out of reach of signals to the worker's group: it serves until the worker has saved.
                start_new_session=True,
                env={**torch_environment(1), LINK_VARIABLE: str(theirs.fileno())},
            )

    def _start_anew(self) -> None:
        code = self._process.poll()
        logger.error(
            "the training server %s and is started again",
            "says nothing" if code is None else f"ended with code {code}",
        )
        self._close()
        self._question = None
        self._start()

    def _stop(self) -> None:
        """Let it send the answers that are there, then end it."""
        if self._link is not None:
            self._link.ask("stop")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS + 1)
        self._close()

    def _close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._link is not None:
            self._link.close()
            self._link = None
        else:
            self._connection.close()


class _Handlers:
    """What the server may ask. Called in the link's thread."""

    def __init__(self, session: Session, key: OwnersKey) -> None:
        self._session = session
        self._key = key

    def by_name(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "look": self.look,
            "refused": self._session.calls.refused,
            "status": self._session.status,
            "checkpoints": self.checkpoints,
            "live": self._key.good,
        }

    def change(self, kind: str, work: Any, number: int | None, digest: str) -> Future[Answer]:
        return self._session.calls.submit(Call(kind, work, changes=True, number=number, digest=digest))

    def look(self, kind: str, work: Any, after: int) -> Future[Answer]:
        return self._session.calls.submit(Call(kind, work, changes=False, after=after))

    def checkpoints(self) -> list[Answer]:
        return [told(self._session, row) for row in self._session.rows() if row.name is not None]

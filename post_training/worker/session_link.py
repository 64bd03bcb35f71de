"""Two processes that ask each other things, over a pair of connected sockets.

Each end has a thread that takes what comes. What is asked is answered when it is done, in whatever order; what both say
of the other's errors is the error itself. No torch and no HTTP here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from apis.errors import PostgradError, Unavailable
from post_training.worker.session_messages import decode, encode

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
"""Called in the thread of the link: it is quick, or gives a Future; and it asks nothing back and waits for it."""


class Link:
    """One end.

    Args:
        connection: a stream that is this link's alone.
        handlers: what the other end may ask, by name. Arguments and answers are what `session_messages.pack` takes.
        on_end: called, in the thread, once nothing more will come.
    """

    def __init__(self, connection: Connection, handlers: Mapping[str, Handler], on_end: Callable[[], None]) -> None:
        self._connection = connection
        self._handlers = handlers
        self._on_end = on_end
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._sending = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._receive, name="session link", daemon=True)
        self._thread.start()

    def ask(self, kind: str, *arguments: Any) -> Future[Any]:
        """The other end's answer, or its error; Unavailable once that is gone."""
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        if not self._send("ask", number, kind, *arguments) or self._over:
            self._settle(number, _gone())
        return answer

    def close(self) -> None:
        """Let go of the connection, whose other end has ended."""
        self._thread.join()
        self._connection.close()

    def _receive(self) -> None:
        try:
            while True:
                what, number, *rest = decode(self._connection.recv_bytes())
                if what == "ask":
                    self._answer(number, *rest)
                else:
                    self._settle(number, *rest)
        except (EOFError, OSError):
            pass  # the other end is gone
        finally:  # also after what no end of ours sends: nobody waits for ever
            self._over = True
            for number in list(self._asked):
                self._settle(number, _gone())
            self._on_end()

    def _answer(self, number: int, kind: str, *arguments: Any) -> None:
        try:
            result = self._handlers[kind](*arguments)
        except Exception as error:
            self._send("answer", number, _told(kind, error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._send("answer", number, _outcome(kind, done)))
        else:
            self._send("answer", number, result)

    def _settle(self, number: int, outcome: Any) -> None:
        answer = self._asked.pop(number, None)
        if answer is None:
            return
        with suppress(InvalidStateError):  # whoever asked has left
            if isinstance(outcome, PostgradError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    def _send(self, *message: Any) -> bool:
        content = encode(list(message))
        try:
            with self._sending:
                self._connection.send_bytes(content)
        except OSError:
            return False
        return True


def _outcome(kind: str, done: Future[Any]) -> Any:
    error = done.exception()
    return done.result() if error is None else _told(kind, error)


def _told(kind: str, error: BaseException) -> PostgradError:
    if isinstance(error, PostgradError):
        return error
    logger.error("%s failed", kind, exc_info=error)
    return PostgradError("the training server failed; the session's log says why")


def _gone() -> PostgradError:
    return Unavailable("the session is over on this server; ask the scheduler for its status")

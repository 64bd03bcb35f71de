"""Work that needs torch, or takes long, done in a process of its own: its caller must not load it, or must survive it.

The child reads JSON requests from standard input, a line each, and answers each with one JSON line. It also holds one
end of a pipe that closes when the caller dies, and then ends itself, so nothing is left computing for nobody.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from apis.errors import DataInvalid, OutOfMemory, PostgradError, error_class
from post_training.processes import LIFELINE, die_with_caller, python_module, torch_environment

logger = logging.getLogger(__name__)
_LOGGED_CHARACTERS = 4000
_KEPT_LINES = 200
# What a child that was told to end may take for it; a process with torch in it takes a moment.
_EXIT_SECONDS = 5.0


class Child:
    """`python -m <module>`, started now and kept for as many requests as its owner has. A context: it ends with it.

    Args:
        what: names the work in messages, such as "the verification".
        failure: raised where the child ends without an answer, or not in time.
        threads: CPU threads of the child; None leaves it to the machine.
        nice: how far it steps back behind other processes, from 0 to 19.
    """

    def __init__(
        self, module: str, *, what: str, failure: type[PostgradError], threads: int | None = None, nice: int = 0
    ) -> None:
        self._what = what
        self._failure = failure
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = _start(module, lifeline, threads)
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        if nice:
            with suppress(OSError):  # it has ended, or the system does not let us
                os.setpriority(os.PRIO_PROCESS, self._process.pid, nice)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._given_up = False
        self._readers = [
            _reading(self._process.stdout, self._answers.put, lambda: self._answers.put("")),
            _reading(self._process.stderr, self._errors.append),
        ]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, request: Mapping[str, Any], timeout: float, too_slow: type[PostgradError] | None = None
    ) -> dict[str, Any]:
        """The answer to one request. A child that gave none is of no further use.

        Args:
            too_slow: raised instead of `failure` where the child takes longer than `timeout` seconds.

        Raises:
            PostgradError: the child's own, with its class, message, field and row.
            OutOfMemory: the system killed the child.
        """
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and how it did says more
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise (too_slow or self._failure)(f"{self._what} took longer than {timeout:g} s and was stopped") from None
        answer = json.loads(line) if line else {}
        if "error" in answer:
            raise _error(answer["error"], self._failure)
        if "result" not in answer:
            raise self._silence()
        return answer["result"]

    @property
    def alive(self) -> bool:
        """Whether it may still be asked."""
        return not self._given_up and self._process.poll() is None

    def close(self) -> None:
        """End it: it goes by itself where it has nothing to do. May be called again."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, at once, whoever waits for an answer. May be called again."""
        self._given_up = True
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for reader in self._readers:
            reader.join(_EXIT_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _silence(self) -> PostgradError:
        if self._given_up:
            return self._failure(f"{self._what} was broken off")
        code = self._process.wait()
        self._readers[1].join(_EXIT_SECONDS)
        logger.error("%s ended with code %d: %s", self._what, code, "".join(self._errors)[-_LOGGED_CHARACTERS:])
        if code == -signal.SIGKILL:
            return OutOfMemory(
                f"{self._what} was killed by the system, most likely for lack of memory: use a smaller model"
            )
        why = "the log of the process that asked for it says why"
        return self._failure(f"{self._what} ended with code {code} and no answer; {why}")


def run_child(
    module: str,
    request: Mapping[str, Any],
    *,
    what: str,
    failure: type[PostgradError],
    timeout: float,
    threads: int | None = None,
    too_slow: type[PostgradError] | None = None,
) -> dict[str, Any]:
    """Run `python -m <module>` on `request` and return its answer. Nothing of it outlives the call.

    Args and errors: as `Child` and `Child.ask`.
    """
    with Child(module, what=what, failure=failure, threads=threads) as child:
        return child.ask(request, timeout, too_slow)


def serve_child(handler: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: each request through `handler`. What libraries print goes to standard error."""
    die_with_caller()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answers:
        for line in sys.stdin:
            print(json.dumps(_answer(handler, json.loads(line))), file=answers, flush=True)


def _answer(handler: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": handler(request)}
    except PostgradError as error:
        traceback.print_exc()
        return {"error": _plain(error)}


def _plain(error: PostgradError) -> dict[str, Any]:
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return fields | ({"row": error.row, "pointer": error.pointer} if isinstance(error, DataInvalid) else {})


def _error(fields: Mapping[str, Any], failure: type[PostgradError]) -> PostgradError:
    error = (error_class(fields["code"]) or failure)(fields["message"], param=fields.get("param"))
    if isinstance(error, DataInvalid):
        # The message names the row already; the constructor would name it twice.
        error.row, error.pointer = fields.get("row"), fields.get("pointer")
    return error


def _start(module: str, lifeline: int, threads: int | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        python_module(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(lifeline,),
        start_new_session=True,
        text=True,
        errors="replace",
        env={**torch_environment(threads), LIFELINE: str(lifeline)},
    )


def _reading(
    pipe: IO[str] | None, take: Callable[[str], None], at_end: Callable[[], None] = lambda: None
) -> threading.Thread:
    """A thread that takes in the lines of a pipe until it ends."""
    assert pipe is not None

    def read() -> None:
        with suppress(OSError, ValueError):  # closed while it was read
            for line in pipe:
                take(line)
        at_end()

    thread = threading.Thread(target=read, name="child output", daemon=True)
    thread.start()
    return thread

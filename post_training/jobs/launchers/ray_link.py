"""The server's end of its line to the Ray driver: started when it is needed, and again after a pause when it ended."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from contextlib import suppress

from post_training.jobs.backoff import Backoff
from post_training.jobs.launchers.orders import Lines
from post_training.jobs.launchers.ray_messages import (
    EVENTS,
    Away,
    Begin,
    Connect,
    Connected,
    Kill,
    Pending,
    Place,
    State,
    Terminate,
)
from post_training.processes import python_module, torch_environment

logger = logging.getLogger(__name__)

DRIVER_MODULE = "post_training.worker.ray_driver"
CONNECT_SECONDS = 40.0
"""A driver that has said nothing by then is ended: Ray tries for minutes to reach a cluster that is away."""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""At 0, Ray listens on 127.0.0.1 and not on the machine's address, on every system."""
_EXIT_SECONDS = 10.0


class DriverLink:
    """One driver process at a time. No method blocks, but for `next`, as long as it is told, and `close`.

    Attributes:
        connected: the cluster answered, and its driver lives.
        why: in what state the connection is, where it is not made.
    """

    def __init__(self, connect: Connect) -> None:
        self.connected = False
        self._connect = connect
        self._process: subprocess.Popen[bytes] | None = None
        self._words: Lines | None = None
        self._started = 0.0
        self._closed = False
        self._backoff = Backoff()
        self.why = f"the Ray cluster at {connect.address} is being connected to"

    def tend(self) -> None:
        """Have a driver, unless one ended just now."""
        if self._process is None and not self._backoff.pausing and not self._closed:
            self._start()
        elif self._process is not None and not self.connected and time.monotonic() - self._started > CONNECT_SECONDS:
            self._lost(f"Ray got no answer in {CONNECT_SECONDS:.0f} s")

    def send(self, command: Connect | Place | Begin | Terminate | Kill) -> None:
        """Tell the driver. Where it cannot be told, nothing happens: what it was told to look after says so later."""
        if self._process is None or self._process.stdin is None:
            return
        line = command.line()
        try:
            sent = os.write(self._process.stdin.fileno(), line)
        except OSError:
            sent = 0
        if sent < len(line):
            self._lost("the driver does not listen")

    def next(self, timeout: float) -> Connected | Pending | State | None:
        """The next thing that the driver saw; None where there was none in so many seconds."""
        line = self._words.next(timeout) if self._words is not None else None
        if line is None:
            if self._words is None:
                time.sleep(min(timeout, 0.05))
            elif self._words.ended:
                self._lost("the driver ended")
            return None
        event = EVENTS.validate_json(line)
        if isinstance(event, Away):
            self._lost(event.why)
            return None
        if isinstance(event, Connected):
            self.connected = True
            self._backoff.worked()
            logger.info("connected to the Ray cluster at %s", self._connect.address)
        return event

    def close(self) -> None:
        """Let the driver do what it was told, and end it for good."""
        self._closed = True
        process, connected = self._process, self.connected
        self._process, self._words, self.connected = None, None, False
        if process is None:
            return
        _close_pipe(process.stdin)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS if connected else 0)
        _end(process)

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                python_module(DRIVER_MODULE),
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._lost(error.strerror or "the driver cannot be started")
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._words = Lines(self._process.stdout.fileno())
        self.send(self._connect)

    def _environment(self) -> dict[str, str]:
        # Nothing is told to anybody unless the administrator wants it.
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **torch_environment(1), "PYTHONUNBUFFERED": "1"}
        if self._connect.address == "local":
            environment[LOOPBACK_ONLY] = "0"
        return environment

    def _lost(self, why: str) -> None:
        seconds = self._backoff.failed()
        self.why = f"the Ray cluster at {self._connect.address} does not answer: {why}"
        logger.error("%s; next try in %.0f s", self.why, seconds)
        process, self._process, self._words, self.connected = self._process, None, None, False
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        _close_pipe(pipe)


def _close_pipe(pipe: object) -> None:
    with suppress(OSError, AttributeError):
        pipe.close()  # pyright: ignore[reportAttributeAccessIssue]

"""A stack of our own for the length of a `with` block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from apis.errors import StackError

TEMPLATE = "experimental-post-training"
STOP_SECONDS = 30
LOG_TAIL = 20


def postgrad() -> list[str]:
    """The `postgrad` command of the environment that runs this."""
    installed = Path(sys.executable).with_name("postgrad")
    return [str(installed)] if installed.is_file() else [sys.executable, "-m", "distributions.cli.main"]


@contextmanager
def running_stack(home: Path, log: Path) -> Iterator[str]:
    """Serve the template on a free port with `home` as its state folder; the value is its URL.

    The server is stopped however the block ends: returning, an error, Ctrl-C, SIGTERM or a closed terminal.

    Raises:
        StackError: it did not start; with the end of its log.
    """
    handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    command = [*postgrad(), "stack", "run", TEMPLATE, "--port", "0"]
    environment = {**os.environ, "POSTGRAD_HOME": str(home)}
    with log.open("w") as errors:
        # In a session of its own, so that Ctrl-C reaches this process alone, which then stops the server in order.
        server = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    try:
        yield _url(server, log)
    finally:
        _stop(server)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    # A second one, as from make and from who stopped make, must not cut the stop of the server short.
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _url(server: subprocess.Popen[str], log: Path) -> str:
    """Wait for the line `Postgrad serves … at URL`, which the server prints once it answers."""
    assert server.stdout is not None
    line = server.stdout.readline()
    if " at http" not in line:
        tail = "\n".join(log.read_text().splitlines()[-LOG_TAIL:])
        raise StackError(f"the server did not start; the end of its log ({log}):\n{tail}")
    return line.rsplit(" at ", 1)[1].strip()


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    finally:
        if server.stdout is not None:
            server.stdout.close()

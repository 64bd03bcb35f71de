"""What lets one worker process run one job after another, and begin each soon.

Between two jobs everything that the first one made goes: model, files, connections, output, memory. What stays is what
a process has from its start: settings of the environment, and what was imported (and compiled).
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from contextlib import suppress

from post_training.jobs.launchers.orders import IDLE, TAKEN, Lines, Order, Word
from post_training.processes import return_memory

logger = logging.getLogger(__name__)

_JOB_LOOP = "post_training.worker.job_loop"
_imports: dict[str, threading.Thread] = {}


class Orders:
    """The worker's end of its line to the server. From now on what is printed goes to the log of the job at hand."""

    def __init__(self) -> None:
        self._words = os.dup(1)
        os.dup2(2, 1)
        self._lines = Lines(0)

    def first(self) -> Order | None:
        """The order that this process was started for; None where there is none."""
        return self._take(None)

    def next(self, seconds: float) -> Order | None:
        """Another order, if one comes within so many seconds and the server lives. The job before must be gone."""
        if not seconds:
            return None
        _forget_job()
        return self._take(seconds) if self._say(IDLE) else None

    def _take(self, seconds: float | None) -> Order | None:
        line = self._lines.next(seconds)
        if line is None:
            return None
        order = Order.model_validate_json(line)
        _send_output_to(order.log)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._say(TAKEN)  # a server that died just now has given the job away all the same
        return order

    def _say(self, word: Word) -> bool:
        """False where nobody listens any more."""
        try:
            os.write(self._words, word.encode() + b"\n")
        except OSError:
            return False
        return True


def begin_imports(model_module: str) -> None:
    """Import what a job needs, torch with it, while something else is done."""
    if model_module not in _imports:
        thread = threading.Thread(target=_import, args=(model_module,), name="imports", daemon=True)
        _imports[model_module] = thread
        thread.start()


def wait_for_imports() -> None:
    """Until what was begun is there: a module that two threads import at once may be seen half made."""
    for thread in _imports.values():
        thread.join()


def exit_on_sigterm() -> None:
    """There is no job: nothing is lost by going at once."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _import(model_module: str) -> None:
    for module in (_JOB_LOOP, model_module):
        try:
            importlib.import_module(module)
        except Exception:
            # The job imports it again and fails by what is wrong; here nobody would hear of it.
            logger.debug("%s cannot be imported", module, exc_info=True)


def _forget_job() -> None:
    """Give back what the job took and leave its log."""
    wait_for_imports()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    return_memory()
    _reset_peak()
    _send_output_to(os.devnull)


def _reset_peak() -> None:
    """Let `ru_maxrss` begin again at what is in use; a system that cannot reports the most of all jobs."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")


def _send_output_to(path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)

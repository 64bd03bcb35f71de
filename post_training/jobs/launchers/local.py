"""Workers as processes on this machine, each in a process group of its own.

One that has ended its job in good order may wait, without a model, for the next: what it has imported, which takes a
new process some seconds, serves again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from post_training.jobs.devices import DeviceKind
from post_training.jobs.launchers.orders import IDLE, TAKEN, Lines, Order
from post_training.jobs.leases import Claim
from post_training.processes import process_identity, python_module, torch_environment

WORKER_MODULE = "post_training.worker.main"
TAKE_SECONDS = 2.0
"""A waiting worker that has not taken its next job by then is ended. A sound one takes it in milliseconds."""
_EXIT_SECONDS = 2.0


class WorkerHandle(Protocol):
    """A worker that was started, by this server or by an earlier one."""

    def ended(self) -> str | None:
        """How it ended, in words that follow "its worker"; None while it runs."""
        ...

    def idle(self) -> bool:
        """Whether it has ended its job in good order and waits for another."""
        ...

    def terminate(self) -> None:
        """Ask it to save, give its job back and stop."""
        ...

    def kill(self) -> None:
        """End it and everything it started, at once."""
        ...


class Launcher(Protocol):
    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> WorkerHandle:
        """Have a worker begin a claimed job, a new one or one that waits; what it prints goes to `log_path`.

        Raises:
            OSError: there is no worker and none can be started.
        """
        ...

    def keep(self, worker: WorkerHandle) -> None:
        """Keep an idle worker for a later job."""
        ...

    def reap(self) -> None:
        """Forget idle workers that have ended."""
        ...

    def at_hand(self, kind: DeviceKind) -> bool:
        """Whether a job on such a device can begin now though no worker could be started a while ago."""
        ...

    def close(self) -> None:
        """End the idle workers."""
        ...

    def adopt(self, pid: int, process_started: str | None) -> WorkerHandle:
        """A worker on this machine that an earlier server started."""
        ...


@dataclass(frozen=True)
class Fit:
    """What a worker and its next job must have in common: all that is set once for a process."""

    device: str
    threads: int | None
    model_module: str


@dataclass
class LocalWorker:
    """A child process, and what it was started for; None where it is no worker of this module's."""

    process: subprocess.Popen[bytes]
    fit: Fit | None = None
    _idle: bool = False
    _words: Lines | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.fit is not None and self.process.stdout is not None:
            self._words = Lines(self.process.stdout.fileno())

    def ended(self) -> str | None:
        status = self.process.poll()
        return None if status is None else _describe(status)

    def idle(self) -> bool:
        while self._words is not None and (word := self._words.next(0)) is not None:
            self._idle = word.decode() == IDLE
        return self._idle

    def take(self, order: Order) -> bool:
        """Give a waiting worker its next job. False where it did not take it, and then it must be killed."""
        self._idle = False
        return self.send(order) and self._words is not None and self._words.next(TAKE_SECONDS) == TAKEN.encode()

    def send(self, order: Order) -> bool:
        """Write an order to the worker. False where it is gone."""
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), order.line())
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        # The group: whatever the worker started in it goes too. A verifying child has a group of its own and ends
        # itself when its worker is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._words = None
        for pipe in (self.process.stdin, self.process.stdout) if self.fit is not None else ():
            if pipe is not None:
                pipe.close()


@dataclass
class AdoptedWorker:
    """A process that is no child: known by its number and, since numbers are used again, by when it started."""

    pid: int
    process_started: str | None

    def ended(self) -> str | None:
        return None if self._lives() else "ended while no server watched it"

    def idle(self) -> bool:
        return False  # it ends after its job: nobody holds the other end of its standard input

    def terminate(self) -> None:
        if self._lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._lives():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _lives(self) -> bool:
        return self.process_started is not None and process_identity(self.pid) == self.process_started


class LocalLauncher:
    """Runs `python -m post_training.worker.main`, a process for one job after another.

    Args:
        warm_seconds: how long a worker waits for its next job; 0: a process for each.
    """

    def __init__(self, database_url: str, home: Path, warm_seconds: float = 0.0) -> None:
        self._database_url = database_url
        self._home = home
        self._warm_seconds = warm_seconds
        self._idle: list[LocalWorker] = []

    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> LocalWorker:
        """As `Launcher.launch`."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        fit = Fit(claim.slot.device, threads, claim.spec.worker.model_module)
        order = self._order(claim, log_path)
        with log_path.open("ab") as log:
            waiting = self._take_idle(fit)
            if waiting is not None:
                if waiting.take(order):
                    return waiting
                waiting.kill()
            started = LocalWorker(_start(self._home, threads, log), fit)
        started.send(order)
        return started

    def adopt(self, pid: int, process_started: str | None) -> AdoptedWorker:
        return AdoptedWorker(pid, process_started)

    def keep(self, worker: WorkerHandle) -> None:
        """As `Launcher.keep`."""
        assert isinstance(worker, LocalWorker)
        self._idle.append(worker)

    def reap(self) -> None:
        """As `Launcher.reap`."""
        for worker in [each for each in self._idle if each.ended() is not None]:
            self._idle.remove(worker)
            worker.kill()

    def at_hand(self, kind: DeviceKind) -> bool:
        """As `Launcher.at_hand`: a machine that has no room for processes has none for a job's model."""
        return False

    def close(self) -> None:
        """As `Launcher.close`."""
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.terminate()
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_EXIT_SECONDS)
            worker.kill()

    def _take_idle(self, fit: Fit) -> LocalWorker | None:
        """One that can do such a job. One that only has its device must go: the memory that it holds is wanted."""
        self.reap()
        worker = next((each for each in self._idle if each.fit == fit), None)
        if worker is not None:
            self._idle.remove(worker)
            return worker
        stranger = next((each for each in self._idle if each.fit is not None and each.fit.device == fit.device), None)
        if stranger is not None:
            self._idle.remove(stranger)
            stranger.kill()
        return None

    def _order(self, claim: Claim, log_path: Path) -> Order:
        return Order(
            database_url=self._database_url,
            job_uuid=claim.job_uuid,
            owner=claim.owner,
            device=claim.slot.device,
            model_module=claim.spec.worker.model_module,
            log=str(log_path.resolve()),
            warm_seconds=self._warm_seconds,
        )


def _start(home: Path, threads: int | None, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*python_module(WORKER_MODULE), "--home", str(home)],
        env={**torch_environment(threads), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"

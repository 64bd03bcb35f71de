"""Workers as processes on this machine, each in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from post_training.jobs.leases import Claim
from post_training.processes import process_identity, python_module, torch_environment

WORKER_MODULE = "post_training.worker.main"
DEVICE_VARIABLE = "POSTGRAD_DEVICE"


class WorkerHandle(Protocol):
    """A worker that was started, by this server or by an earlier one."""

    def ended(self) -> str | None:
        """How it ended, in words that follow "its worker"; None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to save, give its job back and stop."""
        ...

    def kill(self) -> None:
        """End it and everything it started, at once."""
        ...


class Launcher(Protocol):
    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> WorkerHandle:
        """Start a worker for a claimed job; what it prints goes to `log_path`. Raises OSError where it can't."""
        ...

    def adopt(self, pid: int, process_started: str | None) -> WorkerHandle:
        """A worker on this machine that an earlier server started."""
        ...


@dataclass
class LocalWorker:
    """A child process."""

    process: subprocess.Popen[bytes]

    def ended(self) -> str | None:
        status = self.process.poll()
        return None if status is None else _describe(status)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        # The group: whatever the worker started in it goes too. A verifying child has a group of its own and ends
        # itself when its worker is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class AdoptedWorker:
    """A process that is no child: known by its number and, since numbers are used again, by when it started."""

    pid: int
    process_started: str | None

    def ended(self) -> str | None:
        return None if self._lives() else "ended while no server watched it"

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
    """Starts `python -m post_training.worker.main` for one job."""

    def __init__(self, database_url: str, home: Path) -> None:
        self._database_url = database_url
        self._home = home

    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> LocalWorker:
        """As `Launcher.launch`.

        Secrets (the store's URL, the owner token) travel in the environment, where `ps` does not show them.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **torch_environment(threads),
            "POSTGRAD_DATABASE_URL": self._database_url,
            "POSTGRAD_JOB_OWNER": claim.owner,
            DEVICE_VARIABLE: claim.slot.device,
            "PYTHONUNBUFFERED": "1",
        }
        command = [*python_module(WORKER_MODULE), "--home", str(self._home), "--job", claim.job_uuid]
        with log_path.open("ab") as log:
            return LocalWorker(_start(command, environment, log))

    def adopt(self, pid: int, process_started: str | None) -> AdoptedWorker:
        return AdoptedWorker(pid, process_started)


def _start(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"

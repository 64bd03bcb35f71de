"""Workers as child processes on this machine, each in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from post_training.processes import python_module, torch_environment

WORKER_MODULE = "post_training.worker.main"


class WorkerHandle(Protocol):
    """A started worker."""

    def poll(self) -> int | None:
        """Its exit status, or None while it runs; negative for a signal's number."""
        ...

    def terminate(self) -> None:
        """Ask it to give its job back and stop."""
        ...

    def kill(self) -> None:
        """End it and everything it started, at once."""
        ...


class Launcher(Protocol):
    def launch(self, job_uuid: str, owner: str, log_path: Path, threads: int | None) -> WorkerHandle: ...


@dataclass
class LocalWorker:
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        # The group: whatever the worker started in it goes too. A verifying child has a group of its own and ends
        # itself when its worker is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class LocalLauncher:
    """Starts `python -m post_training.worker.main` for one job."""

    def __init__(self, database_url: str, home: Path) -> None:
        self._database_url = database_url
        self._home = home

    def launch(self, job_uuid: str, owner: str, log_path: Path, threads: int | None) -> LocalWorker:
        """Start a worker for a claimed job; what it prints goes to `log_path`.

        Secrets (the store's URL, the owner token) travel in the environment, where `ps` does not show them.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **torch_environment(threads),
            "POSTGRAD_DATABASE_URL": self._database_url,
            "POSTGRAD_JOB_OWNER": owner,
            "PYTHONUNBUFFERED": "1",
        }
        command = [*python_module(WORKER_MODULE), "--home", str(self._home), "--job", job_uuid]
        with log_path.open("ab") as log:
            return LocalWorker(_start(command, environment, log))


def _start(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

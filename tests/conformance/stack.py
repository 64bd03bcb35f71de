"""A served stack with the provider under test: what the promises are tried on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from post_training.catalog.importing import import_model
from post_training.client import StackClient
from tests.conformance.targets import Target
from tests.faults.harness import MODEL, rows, worker_pid
from tests.model_fixture import REPOSITORY
from tests.served_stack import run_yaml_with, served

SECTIONS: dict[str, Any] = {
    "apis": ["post_training", "datasetio"],
    "jobs": {"devices": ["cpu"], "max_attempts": 3, "warm_seconds": 300},
}


class ConformanceStack:
    """The stack; its server may be killed and started again.

    Attributes:
        home: the state folder of the stack whose workers train.
        base: the Hugging Face folder of the model `MODEL`.
    """

    def __init__(self, target: Target, folder: Path, python: Path) -> None:
        self.target, self.home = target, folder / "home"
        self.base = target.model(folder / "base")
        self._python = python
        self._lasting, self._open = ExitStack(), ExitStack()
        import_model(str(self.base), MODEL, self.home)
        if target.behind is None:
            self._front = self.home
            self._run_yaml = _run_yaml(folder, target.entry())
        else:
            behind = _run_yaml(folder, target.behind.entry())
            url, _ = self._lasting.enter_context(served(self.home, stack=behind, PYTHONPATH=_python_path()))
            self._front = folder / "front" / "home"
            self._front.mkdir(parents=True)
            self._run_yaml = _run_yaml(self._front.parent, target.entry(url=url))
        self._serve()
        self.register("rows", rows(60))

    def _serve(self) -> None:
        opened = served(self._front, stack=self._run_yaml, python=str(self._python), PYTHONPATH=_python_path())
        self.url, self._process = self._open.enter_context(opened)
        self.client = self._open.enter_context(StackClient(self.url))

    def register(self, dataset_id: str, content: list[dict[str, Any]]) -> None:
        self.client.datasets.register({"type": "rows", "rows": content}, dataset_id=dataset_id)

    def kill_worker(self, job_uuid: str) -> bool:
        """Kill the process that trains the job, without warning; false where there is none yet."""
        pid = worker_pid(self.home, job_uuid)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def restart_after_kill(self) -> None:
        """Kill the server without warning and start it again; its workers go on."""
        self._process.kill()
        self._process.wait()
        self._open.close()
        self._serve()

    def capabilities(self) -> set[str]:
        """What the provider says that it can do."""
        program = "import sys; from distributions.cli.stack import app; app(sys.argv[1:], prog_name='stack')"
        command = [str(self._python), "-c", program, "list-providers", "post_training", "--json"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
        found = [one for one in json.loads(listed.stdout) if one["provider_type"] == self.target.provider_type]
        return set(found[0]["capabilities"].split(", ")) if found else set()

    def close(self) -> None:
        self._open.close()
        self._lasting.close()


def _run_yaml(folder: Path, entry: dict[str, Any]) -> str:
    datasetio = [{"provider_id": "localfs", "provider_type": "inline::localfs"}]
    return run_yaml_with(folder, providers={"post_training": [entry], "datasetio": datasetio}, **SECTIONS)


def _python_path() -> str:
    """With this checkout first, also for an environment of its own."""
    return os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])


@contextmanager
def conformance_stack(target: Target, folder: Path, python: Path) -> Iterator[ConformanceStack]:
    stack = ConformanceStack(target, folder, python)
    try:
        yield stack
    finally:
        stack.close()

"""A stack as a process of its own, as users run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

TEMPLATE = "experimental-post-training"
PROGRAM = "import sys; from distributions.cli.stack import app; app(sys.argv[1:], prog_name='stack')"


def run_yaml_with(folder: Path, **sections: Any) -> str:
    """A run.yaml like the template, with top-level sections in place of the template's; gives its path."""
    template = Path(__file__).parents[1] / "templates" / TEMPLATE / "run.yaml"
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(template.read_text()), **sections}))
    return str(path)


@contextmanager
def served(
    home: Path,
    *options: str,
    stack: str = TEMPLATE,
    stderr: IO[str] | None = None,
    python: str = sys.executable,
    **environ: str,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a template or run.yaml on a free port from a folder that is not the checkout; gives its URL and process."""
    command = [python, "-c", PROGRAM, "run", stack, "--port", "0", *options]
    env = {**os.environ, "POSTGRAD_HOME": str(home), "OMP_NUM_THREADS": "1", **environ}
    process = subprocess.Popen(command, cwd=home.parent, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Postgrad serves "), line
        yield line.split()[-1], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        process.stdout.close()

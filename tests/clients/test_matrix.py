"""Each real client, unmodified and in an environment of its own, through the whole flow on one live server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served
from tests.clients.environments import environment
from tests.clients.matrix import ALL, Cell, cells
from tests.clients.recorder import recording
from tests.clients.results import Results
from tests.clients.task import task

pytestmark = pytest.mark.timeout(600)  # the first run makes the environments
DRIVERS = Path(__file__).parent / "drivers"
RECORDED = Path(__file__).parent / "recorded"
QUESTION = "Say red 0"
RECORD = bool(os.environ.get("POSTGRAD_RECORD_CLIENTS"))
"""Write anew what the clients ask for, instead of comparing with it."""


@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.name)
def test_client_runs_the_whole_flow(cell: Cell, stack: Served, results: Results, tmp_path: Path):
    python = python_of(cell, results)
    results.started(cell)
    told = task(stack.url, cell.client.name, cell.face, stack.client.inspect.version().version, tmp_path)
    names = {told["job"]: "{job}", told["dataset"]: "{dataset}", told["alias"]: "{alias}", told["model"]: "{model}"}
    with recording(stack.url, names) as recorder:
        steps = drive(python, cell, {**told, "url": recorder.url}, tmp_path)
    faults = [f"{step['verb']} by {step['by']}: {step['error']}" for step in steps if "error" in step]
    faults = faults or wrong_texts(stack, told, steps)
    results.ran(cell, steps, faults)
    recorded = RECORDED / f"{cell.name}.json"
    if RECORD:
        recorded.write_text(json.dumps(recorder.recorded(), indent=1) + "\n")
    assert not faults, "\n".join([cell.name, *faults])
    assert recorder.recorded() == json.loads(recorded.read_text())


def python_of(cell: Cell, results: Results) -> Path:
    """The interpreter of the client's environment. Skips the test where it is not to be run or cannot be."""
    reason = None if ALL or cell.client.always else "only `make test-clients` runs this client"
    if reason is None:
        try:
            return environment(cell.client)
        except LookupError as error:
            reason = str(error)
        except subprocess.CalledProcessError as error:
            pytest.fail(f"the environment of {cell.client.name} cannot be made: {error.stderr[-2000:]}")
    results.skipped(cell, reason)
    pytest.skip(reason)


def drive(python: Path, cell: Cell, told: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run the cell's driver and give its steps."""
    # Neither a proxy nor a key of this machine, and no configuration file of that client.
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONUTF8": "1"}
    done = subprocess.run(
        [str(python), str(DRIVERS / cell.client.drivers[cell.face])],
        input=json.dumps({**told, "processes": ALL}),
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def wrong_texts(stack: Served, told: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """How the client's answers differ from what our own client is told by the same tuned model."""
    model = f"{told['model']}-sft-{told['job']}-0"
    ask: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12}
    chat = stack.client.inference.chat_completion(messages=[{"role": "user", "content": QUESTION}], **ask)
    expected = {
        "chat": chat.choices[0].message.content or "",
        "completion": stack.client.inference.completion(prompt=QUESTION, **ask).choices[0].text,
    }
    told_texts = {step["verb"]: step["seen"]["text"] for step in steps if "text" in step["seen"]}
    # The command line sets no limit, so its answers may go on; a character cut by the limit may then be whole.
    return [
        f"{verb} answered {text!r}, not {expected[verb.split()[-1]]!r}"
        for verb, text in told_texts.items()
        if not text.startswith(expected[verb.split()[-1]].rstrip("\ufffd"))
    ]

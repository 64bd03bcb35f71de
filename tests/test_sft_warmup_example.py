"""The example runs as its README says, against a stack that serves the quickstart's model."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apis.sft_sessions.models import SessionState
from distributions.cli.sft_config import read_run_file
from post_training.client import SFTClient, StackClient
from tests.model_fixture import REPOSITORY
from tests.served_stack import served

EXAMPLE = REPOSITORY / "examples" / "sft_warmup"
_PREAMBLE = (ast.Import, ast.ImportFrom)


@pytest.mark.model
def test_ten_lines_fine_tune_the_model_step_by_step_and_print_a_loss_that_falls(smollm2: Path, tmp_path: Path):
    home = tmp_path / "home"
    environment = {**os.environ, "POSTGRAD_HOME": str(home), "OMP_NUM_THREADS": "2"}
    importing = ["models", "import", str(smollm2), "--model-id", "smollm2-135m-instruct"]
    subprocess.run([sys.executable, "-m", "distributions.cli.main", *importing], env=environment, check=True)
    with served(home, OMP_NUM_THREADS="2") as (url, _):
        command = [sys.executable, str(EXAMPLE / "warmup.py")]
        run = subprocess.run(
            command, env={**environment, "POSTGRAD_BASE_URL": url}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        losses = [float(loss) for loss in re.findall(r"^step \d+  loss (\d+\.\d+)$", run.stdout, re.MULTILINE)]
        assert len(losses) == 12
        assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
        (checkpoint,) = re.findall(r"^checkpoint (\S+)$", run.stdout, re.MULTILINE)
        with StackClient(url) as stack, SFTClient(url) as client:
            assert checkpoint in [model.identifier for model in stack.models.list()]
            (session,) = client.list_jobs()
            assert session.status is SessionState.COMPLETED


def test_the_example_has_ten_statements():
    tree = ast.parse((EXAMPLE / "warmup.py").read_text())
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not isinstance(node, _PREAMBLE)]
    assert len(plain) - 1 <= 10  # the docstring is one too


def test_the_examples_config_file_is_one_that_sft_run_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    file = read_run_file(EXAMPLE / "warmup.yaml", ["num_steps=20"])
    assert Path(file.settings.data_path).is_file()
    assert file.settings.val_data_path is not None
    assert Path(file.settings.val_data_path).is_file()
    assert file.settings.val_batch_size == 4
    config = file.session_config(270)
    assert (config.model, config.total_steps) == ("smollm2-135m-instruct", 20)

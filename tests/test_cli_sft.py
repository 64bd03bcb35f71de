"""`postgrad sft …`: the file it takes, what it prints, and what it exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from apis.errors import FileMissing, InvalidField, NotSupported
from apis.sft_sessions.models import SessionState
from distributions.cli.main import app
from distributions.cli.sft_config import read_run_file
from post_training.client.sft_rows import read_file
from tests.sft_contract_parts import rows_after
from tests.sft_contract_server import Fault, Stack, running_stack

ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(10)]
BATCHES = [ROWS[begin : begin + 4] for begin in range(0, 10, 4)]
MEASURED = [{"loss": float(n), "weight": 1.0, "tokens": 1, "right": n % 2} for n in range(3)]
COMMAND = [sys.executable, "-m", "distributions.cli.main"]


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with data, and no stack that the environment names."""
    for name in ("POSTGRAD_BASE_URL", "LLAMA_STACK_BASE_URL", "POSTGRAD_API_KEY", "LLAMA_STACK_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MEASURED))


def config(**keys: Any) -> Path:
    path = Path("run.yaml")
    path.write_text(yaml.safe_dump({"data_path": "train.jsonl", "batch_size": 4, **keys}))
    return path


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["sft", *arguments])
    assert result.exit_code == code, result.output
    return result


# -- the file --------------------------------------------------------------------------------------------------------


def test_opentinkers_keys_and_ours_are_read_into_typed_settings():
    file = read_run_file(
        config(
            project_name="support",
            experiment_name="tickets",
            logger_backends=["console", "wandb"],
            wandb_key="secret-1",
            val_data_path="val.jsonl",
            val_batch_size=2,
            num_epochs=3,
            save_freq=100,
            test_freq=50,
            lora={"lora_rank": 64, "lora_alpha": 32, "target_modules": "all-linear", "lr": 3e-5},
            scheduler_url="http://127.0.0.1:1",
            scheduler_api_key="secret-2",
            num_gpus=0,
            model="lab/exact",
            seed=7,
        )
    )
    assert file.settings.logger_backends == ["console", "wandb"]
    assert file.settings.num_epochs == 3
    assert file.session == {
        "project_name": "support",
        "experiment_name": "tickets",
        "lora": {"lora_rank": 64, "lora_alpha": 32, "target_modules": "all-linear", "lr": 3e-5},
        "model": "lab/exact",
        "seed": 7,
    }
    assert "secret" not in repr(file)


def test_the_schedule_of_the_learning_rate_ends_with_the_run():
    assert read_run_file(config()).session_config(10).total_steps == 3
    assert read_run_file(config(num_epochs=2)).session_config(10).total_steps == 6
    assert read_run_file(config(num_epochs=2, num_steps=5)).session_config(10).total_steps == 5
    assert read_run_file(config(total_steps=50)).session_config(10).total_steps == 50


def test_overrides_go_over_the_file_and_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RATE", "0.002")
    path = config(
        val_batch_size="${batch_size}", optimizer_config={"lr": "${oc.decode:${oc.env:RATE}}"}, lora={"lora_rank": 4}
    )
    file = read_run_file(path, ["batch_size=16", "lora.lora_rank=8", "logger_backends=[jsonl]", "model=a/b"])
    assert (file.settings.batch_size, file.settings.val_batch_size) == (16, 16)
    assert file.session["lora"] == {"lora_rank": 8}
    assert file.session["model"] == "a/b"
    assert file.session["optimizer_config"] == {"lr": 0.002}
    assert file.settings.logger_backends == ["jsonl"]


@pytest.mark.parametrize(
    ("keys", "overrides", "says"),
    [
        ({"batchsize": 4}, [], "there is no key 'batchsize': did you mean 'batch_size'?"),
        ({}, ["lora.lora_rnak=3"], "there is no key 'lora.lora_rnak': did you mean 'lora_rank'?"),
        ({}, ["optimizer_config.learning=3"], "there is no key 'optimizer_config.learning': there are betas, eps"),
        ({}, ["rollout_n=4"], "rollout_n belongs to reinforcement learning"),
        ({"multi_turn": {"max_turns": 3}}, [], "multi_turn belongs to reinforcement learning"),
        ({"tokenizer_path": "x"}, [], "tokenizer_path is not needed, for a model brings its own"),
        ({"num_workers": 0}, [], "num_workers is not taken"),
        ({"batch_size": 0}, [], "batch_size: Input should be greater than or equal to 1"),
        ({"logger_backends": ["mlflow"]}, [], "logger_backends.0: Input should be 'console', 'jsonl'"),
        ({}, ["batch_size=many"], "batch_size: Input should be a valid integer"),
        ({}, ["batch_size"], "'batch_size' sets nothing: write key=value"),
        ({"val_batch_size": "${missing}"}, [], "Interpolation key 'missing' not found"),
        ({"model": "???"}, [], "Missing mandatory value: model"),
        ({"data_path": None}, [], "data_path: Input should be a valid string"),
        ({}, ["data_path.size=3"], "data_path: Input should be a valid string"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_by_name(keys: dict[str, Any], overrides: list[str], says: str):
    with pytest.raises(InvalidField) as caught:
        read_run_file(config(**keys), overrides)
    assert says in caught.value.message


def test_values_that_only_the_session_knows_are_refused_before_anything_is_sent(stack: Stack):
    path = config(lora={"lora_alpha": 0}, scheduler_url=stack.url)
    assert "lora.lora_alpha: Input should be greater than or equal to 1" in run("run", str(path), code=1).stderr
    assert stack.submits == 0


@pytest.mark.parametrize("content", ["a: [", "- 1", "\x00"])
def test_a_file_that_is_no_config_is_refused(content: str):
    Path("broken.yaml").write_text(content)
    with pytest.raises(InvalidField, match=r"broken\.yaml"):
        read_run_file(Path("broken.yaml"))


def test_a_missing_file_is_named():
    with pytest.raises(FileMissing, match=r"nothing\.yaml"):
        read_run_file(Path("nothing.yaml"))


def test_a_missing_omegaconf_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(NotSupported, match=r"needs omegaconf: pip install 'postgrad\[client\]'"):
        read_run_file(config())


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "rows.parquet"])
def test_data_that_cannot_be_read_open_no_session(stack: Stack, name: str):
    Path("empty.jsonl").write_text("")
    path = config(data_path=name, scheduler_url=stack.url)
    assert name in run("run", str(path), code=1).stderr
    assert stack.submits == 0


# -- the command -----------------------------------------------------------------------------------------------------


def test_run_trains_on_a_file_and_prints_the_checkpoints(stack: Stack):
    path = config(val_data_path="val.jsonl", save_freq=2, scheduler_url=stack.url)
    result = run("run", str(path), "--job-id", "mine", "--set", "seed=3")
    record = stack.sessions["mine"]
    assert record.weights == rows_after(BATCHES)
    assert record.state is SessionState.COMPLETED
    assert (record.request.config.seed, record.request.config.total_steps) == (3, 3)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("step 1  train/loss 0.")
    assert lines[3] == "step 3  val/loss 1  val/perplexity 2.71828  val/token_accuracy 0.333333"
    assert lines[4:] == ["completed 3 steps", *(f"checkpoint lab/exact-sft-mine-step{n}" for n in (2, 3))]
    assert result.stderr.splitlines() == ["session mine"]


def test_json_is_the_only_thing_on_stdout(stack: Stack):
    result = run("run", str(config(scheduler_url=stack.url)), "--job-id", "mine", "--json")
    answer = json.loads(result.stdout)
    assert answer["total_steps"] == 3
    assert [one["step"] for one in answer["losses"]] == [1, 2, 3]
    assert answer["checkpoints"][0]["identifier"] == "lab/exact-sft-mine-step3"
    assert "train/loss" in result.stderr


def test_shuffle_and_steps_are_those_of_the_file(stack: Stack):
    run("run", str(config(scheduler_url=stack.url, shuffle=True, seed=5, num_steps=2)), "--job-id", "mine")
    order = np.random.Generator(np.random.PCG64([5, 0])).permutation(10)
    assert stack.sessions["mine"].weights == rows_after([[ROWS[n] for n in order[:4]], [ROWS[n] for n in order[4:8]]])


def test_metrics_go_to_the_named_trackers_under_the_log_folder(stack: Stack):
    path = config(scheduler_url=stack.url, logger_backends=["jsonl"], log_dir="logs", project_name="support")
    assert "train/loss" not in run("run", str(path), "--job-id", "mine").output
    lines = Path("logs/support/mine/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_the_endpoint_option_goes_before_the_file(stack: Stack):
    path = config(scheduler_url="http://127.0.0.1:9")
    result = CliRunner().invoke(app, ["--endpoint", stack.url, "sft", "run", str(path), "--job-id", "mine"])
    assert result.exit_code == 0, result.output


def test_a_bad_row_is_named_and_what_becomes_of_the_session_is_said(stack: Stack):
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:5], {"bad": 1}]))
    result = run("run", str(config(scheduler_url=stack.url)), "--job-id", "mine", code=1)
    assert result.stderr.splitlines()[-1] == "Error: row 5, /bad: this row cannot be used"
    assert "postgrad sft cancel mine" in result.stderr


def test_a_session_that_is_cancelled_exits_with_3(stack: Stack):
    stack.faults["before", 2] = cancelling("mine")
    result = run("run", str(config(scheduler_url=stack.url)), "--job-id", "mine", code=3)
    assert "session mine was cancelled" in result.stderr


def cancelling(job_id: str) -> Fault:
    async def fault(stack: Stack) -> None:
        await stack.cancel_session(job_id)

    return fault


def test_ctrl_c_exits_with_130_says_how_to_go_on_and_resume_does(stack: Stack):
    stack.step_seconds = 0.4
    path = config(scheduler_url=stack.url, num_epochs=4)
    process = subprocess.Popen(
        [*COMMAND, "sft", "run", str(path), "--job-id", "mine"], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 60
    while "mine" not in stack.sessions or not stack.sessions["mine"].trained:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "postgrad sft run CONFIG --resume mine" in errors
    record = stack.sessions["mine"]
    assert len(record.checkpoints) == 1
    stack.step_seconds = 0
    run("run", str(path), "--resume", "mine")
    assert record.weights == rows_after(BATCHES * 4)


def test_ctrl_c_before_the_session_has_a_device_cancels_it(stack: Stack):
    stack.start_seconds = 60
    process = subprocess.Popen(
        [*COMMAND, "sft", "run", str(config(scheduler_url=stack.url)), "--job-id", "mine"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "session mine" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "session mine had not begun and was cancelled" in errors
    assert stack.sessions["mine"].state is SessionState.CANCELLED


def test_job_id_and_resume_exclude_each_other():
    assert "--resume" in run("run", str(config()), "--job-id", "a", "--resume", "b", code=2).stderr


def test_sessions_are_listed_shown_and_cancelled(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSTGRAD_BASE_URL", stack.url)
    run("run", str(config()), "--job-id", "mine")
    assert run("list").stdout.splitlines()[1].split()[:2] == ["mine", "COMPLETED"]
    assert json.loads(run("list", "--json").stdout)[0]["job_id"] == "mine"
    assert "status             COMPLETED" in run("status", "mine").stdout
    assert run("cancel", "mine").stdout == "mine CANCELLED\n"
    assert "no session 'nobody'" in run("status", "nobody", code=1).stderr


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json", "rows.csv"])
def test_a_file_is_read_by_its_name(name: str):
    texts = {
        ".json": json.dumps(ROWS),
        ".csv": "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS),
    }
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    Path(name).write_text(texts.get(Path(name).suffix, lines))
    assert read_file(Path(name)) == ROWS


def test_the_command_line_imports_no_config_library_for_other_commands():
    check = "import sys, distributions.cli.main; print(*{'omegaconf', 'httpx', 'pydantic', 'numpy'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split() == []
    )

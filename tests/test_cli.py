"""The `postgrad` command line against a stack behind real HTTP: what it sends, prints and exits with."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apis.post_training.models import JobStatus
from distributions.cli import progress
from distributions.cli.main import app
from tests.in_memory_stack import BASE_MODEL, DIVERGING_MODEL, STEPS, InMemoryStack, fault, running

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ho {n}"}]} for n in range(3)
]
ESCAPE = "\x1b["
COMMAND = [sys.executable, "-m", "distributions.cli.main"]


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryStack]:
    with running() as stack:
        yield stack


@pytest.fixture
def stack(server: InMemoryStack) -> InMemoryStack:
    server.reset()
    return server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, server: InMemoryStack) -> None:
    for name in ("LLAMA_STACK_BASE_URL", "LLAMA_STACK_API_KEY", "POSTGRAD_API_KEY", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POSTGRAD_BASE_URL", server.url)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.001)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data file, named relatively from the working folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("tickets.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(*arguments: str, code: int = 0) -> str:
    """What a command printed on stdout; it must exit with `code`, and print errors only where it fails."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert bool(result.stderr) == (code not in (0, 3)), result.stderr
    return result.stdout


def error_of(*arguments: str, code: int = 1) -> str:
    """What a failing command printed on stderr."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.stderr


def submit(data: Path, *arguments: str, model: str = BASE_MODEL, job: str = "j1") -> str:
    return run(
        "post_training", "supervised_fine_tune", "--job-uuid", job, "--model", model, "--dataset", str(data), *arguments
    )


# -- submitting ------------------------------------------------------------------------------------------------------


def test_the_legacy_flags_submit_the_job_they_describe(stack: InMemoryStack, data: Path):
    run("datasets", "register", "--dataset-id", "tickets", "--dataset-path", str(data))
    out = run(
        "post_training", "supervised_fine_tune", "--job-uuid", "1234", "--model", BASE_MODEL,
        "--checkpoint-dir", "null", "--algorithm-config", '{"type": "LoRA", "rank": 8, "alpha": 16}',
        "--training-config", '{"n_epochs": 2, "data_config": {"dataset_id": "tickets", "batch_size": 3}}',
    )  # fmt: skip
    assert out == "1234\n"
    request = stack.post_training.jobs["1234"].request
    assert (request.model, request.checkpoint_dir) == (BASE_MODEL, "null")
    assert request.algorithm_config is not None
    assert request.algorithm_config.model_dump()["rank"] == 8
    config = request.training_config
    assert config.data_config is not None
    assert (config.n_epochs, config.data_config.dataset_id, config.data_config.batch_size) == (2, "tickets", 3)


def test_single_flags_go_over_the_json_and_leave_the_rest_of_it(stack: InMemoryStack, data: Path):
    Path("training.json").write_text(
        json.dumps(
            {"n_epochs": 9, "gradient_accumulation_steps": 5, "optimizer_config": {"lr": 1, "weight_decay": 0.5}}
        )
    )
    submit(
        data, "--training-config", "@training.json", "--algorithm-config", '{"rank": 64, "apply_lora_to_mlp": false}',
        "--epochs", "2", "--lr", "0.01", "--rank", "4", "--alpha", "8", "--batch-size", "2", "--max-seq-len", "64",
        "--dtype", "fp32", "--seed", "7", "--validation-dataset", str(data), "--provider", "huggingface",
    )  # fmt: skip
    request = stack.post_training.jobs["j1"].request
    assert request.provider_id == "huggingface"
    assert request.algorithm_config is not None
    config, algorithm = request.training_config, request.algorithm_config.model_dump()
    assert (config.n_epochs, config.gradient_accumulation_steps, config.dtype, config.seed) == (2, 5, "fp32", 7)
    assert (config.optimizer_config.lr, config.optimizer_config.weight_decay) == (0.01, 0.5)
    assert (algorithm["rank"], algorithm["alpha"], algorithm["apply_lora_to_mlp"]) == (4, 8, False)
    rows = config.data_config
    assert rows is not None
    assert (rows.batch_size, rows.max_seq_len, rows.validation_dataset_id) == (2, 64, rows.dataset_id)


def test_a_job_without_an_id_gets_a_readable_new_one_alone_on_stdout(stack: InMemoryStack, data: Path):
    arguments = ("post_training", "supervised_fine_tune", "--model", BASE_MODEL, "--dataset", str(data))
    first, second = run(*arguments).strip(), run(*arguments).strip()
    assert re.fullmatch(r"tickets-\d{8}-\d{6}-[0-9a-f]{6}", first)
    assert list(stack.post_training.jobs) == [first, second]


def test_a_local_file_is_registered_once_by_name_and_content(stack: InMemoryStack, data: Path):
    submit(data, job="a")
    submit(data, job="b")
    data.write_text(json.dumps(ROWS[0]) + "\n")
    submit(data, job="c")
    listed = json.loads(run("datasets", "list", "--json"))
    assert [one["source"]["rows"] for one in listed] == [ROWS, [ROWS[0]]]
    assert all(re.fullmatch(r"tickets-[0-9a-f]{12}", one["identifier"]) for one in listed)


def test_a_registered_id_is_used_as_it_is(stack: InMemoryStack, data: Path):
    run("datasets", "register", "--dataset-id", "lab/tickets", "--dataset-path", str(data))
    submit(Path("lab/tickets"))
    config = stack.post_training.jobs["j1"].request.training_config.data_config
    assert config is not None
    assert config.dataset_id == "lab/tickets"


@pytest.mark.parametrize("missing", ["nope.jsonl", "no-such-id", "./not an id"])
def test_data_that_is_neither_file_nor_registered_is_refused_with_both_ways_out(stack: InMemoryStack, missing: str):
    message = error_of("post_training", "supervised_fine_tune", "--model", BASE_MODEL, "--dataset", missing)
    assert message.startswith(f"Error: {missing!r} is neither a file here nor a registered data set")
    assert "postgrad datasets list" in message
    assert stack.post_training.jobs == {}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("bad.jsonl", '{"a": 1}\n[2]\n', "bad.jsonl: row 1: must be a JSON object, found an array"),
        ("bad.csv", "a,b\n1,2\n3\n", "bad.csv: row 1: has 1 fields, the header has 2"),
        ("empty.json", "[]", "'empty.json' has no rows"),
        ("rows.parquet", "PAR1", "convert it to one of .jsonl, .ndjson, .json, .csv"),
    ],
)
def test_a_bad_data_file_is_named_by_row_and_nothing_is_sent(
    stack: InMemoryStack, data: Path, name: str, content: str, reason: str
):
    Path(name).write_text(content)
    message = error_of("post_training", "supervised_fine_tune", "--model", BASE_MODEL, "--dataset", name)
    assert message.count("\n") == 1
    assert reason in message
    assert stack.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no/model"), "Error: model 'no/model' is not registered"),
        (("--training-config", '{"n_epochs": 0}'), "training_config.n_epochs: Input should be greater than or equal"),
        (("--training-config", '{"epochs": 1}'), "Error: training_config.epochs: there is no such field"),
        (("--lr", "-1"), "Error: training_config.optimizer_config.lr: Input should be greater than 0"),
        (("--algorithm-config", '{"rank": -4}'), "Error: algorithm_config.rank: Input should be greater than or equal"),
    ],
)
def test_a_refused_job_is_one_line_on_stderr(stack: InMemoryStack, data: Path, arguments: Any, message: str):
    base = ("post_training", "supervised_fine_tune", "--dataset", str(data), "--model", BASE_MODEL)
    found = error_of(*base, *arguments)
    assert message in found
    assert found.count("\n") == 1
    assert stack.post_training.jobs == {}


def test_the_field_is_named_where_the_message_does_not(stack: InMemoryStack):
    assert (
        error_of("post_training", "supervised_fine_tune", "--model", BASE_MODEL)
        == "Error: name the rows to train on (field: training_config.data_config)\n"
    )


def test_an_id_taken_by_another_job_is_a_conflict(stack: InMemoryStack, data: Path):
    submit(data)
    assert submit(data) == "j1\n"
    base = ("post_training", "supervised_fine_tune", "--job-uuid", "j1", "--model", BASE_MODEL, "--dataset", str(data))
    assert "exists with another body" in error_of(*base, "--rank", "3")


def test_preference_optimize_sends_its_config(stack: InMemoryStack, data: Path):
    message = error_of(
        "post_training", "preference_optimize", "--finetuned-model", BASE_MODEL, "--dataset", str(data),
        "--algorithm-config", '{"beta": 0.5}', "--beta", "0.25", "--loss-type", "ipo",
    )  # fmt: skip
    assert message == "Error: no provider does preference optimization (beta 0.25)\n"
    sent = json.loads(stack.requests[-1].body)
    assert sent["algorithm_config"] == {"beta": 0.25, "loss_type": "ipo"}
    assert sent["finetuned_model"] == BASE_MODEL


# -- following -------------------------------------------------------------------------------------------------------


def test_following_prints_plain_lines_and_the_checkpoints(stack: InMemoryStack, data: Path):
    lines = submit(data, "--follow").splitlines()
    assert lines == [
        "j1",
        "scheduled, 2 ahead",
        "load_model",
        "train  step 1/4 (25%)  epoch 0  loss 2.0000  1,234 tokens/s  0:03 left",
        "completed in 1:15",
        f"checkpoint {BASE_MODEL}-sft-j1-0",
    ]


def test_every_step_is_printed_once_enough_time_has_passed(
    stack: InMemoryStack, data: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    steps = re.findall(r"step (\d)/4", submit(data, "--follow"))
    assert steps == [str(step) for step in range(1, STEPS + 1)]


def test_following_a_failing_job_exits_1_with_its_reason_and_code(stack: InMemoryStack, data: Path):
    submit(data, model=DIVERGING_MODEL)
    message = error_of("post_training", "status", "j1", "--follow")
    assert message == "Error: job 'j1': the loss is not finite at step 2; lower the learning rate [non_finite_loss]\n"


def test_following_a_cancelled_job_exits_3(stack: InMemoryStack, data: Path):
    submit(data)
    run("post_training", "cancel", "j1")
    assert run("post_training", "status", "j1", "--follow", code=3) == "cancelled\n"


def test_following_with_json_leaves_only_json_on_stdout(stack: InMemoryStack, data: Path):
    result = CliRunner().invoke(
        app,
        ["post_training", "supervised_fine_tune", "--job-uuid", "j1", "--model", BASE_MODEL, "--dataset", str(data),
         "--follow", "--json"],
    )  # fmt: skip
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "completed"
    assert "completed in 1:15" in result.stderr


def test_ctrl_c_leaves_the_job_running_and_says_how_to_go_on(stack: InMemoryStack, data: Path):
    submit(data)
    stack.post_training.jobs["j1"].ticks = -(10**6)  # it waits for as long as this test does
    process = subprocess.Popen(
        [*COMMAND, "post_training", "status", "j1", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("scheduled")
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "job j1 goes on" in message
    assert "postgrad post_training cancel j1" in message
    assert "Traceback" not in message
    assert not stack.post_training.jobs["j1"].status.terminal


def on_a_terminal(*arguments: str, **environment: str) -> tuple[str, int]:
    """Run with stdout and stderr on a pseudo-terminal of 120 columns; what it drew, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(COMMAND[0], [*COMMAND, *arguments], {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment})
    drawn, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        drawn += piece
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return drawn.decode(), os.waitstatus_to_exitcode(status)


def test_following_on_a_terminal_draws_a_bar_with_loss_speed_and_time_left(stack: InMemoryStack, data: Path):
    submit(data)
    stack.post_training.jobs["j1"].ticks = 3
    drawn, code = on_a_terminal("post_training", "status", "j1", "--follow")
    assert code == 0
    assert ESCAPE in drawn
    bar = re.search(r"train.*?2/4.*?loss 1\.0000.*?1,234 tokens/s.*?0:02 left", drawn)
    assert bar, drawn
    assert "━" in bar.group()
    assert "completed in 1:15" in drawn


def test_no_color_is_honoured_on_a_terminal(stack: InMemoryStack, data: Path):
    submit(data)
    stack.post_training.jobs["j1"].ticks = STEPS
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-9]|4[0-9]|9[0-7])m")
    drawn, _ = on_a_terminal("post_training", "status", "j1", "--follow", NO_COLOR="1")
    assert "completed" in drawn
    assert not colour.search(drawn)
    stack.post_training.jobs["j1"].ticks = STEPS
    drawn, _ = on_a_terminal("post_training", "status", "j2", "--follow")
    assert colour.search(drawn)


def test_a_pipe_never_gets_control_codes_whatever_the_environment_says(
    stack: InMemoryStack, data: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "CLICOLOR_FORCE"):
        monkeypatch.setenv(name, "1")
    submit(data)
    stack.post_training.jobs["j1"].ticks = STEPS
    for arguments in (
        ("--help",),
        ("post_training", "status", "j1", "--follow"),
        ("post_training", "list"),
        ("nonsense",),
    ):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
        assert ESCAPE not in done.stdout + done.stderr
        assert done.stdout + done.stderr


# -- looking ---------------------------------------------------------------------------------------------------------


def test_list_shows_whole_ids_in_columns(stack: InMemoryStack, data: Path):
    name = "a-rather-long-job-id-" * 9
    submit(data, job=name + "x")
    header, row = run("post_training", "list").splitlines()
    assert header.split() == ["JOB", "STATUS", "MODEL", "CREATED"]
    assert row.split()[:3] == [name + "x", "scheduled", BASE_MODEL]


def test_status_takes_the_id_either_way_and_shows_progress(stack: InMemoryStack, data: Path):
    submit(data)
    fields = dict(line.split(maxsplit=1) for line in run("post_training", "status", "--job-uuid", "j1").splitlines())
    assert (fields["job"], fields["status"], fields["now"]) == ("j1", "scheduled", "scheduled, 2 ahead")
    for _ in range(20):
        run("post_training", "status", "j1")
    assert f"{BASE_MODEL}-sft-j1-0" in run("post_training", "status", "j1")


def test_artifacts_show_checkpoints_with_their_losses(stack: InMemoryStack, data: Path):
    submit(data, "--follow")
    row = run("post_training", "artifacts", "--job-uuid", "j1").splitlines()[1]
    assert row.split() == [f"{BASE_MODEL}-sft-j1-0", "0", "4", "0.5000", "0.7500", "jobs/j1/checkpoints/4"]


def test_logs_are_printed_once_and_followed_to_the_end(stack: InMemoryStack, data: Path):
    submit(data)
    assert run("post_training", "logs", "j1") == "job accepted\n"
    lines = ["job accepted", *(f"step {step}" for step in range(1, STEPS + 1)), "completed: it ended"]
    followed = [f"2026-01-01 00:00:00 {line}" for line in lines]
    assert run("post_training", "logs", "j1", "--follow").splitlines() == followed
    streamed = [json.loads(line) for line in run("post_training", "logs", "j1", "--follow", "--json").splitlines()]
    assert [(event["id"], event["message"]) for event in streamed] == list(enumerate(lines, 1))
    assert run("post_training", "logs", "j1", "--tail", "2").splitlines() == lines[-2:]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("post_training", "list"), lambda answer: answer[0]["job_uuid"]),
        (("post_training", "status", "j1"), lambda answer: answer["job_uuid"]),
        (("post_training", "artifacts", "j1"), lambda answer: answer["job_uuid"]),
        (("post_training", "cancel", "j1"), lambda answer: answer["job_uuid"]),
        (("post_training", "logs", "j1"), lambda answer: answer["job_uuid"]),
        (("post_training", "metrics", "j1"), lambda answer: answer["job_uuid"]),
    ],
)
def test_json_of_every_job_command_can_be_parsed(stack: InMemoryStack, data: Path, arguments: Any, told: Any):
    assert json.loads(submit(data, "--json"))["status"] == "scheduled"
    assert told(json.loads(run(*arguments, "--json"))) == "j1"


def test_cancel_says_nothing_and_the_job_is_cancelled(stack: InMemoryStack, data: Path):
    submit(data)
    assert run("post_training", "cancel", "--job-uuid", "j1") == ""
    assert stack.post_training.jobs["j1"].status is JobStatus.cancelled


def test_an_unknown_job_exits_1(stack: InMemoryStack):
    for command in (("status",), ("artifacts",), ("cancel",), ("logs",), ("metrics",), ("delete", "--yes")):
        assert error_of("post_training", *command, "nope") == "Error: job 'nope' does not exist (field: job_uuid)\n"


# -- data sets and models --------------------------------------------------------------------------------------------


def test_data_sets_are_registered_shown_appended_to_and_forgotten(stack: InMemoryStack, data: Path):
    assert run(
        "datasets", "register", "--dataset-id", "t", "--dataset-path", str(data), "--metadata", '{"from": "crm"}'
    ) == "t\n"  # fmt: skip
    assert run("datasets", "list").splitlines()[1].split() == ["t", "post-training/messages", "localfs", "rows"]
    assert '{"from": "crm"}' in run("datasets", "get", "t")
    assert json.loads(run("datasets", "get", "t", "--json"))["source"]["rows"] == ROWS
    assert run("datasets", "append", "t", str(data)) == "added 3 rows to t\n"
    shown = [json.loads(line) for line in run("datasets", "rows", "t", "--start", "2", "--limit", "2").splitlines()]
    assert shown == [ROWS[2], ROWS[0]]
    assert json.loads(run("datasets", "rows", "t", "--limit", "2", "--json"))["has_more"] is True
    assert run("datasets", "unregister", "t") == ""
    assert error_of("datasets", "get", "t") == "Error: dataset 't' is not registered (field: dataset_id)\n"


def test_a_url_is_registered_for_the_server_to_read(stack: InMemoryStack):
    url = "data:text/csv;base64," + "A" * 200
    run("datasets", "register", "--dataset-id", "u", "--url", url, "--purpose", "eval/messages-answer")
    assert json.loads(stack.requests[-1].body) == {
        "dataset_id": "u",
        "purpose": "eval/messages-answer",
        "source": {"type": "uri", "uri": url},
        "metadata": None,
    }
    assert url not in run("datasets", "list")
    assert "data:text/csv" in run("datasets", "list")


def test_models_are_listed_shown_and_forgotten(stack: InMemoryStack):
    assert [line.split()[0] for line in run("models", "list").splitlines()] == ["MODEL", BASE_MODEL, DIVERGING_MODEL]
    assert [model["id"] for model in json.loads(run("models", "list", "--json"))] == [BASE_MODEL, DIVERGING_MODEL]
    assert BASE_MODEL in run("models", "get", BASE_MODEL)
    assert json.loads(run("models", "get", BASE_MODEL, "--json"))["identifier"] == BASE_MODEL
    run("models", "unregister", BASE_MODEL)
    assert "is not registered" in error_of("models", "get", BASE_MODEL)


def tiny_model(folder: Path) -> Path:
    """A whole Hugging Face directory with one weight, written by the safetensors format's own rules."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    return folder


def test_a_model_is_imported_into_the_state_folder_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    monkeypatch.setenv("POSTGRAD_HOME", str(home))
    monkeypatch.setenv("POSTGRAD_BASE_URL", "http://127.0.0.1:1")
    source = tiny_model(tmp_path / "tiny")
    assert run("models", "import", str(source)) == "tiny\n"
    assert run("models", "import", str(source), "--model-id", "lab/tiny") == "lab/tiny\n"
    assert len(list(home.rglob("model.safetensors"))) == 2


def test_a_model_that_cannot_be_imported_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    monkeypatch.setenv("POSTGRAD_HOME", str(home))
    assert "there is no folder" in error_of("models", "import", str(tmp_path / "nope"))
    assert "download lab/tiny yourself" in error_of("models", "import", "lab/tiny")
    assert not home.exists()


def test_export_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSTGRAD_HOME", str(tmp_path / "home"))
    assert "holds no store of a stack" in error_of("models", "export", "m-sft-j-0", "--merged")
    assert not (tmp_path / "home").exists()
    assert "give --merged" in error_of("models", "export", "m-sft-j-0", code=2)


# -- usage, help, connection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("post_training", "status"), "give the job's id, once"),
        (("post_training", "status", "a", "--job-uuid", "b"), "give the job's id, once"),
        (("post_training", "list", "--colour"), "No such option"),
        (("post_training", "supervised_fine_tune", "--training-config", "{"), "not valid JSON"),
        (("post_training", "supervised_fine_tune", "--training-config", "[1]"), "must be a JSON object"),
        (("post_training", "supervised_fine_tune", "--algorithm-config", "@nope.json"), "cannot read 'nope.json'"),
        (("post_training", "supervised_fine_tune", "--epochs", "0"), "Invalid value for '--epochs'"),
        (("post_training", "supervised_fine_tune", "--rank", "-1"), "Invalid value for '--rank'"),
        (("post_training", "supervised_fine_tune", "--dtype", "int8"), "is not one of"),
        (("post_training", "preference_optimize"), "--finetuned-model"),
        (("datasets", "register", "--dataset-id", "x"), "give one of --url and --dataset-path"),
    ],
)
def test_wrong_usage_exits_2(stack: InMemoryStack, arguments: Any, message: str):
    assert message in error_of(*arguments, code=2)
    assert stack.requests == []


def test_no_server_is_one_line_with_the_way_to_start_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("post_training.client.core._FIRST_DELAY", 0.01)
    message = error_of("--endpoint", "http://127.0.0.1:9", "post_training", "list")
    assert message.startswith("Error: cannot reach http://127.0.0.1:9")
    assert "postgrad stack run experimental-post-training" in message
    assert message.count("\n") == 1


def test_endpoint_and_key_options_go_before_the_environment(stack: InMemoryStack, monkeypatch: pytest.MonkeyPatch):
    stack.api_key = "secret"
    monkeypatch.setenv("POSTGRAD_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("POSTGRAD_API_KEY", "wrong")
    run("--endpoint", stack.url, "--api-key", "secret", "models", "list")
    assert "API key" in error_of("--endpoint", stack.url, "models", "list")


def test_a_server_error_is_told_without_a_traceback(stack: InMemoryStack):
    stack.faults.append(
        fault(500, {"error": {"message": "the server failed; its log says why"}}, x_should_retry="false")
    )
    assert error_of("post_training", "list") == "Error: the server failed; its log says why\n"


@pytest.mark.parametrize("group", ["post_training", "datasets", "models"])
def test_every_command_has_help_with_an_example_that_names_it(group: str):
    listed = re.findall(r"^  ([a-z_]+)  +\S", run(group, "--help").split("Commands:")[1], flags=re.M)
    assert len(listed) >= 5
    for command in listed:
        assert f"postgrad {group} {command}" in run(group, command, "--help").split("Example")[1]


def test_hyphens_are_as_good_as_underscores():
    underscores = run("post_training", "supervised_fine_tune", "--help")
    hyphens = run("post-training", "supervised-fine-tune", "--help")
    assert hyphens.splitlines()[1:] == underscores.splitlines()[1:]


def test_the_version_is_the_distributions():
    assert run("--version") == f"postgrad {version('postgrad')}\n"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "pydantic", "httpx", "fastapi", "sqlalchemy", "rich", "yaml"}),
        (["post_training", "list"], {"torch", "transformers", "datasets", "uvicorn", "sqlalchemy"}),
    ],
)
def test_a_command_loads_only_what_it_needs(stack: InMemoryStack, arguments: list[str], heavy: set[str]):
    code = f"""
import sys
from distributions.cli.main import app
try:
    app({arguments})
except SystemExit as end:
    assert end.code == 0
print('LOADED', *{{name.split('.')[0] for name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split("LOADED")[1].split())
    assert "typer" in loaded
    assert not loaded & heavy


def test_the_stack_group_is_reached_through_the_command():
    assert "post_training" in run("stack", "list-apis").split()
    assert "list-templates" in run("stack", "--help")

"""Where metrics go, read back by the readers of those who made the formats."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from apis.errors import DataInvalid, InvalidField, NotSupported
from post_training.client import tracking
from post_training.client.tracking import ConsoleTracking, JsonLinesTracking, TensorBoardTracking, open_tracking

LOGGED = [
    (1, {"train/loss": 2.5, "train/lr": 1e-4}),
    (2, {"train/loss": 1.25, "train/lr": 2e-4}),
    (2, {"val/loss": 3.0}),
]


def log_all(tracker: tracking.Tracking) -> None:
    for step, metrics in LOGGED:
        tracker.log(metrics, step)
    tracker.close()


def test_the_console_shows_a_line_for_each_step():
    out = io.StringIO()
    log_all(ConsoleTracking(out))
    assert out.getvalue().splitlines() == [
        "step 1  train/loss 2.5  train/lr 0.0001",
        "step 2  train/loss 1.25  train/lr 0.0002",
        "step 2  val/loss 3",
    ]


def test_json_lines_hold_every_metric_and_a_second_run_adds_to_them(tmp_path: Path):
    path = tmp_path / "new" / "metrics.jsonl"
    log_all(JsonLinesTracking(path))
    log_all(JsonLinesTracking(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in lines)
    assert lines == [{"step": step, **metrics} for step, metrics in LOGGED] * 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataInvalid, match="taken"):
        JsonLinesTracking(tmp_path / "taken" / "metrics.jsonl")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path):
    log_all(TensorBoardTracking(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["train/loss", "train/lr", "val/loss"]
    assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == [(1, 2.5), (2, 1.25)]
    assert [(event.step, event.value) for event in reader.Scalars("val/loss")] == [(2, 3.0)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B without a network and without a home folder to write to."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_keeps_an_offline_run_with_every_metric(offline: None, tmp_path: Path):
    tracker = open_tracking(
        ["wandb"], project="my project", run="session/1", name="first try", folder=tmp_path, config={"batch_size": 4}
    )
    log_all(tracker)
    (file,) = (tmp_path / "my-project" / "session-1").rglob("*.wandb")
    run, config, history = read_when_written(file)
    assert (run.project, run.run_id, run.display_name) == ("my-project", "session-1", "first try")
    assert config["batch_size"] == 4
    assert [{name: row[name] for name in row if "/" in name} for row in history] == [
        LOGGED[0][1],
        {**LOGGED[1][1], **LOGGED[2][1]},
    ]
    assert [row["_step"] for row in history] == [1, 2]


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, of one block, after the 7 bytes that W&B puts first.

    Each is a checksum of 4 bytes, its length in 2, its type in 1 (1: whole), and its content.
    """
    assert content[:4] == b":W&B"
    assert len(content) < 32 * 1024
    at = 7
    while at < len(content):
        if at + 7 > len(content):
            return  # the rest is still to be written
        length, kind = struct.unpack_from("<HB", content, at + 4)
        assert kind == 1
        if at + 7 + length > len(content):
            return
        yield content[at + 7 : at + 7 + length]
        at += 7 + length


def read_when_written(file: Path, seconds: float = 30) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """As `read_wandb`, once W&B's own process has written the end: on a busy machine that is after `finish`."""
    deadline = time.monotonic() + seconds
    while True:
        found = read_wandb(file)
        if (found[0] is not None and len(found[2]) == 2) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def read_wandb(file: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The run, its config and its history in W&B's own file."""
    proto: Any = import_module("wandb.proto.wandb_internal_pb2")  # its classes are made when it is imported
    run, config, history = None, {}, []
    for data in log_records(file.read_bytes()):
        record = proto.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            history.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            )
    return run, config, history


def test_several_trackers_get_the_same(tmp_path: Path):
    out = io.StringIO()
    with open_tracking(["console", "jsonl", "console"], run="r", folder=tmp_path, console=out) as tracker:
        tracker.log({"train/loss": 1.0}, 1)
    assert out.getvalue() == "step 1  train/loss 1\n"
    assert json.loads((tmp_path / "postgrad" / "r" / "metrics.jsonl").read_text())["train/loss"] == 1.0


def test_a_run_stays_within_its_folder(tmp_path: Path):
    open_tracking(["jsonl"], project="../../up", run="/etc", folder=tmp_path / "runs").close()
    assert [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*.jsonl")] == [
        ("runs", "up", "etc", "metrics.jsonl")
    ]


WITHOUT_A_KEY = """
import sys
from apis.errors import InvalidField
from post_training.client.tracking import open_tracking
try:
    open_tracking(["console", "wandb"], run="r", folder=sys.argv[1])
except InvalidField as error:
    print(error)
"""


def test_wandb_without_a_key_says_how_to_give_one(tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_KEY, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=True,
    )
    assert "`wandb login`, WANDB_API_KEY" in done.stdout


def test_an_unknown_tracker_is_refused_by_name(tmp_path: Path):
    with pytest.raises(InvalidField, match="no tracker 'mlflow'"):
        open_tracking(["mlflow"], run="r", folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("tensorboard", "tensorboardX", "client"), ("wandb", "wandb", "wandb")]
)
def test_a_missing_library_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, module: str, extra: str
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotSupported, match=rf"'{name}' needs {module}: pip install 'postgrad\[{extra}\]'"):
        open_tracking(["console", name], run="r", folder=tmp_path)


CLIENT_ALONE = """
import sys
from post_training.client import SFTClient
from post_training.client.tracking import open_tracking
open_tracking(["console", "jsonl"], run="r", folder=sys.argv[1]).close()
SFTClient("http://127.0.0.1:1").close()
print(*{"torch", "datasets", "pyarrow", "numpy", "tensorboardX", "wandb", "omegaconf", "fastapi"} & set(sys.modules))
"""


def test_the_client_imports_nothing_heavy_and_no_tracker_that_is_not_named(tmp_path: Path):
    command = [sys.executable, "-c", CLIENT_ALONE, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == []

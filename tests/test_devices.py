"""From a `devices` setting to slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from apis.errors import InvalidField
from post_training.jobs.devices import Slot, slots_of, threads_each, usable_cores, visible_gpus


def test_each_cpu_is_a_slot_and_a_gpu_is_one_by_its_number():
    assert slots_of(["cpu", "cuda:1", "cpu"]) == (
        Slot("cpu:0", "cpu", "cpu"),
        Slot("cuda:1", "cuda", "cuda:1"),
        Slot("cpu:1", "cpu", "cpu"),
    )


def test_auto_is_the_cpu_where_there_is_no_gpu():
    assert [slot.name for slot in slots_of("auto", {"CUDA_VISIBLE_DEVICES": ""})] == ["cpu:0"]


@pytest.mark.parametrize(
    ("devices", "what"),
    [
        ([], "auto"),
        ("cpu", "auto"),
        (["gpu"], "'gpu' is no device"),
        (["cuda"], "'cuda' is no device"),
        (["cuda:0", "cuda:0"], "twice"),
        (["cuda:-1"], "no device"),
    ],
)
def test_what_is_no_device_is_refused_by_name(devices: list[str], what: str):
    with pytest.raises(InvalidField, match=what):
        slots_of(devices)


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [(None, 4), ("", 0), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("0,9,1", 1), ("GPU-8932f937,GPU-1", 2)],
)
def test_only_the_gpus_that_cuda_would_show_are_counted(tmp_path: Path, chosen: str | None, visible: int):
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environ, tmp_path) == visible
    assert visible_gpus(environ, tmp_path / "no driver", tmp_path / "no dev") == 0


def test_a_container_without_the_drivers_folder_shows_its_gpus_as_devices(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path / "no driver", tmp_path) == 2


def test_workers_share_the_cores_and_each_has_one_at_least():
    cpus = slots_of(["cpu"] * 64)
    assert threads_each(cpus[:1]) == usable_cores()
    assert threads_each(cpus) == max(1, usable_cores() // 64)

"""Which devices a stack may use, as slots that run one job at a time. Found without torch.

devices: auto            every CUDA device that is visible, else the CPU
devices: [cpu, cpu]      two jobs at once, each with half of the cores
devices: [cuda:0, cpu]   a job that asks for neither takes the first that is free
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apis.errors import InvalidField

DeviceKind = Literal["cpu", "cuda"]
_DEVICE = re.compile(r"cpu|cuda:[0-9]+")


@dataclass(frozen=True)
class Slot:
    """Room for one job.

    Attributes:
        name: unique on its machine: `cpu:0`, `cuda:1`.
        device: what PyTorch calls it: `cpu`, `cuda:1`.
    """

    name: str
    kind: DeviceKind
    device: str


def slots_of(devices: Literal["auto"] | Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Slot, ...]:
    """The slots that a `devices` setting means.

    Raises:
        InvalidField: a name that is no device, a CUDA device twice, or none at all.
    """
    if devices == "auto":
        return _slots([f"cuda:{index}" for index in range(visible_gpus(environ))] or ["cpu"])
    if isinstance(devices, str) or not devices:
        raise InvalidField("devices is `auto` or a list such as [cpu] or [cuda:0, cuda:1]", param="devices")
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise InvalidField(f"{device!r} is no device: use cpu, cuda:0, cuda:1, …", param="devices")
    twice = next((device for device, count in Counter(devices).items() if count > 1 and device != "cpu"), None)
    if twice is not None:
        raise InvalidField(f"{twice} is listed twice: a GPU runs one job at a time", param="devices")
    return _slots(devices)


def _slots(devices: Sequence[str]) -> tuple[Slot, ...]:
    slots, cpus = [], 0
    for device in devices:
        if device == "cpu":
            slots.append(Slot(f"cpu:{cpus}", "cpu", "cpu"))
            cpus += 1
        else:
            slots.append(Slot(device, "cuda", device))
    return tuple(slots)


def visible_gpus(
    environ: Mapping[str, str] = os.environ,
    nvidia: Path = Path("/proc/driver/nvidia/gpus"),
    dev: Path = Path("/dev"),
) -> int:
    """How many CUDA devices a worker would see."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    # Containers may have the devices without the driver's own folder.
    present = sum(1 for _ in nvidia.iterdir()) if nvidia.is_dir() else len(list(dev.glob("nvidia[0-9]*")))
    if chosen is None or not present:
        return present
    # The driver stops at the first that it can't find, such as -1.
    count = 0
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        if entry.startswith("-") or (entry.isdecimal() and int(entry) >= present):
            break
        count += 1
    return count


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def threads_each(slots: Sequence[Slot]) -> int:
    """CPU threads of each worker where all slots are taken."""
    return max(1, usable_cores() // max(1, len(slots)))

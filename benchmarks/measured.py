"""What every measured process does beside training: its clock, its peak memory, which rows each step had."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Order, Result
from benchmarks.workspace import Workspace

Batch = tuple[Sequence[Sequence[int]], int]
"""The token ids of each sequence, without padding, and the positions computed, with it."""

STARTED = time.perf_counter()
"""Each measured process imports this module first, so this is when its program begins."""


def peak_rss() -> int:
    """The most memory that this process has had in use so far, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


@dataclass
class Clock:
    """When training began, when each step ended, each step's loss, and the peak memory until the last of them."""

    began: float = 0.0
    peak: int = 0
    ends: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self.began = time.perf_counter()

    def step(self) -> None:
        self.ends.append(time.perf_counter() - self.began)
        self.peak = peak_rss()


CLOCK = Clock()
"""Of this process: a peer's configuration can name a class, but hand it no object."""


def finish(order: Order, workspace: Workspace, batches: Sequence[Batch], accumulation: int | None = None) -> None:
    """Write the result of this process, which has trained.

    Args:
        batches: all of them, in order.
        accumulation: how many make a step; None: as the settings say.
    """
    steps = _steps(batches, accumulation or order.settings.accumulation)
    known = {_key(row.tokens): row for row in reversed(workspace.rows)}
    found = [[known.get(_key(ids)) for ids in sequences] for sequences, _ in steps]
    rows = [[row for row in step if row is not None] for step in found]
    Result(
        losses=CLOCK.losses,
        ends=CLOCK.ends,
        plan=[[row.row for row in step] for step in rows] if rows == found else None,
        tokens=[sum(len(ids) for ids in sequences) for sequences, _ in steps],
        supervised=[sum(row.supervised for row in step) for step in rows],
        padded_tokens=[computed for _, computed in steps],
        peak_rss=CLOCK.peak,
        setup=CLOCK.began - STARTED,
    ).save(order.out / "result.json")


def _steps(batches: Sequence[Batch], accumulation: int) -> list[Batch]:
    groups = [batches[begin : begin + accumulation] for begin in range(0, len(batches), accumulation)]
    return [([ids for sequences, _ in group for ids in sequences], sum(n for _, n in group)) for group in groups]


def _key(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(token) for token in ids)

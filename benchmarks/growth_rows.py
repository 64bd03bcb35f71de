"""How cost grows with the number of rows, the length of rows and the rank."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import OURS, Order, Result, Settings
from benchmarks.processes import RunFailed, measure, own_environment, run_module
from benchmarks.report import table
from benchmarks.workspace import ROWS, generated_rows

POOL = 1000
"""A large set repeats so many rows: what is trained on is then the same for every size."""
SKIP = 4
SAME_LOSS = 2e-2
"""Relative; in bf16 the order of sums alone makes less of a difference."""
GIB = 2**30


@dataclass(frozen=True)
class Growth:
    """What all axes need.

    Attributes:
        steps: of each training run, after the first `SKIP`.
        tokens: of a step, on the axes of length and rank.
    """

    folder: Path
    model_dir: Path
    threads: int
    steps: int
    tokens: int
    dtype: str
    kernels: str
    repeats: int


def by_rows(growth: Growth, sizes: list[int]) -> str:
    """Reading each size once, then training on all of them in turn, `repeats` times.

    Each is trained on in turn with the pool itself, step by step, so that its speed against that of the pool holds on a
    machine that is not quiet; the pool against itself shows by how much it does.
    """
    read = {size: _run_rows(growth, size, "read") for size in sizes}
    trained: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for _ in range(growth.repeats):
        for size in sizes:
            trained[size].append(_run_rows(growth, size, "train"))
    _check_same_work({size: runs for size, runs in trained.items() if size >= POOL})
    rows = [_rows_line(size, read[size], trained) for size in sizes]
    header = ["rows", "tokens", "checked at submit, s", "tokenised, s", "tokenised, tokens/s", "peak, GiB"]
    more = ["read again, s", "training, tokens/s", "against 1e3 rows", "of it reading rows"]
    more += ["peak of training, GiB", "against 1e3 rows"]
    return f"{growth.steps} steps at random places of each set, {growth.dtype}:\n\n" + table([*header, *more], rows)


def _check_same_work(trained: dict[int, list[dict[str, Any]]]) -> None:
    """Raises RunFailed where sets that are compared do not end with the same loss, within `SAME_LOSS`."""
    losses = {size: [run["last_loss"] for run in runs] for size, runs in trained.items()}
    ends = [loss for each in losses.values() for loss in each]
    if ends and max(ends) > min(ends) * (1 + SAME_LOSS):
        raise RunFailed(f"the sets did not train on the same rows: their last losses are {losses}")


def _rows_line(size: int, read: dict[str, Any], trained: dict[int, list[dict[str, Any]]]) -> list[str]:
    def middle(of: int, name: str) -> float:
        values = sorted(each[name] for each in trained[of])
        return values[len(values) // 2]

    compared = POOL in trained and size >= POOL
    return [
        f"{size:,}",
        f"{read['tokens']:,}",
        f"{read['checked']:.2f}",
        f"{read['tokenized']:.1f}",
        f"{read['tokens'] / read['tokenized']:,.0f}",
        f"{read['tokenizing_peak'] / GIB:.2f}",
        f"{read['read_again']:.2f}",
        f"{middle(size, 'rate'):.0f}",
        f"{middle(size, 'against'):.2f}" if size >= POOL else "",
        f"{middle(size, 'reading'):.2%}",
        f"{middle(size, 'peak') / GIB:.2f}",
        f"{middle(size, 'peak') / middle(POOL, 'peak'):.2f}" if compared else "",
    ]


def _run_rows(growth: Growth, size: int, part: str) -> dict[str, Any]:
    order = {
        "part": part,
        "file": str(_data_file(growth.folder, size)),
        "reference": str(_data_file(growth.folder, min(POOL, size))),
        "home": str(growth.folder / "home"),
        "model_dir": str(growth.model_dir),
        "threads": growth.threads,
        "steps": growth.steps,
        "skip": SKIP,
        "pool": min(POOL, size),
        "dtype": growth.dtype,
        "kernels": growth.kernels,
    }
    file = growth.folder / "rows_order.json"
    file.write_text(json.dumps(order))
    printed = run_module("benchmarks.run_rows", str(file), environment=own_environment(growth.threads))
    return json.loads(printed.splitlines()[-1])


def _data_file(folder: Path, size: int) -> Path:
    """JSON lines: the pool of generated rows, again and again."""
    path = folder / f"{size}.jsonl"
    if not path.exists():
        lines = [json.dumps(row) + "\n" for row in generated_rows(min(POOL, size))]
        with path.open("w", encoding="utf-8") as out:
            for begin in range(0, size, len(lines)):
                out.writelines(lines[: size - begin])
    return path


def by_length(growth: Growth, lengths: list[int]) -> str:
    """Rows of one length, as many of them in a step as its tokens hold."""
    found = {length: _train(growth, length, rank=16, name=f"length-{length}") for length in lengths}
    rows = [
        [f"{length:,}", f"{max(1, growth.tokens // length)}", *_training_cells(each)] for length, each in found.items()
    ]
    header = ["tokens a row", "rows a step", "tokens/s", "s/step", "peak, GiB"]
    return f"Steps of {growth.tokens:,} tokens, rank 16, {growth.dtype}:\n\n" + table(header, rows)


def by_rank(growth: Growth, ranks: list[int]) -> str:
    """Rows of 256 tokens."""
    found = {rank: _train(growth, 256, rank=rank, name=f"rank-{rank}") for rank in ranks}
    rows = [[f"{rank}", *_training_cells(each)] for rank, each in found.items()]
    heading = f"Steps of {growth.tokens:,} tokens in rows of 256, {growth.dtype}:\n\n"
    return heading + table(["rank", "tokens/s", "s/step", "peak, GiB"], rows)


def _training_cells(result: Result) -> list[str]:
    return [f"{result.rate(SKIP):.0f}", f"{result.step_seconds(SKIP):.2f}", f"{result.peak_rss / GIB:.2f}"]


def _train(growth: Growth, length: int, *, rank: int, name: str) -> Result:
    """Half of each row is supervised."""
    folder = growth.folder / name
    folder.mkdir(exist_ok=True)
    a_step, steps = max(1, growth.tokens // length), SKIP + min(growth.steps, 8)
    _write_random_rows(folder, growth.model_dir, length, a_step * steps)
    settings = Settings(rank=rank, alpha=2 * rank)
    plan = [list(range(number * a_step, (number + 1) * a_step)) for number in range(steps)]
    case = replace(OURS[0], options={"kernels": growth.kernels})
    return measure(Order(folder, folder / "out", case, settings, growth.dtype, growth.threads, plan))


def _write_random_rows(folder: Path, model_dir: Path, length: int, count: int) -> None:
    vocabulary = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    rows = [
        {
            "tokens": [draw.randrange(vocabulary) for _ in range(length)],
            "prompt_tokens": length // 2,
            "prompt": "",
            "answer": "",
        }
        for _ in range(count)
    ]
    (folder / ROWS).write_text(json.dumps({"model_dir": str(model_dir), "rows": rows, "held_out": []}))

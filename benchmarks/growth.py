"""How cost grows: with rows, their length, the rank, jobs in the store, events of a job.

    python -m benchmarks.growth
    python -m benchmarks.growth --only rows,jobs --rows 100,1000 --jobs 10,1000 --steps 5      a short one

A data set of a million rows takes some 2 GB of disk, its tokens included, and minutes to tokenise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.growth_rows import Growth, by_length, by_rank, by_rows
from benchmarks.growth_store import by_events, by_jobs
from benchmarks.report import publish
from benchmarks.stack import offline
from benchmarks.workspace import real_model_dir
from post_training.jobs.devices import usable_cores

TITLES = {
    "rows": "Rows of a data set",
    "length": "Length of rows",
    "rank": "Rank",
    "jobs": "Jobs in the store",
    "events": "Steps of one job",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TITLES), help="axes, with commas between")
    parser.add_argument("--rows", type=_sizes, default="100,1000,10000,100000,1000000")
    parser.add_argument("--length", type=_sizes, default="64,256,1024,4096")
    parser.add_argument("--rank", type=_sizes, default="4,8,16,32,64,128")
    parser.add_argument("--jobs", type=_sizes, default="10,100,1000,10000,100000")
    parser.add_argument("--events", type=_sizes, default="100,1000,10000,100000")
    parser.add_argument("--steps", type=int, default=50, help="of each training run; at most 8 for length and rank")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, for length and rank")
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--repeats", type=int, default=3, help="of the training on each number of rows")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--kernels", default="compiled")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    offline()
    model_dir = options.model or real_model_dir()
    with tempfile.TemporaryDirectory() as temporary:
        growth = Growth(
            folder=Path(temporary),
            model_dir=model_dir,
            threads=options.threads,
            steps=options.steps,
            tokens=options.tokens,
            dtype=options.dtype,
            kernels=options.kernels,
            repeats=options.repeats,
        )
        axes: dict[str, Callable[[], str]] = {
            "rows": lambda: by_rows(growth, options.rows),
            "length": lambda: by_length(growth, options.length),
            "rank": lambda: by_rank(growth, options.rank),
            "jobs": lambda: by_jobs(growth.folder, options.jobs, options.calls),
            "events": lambda: by_events(growth.folder, options.events, options.calls),
        }
        parts = []
        for name in options.only.split(","):
            parts.append(f"### {TITLES[name]}\n\n{axes[name]()}")
            print(parts[-1], flush=True)
    publish("growth", "Growth", "\n\n".join([f"{model_dir.name}.", *parts]), write=options.write)


if __name__ == "__main__":
    main()

"""Measured processes: one at a time, each with its threads fixed by its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cases import Order, Result
from benchmarks.machine import REPOSITORY
from post_training.processes import torch_environment


class RunFailed(Exception):
    """A measured process ended without a result; the message has the end of what it printed."""


def run_module(module: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """Run a module from the repository's root and give what it printed.

    Raises:
        RunFailed: it did not end with 0.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunFailed(f"{module} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def plain_environment(threads: int) -> dict[str, str]:
    """For a peer: its own defaults, but for threads and the network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def own_environment(threads: int) -> dict[str, str]:
    """For us: what a job's worker gets."""
    return {**torch_environment(threads), "HF_HUB_OFFLINE": "1"}


def measure(order: Order, **environ: str) -> Result:
    """Run one case in a process of its own, with `environ` added to its environment. Raises RunFailed."""
    order.out.mkdir(parents=True, exist_ok=True)
    file = order.out / "order.json"
    order.save(file)
    ours = order.case.tool == "ours"
    environment = own_environment(order.threads) if ours else plain_environment(order.threads)
    environment |= {"HF_DATASETS_CACHE": str(order.workspace / "datasets"), **environ}
    run_module(f"benchmarks.run_{order.case.tool}", str(file), environment=environment)
    return Result.load(order.out / "result.json")


def prepare(folder: Path, model_dir: Path, arguments: Sequence[str]) -> None:
    """Make the workspace, in a process of its own so that this one stays free of torch. Raises RunFailed."""
    run_module("benchmarks.workspace", str(model_dir), str(folder), *arguments, environment=plain_environment(1))

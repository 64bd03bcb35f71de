"""How processes with torch in them are started, by whichever room starts one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])


def python_module(module: str) -> list[str]:
    """The command that runs a module of ours from any folder; `-P`, so that the folder itself is not searched."""
    return [sys.executable, "-P", "-m", module]


def torch_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process that computes.

    Its OpenMP threads sleep at a barrier instead of spinning (unless the user set OMP_WAIT_POLICY). Alone on a machine
    that changes little; beside one other busy process on two cores, spinning threads take the core from the thread they
    wait for, and a training step was seen to take ten to twenty times as long.

    Args:
        threads: OpenMP threads; None leaves the user's setting.
    """
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # torchao would log that it cannot load kernels that are of no use here.
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment

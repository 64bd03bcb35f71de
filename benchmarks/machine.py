"""What a result was measured on: processor, cores, instructions, versions, revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from post_training.jobs.devices import usable_cores

REPOSITORY = Path(__file__).resolve().parents[1]
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
PACKAGES = ("torch", "torchtune", "torchao", "transformers", "peft", "trl")

_LOAD = os.getloadavg()[0]  # at the start: later it is the benchmark's own


def processor() -> str:
    """The processor's model and whichever of `INSTRUCTIONS` it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(named.get("flags", "").split())
    found = ", ".join(name for name in INSTRUCTIONS if name in flags) or "none of " + ", ".join(INSTRUCTIONS)
    model = " ".join(named.get(name, "") for name in ("model name", "cpu family", "model")).strip()
    return f"{model} ({found})" if model else f"{platform.machine()} ({found})"


def memory_gib() -> float:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def versions() -> str:
    """Python's version and those of whichever of `PACKAGES` are installed."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def revision() -> str:
    """The commit, and whether files differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!docs/performance.md")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def command() -> str:
    """How this process was started, as one would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec is not None else ["python", sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])


def description() -> list[str]:
    """Lines of Markdown that say when, where and how a result came about."""
    return [
        f"* {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, revision {revision()}, by `{command()}`",
        f"* {processor()}, {usable_cores()} cores, {memory_gib():.0f} GiB; load before the run {_LOAD:.2f}",
        f"* {versions()}",
    ]

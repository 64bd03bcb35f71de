"""How processes with torch in them are started, by whichever room starts one.

python -m post_training.processes <module> …     (runs a module that ends itself when its lifeline closes)
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

LIFELINE = "POSTGRAD_LIFELINE_FD"
_ROOT = str(Path(__file__).parents[1])
_CGROUP = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1


def python_module(module: str) -> list[str]:
    """The command that runs a module of ours from any folder; `-P`, so that the folder itself is not searched."""
    return [sys.executable, "-P", "-m", module]


def tied_module(module: str) -> list[str]:
    """The command as `python_module`'s, of a process that dies with its caller.

    The caller hands it the read end of a pipe, its number in the environment variable `LIFELINE`, and keeps the other
    end open for as long as the process may live.
    """
    return [*python_module("post_training.processes"), module]


def die_with_caller() -> None:
    """End this process as soon as the pipe named by `LIFELINE` closes; without one, nothing happens."""
    lifeline = os.environ.pop(LIFELINE, None)
    if lifeline is None:
        return  # started by hand

    def watch() -> None:
        os.read(int(lifeline), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def kill_with_parent() -> None:
    """Have the system end this process with the thread that started it, even where it is stopped; Linux alone can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def process_identity(pid: int) -> str | None:
    """What tells a running process from a later one with the same number; None where there is no such process.

    A process that has ended and that nobody waited for counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return _identity_by_ps(pid) if not Path("/proc/self/stat").exists() else None
    except ProcessLookupError:
        return None
    # Behind the command's name, which may hold anything: the state, and 19 fields later the start in clock ticks.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else f"{boot}:{fields[19]}"


def _identity_by_ps(pid: int) -> str | None:
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def host_identity() -> str:
    """Names the machine, and on it the set of processes that can see each other: a container has its own."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {namespace}"


def torch_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process that computes.

    Its OpenMP threads spin only shortly at a barrier before they sleep (unless the user set GOMP_SPINCOUNT). Beside one
    other busy process on two cores, threads that spin take the core from the thread they wait for: training SmolLM2 in
    bf16 then made 20 to 60 tokens/s with GNU OpenMP's default, 190 with this setting. Alone it costs 6 % (465 of 495).

    Args:
        threads: OpenMP threads; None leaves the user's setting.
    """
    environment = {
        "GOMP_SPINCOUNT": "10000",
        "TOKENIZERS_PARALLELISM": "false",
        # Kernels are compiled one by one, where they are first called: helper processes would only take memory.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # torchao would log that it cannot load kernels that are of no use here.
        "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def return_memory() -> None:
    """Give what this process has freed back to the system, where its C library can: glibc keeps it otherwise."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that this process may still take without driving others out; None where the system does not tell.

    In a container (cgroup v2, as it sees itself) also no more than its limit leaves, cached files aside.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    with suppress(OSError, ValueError, KeyError):  # no such limit
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return free


if __name__ == "__main__":
    die_with_caller()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

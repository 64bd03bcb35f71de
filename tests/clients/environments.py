"""Virtual environments of the clients: made once with venv and pip, kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.matrix import CONSTRAINTS, Client

_PROBE = "import ensurepip, sys, venv; print(*sys.version_info[:2])"


def cache_folder() -> Path:
    """`$POSTGRAD_CLIENT_VENVS`, else `postgrad/clients` in the user's cache folder."""
    if configured := os.environ.get("POSTGRAD_CLIENT_VENVS"):
        return Path(configured).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "postgrad" / "clients"


@functools.cache
def interpreter(python: tuple[int, int]) -> str | None:
    """A Python of that version that can make environments, None where there is none."""
    return next((candidate for candidate in _candidates(python) if _works(candidate, python)), None)


def _candidates(python: tuple[int, int]) -> Iterator[str]:
    name = f"python{python[0]}.{python[1]}"
    yield sys.executable
    if found := shutil.which(name):
        yield found
    roots = [os.environ.get("PYENV_ROOT"), str(Path.home() / ".pyenv")]
    for root in (Path(root) for root in roots if root):
        yield from sorted(
            (str(path) for path in root.glob(f"versions/{python[0]}.{python[1]}*/bin/{name}")), reverse=True
        )
    yield from (f"{folder}/{name}" for folder in ("/usr/local/bin", "/usr/bin", "/opt/homebrew/bin"))


def _works(candidate: str, python: tuple[int, int]) -> bool:
    # A shim may lie on the PATH and have no interpreter behind it, so only what it prints counts.
    try:
        asked = subprocess.run([candidate, "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return False
    return asked.returncode == 0 and asked.stdout.split() == [str(part) for part in python]


def environment(client: Client) -> Path:
    """The Python of the client's environment, which is made first where it is not there yet.

    Raises:
        LookupError: there is no interpreter of the version that the client needs.
        subprocess.CalledProcessError: the environment cannot be made; `stderr` says why.
    """
    python = interpreter(client.python)
    if python is None:
        raise LookupError(f"there is no working Python {client.python[0]}.{client.python[1]} here")
    folder = cache_folder() / client.key
    with _locked(folder):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run(python, "-m", "venv", str(folder))
            _install(folder, client)
            (folder / ".complete").touch()
    return folder / "bin" / "python"


def _install(folder: Path, client: Client) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--constraint", str(CONSTRAINTS)]
    # Most of the time would go into compiling modules that no client imports.
    options.append("--no-compile")
    _run(str(folder / "bin" / "python"), "-m", "pip", "install", *options, *client.requirements)


def _run(*command: str) -> None:
    # What the tests run under says nothing to the interpreter of another version.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    subprocess.run(command, env=env, capture_output=True, text=True, check=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two test runs at once make an environment once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

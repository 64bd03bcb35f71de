"""Real data sets of public projects, which are no part of this one: found, or a reason to skip."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "POSTGRAD_TEST_DATA"


def find_shared(name: str) -> Path | None:
    """The file in `$POSTGRAD_TEST_DATA`, else in `shared/data` beside the repository; None where it is in neither."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get(_FOLDER) or beside) / name
    return path if path.is_file() else None


def shared_file(name: str) -> Path:
    """As `find_shared`, but the test is skipped where the file is absent."""
    path = find_shared(name)
    if path is None:
        pytest.skip(f"needs the public data set {name}: set {_FOLDER} to the folder that has it")
    return path


def shared_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in shared_file(name).read_bytes().split(b"\n") if line.strip()]

"""Rows as the files that clients send.

Runs in a client's virtual environment.
"""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def address(path: Path, kind: str) -> str:
    """The file as a `data:` URI."""
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def csv_address(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    return address(write_csv(rows, folder / "rows.csv"), "text/csv")

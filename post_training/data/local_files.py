"""Data files of this machine, for programs that send their rows on."""

from __future__ import annotations

import io
from pathlib import Path

from apis.datasets.models import Row
from apis.errors import DataInvalid, FileMissing
from post_training.data.records import RecordKind, parse_records

KINDS: dict[str, RecordKind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv"}


def read_local(path: Path) -> tuple[list[Row], bytes]:
    """Every row of a .jsonl, .ndjson, .json or .csv file, and its content.

    Raises:
        FileMissing: there is no such file.
        DataInvalid: it cannot be read, has no rows, or a row is not an object; the row is named.
    """
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise DataInvalid(f"cannot tell how to read {str(path)!r}; convert it to one of {', '.join(KINDS)}")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileMissing(f"there is no file {str(path)!r}; check the path") from None
    except OSError as error:
        raise DataInvalid(f"cannot read {str(path)!r}: {error.strerror}") from None
    try:
        rows = list(parse_records(io.BytesIO(content), kind))
    except DataInvalid as error:
        error.message = f"{path}: {error.message}"
        raise
    if not rows:
        raise DataInvalid(f"{str(path)!r} has no rows; a data set needs at least one")
    return rows, content

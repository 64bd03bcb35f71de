"""Data files of this machine, sent to the stack as rows."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apis.errors import DatasetNotFound, InvalidField

if TYPE_CHECKING:
    from apis.datasets.models import Row
    from post_training.client import StackClient


def read_rows(path: Path) -> list[Row]:
    """Every row of a data file.

    Raises:
        FileMissing: there is no such file.
        DataInvalid: it cannot be read, has no rows, or a row is not an object; the row is named.
    """
    from post_training.data.local_files import read_local

    return read_local(path)[0]


def read_source(path: Path) -> tuple[dict[str, Any], str]:
    """A data file's rows as a source, and an id made of the file's name and a hash of its content.

    So the same file is the same data set however often it is sent, and a changed one never takes its place. Raises as
    `read_rows` does.
    """
    from post_training.data.local_files import read_local

    rows, content = read_local(path)
    identifier = f"{slug(path.stem)}-{hashlib.sha256(content).hexdigest()[:12]}"
    return {"type": "rows", "rows": rows}, identifier


def dataset_of(client: StackClient, value: str) -> str:
    """The id of a registered data set, or of a local file's rows, which are registered first.

    Raises:
        DatasetNotFound: neither a file here nor registered.
    """
    if Path(value).is_file():
        source, identifier = read_source(Path(value))
        return client.datasets.register(source, dataset_id=identifier).identifier
    try:
        return client.datasets.get(value).identifier
    except (DatasetNotFound, InvalidField):
        raise DatasetNotFound(
            f"{value!r} is neither a file here nor a registered data set; check the path, "
            "or see the registered ones with: postgrad datasets list"
        ) from None


def slug(name: str, longest: int = 60) -> str:
    """A name as part of an id: other characters than an id may hold become `-`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:longest].rstrip("-.") or "data"

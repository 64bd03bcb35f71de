"""Tokenised data sets kept on disk, by what they were made of: `<home>/cache/tokens/<key>/`.

An entry is three files: rows as numpy arrays (never pickle), the report as JSON, and the hashes of both. It is written
beside its place and renamed, and read only where its hashes are right. So a reader sees a whole entry or none, whoever
else reads, writes or removes one at the same time, and the cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from apis.errors import InvalidField
from post_training.data.preflight import TokenizedDataset
from post_training.data.types import TokenizedRow

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "POSTGRAD_TOKEN_CACHE_BYTES"
DEFAULT_LIMIT_BYTES = 4 * 2**30
ROWS_FILE, REPORT_FILE, HASHES_FILE = "rows.npz", "report.json", "sha256.json"
# An entry takes at most this part of the free disk, which the checkpoints of jobs need more.
_FREE_SHARE = 0.05
# What a writer that was killed left behind goes after this time.
_ABANDONED_SECONDS = 3600.0
_PARTIAL = "."


class TokenCache:
    """Safe for any number of readers and writers in any number of processes.

    Args:
        folder: holds the entries and nothing else; made when the first is written.
        limit_bytes: of all entries together; those not used for the longest go. 0: nothing is kept.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit_bytes

    @classmethod
    def under(cls, home: Path) -> TokenCache:
        """That of a state folder; `$POSTGRAD_TOKEN_CACHE_BYTES` is its limit. Raises InvalidField."""
        return cls(home / "cache" / "tokens", _limit_from_environment())

    def get(self, key: str) -> TokenizedDataset | None:
        """The entry, or None where there is none or it is damaged; a damaged one is removed."""
        entry = self._folder / key
        try:
            found = _read(entry)
        except (OSError, ValueError, LookupError, TypeError) as error:
            if entry.exists():
                logger.warning("the cached tokens %s are damaged (%s) and are made anew", key, error)
                self._remove(entry)
            return None
        with suppress(OSError):  # removed by another process meanwhile; it is read
            os.utime(entry)
        return found

    def put(self, key: str, data: TokenizedDataset) -> None:
        """Keep `data`, unless it is too large. A cache that cannot be written is no error: nothing is kept then."""
        files = _encoded(data)
        size = sum(map(len, files.values()))
        partial = self._folder / f"{_PARTIAL}{key}.{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if size > min(self._limit, shutil.disk_usage(self._folder).free * _FREE_SHARE):
                return
            self._make_room(size)
            _write(partial, files)
            with suppress(OSError):  # another process had the same rows first
                partial.rename(self._folder / key)
        except OSError as error:
            logger.warning("tokens are not cached: %s", error)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        """Remove what was not used for the longest until `size` bytes more are within the limit."""
        entries = sorted(self._entries())
        total = size + sum(bytes_ for _, bytes_, _ in entries)
        for _, bytes_, entry in entries:
            if total <= self._limit:
                return
            self._remove(entry)
            total -= bytes_

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When each entry was last used, its size and its place. What was abandoned half-written is removed."""
        for entry in self._folder.iterdir():
            with suppress(OSError):  # removed by another process meanwhile
                used = entry.stat().st_mtime
                if not entry.name.startswith(_PARTIAL):
                    yield used, sum(file.stat().st_size for file in entry.iterdir()), entry
                elif time.time() - used > _ABANDONED_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, entry: Path) -> None:
        gone = self._folder / f"{_PARTIAL}{entry.name}.{uuid.uuid4().hex}"
        with suppress(OSError):  # another process removed it first
            entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _limit_from_environment() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not (text.isascii() and text.isdigit()):
        raise InvalidField(f"{LIMIT_VARIABLE} is a number of bytes, such as {DEFAULT_LIMIT_BYTES}; 0: no cache")
    return int(text)


def _encoded(data: TokenizedDataset) -> dict[str, bytes]:
    rows = io.BytesIO()
    np.savez(
        rows,
        allow_pickle=False,
        numbers=np.array([row.row for row in data.rows], dtype=np.int64),
        lengths=np.array([len(row.tokens) for row in data.rows], dtype=np.int64),
        tokens=np.concatenate([row.tokens for row in data.rows]),
        weights=np.concatenate([row.weights for row in data.rows]),
    )
    files = {ROWS_FILE: rows.getvalue(), REPORT_FILE: json.dumps(data.report).encode()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**files, HASHES_FILE: json.dumps(hashes).encode()}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read(entry: Path) -> TokenizedDataset:
    """Raises OSError, or one of several others where the entry is damaged."""
    hashes = json.loads((entry / HASHES_FILE).read_bytes())
    files = {name: (entry / name).read_bytes() for name in (ROWS_FILE, REPORT_FILE)}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != hashes[name]:
            raise ValueError(f"{name} differs from its hash")
    with np.load(io.BytesIO(files[ROWS_FILE]), allow_pickle=False) as arrays:
        numbers, lengths = arrays["numbers"].tolist(), arrays["lengths"]
        tokens, weights = arrays["tokens"], arrays["weights"]
    edges = np.cumsum(lengths)[:-1]
    parts = zip(numbers, np.split(tokens, edges), np.split(weights, edges), strict=True)
    return TokenizedDataset([TokenizedRow(*part) for part in parts], json.loads(files[REPORT_FILE]))

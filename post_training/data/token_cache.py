"""Tokenised data sets kept on disk, by what they were made of: `<home>/cache/tokens/<key>/`.

An entry is four files: the rows (`token_rows` has their layout), their index as a numpy array (never pickle), the
report as JSON, and the hashes of the three. It is written beside its place, row by row, and renamed, and read only
where its hashes are right. So a reader sees a whole entry or none, whoever else reads, writes or removes one at the
same time, and the cache may be deleted at any time: rows that are in use stay readable.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from apis.errors import InvalidField
from post_training.data.preflight import TokenizedDataset
from post_training.data.token_rows import TokenRows, open_token_rows, temporary_rows, write_rows
from post_training.data.types import TokenizedRow

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "POSTGRAD_TOKEN_CACHE_BYTES"
DEFAULT_LIMIT_BYTES = 4 * 2**30
ROWS_FILE, INDEX_FILE, REPORT_FILE, HASHES_FILE = "rows.bin", "index.npy", "report.json", "sha256.json"
# An entry takes at most this part of the free disk, which the checkpoints of jobs need more.
_FREE_SHARE = 0.05
# What a writer that was killed left behind goes when nothing was written to it for this time.
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

    @contextmanager
    def writing(self, key: str) -> Iterator[Draft]:
        """An entry in the making, kept after the block if `Draft.finish` was called in it, unless it is too large.

        A cache that cannot be written is no error: nothing is kept then. The rows stay readable in any case.
        """
        partial = self._folder / f"{_PARTIAL}{key}.{uuid.uuid4().hex}"
        draft = Draft(self, partial if self._limit else None)
        try:
            yield draft
            if draft.finished:
                self._admit(partial, self._folder / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def temporary(self, rows: Iterable[TokenizedRow]) -> TokenRows:
        """Rows that are not to be kept, on the same disk. Raises DiskFull."""
        return temporary_rows(rows, self._folder)

    def _admit(self, partial: Path, entry: Path) -> None:
        try:
            size = _size(partial)
            free = shutil.disk_usage(self._folder).free + size
            if size <= min(self._limit, free * _FREE_SHARE):
                self._make_room(size)
                with suppress(OSError):  # another process had the same rows first
                    partial.rename(entry)
        except OSError as error:
            logger.warning("tokens are not cached: %s", error)

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
                if not entry.name.startswith(_PARTIAL):
                    yield entry.stat().st_mtime, _size(entry), entry
                elif time.time() - _last_written(entry) > _ABANDONED_SECONDS:
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, entry: Path) -> None:
        gone = self._folder / f"{_PARTIAL}{entry.name}.{uuid.uuid4().hex}"
        with suppress(OSError):  # another process removed it first
            entry.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


class Draft:
    """An entry in the making; see `TokenCache.writing`.

    Args:
        folder: where it is made; None where it will not be kept.

    Attributes:
        finished: whether all of it is written.
    """

    def __init__(self, cache: TokenCache, folder: Path | None) -> None:
        self._cache = cache
        self._folder = folder
        self._rows: TokenRows | None = None
        self.finished = False

    def store(self, rows: Iterable[TokenizedRow]) -> TokenRows:
        """Write the rows, as they come. Raises DiskFull."""
        file = self._create()
        if file is None:
            return self._cache.temporary(rows)
        with file:
            self._rows = write_rows(rows, file)
        return self._rows

    def finish(self, report: dict[str, Any]) -> None:
        """Write what belongs to the rows that were stored."""
        if self._folder is None or self._rows is None:
            return
        index = io.BytesIO()
        np.save(index, self._rows.entries, allow_pickle=False)
        files = {INDEX_FILE: index.getvalue(), REPORT_FILE: json.dumps(report).encode()}
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        files[HASHES_FILE] = json.dumps({ROWS_FILE: self._rows.sha256, **hashes}).encode()
        try:
            for name, content in files.items():
                (self._folder / name).write_bytes(content)
            self.finished = True
        except OSError as error:
            logger.warning("tokens are not cached: %s", error)

    def _create(self) -> IO[bytes] | None:
        """The file for the rows; None where they are not kept."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True)
            return (self._folder / ROWS_FILE).open("x+b", buffering=0)
        except OSError as error:
            logger.warning("tokens are not cached: %s", error)
            return None


def _limit_from_environment() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_LIMIT_BYTES
    if not (text.isascii() and text.isdigit()):
        raise InvalidField(f"{LIMIT_VARIABLE} is a number of bytes, such as {DEFAULT_LIMIT_BYTES}; 0: no cache")
    return int(text)


def _size(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())


def _last_written(entry: Path) -> float:
    return max(path.stat().st_mtime for path in (entry, *entry.iterdir()))


def _read(entry: Path) -> TokenizedDataset:
    """Raises OSError, or one of several others where the entry is damaged."""
    hashes = json.loads((entry / HASHES_FILE).read_bytes())
    files = {name: (entry / name).read_bytes() for name in (INDEX_FILE, REPORT_FILE)}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != hashes[name]:
            raise ValueError(f"{name} differs from its hash")
    index = np.load(io.BytesIO(files[INDEX_FILE]), allow_pickle=False)
    rows = open_token_rows(entry / ROWS_FILE, index, hashes[ROWS_FILE])
    return TokenizedDataset(rows, json.loads(files[REPORT_FILE]))

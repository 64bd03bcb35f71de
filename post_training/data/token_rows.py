"""Tokenised rows that lie in a file: in memory a row takes 20 bytes, however many tokens it has.

A row in the file is its length (8 bytes, little-endian), its tokens (int32) and its weights (float32). These are the
bytes that `fingerprint` hashes, so the file's sha256 is the fingerprint of its rows. Rows are read, not mapped: mapped
pages would count as memory of the process.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from apis.errors import JobFailure
from post_training.checkpoints.layout import disk_full
from post_training.data.types import TokenizedRow

ENTRY = np.dtype([("offset", "<i8"), ("row", "<u4"), ("length", "<i4"), ("check", "<u4")])
"""What the index knows of a row: where it begins in the file, its number, its tokens, the CRC-32 of its bytes."""

_PACKED_ENTRY = struct.Struct("<qIiI")
_PREFIX_BYTES = 8
_BLOCK_BYTES = 1 << 20


class TokenRows(Sequence[TokenizedRow]):
    """Rows of a file, each read when it is asked for. Slices and `take` give views of the same file.

    Any number of threads may read. The file stays readable when its name is gone, and is closed with the last view.

    Attributes:
        entries: [n] of `ENTRY`, the index.
        sha256: the fingerprint of the rows, hexadecimal; None for a view.

    Raises:
        JobFailure: from reading a row, where its bytes are not those that were written.
    """

    def __init__(self, file: _Descriptor, entries: NDArray[Any], sha256: str | None = None) -> None:
        self._file = file
        self.entries = entries
        self.sha256 = sha256

    @property
    def lengths(self) -> NDArray[np.int32]:
        """[n] tokens of each row; reads none."""
        return np.ascontiguousarray(self.entries["length"])

    def take(self, indices: NDArray[np.integer[Any]]) -> TokenRows:
        """A view of the rows at these indices, in their order."""
        return TokenRows(self._file, self.entries[indices])

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> TokenizedRow: ...
    @overload
    def __getitem__(self, index: slice) -> TokenRows: ...
    def __getitem__(self, index: int | slice) -> TokenizedRow | TokenRows:
        if isinstance(index, slice):
            return TokenRows(self._file, self.entries[index])
        offset, row, length, check = self.entries[index].item()
        content = self._file.read(_PREFIX_BYTES + 8 * length, offset, row)
        if zlib.crc32(content) != check:
            raise _damaged(row, "its bytes are not those that were written")
        tokens = np.frombuffer(content, np.int32, length, _PREFIX_BYTES)
        return TokenizedRow(row, tokens, np.frombuffer(content, np.float32, length, _PREFIX_BYTES + 4 * length))


class _Descriptor:
    """An open file, closed with the last object that holds this one."""

    def __init__(self, number: int) -> None:
        self._number = number
        weakref.finalize(self, os.close, number).atexit = False

    def read(self, size: int, offset: int, row: int) -> bytes:
        """So many bytes of a row. Raises JobFailure."""
        try:
            content = os.pread(self._number, size, offset)
        except OSError as error:
            raise _damaged(row, os.strerror(error.errno or 0)) from error
        if len(content) != size:
            raise _damaged(row, f"{len(content)} of its {size} bytes are there")
        return content

    def blocks(self) -> Iterator[bytes]:
        """The whole file. Raises OSError."""
        offset = 0
        while block := os.pread(self._number, _BLOCK_BYTES, offset):
            yield block
            offset += len(block)


def row_bytes(row: TokenizedRow) -> bytes:
    """A row as files hold it and as `fingerprint` hashes it."""
    tokens, weights = np.asarray(row.tokens, np.int32), np.asarray(row.weights, np.float32)
    return len(tokens).to_bytes(_PREFIX_BYTES, "little") + tokens.tobytes() + weights.tobytes()


def row_lengths(rows: Sequence[TokenizedRow]) -> NDArray[np.int32]:
    """[n] tokens of each row; reads none of `TokenRows`."""
    if isinstance(rows, TokenRows):
        return rows.lengths
    return np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))


def take_rows(rows: Sequence[TokenizedRow], indices: NDArray[np.integer[Any]]) -> Sequence[TokenizedRow]:
    """The rows at these indices, in their order; reads none of `TokenRows`."""
    return rows.take(indices) if isinstance(rows, TokenRows) else [rows[index] for index in indices]


def write_rows(rows: Iterable[TokenizedRow], file: IO[bytes]) -> TokenRows:
    """Write rows, as they come, into an empty file that is open for reading and writing without a buffer.

    Raises:
        DiskFull: the disk or the quota is full.
    """
    index, digest = bytearray(), hashlib.sha256()
    for block in _blocks(rows, index):
        digest.update(block)
        _write(file, block)
    entries = np.frombuffer(index, ENTRY) if index else np.empty(0, ENTRY)
    return TokenRows(_Descriptor(os.dup(file.fileno())), entries, digest.hexdigest())


def temporary_rows(rows: Iterable[TokenizedRow], folder: Path | None = None) -> TokenRows:
    """Write rows, as they come, into a file without a name, whose room is free again with the last view of it.

    Args:
        folder: on whose disk it lies; made where it is missing. None, or one that cannot be written to: where the
            system keeps temporary files.

    Raises:
        DiskFull: the disk or the quota is full.
    """
    with _temporary_file(folder) as file:
        return write_rows(rows, file)


def open_token_rows(path: Path, entries: NDArray[Any], sha256: str) -> TokenRows:
    """The rows of a file that was written before; all of it is read once, a block at a time.

    Raises:
        OSError: it is missing or unreadable.
        ValueError: its content has another hash.
    """
    file = _Descriptor(os.open(path, os.O_RDONLY))
    digest = hashlib.sha256()
    for block in file.blocks():
        digest.update(block)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{path.name} differs from its hash")
    return TokenRows(file, entries, sha256)


def _blocks(rows: Iterable[TokenizedRow], index: bytearray) -> Iterator[bytes]:
    """The file's content in blocks, and into `index` what it holds of each row."""
    parts: list[bytes] = []
    offset = begin = 0
    for row in rows:
        content = row_bytes(row)
        index += _PACKED_ENTRY.pack(offset, row.row, len(row.tokens), zlib.crc32(content))
        parts.append(content)
        offset += len(content)
        if offset - begin >= _BLOCK_BYTES:
            yield b"".join(parts)
            parts, begin = [], offset
    yield b"".join(parts)


def _write(file: IO[bytes], block: bytes) -> None:
    left = memoryview(block)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        if full := disk_full(error, "the tokenised rows"):
            raise full from error
        raise


def _temporary_file(folder: Path | None) -> IO[bytes]:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(buffering=0, dir=folder)
        except OSError:
            pass  # it is only the better place: its room is what the state folder has
    return tempfile.TemporaryFile(buffering=0)


def _damaged(row: int, how: str) -> JobFailure:
    return JobFailure(f"the tokenised row {row} cannot be read back: {how}. Check the disk and submit the job again")

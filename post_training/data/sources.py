"""A data set's source to a stream of rows, under a policy that says what may be read."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeGuard, cast
from urllib.parse import SplitResult, parse_qsl, unquote, unquote_to_bytes, urlsplit

from pydantic import BaseModel, ConfigDict

from apis.datasets.models import DataSource, Row, RowsDataSource, URIDataSource
from apis.errors import DataInvalid, InvalidField, TooLarge
from post_training.data.addresses import check_url
from post_training.data.reader_process import HUB, PARQUET, XLSX, Kind, read_in_process
from post_training.data.records import RecordKind, encode_rows, parse_json_lines, parse_records

DEFAULT_MAX_INLINE_BYTES = 64 * 2**20
DEFAULT_MAX_FETCH_BYTES = 2**30
DEFAULT_FETCH_SECONDS = 50.0  # within the minute that clients wait for an answer
_PARAM = "source.uri"
_COMMIT = re.compile("[0-9a-f]{40}")
_HASHED_BYTES = 2**20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
FileKind: TypeAlias = RecordKind | Literal["parquet", "xlsx"]
_SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".xlsx": "xlsx",
}
_MEDIA_TYPES: dict[str, FileKind] = {
    "text/csv": "csv",
    "application/csv": "csv",
    "application/json": "json",
    "application/jsonl": "jsonl",
    "application/json-lines": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/x-ndjson": "jsonl",
    "text/jsonl": "jsonl",
    # Real clients write the Python word None where they could not guess a type.
    "none": "sniff",
    "": "sniff",
    "text/plain": "sniff",
    "application/octet-stream": "sniff",
    "binary/octet-stream": "sniff",
    # On a machine with a spreadsheet program, what browsers and Python call a .csv file as well as a workbook.
    "application/vnd.ms-excel": "sniff",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "application/vnd.apache.parquet": "parquet",
    "application/parquet": "parquet",
    "application/x-parquet": "parquet",
}
# What such a file begins with; the last is an older .xls, whose reader says what to do.
_MAGIC: tuple[tuple[bytes, FileKind], ...] = (
    (b"PK\x03\x04", "xlsx"),
    (b"PAR1", "parquet"),
    (b"\xd0\xcf\x11\xe0", "xlsx"),
)
_MAGIC_BYTES = 4
_IN_PROCESS: dict[FileKind, tuple[str, Kind]] = {"parquet": ("--parquet", PARQUET), "xlsx": ("--file", XLSX)}
_TYPES_READ = "text/csv, application/json, application/jsonl, or the type of an .xlsx or .parquet file"


class SourcePolicy(BaseModel):
    """Which sources may be read. Stored with a job, so that every attempt reads under the rules it was accepted with.

    Attributes:
        allowed_roots: absolute folders; a local file must lie in one after symbolic links are resolved.
        allow_hub: whether `huggingface://datasets/…` is read.
        max_inline_bytes: most bytes of inline rows or of a `data:` URI.
        allowed_hosts: what `http(s)://` data sets may be fetched from; see `addresses.check_url`.
        allow_private_addresses: whether those may have an address of a private network or of this machine.
        max_fetch_bytes, fetch_seconds: the most that fetching one may take.
        rows_file: the rows of an inline source, as JSON lines, or the file of a fetched one; written by the catalog.
        rows_bytes: how many bytes of `rows_file` belong to the data set; what follows was appended later.
    """

    model_config = ConfigDict(extra="forbid")

    allowed_roots: list[str] = []
    allow_hub: bool = False
    max_inline_bytes: int = DEFAULT_MAX_INLINE_BYTES
    allowed_hosts: list[str] = []
    allow_private_addresses: bool = False
    max_fetch_bytes: int = DEFAULT_MAX_FETCH_BYTES
    fetch_seconds: float = DEFAULT_FETCH_SECONDS
    rows_file: str | None = None
    rows_bytes: int | None = None


class RowReader:
    """Rows, streamed anew by each iteration. No `__len__`, since `list()` would then read everything twice.

    Attributes:
        size_bytes: bytes of the source, None where unknown.
    """

    def __init__(
        self,
        open_stream: Callable[[], Iterator[Row]],
        size_bytes: int | None = None,
        digest: Callable[[], str] | None = None,
    ) -> None:
        """`digest`: see the method; None where the same source may give other rows at any time."""
        self._open = open_stream
        self._digest = digest
        self._count: int | None = None
        self.size_bytes = size_bytes

    def __iter__(self) -> Iterator[Row]:
        """Raises DataInvalid at a row that cannot be read, and where there is none."""
        count = 0
        for row in self._open():
            count += 1
            yield row
        if count == 0:
            raise DataInvalid("the data set has no rows; it needs at least one")
        self._count = count

    def digest(self) -> str | None:
        """sha256 of what the rows are read from as it is now, hexadecimal; None where that cannot be told.

        Raises:
            DataInvalid: a file is missing or unreadable.
        """
        return None if self._digest is None else self._digest()

    def count(self) -> int:
        """How many rows there are; reads them all the first time. Raises DataInvalid as iteration does."""
        if self._count is None:
            self._count = sum(1 for _ in self)
        return self._count


def open_rows(source: DataSource, policy: SourcePolicy) -> RowReader:
    """Open a source for reading.

    Raises:
        InvalidField: the source is of a kind that is not read, or not allowed here.
        DataInvalid: a file is missing or unreadable; rows are checked when they are read.
        TooLarge: inline data over `max_inline_bytes`.
    """
    if policy.rows_file is not None:
        path = Path(policy.rows_file)
        return _fetched_rows(path) if is_web_source(source) else _stored_rows(path, policy.rows_bytes)
    if isinstance(source, RowsDataSource):
        return _inline_rows(source.rows, policy)
    return _open_uri(source, policy)


def is_hub_source(source: DataSource) -> bool:
    return isinstance(source, URIDataSource) and source.uri.lower().startswith("huggingface:")


def is_web_source(source: DataSource) -> TypeGuard[URIDataSource]:
    return isinstance(source, URIDataSource) and source.uri.lower().startswith(("http:", "https:"))


def is_inline_source(source: DataSource) -> bool:
    """Whether the data travels inside the source itself."""
    return isinstance(source, RowsDataSource) or source.uri[:5].lower() == "data:"


def _open_uri(source: URIDataSource, policy: SourcePolicy) -> RowReader:
    match = _SCHEME.match(source.uri)
    scheme = match.group(1).lower() if match else ""
    if scheme == "data":
        return _data_uri(source.uri, policy)
    if scheme == "huggingface":
        return _hub(source.uri, policy)
    if scheme == "file":
        return _file(_file_uri_path(source.uri), policy)
    if is_web_source(source):
        check_url(source.uri, policy.allowed_hosts)
        raise DataInvalid("data at a URL are read from a copy, made when the data set is registered", param=_PARAM)
    if scheme:
        raise InvalidField(
            f"data sets are not read over {scheme!r}: fetch the file and give its path, "
            "or send the rows (source type 'rows')",
            param=_PARAM,
        )
    return _file(source.uri, policy)


def _stored_rows(path: Path, size: int | None) -> RowReader:
    if not path.is_file():
        raise DataInvalid("the rows of this data set are gone: it was unregistered since; register it again")
    size = path.stat().st_size if size is None else size

    def rows() -> Iterator[Row]:
        with path.open("rb") as stream:
            yield from parse_json_lines(_head(stream, size))

    def digest() -> str:
        with path.open("rb") as stream:
            return _sha256("jsonl", _head(stream, size))

    return RowReader(rows, size, digest)


def _head(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The lines in the first `size` bytes: rows appended later are not part of the snapshot."""
    while size > 0 and (line := stream.readline(size)):
        size -= len(line)
        yield line


def _inline_rows(rows: list[Row], policy: SourcePolicy) -> RowReader:
    content = encode_rows(rows)
    _check_inline_size(len(content), policy, "source.rows")
    return RowReader(lambda: iter(rows), len(content), lambda: _sha256("jsonl", [content]))


def _sha256(kind: str, chunks: Iterable[bytes]) -> str:
    """Of the bytes and of how they are read."""
    digest = hashlib.sha256(f"{kind}\n".encode())
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _check_inline_size(size: int, policy: SourcePolicy, param: str) -> None:
    if size > policy.max_inline_bytes:
        raise TooLarge(
            f"inline data of {size} bytes is over the limit of {policy.max_inline_bytes}: put it in a file "
            "under a folder this server reads from and register its path",
            param=param,
        )


def _data_uri(uri: str, policy: SourcePolicy) -> RowReader:
    header, comma, payload = uri[len("data:") :].partition(",")
    if not comma:
        raise InvalidField("a data: URI is data:<media type>[;base64],<data>; this one has no comma", param=_PARAM)
    media_type, *parameters = [part.strip().lower() for part in header.split(";")]
    kind = _MEDIA_TYPES.get(media_type)
    if kind is None:
        raise InvalidField(
            f"a data: URI of type {media_type[:100]!r} is not read: send {_TYPES_READ}",
            param=_PARAM,
        )
    # Each byte takes at least one character, base64 at most 4 for 3: refuse before decoding.
    _check_inline_size(len(payload) * 3 // 4 if "base64" in parameters else 0, policy, _PARAM)
    content = _decode_payload(payload, "base64" in parameters)
    _check_inline_size(len(content), policy, _PARAM)
    return _file_rows(kind, lambda: _as_file(content, kind), len(content))


def _as_file(content: bytes, kind: FileKind) -> BinaryIO:
    """Content that can be read as a file; a file indeed where another process reads it."""
    if _told(kind, content) not in _IN_PROCESS:
        return io.BytesIO(content)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by who reads
    file.write(content)
    file.seek(0)
    return cast(BinaryIO, file)


def _told(kind: FileKind, beginning: bytes) -> FileKind:
    """What a file of `kind` is: `sniff` may be one that is not text."""
    if kind == "sniff":
        for start, found in _MAGIC:
            if beginning.startswith(start):
                return found
    return kind


def _decode_payload(payload: str, is_base64: bool) -> bytes:
    if not is_base64:
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(unquote(payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidField(f"the data: URI is not valid base64: {error}", param=_PARAM) from None


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError as error:  # such as a bracket that opens an address and is not closed
        raise InvalidField(f"{uri[:100]!r} is not a URI: {error}", param=_PARAM) from None


def _file_uri_path(uri: str) -> str:
    parts = _split(uri)
    if parts.netloc not in ("", "localhost"):
        raise InvalidField(f"a file:// URI names no host, this one names {parts.netloc!r}: use file:///…", param=_PARAM)
    return unquote(parts.path)


def _file(name: str, policy: SourcePolicy) -> RowReader:
    kind = _SUFFIXES.get(Path(name).suffix.lower())
    if kind is None:
        raise InvalidField(
            f"{name!r} is not read: data files end in {', '.join(sorted(_SUFFIXES))}",
            param=_PARAM,
        )
    path = _resolve(name, policy)
    return _file_rows(kind, lambda: _open_regular(path, name), _check_readable(path, name))


def _fetched_rows(path: Path) -> RowReader:
    if not path.is_file():
        raise DataInvalid("the rows of this data set are gone: it was unregistered since; register it again")
    return _file_rows(cast(FileKind, path.suffix.removeprefix(".")), lambda: path.open("rb"), path.stat().st_size)


def _file_rows(kind: FileKind, open_file: Callable[[], BinaryIO], size: int) -> RowReader:
    def rows() -> Iterator[Row]:
        with open_file() as stream:
            found = _told(kind, stream.read(_MAGIC_BYTES))
            stream.seek(0)
            if found in _IN_PROCESS:
                # The open file travels, not its name: what was checked is what is read.
                option, what = _IN_PROCESS[found]
                yield from read_in_process([f"{option}={stream.fileno()}"], what, [stream.fileno()])
            else:
                yield from parse_records(stream, cast(RecordKind, found))

    def digest() -> str:
        with open_file() as stream:
            return _sha256(kind, iter(lambda: stream.read(_HASHED_BYTES), b""))

    return RowReader(rows, size, digest)


def kind_of_web_file(paths: Sequence[str], content_type: str) -> FileKind:
    """What a fetched file is: by the names in its URLs, the first asked for first, else by its media type.

    Raises:
        InvalidField: nothing that is read here.
    """
    for path in paths:
        if named := _SUFFIXES.get(Path(path).suffix.lower()):
            return named
    kind = _MEDIA_TYPES.get(content_type.partition(";")[0].strip().lower())
    if kind is None:
        raise InvalidField(
            f"the URL gives {content_type[:100]!r}: name a file that ends in {', '.join(sorted(_SUFFIXES))}, or one of "
            f"type {_TYPES_READ}",
            param=_PARAM,
        )
    return kind


def _resolve(name: str, policy: SourcePolicy) -> Path:
    """The file meant by `name`, inside an allowed root; a relative name is looked up in each root in turn."""
    if "\0" in name:
        raise InvalidField("a path holds no NUL character", param=_PARAM)
    # os.path, whose functions answer where pathlib's raise: link loops, names that are too long.
    roots = [Path(os.path.realpath(root)) for root in policy.allowed_roots]
    candidates = [Path(os.path.realpath(root / name)) for root in roots]
    inside = [path for path in candidates if any(path.is_relative_to(root) for root in roots)]
    if not inside:
        raise InvalidField(
            f"{name!r} lies outside the folders this server reads data from: move it there, or have its folder added "
            "to `allowed_roots` of the datasetio provider in run.yaml",
            param=_PARAM,
        )
    return next((path for path in inside if os.path.exists(path)), inside[0])


def _check_readable(path: Path, name: str) -> int:
    with _open_regular(path, name) as stream:
        return os.fstat(stream.fileno()).st_size


def _open_regular(path: Path, name: str) -> BinaryIO:
    # No link may appear after the path was checked, and opening a pipe must not hang.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataInvalid(f"there is no file {name!r}; check the path", param=_PARAM) from None
    except OSError as error:
        raise DataInvalid(f"{name!r} cannot be read: {error.strerror}", param=_PARAM) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataInvalid(f"{name!r} is not a regular file", param=_PARAM)
    return os.fdopen(descriptor, "rb")


def _hub(uri: str, policy: SourcePolicy) -> RowReader:
    if not policy.allow_hub:
        raise InvalidField(
            "data sets of the Hugging Face hub are not read by this server: set `allow_hub: true` in the config of "
            "the datasetio provider in run.yaml, or send the rows",
            param=_PARAM,
        )
    # A branch or a tag may move; a commit's files never change.
    fixed = _COMMIT.fullmatch(dict(parse_qsl(_split(uri).query)).get("revision", "")) is not None
    return RowReader(lambda: _hub_rows(uri), digest=(lambda: _sha256("hub", [uri.encode()])) if fixed else None)


def _hub_rows(uri: str) -> Iterator[Row]:
    return read_in_process([f"--uri={uri}"], HUB)

"""The data set catalog: which data sets are registered, and their rows.

Rows that travel inside a source are kept as JSON lines under `<home>/datasets/`. The store says how many bytes of such
a file count, so an append is complete once the store is committed, and not before. What a URL gives is kept there as it
came.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import anyio.to_thread
from sqlalchemy import JSON, BigInteger, Index, String, Text, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from apis.common import MAX_IDENTIFIER_LENGTH
from apis.datasets.models import (
    DATA_SOURCE,
    Dataset,
    DatasetPurpose,
    DataSource,
    IterrowsResponse,
    ListDatasetsResponse,
    RegisterDatasetRequest,
    Row,
    RowsDataSource,
)
from apis.datasets.protocol import DatasetIO
from apis.errors import Conflict, DatasetNotFound, InvalidField, TooLarge, Unavailable
from post_training.catalog.naming import folder_name
from post_training.checkpoints.layout import disk_full, fsync
from post_training.data.records import encode_row, encode_rows
from post_training.data.sources import RowReader, SourcePolicy, is_inline_source, is_web_source, open_rows
from post_training.jobs.database import Base, Database, UtcDateTime, now
from post_training.jobs.spec import DatasetRef
from post_training.owners import (
    EVERYBODY,
    MAX_OWNER_LENGTH,
    STACK,
    check_changeable,
    current_caller,
    is_visible,
    visible,
)

log = logging.getLogger(__name__)

EMBEDDED_BYTES = 2**20
PAGE_BYTES = 64 * 2**20
FETCHES_AT_ONCE = 4
# What a source may hold packed (a workbook, Parquet, CSV without its names in each row) may grow so many times.
MAX_UNPACKING = 16
_SMALL_BYTES = 2**20
# Under the folder of data sets, among which none has this name: see `folder_name`.
_UNFINISHED = Path("datasets", "+unfinished")


class DatasetRow(Base):
    """A registered data set. `rows_file` is relative to the home folder; its first `rows_bytes` bytes are the rows."""

    __tablename__ = "catalog_datasets"

    identifier: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH), primary_key=True)
    provider_id: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH))
    purpose: Mapped[str] = mapped_column(String(64))
    source: Mapped[dict[str, Any]] = mapped_column(JSON)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    fingerprint: Mapped[str] = mapped_column(String(64))
    rows_file: Mapped[str | None] = mapped_column(Text)
    rows_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    owned_by: Mapped[str | None] = mapped_column(String(MAX_OWNER_LENGTH), default=None)

    __table_args__ = (Index("datasets_by_owner", "owned_by", "created_at"),)


class DatasetCatalog:
    """Fulfils `apis.datasets.Datasets`. Files and store are worked on in threads, never on the event loop."""

    def __init__(self, database: Database, home: Path) -> None:
        self._database = database
        self._home = home
        self._appending = threading.Lock()
        self._folders = threading.Lock()
        self._sources: dict[str, DatasetIO] = {}
        self._fetches = anyio.CapacityLimiter(FETCHES_AT_ONCE)

    def attach_sources(self, sources: Sequence[DatasetIO]) -> None:
        """Set the providers of `datasetio`; for each data set the first that accepts its source is asked."""
        self._sources = {source.provider_id: source for source in sources}

    def discard_unfinished(self) -> None:
        """Remove the files that a process which broke off had begun. Call it before requests, when no other has the
        home folder."""
        shutil.rmtree(self._home / _UNFINISHED, ignore_errors=True)

    async def register_dataset(self, request: RegisterDatasetRequest, provider_id: str | None = None) -> Dataset:
        """See `apis.datasets.Datasets`. A small source is read whole, of a large one the first row.

        Args:
            provider_id: the `datasetio` provider that shall read it. None: the one that the metadata names, else the
                first that accepts the source.
        """
        # Threads of their own, since those of all requests could be waiting for slow servers else.
        threads = self._fetches if is_web_source(request.source) else None
        return await anyio.to_thread.run_sync(self._register, request, provider_id, limiter=threads)

    async def list_datasets(self) -> ListDatasetsResponse:
        """The data sets that the caller may see, oldest first. Inline rows are left out; `get_dataset` has them."""
        return await anyio.to_thread.run_sync(self._list)

    async def get_dataset(self, dataset_id: str) -> Dataset:
        return await anyio.to_thread.run_sync(self._get, dataset_id)

    async def unregister_dataset(self, dataset_id: str) -> None:
        await anyio.to_thread.run_sync(self._unregister, dataset_id)

    async def iterrows(
        self, dataset_id: str, start_index: int | None = None, limit: int | None = None
    ) -> IterrowsResponse:
        return await anyio.to_thread.run_sync(partial(self._iterrows, dataset_id, start_index or 0, limit))

    async def append_rows(self, dataset_id: str, rows: list[Row]) -> None:
        await anyio.to_thread.run_sync(self._append, dataset_id, rows)

    def reference(self, dataset_id: str) -> DatasetRef:
        """What a worker needs to read the data set as it is now; rows appended later are not part of it.

        Raises:
            DatasetNotFound: no such data set.
            InvalidField: its provider is no longer configured.
        """
        row = self._find(dataset_id)
        return DatasetRef(dataset_id=dataset_id, source=row.source, policy=self._policy(row).model_dump())

    # -- in threads ----------------------------------------------------------------------------------------------

    def _register(self, request: RegisterDatasetRequest, provider_id: str | None) -> Dataset:
        identifier = request.dataset_id or f"dataset-{uuid.uuid4()}"
        fingerprint = _fingerprint(request)
        with self._database.reading() as session:
            found = session.get(DatasetRow, identifier)
        if found is not None:
            return self._same_or_conflict(found, fingerprint, provider_id)
        provider = self._provider_for(request) if provider_id is None else self._provider(provider_id, "provider_id")
        policy = SourcePolicy.model_validate(provider.source_policy())
        row = DatasetRow(
            identifier=identifier,
            provider_id=provider.provider_id,
            purpose=request.purpose.value,
            source=_slim(request.source),
            details=request.metadata or {},
            fingerprint=fingerprint,
            created_at=now(),
            owned_by=current_caller().owner,
        )
        if is_web_source(request.source):
            self._fetch(row, request.source.uri, policy)
        elif is_inline_source(request.source):
            row.rows_file, row.rows_bytes = self._store_rows(identifier, open_rows(request.source, policy), policy)
        else:
            _probe(open_rows(request.source, policy))
        return self._insert(row)

    def _insert(self, row: DatasetRow, again: bool = True) -> Dataset:
        try:
            with self._database.session() as session:
                session.add(row)
        except IntegrityError:
            # Another request was first; what this one wrote belongs to nobody.
            with self._database.reading() as session:
                first = session.get(DatasetRow, row.identifier)
            if first is None and again:  # and it is unregistered already
                return self._insert(row, again=False)
            self._delete_rows(row.rows_file)
            if first is None:
                raise
            return self._same_or_conflict(first, row.fingerprint)
        except BaseException:
            self._delete_rows(row.rows_file)
            raise
        return self._dataset(row)

    def _same_or_conflict(self, row: DatasetRow, fingerprint: str, provider_id: str | None = None) -> Dataset:
        if not is_visible(row.owned_by):
            raise Conflict(f"the id {row.identifier!r} is taken: choose another one", param="dataset_id")
        if row.fingerprint != fingerprint or provider_id not in (None, row.provider_id):
            raise Conflict(
                f"the data set {row.identifier!r} is registered with another source, purpose, metadata or provider: "
                "unregister it first, or choose another id",
                param="dataset_id",
            )
        if current_caller() is STACK and row.owned_by != EVERYBODY:
            with self._database.session() as session:
                _load(session, row.identifier).owned_by = EVERYBODY
        return self._dataset(row)

    def _provider_for(self, request: RegisterDatasetRequest) -> DatasetIO:
        named = (request.metadata or {}).get("provider_id")
        if named is not None:
            return self._provider(named)
        for provider in self._sources.values():
            if provider.accepts(request.source):
                return provider
        # No provider takes it: the most closed policy says what is wrong with the source.
        open_rows(request.source, SourcePolicy())
        raise InvalidField("no configured datasetio provider reads this source; add one in run.yaml", param="source")

    def _provider(self, provider_id: object, param: str = "metadata.provider_id") -> DatasetIO:
        provider = self._sources.get(provider_id) if isinstance(provider_id, str) else None
        if provider is None:
            raise InvalidField(
                f"no datasetio provider {provider_id!r} is configured; there is {', '.join(self._sources) or 'none'}",
                param=param,
            )
        return provider

    def _policy(self, row: DatasetRow) -> SourcePolicy:
        policy = SourcePolicy.model_validate(self._provider(row.provider_id).source_policy())
        if row.rows_file is None:
            return policy
        return policy.model_copy(
            update={"rows_file": str((self._home / row.rows_file).resolve()), "rows_bytes": row.rows_bytes}
        )

    def _reader(self, row: DatasetRow) -> RowReader:
        return open_rows(DATA_SOURCE.validate_python(row.source), self._policy(row))

    def _list(self) -> ListDatasetsResponse:
        with self._database.reading() as session:
            query = select(DatasetRow).where(visible(DatasetRow.owned_by))
            rows = session.scalars(query.order_by(DatasetRow.created_at, DatasetRow.identifier)).all()
        return ListDatasetsResponse(data=[_in_list(row) for row in rows])

    def _get(self, dataset_id: str) -> Dataset:
        return self._dataset(self._find(dataset_id))

    def _dataset(self, row: DatasetRow) -> Dataset:
        source, truncated = DATA_SOURCE.validate_python(row.source), False
        if isinstance(source, RowsDataSource):
            rows, truncated = _within(EMBEDDED_BYTES, iter(self._reader(row)))
            source = RowsDataSource(rows=rows)
        return _dataset(row, source, truncated)

    def _find(self, dataset_id: str) -> DatasetRow:
        with self._database.reading() as session:
            return _load(session, dataset_id)

    def _unregister(self, dataset_id: str) -> None:
        with self._database.session() as session:
            row = _load(session, dataset_id)
            check_changeable(row.owned_by, f"the data set {dataset_id!r}")
            session.delete(row)
        self._delete_rows(row.rows_file)

    def _iterrows(self, dataset_id: str, start: int, limit: int | None) -> IterrowsResponse:
        if not 0 <= start <= sys.maxsize:
            raise InvalidField(f"must be 0 or more, and at most {sys.maxsize}, found {start}", param="start_index")
        if limit is not None and limit < -1:
            raise InvalidField(f"must be 0 or more, or -1 for all rows, found {limit}", param="limit")
        stop = None if limit is None or limit == -1 else min(start + limit, sys.maxsize)
        rows = iter(self._reader(self._find(dataset_id)))
        data, cut = _within(PAGE_BYTES, itertools.islice(rows, start, stop))
        return IterrowsResponse(data=data, has_more=cut or next(rows, None) is not None)

    def _append(self, dataset_id: str, rows: list[Row]) -> None:
        content = encode_rows(rows)
        with self._appending, self._database.session() as session:
            row = _load(session, dataset_id, lock=True)
            check_changeable(row.owned_by, f"the data set {dataset_id!r}")
            inline = is_inline_source(DATA_SOURCE.validate_python(row.source))
            if not inline or row.rows_file is None or row.rows_bytes is None:
                raise InvalidField(
                    f"the data set {dataset_id!r} is read from a file or URL and cannot be appended to: "
                    "change the file, or register the rows themselves",
                    param="dataset_id",
                )
            _check_size(len(content), self._policy(row))
            with _write_faults_named(dataset_id):
                _append_durably(self._home / row.rows_file, row.rows_bytes, content)
            row.rows_bytes += len(content)

    def _store_rows(self, identifier: str, rows: Iterable[Row], policy: SourcePolicy) -> tuple[str, int]:
        size, most = 0, policy.max_inline_bytes * MAX_UNPACKING
        with self._new_file(identifier) as file:
            for part in _encoded(rows):
                size += len(part)
                if size > most:
                    raise TooLarge(
                        f"the rows of this source take more than {most} bytes as JSON lines: put them in a file under "
                        "a folder this server reads from and register its path",
                        param="source",
                    )
                _write_all(file.fileno(), part)
            return self._place(file, identifier, "jsonl"), size

    def _fetch(self, row: DatasetRow, url: str, policy: SourcePolicy) -> None:
        """Keep a copy of what a URL gives now: jobs read the same rows whenever they run, and open no connection."""
        # Imported here: it takes a tenth of a second, and most stacks fetch nothing.
        from post_training.catalog.fetching import fetch

        with self._new_file(row.identifier) as file:
            kind = fetch(url, policy, file)
            row.rows_bytes = file.tell()
            row.rows_file = self._place(file, row.identifier, kind)
        try:
            _probe(self._reader(row))
        except BaseException:
            self._delete_rows(row.rows_file)
            raise

    @contextmanager
    def _new_file(self, identifier: str) -> Iterator[BinaryIO]:
        """An open file among the unfinished, of which nothing stays there."""
        path = self._home / _UNFINISHED / uuid.uuid4().hex
        with _write_faults_named(identifier):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("xb") as file:
                    yield file
            finally:
                path.unlink(missing_ok=True)

    def _place(self, file: BinaryIO, identifier: str, kind: str) -> str:
        """Put a written file where the data set's rows belong, durably; gives its name relative to the home folder."""
        file.flush()
        os.fsync(file.fileno())
        # A new name each time, so that a job of an earlier data set with this id never reads this one's rows.
        relative = Path("datasets", folder_name(identifier), f"{uuid.uuid4().hex}.{kind}")
        path = self._home / relative
        try:
            with self._folders:  # else another request may remove the folder while it is still empty
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(file.name, path)
            for folder in (path.parent, path.parent.parent):
                fsync(folder)
        except BaseException:
            self._delete_rows(str(relative))
            raise
        return str(relative)

    def _delete_rows(self, rows_file: str | None) -> None:
        if rows_file is None:
            return
        path = self._home / rows_file
        with self._folders:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # other rows are in it
                path.parent.rmdir()


def _load(session: Session, dataset_id: str, *, lock: bool = False) -> DatasetRow:
    row = session.get(DatasetRow, dataset_id, with_for_update=lock)
    if row is None or not is_visible(row.owned_by):
        raise DatasetNotFound(f"there is no data set {dataset_id!r}; register it first", param="dataset_id")
    return row


def _dataset(row: DatasetRow, source: DataSource, truncated: bool = False) -> Dataset:
    return Dataset(
        identifier=row.identifier,
        provider_resource_id=row.identifier,
        provider_id=row.provider_id,
        purpose=DatasetPurpose(row.purpose),
        source=source,
        source_truncated=truncated,
        metadata=row.details,
    )


def _in_list(row: DatasetRow) -> Dataset:
    """A data set among others: rows that came in a request are left out, however few."""
    source = DATA_SOURCE.validate_python(row.source)
    return _dataset(row, source, truncated=isinstance(source, RowsDataSource))


def _within(limit: int, rows: Iterator[Row]) -> tuple[list[Row], bool]:
    """Rows, at least one, until `limit` bytes of JSON lines are passed; and whether that cut any off."""
    taken: list[Row] = []
    size = 0
    for number, row in enumerate(rows):
        size += len(encode_row(row, number))
        if size > limit and taken:
            return taken, True
        taken.append(row)
    return taken, False


def _slim(source: DataSource) -> dict[str, Any]:
    """The source as it is stored: rows are in their file already."""
    return {"type": "rows", "rows": []} if isinstance(source, RowsDataSource) else source.model_dump()


def _fingerprint(request: RegisterDatasetRequest) -> str:
    content = {
        "source": request.source.model_dump(),
        "purpose": request.purpose.value,
        "metadata": request.metadata or {},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _probe(reader: RowReader) -> None:
    """Read a small source whole, of a large one the first row. Raises DataInvalid."""
    if reader.size_bytes is not None and reader.size_bytes <= _SMALL_BYTES:
        reader.count()
    else:
        next(iter(reader))


def _check_size(size: int, policy: SourcePolicy) -> None:
    if size > policy.max_inline_bytes:
        raise TooLarge(
            f"{size} bytes of rows are over the limit of {policy.max_inline_bytes}; append them in smaller portions",
            param="rows",
        )


@contextmanager
def _write_faults_named(dataset_id: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the rows of data set {dataset_id!r}"
        log.error("%s could not be written: %s", what, error)
        if full := disk_full(error, what):
            raise full from error
        raise Unavailable(
            f"{what} could not be written ({error.strerror or type(error).__name__}): whoever runs this server must "
            "see that its state folder can be written to",
        ) from error


def _append_durably(path: Path, size: int, content: bytes) -> None:
    # An append that never reached the store may have left bytes after `size`; they are written over, never read.
    with path.open("r+b") as file:
        file.seek(size)
        _write_through(file.fileno(), content)


def _encoded(rows: Iterable[Row]) -> Iterator[bytes]:
    """Rows as JSON lines, in parts of a MiB or a little more."""
    part = bytearray()
    for number, row in enumerate(rows):
        part += encode_row(row, number)
        if len(part) >= _SMALL_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)


def _write_through(descriptor: int, content: bytes) -> None:
    _write_all(descriptor, content)
    os.fsync(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]

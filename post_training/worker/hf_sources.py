"""Rows of data sets on the Hugging Face hub and of Parquet files: the one file that imports `datasets` and `pyarrow`.

`post_training.data.reader_process` runs it as a process of its own:

    python -m post_training.worker.hf_sources --uri='huggingface://datasets/org/name?split=train'
    python -m post_training.worker.hf_sources --parquet=0 < rows.parquet

It prints the rows as JSON lines. On a fault the last line of stderr is an error object, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from apis.datasets.models import Row
from apis.errors import DataInvalid, InvalidField, PostgradError
from post_training.data.records import MAX_ROW_BYTES, encode_row, too_long
from post_training.worker.printing import print_rows

_PARAM = "source.uri"
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
# No `data_files` or `data_dir`: those name other places to read from.
_OPTIONS = {"split", "name", "revision"}
_PARQUET_ROWS = 256
_MAX_REASON = 500


def read_hub_rows(uri: str) -> Iterator[Row]:
    """Stream the rows of `huggingface://datasets/<org>/<name>?split=…&name=<config>&revision=…` (split: train).

    Raises:
        InvalidField: the URI is not of that form.
        DataInvalid: the hub has no such data set, its files lie elsewhere, or a value has no JSON form.
    """
    repository, options = parse_hub_uri(uri)
    # `load_dataset` prefers a local folder of that name over the hub, and so would read around the allowed roots.
    if os.path.exists(repository):
        raise InvalidField(f"{repository!r} is also a local folder here; give its files by path instead", param=_PARAM)
    return _read_on_the_hub(repository, options)


def _read_on_the_hub(repository: str, options: dict[str, str]) -> Iterator[Row]:
    with _confined_to_the_hub():
        yield from read_rows(repository, **options)


@contextmanager
def _confined_to_the_hub() -> Iterator[None]:
    """Have `datasets` look for files on the hub alone.

    A data set's README may name any path or URL as its files, so that whoever writes one could have a file of this
    machine read, or its network asked: `datasets` looks there before it finds that they are not the data set's.
    """
    from datasets import data_files
    from datasets.utils.file_utils import is_relative_path

    resolve = data_files.resolve_pattern

    def resolve_on_the_hub(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
        place = base_path if is_relative_path(pattern) else pattern
        if not place.startswith("hf://") or "::" in pattern:
            raise DataInvalid("the data set's README names files that do not lie on the hub", param=_PARAM)
        return resolve(pattern, base_path, *args, **options)

    data_files.resolve_pattern = resolve_on_the_hub
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def parse_hub_uri(uri: str) -> tuple[str, dict[str, str]]:
    """The repository and the options of a hub URI. Raises InvalidField."""
    parts = urlsplit(uri)
    repository = unquote(parts.path).strip("/")
    if parts.netloc != "datasets" or not _REPOSITORY.fullmatch(repository):
        raise InvalidField(f"{uri!r} is not of the form huggingface://datasets/<org>/<name>?split=train", param=_PARAM)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - _OPTIONS):
        raise InvalidField(f"{unknown[0]!r} is not an option here; use {', '.join(sorted(_OPTIONS))}", param=_PARAM)
    return repository, options


def read_rows(path: str, split: str = "train", name: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Stream the rows of a hub repository or a local folder. Raises DataInvalid."""
    import datasets  # here, since it takes seconds and a Parquet file does without

    try:
        rows = datasets.load_dataset(path, name=name, split=split, revision=revision, streaming=True)
        if rows.features:
            # An image or audio cell names a file or URL, which decoding would open, whatever and wherever it is.
            rows = rows.decode(False)
        for number, row in enumerate(rows):
            encode_row(row, number)  # what has no JSON form is named here, whoever reads
            yield row
    except PostgradError:
        raise
    # The hub client raises errors of many libraries; any of them means: this data set cannot be read.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].replace(os.getcwd(), ".")[:_MAX_REASON]
        raise DataInvalid(f"the data set cannot be read from the hub: {reason}", param=_PARAM) from error


def read_parquet(stream: BinaryIO) -> Iterator[Row]:
    """Stream the rows of a Parquet file. Raises DataInvalid, also where a value has no JSON form."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        _check_columns(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in _converted(batch, number):
                # What has no JSON form is named here, whoever reads.
                if len(encode_row(row, number)) > MAX_ROW_BYTES:
                    raise too_long(number)
                yield row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataInvalid(f"the Parquet file cannot be read after {number} rows: {reason}", param=_PARAM) from error


def _check_columns(names: list[str]) -> None:
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise DataInvalid(f"the Parquet file has two columns {repeated!r}; column names must differ", param=_PARAM)


def _converted(batch: Any, first: int) -> list[Row]:
    """The rows of an Arrow batch, the first of them numbered `first`. Raises DataInvalid."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # of one of its values: UTF-8 that is none, a date out of range
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            for offset, value in enumerate(values):
                try:
                    value.as_py()
                except (ValueError, OverflowError) as error:
                    reason = f"has a value that cannot be read: {error}"
                    raise DataInvalid(reason, row=first + offset, pointer=f"/{column}") from None
        raise


def main(arguments: list[str] | None = None) -> int:
    """Print every row; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Print the rows of a data set as JSON lines")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--uri", help="huggingface://datasets/<org>/<name>?split=train")
    source.add_argument("--parquet", type=int, metavar="FD", help="number of an open, seekable file")
    given = parser.parse_args(arguments)
    if given.uri:
        return print_rows(_hub_rows(given.uri))
    return print_rows(read_parquet(os.fdopen(given.parquet, "rb")))


def _hub_rows(uri: str) -> Iterator[Row]:
    yield from read_hub_rows(uri)  # what that raises before the first row is a fault like any other


if __name__ == "__main__":
    sys.exit(main())

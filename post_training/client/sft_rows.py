"""Rows as callers hold them: lists, data sets, iterators, functions, files; each row checked before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from apis.errors import DataInvalid
from post_training.client.sft_arrays import encode_tokens, encode_weights
from post_training.data.local_files import read_local
from post_training.data.records import encode_row, json_type

Row = dict[str, Any]
Rows: TypeAlias = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]] | str | PathLike[str]
"""What `fit` takes: any iterable of rows, a function that gives one, or the path of a file."""

_TOKEN_FIELDS = {"tokens", "labels", "weights"}


def as_batch(rows: Sequence[Row]) -> dict[str, Any]:
    """The field of a request that holds these rows: as they are, or as token ids where they are such."""
    if all("tokens" in row and row.keys() <= _TOKEN_FIELDS for row in rows):
        return {"sequences": [as_sequence(row) for row in rows]}
    return {"rows": list(rows)}


def as_sequence(row: Row) -> Row:
    """`tokens` with `labels` or `weights`, each [n] as a list or array, in the form that takes the fewest bytes."""
    encode = {"tokens": encode_tokens, "labels": encode_tokens, "weights": encode_weights}
    return {name: encode[name](values) for name, values in row.items() if values is not None}


def located(error: DataInvalid, numbers: Sequence[int]) -> DataInvalid:
    """A server's error about a row of a batch as one about a row of the data, where the batch's rows have `numbers`."""
    if error.row is None or not 0 <= error.row < len(numbers):
        return error
    number = numbers[error.row]
    message = error.message.removeprefix(f"row {error.row}")
    if message != error.message:
        error.message = f"row {number}{message}"
    error.row = number
    return error


def read_file(path: Path) -> list[Row]:
    """Every row of a file. Raises as `read_local` does."""
    return read_local(path)[0]


def encoded(row: Any, number: int) -> tuple[Row, bytes]:
    """A row, and its JSON. Raises DataInvalid where it is no mapping or has no JSON form."""
    if not isinstance(row, Mapping):
        raise DataInvalid(f"must be a mapping of column to value, found {json_type(row)}", row=number)
    plain = dict(row)
    return plain, encode_row(plain, number)


def row_source(data: Rows) -> Any:
    """A Sequence, an iterable, an iterator, or a function that gives an iterable."""
    if isinstance(data, str | PathLike):
        return read_file(Path(data))
    if isinstance(data, Mapping):
        raise DataInvalid("a mapping is one row, or columns: pass a list of rows")
    if isinstance(data, Sequence):
        return data
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _Picked(data)
    if callable(data) or isinstance(data, Iterable):
        return data
    raise DataInvalid(f"rows must be iterable, found {type(data).__name__}")


class _Picked(Sequence[Any]):
    """What has a length and gives its items by number, as a `datasets.Dataset`, but is not declared a Sequence."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._data[index]
        except (KeyError, TypeError) as error:
            raise DataInvalid(
                f"a {type(self._data).__name__} does not give its rows by their number; pass a list of rows"
            ) from error

    def pick(self, numbers: list[int]) -> Sequence[Any]:
        many = getattr(self._data, "__getitems__", None)
        return many(numbers) if many is not None else [self[number] for number in numbers]


def pick(rows: Sequence[Any], numbers: list[int]) -> Sequence[Any]:
    return rows.pick(numbers) if isinstance(rows, _Picked) else [rows[number] for number in numbers]

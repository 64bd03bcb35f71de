"""Bytes to rows: JSON lines, JSON arrays and CSV, streamed, each fault named by its row number."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Literal, NoReturn

from apis.common import MAX_NESTING, check_nesting
from apis.datasets.models import Row
from apis.errors import DataInvalid

RecordKind = Literal["jsonl", "json", "csv", "sniff"]
MAX_ARRAY_BYTES = 64 * 2**20
# A row is read as a whole, while nothing else of the process moves: of this size for a tenth of a second.
MAX_ROW_BYTES = 16 * 2**20

_BLANK = b" \t\r\n"


def parse_records(stream: BinaryIO, kind: RecordKind) -> Iterator[Row]:
    """Read rows from a seekable stream of UTF-8, a byte order mark allowed.

    `json` takes an array of objects, or JSON lines under that name; `sniff` tells JSON from CSV by the first character.
    An array cannot be read row by row, so one of more than `MAX_ARRAY_BYTES` is refused, as is a row of more than
    `MAX_ROW_BYTES`.

    Raises:
        DataInvalid: with the 0-based row and the reason.
    """
    if kind == "jsonl":
        return parse_json_lines(_lines(stream))
    first = _first_character(stream)
    if kind == "csv" or (kind == "sniff" and first not in b"{["):
        return _csv(stream)
    return _json_array(stream) if first == b"[" else parse_json_lines(_lines(stream))


def encode_rows(rows: Iterable[Row]) -> bytes:
    """Rows as JSON lines, exact and in order.

    Raises:
        DataInvalid: a value has no JSON form (NaN, infinity, an unpaired surrogate).
    """
    return b"".join(encode_row(row, number) for number, row in enumerate(rows))


def decode_value(text: str) -> Any:
    """`json.loads`, strict: NaN and infinity are not JSON, and a string must have a UTF-8 form.

    Raises:
        ValueError: with the reason and the column.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    _check_nesting(text, value)
    # An escaped lone surrogate parses, and then breaks whatever writes it: tokenizers, JSON answers, files.
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _check_nesting(text: str, value: Any) -> None:
    # No value is deeper than it has brackets, and few texts have many.
    if text.count("[") + text.count("{") > MAX_NESTING:
        check_nesting(value)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds an unpaired surrogate (\\ud800 to \\udfff), which is not text") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON: use null or a number")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{_shortened(digits)} is too large for a number: write it as a string")
    return value


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads no more than some thousands of digits
        raise ValueError(f"{_shortened(digits)} is too long for a number: write it as a string") from None


def _shortened(digits: str) -> str:
    return digits if len(digits) <= 20 else f"{digits[:20]}… ({len(digits)} characters)"


def encode_row(row: Row, number: int) -> bytes:
    """One row as a line of JSON; see `encode_rows`."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        _check_nesting(text, row)
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        raise DataInvalid("holds an unpaired surrogate (\\ud800 to \\udfff), which is not text", row=number) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataInvalid(f"has no JSON form: {error}", row=number) from None


def _first_character(stream: BinaryIO) -> bytes:
    head = stream.read(4096).removeprefix(codecs.BOM_UTF8)
    stream.seek(0)
    return head.lstrip(_BLANK)[:1]


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise too_long(number)
        yield line
        number += 1


def too_long(number: int) -> DataInvalid:
    return DataInvalid(f"is longer than {MAX_ROW_BYTES} bytes: shorten it, or make several of it", row=number)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    blank: int | None = None
    for number, line in enumerate(lines):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
        if not line.strip(_BLANK):
            blank = number if blank is None else blank
            continue
        if blank is not None:
            raise DataInvalid("this line is blank; delete it", row=blank)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def parse_json_lines(lines: Iterable[bytes]) -> Iterator[Row]:
    """Rows of lines split on \\n only (as binary files are): U+2028, U+2029 and U+0085 are data.

    Raises:
        DataInvalid: with the 0-based row and the reason.
    """
    for number, line in _numbered(lines):
        yield _object(_decode(line, number), number)


def _decode(line: bytes, number: int | None) -> Any:
    try:
        return decode_value(line.decode())
    except UnicodeDecodeError as error:
        raise DataInvalid(
            f"is not UTF-8 (byte {error.start} of the line); save the file as UTF-8", row=number
        ) from None
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if number is not None else f"line {error.lineno}, column {error.colno}"
        raise DataInvalid(f"is not valid JSON: {error.msg} at {where}", row=number) from None
    except ValueError as error:
        raise DataInvalid(str(error), row=number) from None


def _object(value: Any, number: int) -> Row:
    if not isinstance(value, dict):
        raise DataInvalid(f"must be a JSON object, found {json_type(value)}", row=number)
    return value


def json_type(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _json_array(stream: BinaryIO) -> Iterator[Row]:
    content = stream.read(MAX_ARRAY_BYTES + 1)
    if len(content) > MAX_ARRAY_BYTES:
        raise DataInvalid(f"a JSON array of more than {MAX_ARRAY_BYTES} bytes is not read: save the rows as JSON lines")
    values = _decode(content.removeprefix(codecs.BOM_UTF8), None)
    for number, value in enumerate(values):
        yield _object(value, number)


def _csv(stream: BinaryIO) -> Iterator[Row]:
    # The default limit of 131,072 characters a field is below what a long conversation needs.
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    number = -1
    try:
        cells = csv.reader(_text_lines(text), strict=True)
        header = _csv_header(next(cells, []))
        for record in cells:
            if not record:
                continue
            number += 1
            yield _csv_row(header, record, number)
    except UnicodeDecodeError:
        raise DataInvalid("is not UTF-8; save the file as UTF-8", row=number + 1) from None
    except csv.Error as error:
        raise DataInvalid(f"is not valid CSV: {error}", row=number + 1) from None
    finally:
        text.detach()


def _text_lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise csv.Error(f"a line is longer than {MAX_ROW_BYTES} characters")
        yield line


def _csv_header(header: list[str]) -> list[str]:
    for name in header:
        if not name.strip():
            raise DataInvalid("the CSV header has a column without a name; name every column")
        if header.count(name) > 1:
            raise DataInvalid(f"the CSV header names {name!r} twice; column names must differ")
    return header


def _csv_row(header: list[str], record: list[str], number: int) -> Row:
    if len(record) != len(header):
        raise DataInvalid(
            f"has {len(record)} fields, the header has {len(header)}; quote fields that hold commas or line breaks",
            row=number,
        )
    return dict(zip(header, record, strict=True))

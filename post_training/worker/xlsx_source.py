"""Rows of .xlsx workbooks: the one file that imports `openpyxl`.

`post_training.data.reader_process` runs it as a process of its own, with little memory:

    python -m post_training.worker.xlsx_source --file=0 < rows.xlsx

It prints the rows as JSON lines. On a fault the last line of stderr is an error object, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from typing import Any, BinaryIO

from apis.datasets.models import Row
from apis.errors import DataInvalid, PostgradError
from post_training.data.records import MAX_ROW_BYTES, encode_row, too_long
from post_training.worker.printing import print_rows

_PARAM = "source.uri"
_UNCOMPUTED = "a formula without its value: open and save the file in a spreadsheet program"
# A workbook is a zip archive: a small one may unpack to anything.
MAX_UNPACKED_BYTES = 2**30
MAX_PARTS = 10_000
MEMORY_BYTES = 4 * 2**30
# What spreadsheet programs have at most; in a file the number of a line may be any.
MAX_LINES = 2**20

Cells = Sequence[Any]


def read_xlsx(stream: BinaryIO) -> Iterator[Row]:
    """Stream the rows of a workbook's first sheet with cells, whose first line that is not blank names the columns.

    Sheets that are a chart are passed over. An empty cell is null, a date ISO 8601 text, a formula the value that the
    file holds for it. Blank lines are left out.

    Raises:
        DataInvalid: not a workbook, a cell without a JSON form, or one that the header does not name.
    """
    _check_archive(stream)
    number = 0
    try:
        for row in _rows(stream):
            # What has no JSON form is named here, whoever reads.
            if len(encode_row(row, number)) > MAX_ROW_BYTES:
                raise too_long(number)
            yield row
            number += 1
    except PostgradError:
        raise
    except MemoryError:
        raise DataInvalid("the workbook takes too much memory: save its rows as CSV", param=_PARAM) from None
    except Exception as error:  # openpyxl and what it reads XML with raise errors of any kind for what they can't read
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataInvalid(f"the workbook cannot be read after {number} rows: {reason}", param=_PARAM) from error


def _check_archive(stream: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(stream) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # the last: a zip of a later version
        raise DataInvalid(
            "the file is not an .xlsx workbook (an older .xls, or protected by a password?): save it as .xlsx or CSV",
            param=_PARAM,
        ) from None
    # zipfile unpacks no more of a part than it is declared to hold.
    unpacked = sum(part.file_size for part in parts)
    if unpacked > MAX_UNPACKED_BYTES or len(parts) > MAX_PARTS:
        raise DataInvalid(
            f"the workbook unpacks to {unpacked} bytes in {len(parts)} parts; at most {MAX_UNPACKED_BYTES} in "
            f"{MAX_PARTS} are read: save its rows as CSV",
            param=_PARAM,
        )


def _rows(stream: BinaryIO) -> Iterator[Row]:
    formulas = _Formulas(lambda: _lines(stream, values=False))
    header: list[str] | None = None
    number = 0
    for line, cells in enumerate(_lines(stream, values=True)):
        if line >= MAX_LINES:
            raise DataInvalid(f"the sheet has a line beyond {MAX_LINES}", param=_PARAM)
        if all(cell.value is None for cell in cells) and not formulas.any_at(line, cells):
            continue
        if header is None:
            header = _header([cell.value for cell in cells], lambda column, line=line: formulas.at(line, column))
        else:
            yield _row(header, cells, number, lambda column, line=line: formulas.at(line, column))
            number += 1


def _lines(stream: BinaryIO, *, values: bool) -> Iterator[Cells]:
    """The lines of the first sheet; with `values` off, a formula's cell holds the formula."""
    book = _book(stream, values)
    if not book.worksheets:
        raise DataInvalid(
            "the workbook has no sheet with cells, only charts: put the rows in a sheet of their own", param=_PARAM
        )
    sheet: Any = book.worksheets[0]
    sheet.reset_dimensions()  # the file may claim any size
    return sheet.iter_rows()


def _book(stream: BinaryIO, values: bool) -> Any:
    # Imported here: it takes a moment, and a server never needs it.
    from openpyxl.chartsheet import Chartsheet
    from openpyxl.reader.excel import ExcelReader

    class Reader(ExcelReader):
        def read_chartsheet(self, sheet: Any, rel: Any) -> None:
            """Take its place among the sheets, by which names are given to them, and none of its charts."""
            book: Any = self.wb
            chart: Any = Chartsheet()
            chart._parent, chart.title = book, sheet.name
            book._add_sheet(chart)

    reader = Reader(stream, read_only=True, data_only=values, keep_links=False)
    reader.read()
    return reader.wb


class _Formulas:
    """Where formulas stand. The sheet is read a second time for it, and only where a cell without a value asks."""

    def __init__(self, lines: Callable[[], Iterator[Cells]]) -> None:
        self._open = lines
        self._lines: Iterator[Cells] | None = None
        self._line, self._cells = -1, ()

    def at(self, line: int, column: int) -> bool:
        self._lines = self._lines or self._open()
        while self._line < line:
            self._cells = next(self._lines, ())
            self._line += 1
        return column < len(self._cells) and self._cells[column].data_type == "f"

    def any_at(self, line: int, cells: Cells) -> bool:
        return any(self.at(line, column) for column in range(len(cells)))


def _header(values: list[Any], is_formula: Callable[[int], bool]) -> list[str]:
    for column, name in enumerate(values):
        if name is None and is_formula(column):
            raise DataInvalid(f"the name of column {_letters(column)} is {_UNCOMPUTED}", param=_PARAM)
    while values and values[-1] is None:
        values.pop()
    for column, name in enumerate(values):
        if not isinstance(name, str) or not name.strip():
            raise DataInvalid(f"column {_letters(column)} has no name in the sheet's first line; name it", param=_PARAM)
        if values.count(name) > 1:
            raise DataInvalid(f"the sheet's first line names {name!r} twice; names must differ", param=_PARAM)
    return values


def _row(header: list[str], cells: Cells, number: int, is_formula: Callable[[int], bool]) -> Row:
    for column in range(len(header), len(cells)):
        if cells[column].value is not None:
            raise DataInvalid(
                f"has a value in column {_letters(column)}, which has no name in the sheet's first line", row=number
            )
    row: Row = dict.fromkeys(header)
    for column, (name, cell) in enumerate(zip(header, cells, strict=False)):
        if cell.data_type == "e":
            raise DataInvalid(f"holds the error {cell.value}", row=number, pointer=f"/{name}")
        if cell.value is None and is_formula(column):
            raise DataInvalid(f"holds {_UNCOMPUTED}", row=number, pointer=f"/{name}")
        row[name] = _json_value(cell)
    return row


def _json_value(cell: Any) -> Any:
    value = cell.value
    if isinstance(value, datetime):
        # Every date comes with a time; the cell's format says whether it means one.
        from openpyxl.styles.numbers import is_datetime

        return (value.date() if is_datetime(cell.number_format) == "date" else value).isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, timedelta) else value


def _letters(column: int) -> str:
    """The name of a column counted from 0: A, …, Z, AA, …"""
    letters, rest = "", column + 1
    while rest:
        rest, digit = divmod(rest - 1, 26)
        letters = chr(ord("A") + digit) + letters
    return letters


def main(arguments: list[str] | None = None) -> int:
    """Print every row; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Print the rows of an .xlsx workbook as JSON lines")
    parser.add_argument("--file", type=int, required=True, metavar="FD", help="number of an open, seekable file")
    given = parser.parse_args(arguments)
    with suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")  # of openpyxl's, of features that say nothing of values
    with os.fdopen(given.file, "rb") as stream:
        return print_rows(read_xlsx(stream))


if __name__ == "__main__":
    sys.exit(main())

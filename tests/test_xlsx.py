"""Workbooks: their rows, exactly, and what no workbook can make the reader do."""

from __future__ import annotations

import io
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from datetime import date, datetime, timedelta
from datetime import time as clock
from pathlib import Path
from typing import Any

import openpyxl
import openpyxl.chart
import pytest

from apis.datasets.models import URIDataSource
from apis.errors import DataInvalid
from post_training.data.sources import SourcePolicy, open_rows
from post_training.worker import xlsx_source
from post_training.worker.printing import ERROR_EXIT_CODE
from post_training.worker.xlsx_source import read_xlsx

SHEET = '<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">{}</worksheet>'
TEXT = '<c r="{}" t="inlineStr"><is><t>{}</t></is></c>'
HEAD = '<row r="1">' + TEXT.format("A1", "a") + TEXT.format("B1", "b") + "</row>"


def saved(*lines: list[Any], **formats: str) -> bytes:
    """A workbook that openpyxl writes; `formats` by cell."""
    book = openpyxl.Workbook()
    sheet: Any = book.active
    for line in lines:
        sheet.append(line)
    for cell, number_format in formats.items():
        sheet[cell].number_format = number_format
    return _bytes(book)


def _bytes(book: openpyxl.Workbook) -> bytes:
    content = io.BytesIO()
    book.save(content)
    return content.getvalue()


def with_part(name: str, text: str | bytes, content: bytes | None = None) -> bytes:
    """A workbook with one part of its archive replaced, as another program, or an attacker, may write it."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content or saved(["a", "b"], [1, 2]))) as before,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for part in before.namelist():
            after.writestr(part, text if part == name else before.read(part))
    return made.getvalue()


def without_part(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(made, "w") as after:
        for part in before.namelist():
            if part != name:
                after.writestr(part, before.read(part))
    return made.getvalue()


def with_strings(items: str, before: str = "") -> bytes:
    """A workbook with a table of shared strings, where openpyxl writes each string in its cell; B2 is the first."""
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    made = io.BytesIO(with_sheet('<row r="2"><c r="B2" t="s"><v>0</v></c></row>'))
    with zipfile.ZipFile(made) as archive:
        types = archive.read("[Content_Types].xml").decode()
    listed = types.replace("</Types>", f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>')
    made = io.BytesIO(with_part("[Content_Types].xml", listed, made.getvalue()))
    with zipfile.ZipFile(made, "a", zipfile.ZIP_DEFLATED) as archive:
        namespace = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
        archive.writestr("xl/sharedStrings.xml", f'{before}<sst xmlns="{namespace}">{items}</sst>')
    return made.getvalue()


def with_sheet(rows: str) -> bytes:
    return with_part("xl/worksheets/sheet1.xml", SHEET.format(f"<sheetData>{HEAD}{rows}</sheetData>"))


def read(content: bytes) -> list[dict[str, Any]]:
    return list(read_xlsx(io.BytesIO(content)))


def refusal(content: bytes) -> str:
    with pytest.raises(DataInvalid) as caught:
        read(content)
    return caught.value.message


def test_values_keep_their_json_types():
    content = saved(
        ["text", "whole", "half", "flag", "none"], ["ä\n=1\u2028", 3, 0.5, True, None], ["", -7, 1e300, False]
    )
    assert read(content) == [
        {"text": "ä\n=1\u2028", "whole": 3, "half": 0.5, "flag": True, "none": None},
        {"text": None, "whole": -7, "half": 1e300, "flag": False, "none": None},
    ]


def test_dates_are_iso_text():
    moment = datetime(2024, 2, 29, 13, 5, 7)
    content = saved(
        ["moment", "day", "midnight", "hour", "length"],
        [moment, date(2024, 2, 29), datetime(2024, 2, 29), clock(13, 5), timedelta(hours=30)],
        C2="yyyy-mm-dd hh:mm",
    )
    row = {"moment": "2024-02-29T13:05:07", "day": "2024-02-29", "midnight": "2024-02-29T00:00:00"}
    assert read(content) == [{**row, "hour": "13:05:00", "length": "1 day, 6:00:00"}]


def test_shared_strings_are_read():
    assert read(with_strings("<si><t>first</t></si>")) == [{"a": None, "b": "first"}]


def test_only_the_first_sheet_is_read_and_blank_lines_are_left_out():
    book = openpyxl.Workbook()
    first: Any = book.active
    book.create_sheet("second").append(["x"])
    for line, values in {3: ("a", "b", None), 5: (1, None, None), 9: (None, 2, None)}.items():
        for column, value in enumerate(values, 1):
            first.cell(line, column, value)
    first.cell(12, 1).number_format = "0.00"  # a format alone makes no row
    assert read(_bytes(book)) == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def with_chart_first(*, rows: bool) -> bytes:
    """A workbook whose first sheet is a chart, and whose names belong to sheets by their number."""
    book = openpyxl.Workbook()
    sheet: Any = book.active
    for line in (["a", "b"], [1, 2]):
        sheet.append(line)
    sheet.print_title_rows = "1:1"
    chart = openpyxl.chart.BarChart()
    chart.add_data(openpyxl.chart.Reference(sheet, min_col=1, min_row=1, max_row=2), titles_from_data=True)
    book.create_chartsheet("chart", 0).add_chart(chart)
    if not rows:
        book.remove(sheet)
    return _bytes(book)


def test_sheets_that_are_charts_are_passed_over():
    assert read(with_chart_first(rows=True)) == [{"a": 1, "b": 2}]
    drawn = "xl/chartsheets/_rels/sheet1.xml.rels"
    assert read(with_part(drawn, "<a/>", with_chart_first(rows=True))) == [{"a": 1, "b": 2}]
    assert read(without_part(drawn, with_chart_first(rows=True))) == [{"a": 1, "b": 2}]


def test_a_workbook_of_charts_alone_is_said_to_be_one():
    assert "no sheet with cells, only charts: put the rows in a sheet" in refusal(with_chart_first(rows=False))


def test_a_formula_is_the_value_that_the_file_holds_for_it():
    assert read(
        with_sheet('<row r="2"><c r="A2"><f>1+1</f><v>2</v></c><c r="B2" t="str"><f>"x"</f><v>x</v></c></row>')
    ) == [{"a": 2, "b": "x"}]


def test_a_formula_without_a_value_is_named():
    content = saved(["a", "b"], [1, None], [2, "=A2+1"])
    assert refusal(content).startswith("row 1, /b: holds a formula without its value: open and save the file")
    alone = saved(["a"], ["=1+1"])
    assert refusal(alone).startswith("row 0, /a: holds a formula")
    for names, column in ((['=A5&"a"', "b"], "A"), (["a", '=A5&"b"'], "B"), (['=A5&"a"'], "A")):
        assert refusal(saved(names, ["x"])).startswith(f"the name of column {column} is a formula without its value")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_sheet('<row r="2"><c r="B2" t="e"><v>#DIV/0!</v></c></row>'), "row 0, /b: holds the error #DIV/0!"),
        (saved(["a", None, "c"], [1, 2, 3]), "column B has no name"),
        (saved(["a", 7], [1, 2]), "column B has no name"),
        (saved(["a", " "], [1, 2]), "column B has no name"),
        (saved(["a", "a"], [1, 2]), "names 'a' twice"),
        (saved(["a"], [1], [1, None, 3]), "row 1: has a value in column C, which has no name"),
        (with_sheet('<row r="2"><c r="A2"><v>1E999</v></c></row>'), "row 0: has no JSON form"),
        (saved(["a"], ["x" * 32_000]), ""),
    ],
)
def test_a_cell_that_cannot_be_used_is_named(content: bytes, message: str):
    if message:
        assert message in refusal(content)
    else:
        assert len(read(content)[0]["a"]) == 32_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,b\n1,2\n",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504),  # .xls, and any workbook under a password
        saved(["a"], [1])[:-100],
    ],
)
def test_what_is_no_workbook_is_said_to_be_none(content: bytes):
    assert "not an .xlsx workbook" in refusal(content)


@pytest.mark.parametrize(
    "part", ["xl/worksheets/sheet1.xml", "xl/workbook.xml", "[Content_Types].xml", "xl/styles.xml"]
)
@pytest.mark.parametrize("text", ["", "<a", "<a/>", "\0"])
def test_a_broken_part_is_the_datas_fault(part: str, text: str):
    with suppress(DataInvalid):  # any other error is a failure
        assert read(with_part(part, text)) in ([], [{"a": 1, "b": 2}])


def test_a_part_that_is_not_what_its_checksum_says_is_the_datas_fault():
    content = bytearray(saved(["a"], [1]))
    at = content.index(b"xl/worksheets/sheet1.xml") + 60
    content[at : at + 20] = bytes(20)
    assert "the workbook cannot be read" in refusal(bytes(content))


# -- bombs ------------------------------------------------------------------------------------------------------------


def declared(content: bytes, name: str, size: int) -> bytes:
    """The archive with another unpacked size of a part in its directory."""
    changed = bytearray(content)
    entry = changed.rindex(name.encode()) - 46
    assert changed[entry : entry + 4] == b"PK\x01\x02"
    changed[entry + 24 : entry + 28] = size.to_bytes(4, "little")
    return bytes(changed)


def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_is_unpacked():
    began = time.monotonic()
    assert "unpacks to" in refusal(declared(saved(["a"], [1]), "xl/worksheets/sheet1.xml", 2**31))
    assert time.monotonic() - began < 0.5


def test_a_part_gives_no_more_than_it_is_declared_to_hold(monkeypatch: pytest.MonkeyPatch):
    bomb = with_part("xl/worksheets/sheet1.xml", SHEET.format("<sheetData>" + " " * 5_000_000 + "</sheetData>"))
    assert len(bomb) < 20_000
    assert "the workbook cannot be read" in refusal(declared(bomb, "xl/worksheets/sheet1.xml", 1000))
    monkeypatch.setattr(xlsx_source, "MAX_UNPACKED_BYTES", 1_000_000)
    assert "unpacks to 50" in refusal(bomb)


def test_an_archive_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(xlsx_source, "MAX_PARTS", 5)
    assert "parts; at most" in refusal(saved(["a"], [1]))


@pytest.mark.parametrize("number", ["1048577", "99999999999"])
def test_a_line_of_an_impossible_number_is_refused(number: str):
    began = time.monotonic()
    assert "line beyond 1048576" in refusal(with_sheet(f'<row r="{number}"><c r="A{number}"><v>1</v></c></row>'))
    assert time.monotonic() - began < 20


def test_a_sheet_is_as_large_as_its_rows_whatever_it_claims():
    claims = '<dimension ref="A1:XFD1048576"/>'
    rows = f"<sheetData>{HEAD}<row><c><v>1</v></c></row></sheetData>"
    content = with_part("xl/worksheets/sheet1.xml", SHEET.format(claims + rows))
    assert read(content) == [{"a": 1, "b": None}]


ENTITIES = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
LAUGHS = f'<!DOCTYPE x [<!ENTITY e0 "{"ha" * 100}">{ENTITIES}]>'


@pytest.mark.parametrize(
    "content",
    [
        with_part("xl/worksheets/sheet1.xml", LAUGHS + SHEET.format(f"<sheetData>{HEAD}</sheetData>&e9;")),
        with_part("xl/workbook.xml", LAUGHS + "<workbook>&e9;</workbook>"),
        with_strings("<si><t>&e9;</t></si>", LAUGHS),
    ],
    ids=["sheet", "workbook", "strings"],
)
def test_entities_do_not_grow(content: bytes):
    began = time.monotonic()
    rows: list[Any] = []
    with suppress(DataInvalid):
        rows = read(content)
    assert sum(len(str(row)) for row in rows) < 10_000
    assert time.monotonic() - began < 10


def test_entities_do_not_name_files(tmp_path: Path):
    (tmp_path / "secret").write_text("hunter2")
    outside = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{tmp_path}/secret">]>'
    content = with_part(
        "xl/worksheets/sheet1.xml",
        outside + SHEET.format(f'<sheetData>{HEAD}<row r="2">{TEXT.format("A2", "&e;")}</row></sheetData>'),
    )
    said: Any = None
    try:
        said = read(content)
    except DataInvalid as error:
        said = error.message
    assert "hunter2" not in str(said)


# -- in its process ---------------------------------------------------------------------------------------------------


def from_file(folder: Path, content: bytes) -> list[dict[str, Any]]:
    (folder / "rows.xlsx").write_bytes(content)
    return list(open_rows(URIDataSource(uri="rows.xlsx"), SourcePolicy(allowed_roots=[str(folder)])))


def test_a_workbook_under_an_allowed_root_is_a_data_set(tmp_path: Path):
    rows = [[f"question {n}", f"answer {n}"] for n in range(3000)]
    read_back = from_file(tmp_path, saved(["prompt", "completion"], *rows))
    assert read_back == [{"prompt": prompt, "completion": completion} for prompt, completion in rows]


def test_a_fault_names_its_row_across_the_process(tmp_path: Path):
    with pytest.raises(DataInvalid, match="row 1: has a value in column B"):
        from_file(tmp_path, saved(["a"], [1], [1, 2]))
    with pytest.raises(DataInvalid, match=r"not an \.xlsx workbook"):
        from_file(tmp_path, b"no workbook")
    with pytest.raises(DataInvalid, match="no rows"):
        from_file(tmp_path, saved(["a"]))


def test_a_workbook_that_takes_too_much_memory_is_refused(tmp_path: Path):
    (tmp_path / "a.xlsx").write_bytes(with_strings("".join(f"<si><t>{n} {'x' * 30_000}</t></si>" for n in range(5000))))
    program = (
        "import sys; from post_training.worker import xlsx_source as x\n"
        "import openpyxl, resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "x.MEMORY_BYTES = used + 2**24\n"
        "sys.exit(x.main(['--file', '0']))"
    )
    with (tmp_path / "a.xlsx").open("rb") as stream:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=stream, capture_output=True, text=True, check=False
        )
    assert done.returncode == ERROR_EXIT_CODE
    assert "memory" in done.stderr


def test_a_workbook_changed_is_another_data_set(tmp_path: Path):
    (tmp_path / "a.xlsx").write_bytes(saved(["a"], [1]))
    reader = open_rows(URIDataSource(uri="a.xlsx"), SourcePolicy(allowed_roots=[str(tmp_path)]))
    before = reader.digest()
    (tmp_path / "a.xlsx").write_bytes(saved(["a"], [2]))
    assert before != reader.digest()

"""Workbooks and Parquet files inside `data:` URIs, under every type that a client gives them."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow
import pyarrow.parquet
import pytest

from apis.datasets.models import URIDataSource
from apis.errors import DataInvalid, PostgradError
from post_training.catalog import datasets
from post_training.data.sources import SourcePolicy, kind_of_web_file, open_rows
from tests.dialect_server import DialectServer, dialects

__all__ = ["dialects"]

ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]
CSV = b"prompt,completion\none,eins\ntwo,zwei\n"
XLSX = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"


def workbook() -> bytes:
    book, content = openpyxl.Workbook(), io.BytesIO()
    sheet: Any = book.active
    for line in (list(ROWS[0]), *(list(row.values()) for row in ROWS)):
        sheet.append(line)
    book.save(content)
    return content.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content)
    return content.getvalue()


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read(uri: str) -> list[dict[str, Any]]:
    return list(open_rows(URIDataSource(uri=uri), SourcePolicy()))


@pytest.mark.parametrize("kind", [XLSX, "application/vnd.ms-excel", "None", "", "application/octet-stream"])
def test_a_workbook_is_read_whatever_its_type_is_said_to_be(kind: str):
    assert read(data_uri(kind, workbook())) == ROWS


@pytest.mark.parametrize(
    "kind", ["application/vnd.apache.parquet", "application/x-parquet", "None", "", "application/octet-stream"]
)
def test_a_parquet_file_is_read_whatever_its_type_is_said_to_be(kind: str):
    assert read(data_uri(kind, parquet(ROWS))) == ROWS


@pytest.mark.parametrize("kind", ["application/vnd.ms-excel", "text/csv", "None"])
def test_csv_under_a_spreadsheets_type_is_csv(kind: str):
    assert read(data_uri(kind, CSV)) == ROWS


def test_an_older_workbook_is_told_to_be_saved_anew():
    with pytest.raises(DataInvalid, match=r"older \.xls.*save it as \.xlsx or CSV"):
        read(data_uri("application/vnd.ms-excel", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512)))


def test_text_under_a_workbooks_own_type_is_refused():
    with pytest.raises(DataInvalid, match=r"not an \.xlsx workbook"):
        read(data_uri(XLSX, CSV))


def test_the_same_file_has_the_same_digest_and_another_one_another():
    first, again, other = (
        open_rows(URIDataSource(uri=data_uri("None", parquet(rows))), SourcePolicy()).digest()
        for rows in (ROWS, ROWS, ROWS[:1])
    )
    assert first == again != other


def test_a_workbook_is_read_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)  # an import of it here would fail
    assert read(data_uri("None", REAL_WORKBOOK)) == ROWS


REAL_WORKBOOK = workbook()


@pytest.mark.parametrize("kind", ["application/x-parquet", XLSX, "application/octet-stream"])
def test_what_a_url_gives_without_a_name_is_told_by_its_type(kind: str):
    expected = {"application/x-parquet": "parquet", XLSX: "xlsx"}.get(kind, "sniff")
    assert kind_of_web_file(["/download"], kind) == expected


@pytest.mark.parametrize("make", [workbook, lambda: parquet(ROWS)])
def test_every_generation_registers_it_and_reads_its_rows_back(dialects: DialectServer, make: Any):
    uri = data_uri("None", make())
    for path, body in (
        ("/v1/datasets", {"dataset_id": "packed", "source": {"uri": uri}}),
        ("/v1beta/datasets", {"dataset_id": "packed", "source": {"type": "uri", "uri": uri}}),
        ("/alpha/datasets/register", {"dataset_id": "packed", "url": {"uri": uri}, "dataset_schema": {}}),
    ):
        answer = dialects.http.post(path, json=body)
        assert answer.status_code in (200, 204), answer.text
        assert dialects.http.get("/v1/datasetio/iterrows/packed").json()["data"] == ROWS
        more = dialects.http.post("/v1beta/datasetio/append-rows/packed", json={"rows": ROWS[:1]})
        assert more.status_code == 204
        assert dialects.http.get("/v1/datasetio/iterrows/packed").json()["data"] == [*ROWS, ROWS[0]]
        assert dialects.http.delete("/v1/datasets/packed").status_code == 204


def test_a_small_file_that_unpacks_to_too_much_is_refused_and_leaves_nothing(
    dialects: DialectServer, monkeypatch: pytest.MonkeyPatch
):
    packed = parquet([{"prompt": "a" * 1000, "completion": "b"}] * 20_000)  # 20 MB of rows in some kilobytes
    assert len(packed) < 100_000
    monkeypatch.setattr(datasets, "MAX_UNPACKING", 0.1)  # of 64 MiB
    answer = dialects.http.post("/v1/datasets", json={"dataset_id": "bomb", "source": {"uri": data_uri("", packed)}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert dialects.http.get("/v1/datasets/bomb").status_code == 404


def test_the_reader_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    rows = iter(open_rows(URIDataSource(uri=data_uri("None", parquet(ROWS))), SourcePolicy()))
    assert next(rows) == ROWS[0]
    del rows
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PostgradError):
        read(data_uri("application/x-parquet", b"PAR1" + bytes(64)))
    assert list(tmp_path.iterdir()) == []

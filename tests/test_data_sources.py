"""Sources: what is read, exactly how, and what is refused."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.datasets.models import DataSource, RowsDataSource, URIDataSource
from apis.errors import DataInvalid, InvalidField, PostgradError, TooLarge, Unavailable
from post_training.data import reader_process
from post_training.data.records import encode_rows, parse_json_lines
from post_training.data.sources import SourcePolicy, open_rows
from post_training.worker.hf_sources import parse_hub_uri, read_hub_rows, read_rows

ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def read(uri: str, **policy: Any) -> list[dict[str, Any]]:
    return list(open_rows(URIDataSource(uri=uri), SourcePolicy(**policy)))


def read_file(folder: Path, name: str, content: bytes) -> list[dict[str, Any]]:
    (folder / name).write_bytes(content)
    return read(name, allowed_roots=[str(folder)])


def refusal(uri: str, **policy: Any) -> PostgradError:
    with pytest.raises(PostgradError) as caught:
        read(uri, **policy)
    return caught.value


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", JSONL),
        ("a.JSONL", JSONL.replace(b"\n", b"\r\n")),
        ("a.jsonl", JSONL.rstrip(b"\n")),
        ("a.jsonl", JSONL + b"\n  \n\r\n"),
        ("a.jsonl", b"\xef\xbb\xbf" + JSONL),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode()),
        ("a.json", JSONL),
        ("a.csv", b"prompt,completion\none,eins\ntwo,zwei\n"),
        ("a.csv", b'\xef\xbb\xbf"prompt",completion\r\none,"eins"\r\ntwo,zwei'),
    ],
)
def test_every_file_kind_gives_the_same_rows(tmp_path: Path, name: str, content: bytes):
    assert read_file(tmp_path, name, content) == ROWS


def test_unicode_line_separators_inside_strings_are_data(tmp_path: Path):
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf"
    content = json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n"
    assert read_file(tmp_path, "a.jsonl", content) == [{"prompt": text}]
    assert read_file(tmp_path, "a.csv", f"prompt\n{text}\n".encode()) == [{"prompt": text}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=4))
def test_rows_survive_being_stored_as_json_lines(rows: list[dict[str, Any]]):
    stored = encode_rows(rows)
    assert list(parse_json_lines(io.BytesIO(stored))) == rows
    assert [json.loads(line) for line in stored.split(b"\n")[:-1]] == rows


@given(
    st.lists(
        st.fixed_dictionaries({"a": st.text(st.characters(exclude_categories=["Cs", "Cc"])), "b": st.text("x,\"'\n")}),
        min_size=1,
        max_size=4,
    )
)
def test_csv_written_by_the_standard_writer_reads_back(rows: list[dict[str, str]]):
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, ["a", "b"], quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    uri = "data:text/csv;base64," + base64.b64encode(written.getvalue().encode()).decode()
    assert read(uri) == rows


@pytest.mark.parametrize(
    ("name", "content", "row", "reason"),
    [
        ("a.jsonl", JSONL + b'{"prompt": }\n', 2, "is not valid JSON: Expecting value at column 12"),
        ("a.jsonl", JSONL + b"\n" + JSONL, 2, "blank"),
        ("a.jsonl", JSONL + b"[1]\n", 2, "must be a JSON object, found an array"),
        ("a.jsonl", b'{"a": "\xff"}\n', 0, "is not UTF-8 (byte 7 of the line)"),
        ("a.jsonl", b'{"a": NaN}\n', 0, "NaN is not JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": [-1e999]}\n', 1, "-1e999 is too large for a number: write it as a string"),
        ("a.json", b'[{"a": 1e999}]', None, "1e999 is too large for a number"),
        ("a.jsonl", b'{"a": ' + b"7" * 5000 + b"}\n", 0, "77777777777777777777… (5000 characters) is too long"),
        ("a.jsonl", b'{"a": "\\ud800"}\n', 0, "unpaired surrogate"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", 0, "nested too deeply"),
        ("a.json", b'[{"a": 1}, 7]', 1, "must be a JSON object, found a number"),
        ("a.json", b'[{"a": 1},\n{"a": }]', None, "is not valid JSON: Expecting value at line 2, column 7"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", 1, "has 3 fields, the header has 2"),
        ("a.csv", b'a,b\n1,2\n"1,2\n', 1, "is not valid CSV"),
        ("a.csv", b"a,a\n1,2\n", None, "names 'a' twice"),
        ("a.csv", b"a,\n1,2\n", None, "a column without a name"),
        ("a.csv", b"a\n1\n\xff\n", None, "is not UTF-8"),
        ("a.jsonl", b"", None, "no rows"),
        ("a.jsonl", b"\n\n", None, "no rows"),
        ("a.json", b"[]", None, "no rows"),
        ("a.csv", b"a,b\n", None, "no rows"),
    ],
)
def test_a_bad_file_is_refused_with_row_and_reason(
    tmp_path: Path, name: str, content: bytes, row: int | None, reason: str
):
    with pytest.raises(DataInvalid) as caught:
        read_file(tmp_path, name, content)
    assert reason in caught.value.message
    if row is not None:
        assert caught.value.row == row


@pytest.mark.parametrize("media_type", ["application/jsonl", "application/x-ndjson", "None", "", "text/plain"])
def test_a_base64_data_uri_of_json_lines_reads_as_rows(media_type: str):
    assert read(f"data:{media_type};base64,{base64.b64encode(JSONL).decode()}") == ROWS


@pytest.mark.parametrize(
    "uri",
    [
        "data:text/csv,prompt,completion%0Aone,eins%0Atwo,zwei",
        "DATA:text/csv;charset=utf-8;base64," + base64.b64encode(b"prompt,completion\none,eins\ntwo,zwei").decode(),
        "data:application/json,%5B%7B%22prompt%22:%22one%22,%22completion%22:%22eins%22%7D,"
        "%7B%22prompt%22:%22two%22,%22completion%22:%22zwei%22%7D%5D",
        "data:None;base64," + base64.b64encode(json.dumps(ROWS).encode()).decode(),
        "data:None;base64," + base64.b64encode(b"prompt,completion\none,eins\ntwo,zwei").decode(),
    ],
)
def test_other_data_uris_read_as_rows(uri: str):
    assert read(uri) == ROWS


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("data:text/csv;base64", "no comma"),
        ("data:text/csv;base64,%%%", "not valid base64"),
        ("data:image/png;base64,AAAA", "'image/png' is not read: send text/csv"),
        ("http://127.0.0.1/a.jsonl", "not read over 'http'"),
        ("https://example.com/a.jsonl", "not read over 'https'"),
        ("s3://bucket/a.jsonl", "not read over 's3'"),
        ("lsfs://a.jsonl", "not read over 'lsfs'"),
        ("huggingface://datasets/org/name", "allow_hub: true"),
        ("file://host/a.jsonl", "names no host"),
        ("file://[/a.jsonl", "'file://[/a.jsonl' is not a URI"),
        ("a.arrow", "data files end in .csv, .json, .jsonl, .parquet, .xlsx"),
        ("a", "data files end in .csv, .json, .jsonl, .parquet, .xlsx"),
        ("a\0.jsonl", "NUL"),
    ],
)
def test_a_source_that_is_not_read_is_refused_by_name(tmp_path: Path, uri: str, reason: str):
    error = refusal(uri, allowed_roots=[str(tmp_path)])
    assert isinstance(error, InvalidField)
    assert error.param == "source.uri"
    assert reason in error.message


def test_a_hub_uri_that_is_no_uri_is_refused_by_name():
    assert "is not a URI" in refusal("huggingface://[datasets/a/b", allow_hub=True).message


def test_files_are_found_by_relative_path_absolute_path_and_file_uri(tmp_path: Path):
    second = tmp_path / "second root"
    second.mkdir()
    path = second / "a b.jsonl"
    path.write_bytes(JSONL)
    roots = [str(tmp_path / "absent"), str(second)]
    for uri in ("a b.jsonl", str(path), f"file://{path}", f"file://localhost{second}/a%20b.jsonl"):
        assert read(uri, allowed_roots=roots) == ROWS


def test_nothing_outside_the_allowed_roots_is_read(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "root2"
    root.mkdir()
    outside.mkdir()
    (outside / "secret.jsonl").write_bytes(JSONL)
    (root / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (root / "folder").symlink_to(outside)
    for uri in (
        str(outside / "secret.jsonl"),
        "../root2/secret.jsonl",
        f"file://{root}/../root2/secret.jsonl",
        f"file://{root}/%2e%2e/root2/secret.jsonl",
        "link.jsonl",
        "folder/secret.jsonl",
        "../root2/absent.jsonl",
    ):
        error = refusal(uri, allowed_roots=[str(root)])
        assert isinstance(error, InvalidField), uri
        assert "allowed_roots" in error.message
    assert isinstance(refusal(str(outside / "secret.jsonl"), allowed_roots=[]), InvalidField)


def test_a_file_that_cannot_be_read_is_an_error_without_server_paths(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for name in ("absent.jsonl", "pipe.jsonl", "folder.jsonl", "loop.jsonl", "n" * 300 + ".jsonl"):
        error = refusal(name, allowed_roots=[str(tmp_path)])
        assert isinstance(error, DataInvalid), name
        assert str(tmp_path) not in error.message


def test_inline_data_over_the_limit_is_refused_as_too_large():
    sources: list[DataSource] = [
        RowsDataSource(rows=[{"a": "x" * 100}]),
        URIDataSource(uri="data:text/plain;base64," + base64.b64encode(b"x" * 101).decode()),
        URIDataSource(uri="data:text/plain," + "x" * 101),
    ]
    for source in sources:
        with pytest.raises(TooLarge, match="over the limit of 100"):
            open_rows(source, SourcePolicy(max_inline_bytes=100))


def test_inline_rows_are_counted_and_measured():
    reader = open_rows(RowsDataSource(rows=[{"a": 1}, {"a": 2}]), SourcePolicy())
    assert list(reader) == list(reader) == [{"a": 1}, {"a": 2}]
    assert reader.count() == 2
    assert reader.size_bytes == len(b'{"a":1}\n{"a":2}\n')
    with pytest.raises(DataInvalid, match="no rows"):
        list(open_rows(RowsDataSource(rows=[]), SourcePolicy()))


def test_a_large_file_is_streamed_not_loaded(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(JSONL + b"this is no JSON\n")
    rows = iter(open_rows(URIDataSource(uri="a.jsonl"), SourcePolicy(allowed_roots=[str(tmp_path)])))
    assert [next(rows), next(rows)] == ROWS
    with pytest.raises(DataInvalid, match="row 2"):
        next(rows)


def test_a_json_array_too_large_to_read_at_once_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = json.dumps(ROWS).encode()
    monkeypatch.setattr("post_training.data.records.MAX_ARRAY_BYTES", len(content))
    assert read_file(tmp_path, "fits.json", content) == ROWS
    with pytest.raises(DataInvalid, match="save the rows as JSON lines"):
        read_file(tmp_path, "large.json", content + b" ")
    assert read_file(tmp_path, "lines.json", JSONL * 2) == ROWS * 2


def test_a_row_too_long_to_read_at_once_is_refused_by_its_number_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("post_training.data.records.MAX_ROW_BYTES", 100)
    long = b'{"a": "' + b"x" * 200 + b'"}\n'
    for name in ("a.jsonl", "a.json"):
        with pytest.raises(DataInvalid, match=r"row 2: is longer than 100 bytes: shorten it, or make several of it"):
            read_file(tmp_path, name, JSONL + long)
    for content in (b"a,b\n1,2\n" + b"x" * 200 + b",2\n", b'a,b\n1,2\n"' + b"x\n" * 100 + b'",2\n'):
        with pytest.raises(DataInvalid, match=r"row 1: is not valid CSV: .*(longer|larger) than"):
            read_file(tmp_path, "a.csv", content)
    assert read_file(tmp_path, "fits.jsonl", b'{"a": "' + b"x" * 90 + b'"}\n') == [{"a": "x" * 90}]


def test_a_row_too_deep_for_an_answer_is_refused(tmp_path: Path):
    for name, row in (("list", "[" * 300 + "]" * 300), ("object", '{"b":' * 300 + "1" + "}" * 300)):
        with pytest.raises(DataInvalid, match="row 1: is nested too deeply"):
            read_file(tmp_path, f"{name}.jsonl", f'{{"a": 1}}\n{{"a": {row}}}\n'.encode())
    with pytest.raises(DataInvalid, match=r"row 0: .* nested too deeply"):
        encode_rows([json.loads('{"a": ' + "[" * 300 + "]" * 300 + "}")])
    wide = {"a": [[1]] * 300}
    assert read_file(tmp_path, "wide.jsonl", json.dumps(wide).encode()) == [wide]


def test_a_snapshot_of_a_growing_rows_file_keeps_its_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(JSONL)
    policy = SourcePolicy(rows_file=str(path), rows_bytes=len(JSONL))
    path.write_bytes(JSONL + b'{"half": ')
    reader = open_rows(RowsDataSource(rows=[]), SourcePolicy.model_validate_json(policy.model_dump_json()))
    assert list(reader) == ROWS
    path.unlink()
    with pytest.raises(DataInvalid, match="unregistered"):
        open_rows(RowsDataSource(rows=[]), policy)


def test_the_hub_is_read_by_a_process_whose_refusal_arrives_as_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refusal("huggingface://datasets/org/name?data_files=/etc/passwd", allow_hub=True)
    assert isinstance(error, InvalidField)
    assert "'data_files' is not an option" in error.message


def hub_program(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have `code` run in place of the hub's reader, which would need the hub."""
    (folder / "stands_in_for_the_hub.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(reader_process, "READER_MODULE", "stands_in_for_the_hub")


HUB = "huggingface://datasets/org/name"


def test_a_hub_that_keeps_a_request_waiting_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_program(tmp_path, monkeypatch, """print('{"n": 0}', flush=True); import time; time.sleep(60)""")
    monkeypatch.setattr(reader_process, "READER_SECONDS", 2.0)
    rows = iter(open_rows(URIDataSource(uri=HUB), SourcePolicy(allow_hub=True)))
    assert next(rows) == {"n": 0}
    began = time.monotonic()
    with pytest.raises(Unavailable, match="took longer than 2 s"):
        next(rows)
    assert time.monotonic() - began < 10


def test_rows_of_the_hub_arrive_whole_whatever_the_pieces_and_get_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = """
        import json, sys
        assert sys.stdin.read() == ""
        assert sys.argv[1:] == ["--uri=huggingface://datasets/org/name"]
        for n in range(3000):
            print(json.dumps({"n": n, "long": "x" * (200_000 if n == 7 else 1)}))
    """
    hub_program(tmp_path, monkeypatch, code)
    rows = list(open_rows(URIDataSource(uri=HUB), SourcePolicy(allow_hub=True)))
    assert [row["n"] for row in rows] == list(range(3000))
    assert len(rows[7]["long"]) == 200_000


def test_a_reader_of_the_hub_that_breaks_off_inside_a_row_is_not_the_datas_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub_program(tmp_path, monkeypatch, """print('{"n": 0}\\n{"n', end="", flush=True); import os; os.abort()""")
    with pytest.raises(Unavailable, match="broke off"):
        list(open_rows(URIDataSource(uri=HUB), SourcePolicy(allow_hub=True)))


def test_the_hubs_reader_ends_with_the_process_that_wants_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub_program(tmp_path, monkeypatch, """
        import json, os, time
        print(json.dumps({"pid": os.getpid()}), flush=True)
        time.sleep(60)
    """)  # fmt: skip
    code = """
        import os, signal
        from apis.datasets.models import URIDataSource
        from post_training.data import reader_process, sources
        reader_process.READER_MODULE = "stands_in_for_the_hub"
        policy = sources.SourcePolicy(allow_hub=True)
        rows = iter(sources.open_rows(URIDataSource(uri="huggingface://datasets/org/name"), policy))
        print(next(rows)["pid"], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pid = int(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    deadline = time.monotonic() + 10
    while running(pid):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        # The third field; a process that ended and that nobody has asked about yet is a Z.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parquet(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_a_parquet_file_gives_its_rows_nested_values_and_all(tmp_path: Path):
    message = {"role": "user", "content": "a\u2028b"}
    rows = [{"messages": [message, {**message, "role": "assistant"}], "n": n, "score": 0.5} for n in range(1000)]
    parquet(tmp_path, rows, row_group_size=300)
    assert read("a.parquet", allowed_roots=[str(tmp_path)]) == rows


def test_the_parquet_file_that_was_checked_is_the_one_that_is_read(tmp_path: Path):
    path = parquet(tmp_path, ROWS)
    path.rename(tmp_path / "real.parquet")
    outside = tmp_path / "root"
    outside.mkdir()
    (outside / "link.parquet").symlink_to(tmp_path / "real.parquet")
    assert "allowed_roots" in refusal("link.parquet", allowed_roots=[str(outside)]).message
    assert read("real.parquet", allowed_roots=[str(tmp_path)]) == ROWS


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff", "row 1: has no JSON form: Object of type bytes"),
        (datetime(2024, 2, 29), "row 1: has no JSON form: Object of type datetime"),
        (math.nan, "row 1: has no JSON form: Out of range float"),
    ],
)
def test_a_parquet_value_without_a_json_form_names_its_row(tmp_path: Path, value: object, reason: str):
    parquet(tmp_path, [{"a": None}, {"a": value}])
    error = refusal("a.parquet", allowed_roots=[str(tmp_path)])
    assert isinstance(error, DataInvalid)
    assert reason in error.message


def test_a_parquet_value_that_cannot_be_read_names_its_row_and_column(tmp_path: Path):
    torn = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, pyarrow.array([b"ok", b"\xff\xfe"], pyarrow.binary()).buffers()
    )
    late = pyarrow.array([0, 2**60], pyarrow.timestamp("us"))  # far beyond the year 9999
    for column in (torn, late):
        pyarrow.parquet.write_table(pyarrow.table({"n": [0, 1], "a": column}), tmp_path / "a.parquet")
        error = refusal("a.parquet", allowed_roots=[str(tmp_path)])
        assert isinstance(error, DataInvalid)
        assert "row 1, /a: has a value that cannot be read" in error.message


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path):
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "two columns 'a'" in refusal("a.parquet", allowed_roots=[str(tmp_path)]).message


def test_a_broken_parquet_file_is_the_datas_fault(tmp_path: Path):
    path = parquet(tmp_path, ROWS)
    whole = path.read_bytes()
    for content in (b"", b"no parquet", whole[: len(whole) // 2], b"PAR1" + bytes(100) + b"PAR1"):
        path.write_bytes(content)
        error = refusal("a.parquet", allowed_roots=[str(tmp_path)])
        assert isinstance(error, DataInvalid)
        assert "Parquet file cannot be read" in error.message
        assert str(tmp_path) not in error.message
    pyarrow.parquet.write_table(pyarrow.table({"a": []}), path)
    with pytest.raises(DataInvalid, match="no rows"):
        read("a.parquet", allowed_roots=[str(tmp_path)])


def test_of_a_parquet_file_no_more_is_read_than_is_asked_for(tmp_path: Path):
    parquet(tmp_path, [{"n": n} for n in range(100_000)])
    rows = iter(open_rows(URIDataSource(uri="a.parquet"), SourcePolicy(allowed_roots=[str(tmp_path)])))
    assert [next(rows) for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    rows.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_local_folder_reads_through_the_datasets_library(tmp_path: Path):
    (tmp_path / "train.jsonl").write_bytes(JSONL)
    (tmp_path / "test.jsonl").write_bytes(JSONL[: len(JSONL) // 2])
    assert list(read_rows(str(tmp_path))) == ROWS
    assert list(read_rows(str(tmp_path), split="test")) == ROWS[:1]
    with pytest.raises(DataInvalid, match="cannot be read from the hub"):
        list(read_rows(str(tmp_path), split="absent"))


@pytest.mark.parametrize(
    "uri",
    [
        "huggingface://datasets/..%2F..%2Fetc",
        "huggingface://models/org/name",
        "huggingface://datasets/a/b/c",
        "huggingface://datasets/",
    ],
)
def test_a_hub_uri_cannot_name_a_local_folder(uri: str):
    with pytest.raises(InvalidField, match="is not of the form"):
        parse_hub_uri(uri)


def test_a_hub_uri_is_a_repository_and_options():
    uri = "huggingface://datasets/org/name?split=train[:10]&name=en&revision=v1"
    assert parse_hub_uri(uri) == ("org/name", {"split": "train[:10]", "name": "en", "revision": "v1"})
    # A second slash cannot make the name an absolute path.
    assert parse_hub_uri("huggingface://datasets//etc") == ("etc", {})


def test_a_hub_name_that_is_also_a_local_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidField, match="also a local folder"):
        read_hub_rows("huggingface://datasets/org/name?split=train")


def test_the_data_floor_imports_without_torch_transformers_or_datasets():
    code = (
        "import sys, post_training.data.preflight, post_training.catalog.datasets\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'torchtune', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Data files of every kind, registered in the words of every client, and what their rows are then."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openpyxl
import pyarrow
import pyarrow.parquet
import pytest
import pytest_asyncio

from distributions.resolver import plan
from distributions.run_config import StackRunConfig
from distributions.server import create_app
from distributions.stack import build_stack

ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two,\nthree", "completion": "zwei, drei"}]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'prompt,completion\none,eins\n"two,\nthree","zwei, drei"\n'


def _workbook(path: Path) -> None:
    book = openpyxl.Workbook()
    sheet: Any = book.active
    for line in ([*ROWS[0]], *([*row.values()] for row in ROWS)):
        sheet.append(line)
    book.save(path)


FILES: dict[str, Callable[[Path], Any]] = {
    ".jsonl": lambda path: path.write_text(JSONL),
    ".json": lambda path: path.write_text(json.dumps(ROWS)),
    ".csv": lambda path: path.write_text(CSV),
    ".parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    ".xlsx": _workbook,
}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


URIS = {
    "a .jsonl of the command line's": f"data:None;base64,{_encoded(JSONL)}",
    "a .json of the command line's": f"data:application/json;base64,{_encoded(json.dumps(ROWS))}",
    "a .csv of the command line's": f"data:text/csv;base64,{_encoded(CSV)}",
    "an unknown type": f"data:None;base64,{_encoded(CSV)}",
    "an array of an unknown type": f"data:None;base64,{_encoded(json.dumps(ROWS))}",
    "no type": f"data:;base64,{_encoded(JSONL)}",
}


def today(uri: str) -> dict[str, Any]:
    return {"purpose": "post-training/messages", "source": {"type": "uri", "uri": uri}}


def without_type(uri: str) -> dict[str, Any]:
    return {"purpose": "post-training/messages", "source": {"uri": uri}, "metadata": {}}


def with_url(uri: str) -> dict[str, Any]:
    return {"dataset_schema": {"prompt": {"type": "string"}}, "url": {"uri": uri}, "provider_id": "localfs"}


def with_plain_url(uri: str) -> dict[str, Any]:
    return {"dataset_schema": {}, "url": uri}


# Where and how clients register: 0.7.0, 0.2.3 and later, their command line, 0.1, 0.0.63, 0.0.61.
DIALECTS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "v1beta": ("/v1beta/datasets", today),
    "v1": ("/v1/datasets", today),
    "command line": ("/v1/datasets", without_type),
    "0.1": ("/v1/datasets", with_url),
    "0.0.63": ("/alpha/datasets/register", with_url),
    "0.0.61": ("/alpha/datasets/register", with_plain_url),
}


@pytest_asyncio.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    sources = [{"provider_id": "localfs", "provider_type": "inline::localfs"}]
    config = StackRunConfig.model_validate({"providers": {"datasetio": sources}})
    config._environ = {"POSTGRAD_HOME": str(tmp_path / "home")}
    stack = await build_stack(config, plan(config))
    app = create_app(stack)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    (tmp_path / "home" / "data").mkdir()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def rows_of(http: httpx.AsyncClient, path: str, body: dict[str, Any], dataset_id: str) -> Any:
    made = await http.post(path, json={**body, "dataset_id": dataset_id})
    assert made.status_code in (200, 204), (path, body, made.text)
    return (await http.get(f"/v1/datasetio/iterrows/{dataset_id}")).json()["data"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_file_of_every_kind_is_read_however_it_is_registered(
    http: httpx.AsyncClient, tmp_path: Path, dialect: str
):
    path, body = DIALECTS[dialect]
    folder = tmp_path / "home" / "data"
    for suffix, write in FILES.items():
        write(folder / f"rows{suffix}")
    read = await asyncio.gather(
        *(rows_of(http, path, body(f"file://{folder}/rows{suffix}"), f"d{suffix}") for suffix in FILES)
    )
    assert dict(zip(FILES, read, strict=True)) == dict.fromkeys(FILES, ROWS)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_data_uri_is_read_for_what_it_holds_however_it_is_registered(http: httpx.AsyncClient, dialect: str):
    path, body = DIALECTS[dialect]
    read = [await rows_of(http, path, body(uri), f"d{n}") for n, uri in enumerate(URIS.values())]
    assert dict(zip(URIS, read, strict=True)) == dict.fromkeys(URIS, ROWS)

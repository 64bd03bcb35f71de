"""The data set catalog on a real store and real files."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from apis.datasets import Dataset, DatasetIO, DatasetPurpose, RegisterDatasetRequest, RowsDataSource, URIDataSource
from apis.errors import Conflict, DataInvalid, DatasetNotFound, DiskFull, InvalidField, TooLarge
from post_training.catalog import datasets as catalog_datasets
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.catalog.naming import MAX_FOLDER_NAME, folder_name
from post_training.data.records import encode_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.jobs.database import Database
from post_training.jobs.scheduler import local_scheduler
from post_training.jobs.spec import DatasetRef
from providers.localfs.config import LocalFSConfig
from providers.localfs.provider import LocalFiles, get_provider_impl
from providers.spec import ProviderDeps

ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]


def open_catalog(home: Path, **config: Any) -> DatasetCatalog:
    database = Database(f"sqlite:///{home}/postgrad.db")
    database.migrate()
    catalog = DatasetCatalog(database, home)
    catalog.attach_sources([LocalFiles("localfs", LocalFSConfig(**config), [home / "data"])])
    return catalog


@pytest.fixture
def catalog(tmp_path: Path) -> DatasetCatalog:
    (tmp_path / "data").mkdir()
    return open_catalog(tmp_path)


def rows_request(rows: list[dict[str, Any]], dataset_id: str | None = "d1", **fields: Any) -> RegisterDatasetRequest:
    return RegisterDatasetRequest(source=RowsDataSource(rows=rows), dataset_id=dataset_id, **fields)


def uri_request(uri: str, dataset_id: str = "d1", **fields: Any) -> RegisterDatasetRequest:
    return RegisterDatasetRequest(source=URIDataSource(uri=uri), dataset_id=dataset_id, **fields)


def read(reference: DatasetRef) -> list[dict[str, Any]]:
    """As a worker does: from the JSON that its job carries."""
    stored = DatasetRef.model_validate_json(reference.model_dump_json())
    request = RegisterDatasetRequest.model_validate({"source": stored.source})
    return list(open_rows(request.source, SourcePolicy.model_validate(stored.policy)))


def files(home: Path) -> list[Path]:
    """Files and folders of data sets; a folder of unfinished files that is empty is none."""
    found = sorted((home / "datasets").rglob("*")) if (home / "datasets").exists() else []
    return [path for path in found if path.name != "+unfinished"]


async def test_registered_rows_are_answered_listed_and_read_by_a_worker(catalog: DatasetCatalog):
    expected = Dataset(
        identifier="d1",
        provider_resource_id="d1",
        provider_id="localfs",
        purpose=DatasetPurpose.post_training_messages,
        source=RowsDataSource(rows=ROWS),
        metadata={"by": "me"},
    )
    assert await catalog.register_dataset(rows_request(ROWS, metadata={"by": "me"})) == expected
    assert await catalog.get_dataset("d1") == expected
    listed = (await catalog.list_datasets()).data
    assert [dataset.identifier for dataset in listed] == ["d1"]
    assert read(catalog.reference("d1")) == ROWS


async def test_a_data_set_without_an_id_gets_one_of_its_own(catalog: DatasetCatalog):
    first = await catalog.register_dataset(rows_request(ROWS, None))
    second = await catalog.register_dataset(rows_request(ROWS, None))
    assert first.identifier.startswith("dataset-")
    assert len(first.identifier) == len("dataset-") + 36
    assert first.identifier != second.identifier


async def test_the_same_registration_again_is_a_no_op_and_another_one_a_conflict(
    catalog: DatasetCatalog, tmp_path: Path
):
    first = await catalog.register_dataset(rows_request(ROWS))
    before = files(tmp_path)
    assert await catalog.register_dataset(rows_request(ROWS)) == first
    for other in (
        rows_request(ROWS[:1]),
        rows_request(ROWS, purpose=DatasetPurpose.eval_question_answer),
        rows_request(ROWS, metadata={"by": "me"}),
        uri_request("data:text/plain,a%0Ab"),
    ):
        with pytest.raises(Conflict, match="'d1' is registered with another source"):
            await catalog.register_dataset(other)
    assert files(tmp_path) == before
    await catalog.append_rows("d1", ROWS)
    assert (await catalog.register_dataset(rows_request(ROWS))).source == RowsDataSource(rows=[*ROWS, *ROWS])


async def test_two_registrations_of_one_id_at_once_leave_one_winner(catalog: DatasetCatalog, tmp_path: Path):
    requests = [rows_request([{"prompt": str(i), "completion": "x"}]) for i in range(8)]
    answers = await asyncio.gather(*map(catalog.register_dataset, requests), return_exceptions=True)
    winners = [answer for answer in answers if isinstance(answer, Dataset)]
    assert len(winners) == 1
    assert sum(isinstance(answer, Conflict) for answer in answers) == 7
    assert winners[0].source == RowsDataSource(rows=read(catalog.reference("d1")))
    assert len([path for path in files(tmp_path) if path.is_file()]) == 1


async def test_files_and_data_uris_are_read_and_keep_their_uri(catalog: DatasetCatalog, tmp_path: Path):
    (tmp_path / "data" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    inline = "data:None;base64," + base64.b64encode(json.dumps(ROWS).encode()).decode()
    for dataset_id, uri in (("file", "a.jsonl"), ("inline", inline)):
        dataset = await catalog.register_dataset(uri_request(uri, dataset_id))
        assert dataset.source == URIDataSource(uri=uri)
        assert (await catalog.iterrows(dataset_id)).data == ROWS
        assert read(catalog.reference(dataset_id)) == ROWS
    with pytest.raises(InvalidField, match="cannot be appended to"):
        await catalog.append_rows("file", ROWS)


async def test_rows_can_be_appended_to_those_of_a_data_uri(catalog: DatasetCatalog):
    # Clients up to 0.1.7 have no other way to send rows, and have a call to append some.
    uri = "data:None;base64," + base64.b64encode(json.dumps(ROWS).encode()).decode()
    await catalog.register_dataset(uri_request(uri, "inline"))
    before = catalog.reference("inline")
    await catalog.append_rows("inline", [{"prompt": "c", "completion": "d"}])
    assert (await catalog.iterrows("inline")).data == [*ROWS, {"prompt": "c", "completion": "d"}]
    assert read(before) == ROWS
    assert read(catalog.reference("inline")) == [*ROWS, {"prompt": "c", "completion": "d"}]


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (rows_request([]), DataInvalid, "no rows"),
        (rows_request([{"a": float("nan")}]), DataInvalid, "row 0: has no JSON form"),
        (rows_request([{"a": "\ud800"}]), DataInvalid, "row 0: holds an unpaired surrogate"),
        (rows_request([{"a": "x" * 2000}]), TooLarge, "over the limit of 1000"),
        (uri_request("absent.jsonl"), DataInvalid, "there is no file 'absent.jsonl'"),
        (uri_request("empty.jsonl"), DataInvalid, "no rows"),
        (uri_request("broken.jsonl"), DataInvalid, "row 1: is not valid JSON"),
        (uri_request("/etc/passwd.csv"), InvalidField, "outside the folders"),
        (uri_request("https://example.com/a.csv"), InvalidField, "not read over 'https'"),
        (uri_request("huggingface://datasets/org/name"), InvalidField, "allow_hub: true"),
        (uri_request("data:text/csv,a%0A1", metadata={"provider_id": "huggingface"}), InvalidField, "there is localfs"),
    ],
)
async def test_a_source_that_cannot_be_used_is_refused_and_leaves_nothing(
    tmp_path: Path, request_: RegisterDatasetRequest, error: type[Exception], message: str
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "empty.jsonl").write_text("")
    (tmp_path / "data" / "broken.jsonl").write_text('{"a": 1}\n{"a": }\n')
    catalog = open_catalog(tmp_path, max_inline_bytes=1000)
    with pytest.raises(error, match=message):
        await catalog.register_dataset(request_)
    assert (await catalog.list_datasets()).data == []
    assert [path for path in files(tmp_path) if path.is_file()] == []


async def test_rows_page_with_and_without_a_limit(catalog: DatasetCatalog):
    rows = [{"n": n} for n in range(5)]
    await catalog.register_dataset(rows_request(rows))
    for start, limit, expected, more in (
        (None, None, rows, False),
        (None, -1, rows, False),
        (2, None, rows[2:], False),
        (2, -1, rows[2:], False),
        (0, 2, rows[:2], True),
        (2, 2, rows[2:4], True),
        (3, 2, rows[3:], False),
        (3, 9, rows[3:], False),
        (5, 1, [], False),
        (9, None, [], False),
        (0, 0, [], True),
    ):
        page = await catalog.iterrows("d1", start, limit)
        assert (page.data, page.has_more) == (expected, more), (start, limit)
    for start, limit, field in ((-1, None, "start_index"), (0, -2, "limit")):
        with pytest.raises(InvalidField) as caught:
            await catalog.iterrows("d1", start, limit)
        assert caught.value.param == field


async def test_appended_rows_outlive_the_process_and_change_no_earlier_reference(tmp_path: Path):
    (tmp_path / "data").mkdir()
    catalog = open_catalog(tmp_path)
    await catalog.register_dataset(rows_request(ROWS))
    accepted = catalog.reference("d1")
    await catalog.append_rows("d1", [{"prompt": "three", "completion": "drei"}])
    reopened = open_catalog(tmp_path)
    assert (await reopened.iterrows("d1", 2)).data == [{"prompt": "three", "completion": "drei"}]
    assert read(accepted) == ROWS
    assert len(read(reopened.reference("d1"))) == 3
    with pytest.raises(DataInvalid, match="row 1: has no JSON form"):
        await reopened.append_rows("d1", [{"a": 1}, {"a": float("inf")}])
    assert len(read(reopened.reference("d1"))) == 3


async def test_of_many_inline_rows_the_first_are_embedded_and_iterrows_has_them_all(catalog: DatasetCatalog):
    rows = [{"n": n, "text": "x" * 1000} for n in range(1500)]
    for dataset in (await catalog.register_dataset(rows_request(rows)), await catalog.get_dataset("d1")):
        assert isinstance(dataset.source, RowsDataSource)
        assert dataset.source_truncated
        assert dataset.source.rows == rows[: len(dataset.source.rows)]
        assert 2**20 - 1100 < len(encode_rows(dataset.source.rows)) <= 2**20
    assert (await catalog.iterrows("d1")).data == rows
    assert not (await catalog.register_dataset(rows_request(ROWS, "small"))).source_truncated


async def test_an_answer_of_rows_is_bounded_and_the_next_goes_on_behind_it(
    catalog: DatasetCatalog, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"n": n} for n in range(9)] + [{"long": "x" * 100}]
    monkeypatch.setattr(catalog_datasets, "PAGE_BYTES", len(encode_rows(rows[:4])))
    await catalog.register_dataset(rows_request(rows))
    seen: list[dict[str, Any]] = []
    sizes = []
    more = True
    while more:
        page = await catalog.iterrows("d1", len(seen))
        seen, more = seen + page.data, page.has_more
        sizes.append(len(page.data))
    assert (seen, sizes) == (rows, [4, 4, 1, 1])


async def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    catalog: DatasetCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await catalog.register_dataset(rows_request(ROWS))
    before = files(tmp_path)

    def full(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("post_training.catalog.datasets.os.write", full)
        with pytest.raises(DiskFull, match=r"rows of data set 'd2'.*free some space"):
            await catalog.register_dataset(rows_request(ROWS, "d2"))
        with pytest.raises(DiskFull, match="rows of data set 'd1'"):
            await catalog.append_rows("d1", ROWS)
    assert files(tmp_path) == before
    assert (await catalog.iterrows("d1")).data == ROWS
    assert [dataset.identifier for dataset in (await catalog.list_datasets()).data] == ["d1"]


async def test_a_data_set_is_read_by_the_provider_that_was_asked_for(catalog: DatasetCatalog, tmp_path: Path):
    other = LocalFiles("other", LocalFSConfig(), [tmp_path / "elsewhere"])
    catalog.attach_sources([LocalFiles("localfs", LocalFSConfig(), [tmp_path / "data"]), other])
    assert (await catalog.register_dataset(rows_request(ROWS), provider_id="other")).provider_id == "other"
    assert (await catalog.register_dataset(rows_request(ROWS))).provider_id == "other"
    with pytest.raises(Conflict, match="or provider"):
        await catalog.register_dataset(rows_request(ROWS), provider_id="localfs")
    with pytest.raises(InvalidField, match="no datasetio provider 'torchtune' is configured; there is localfs, other"):
        await catalog.register_dataset(rows_request(ROWS, "d2"), provider_id="torchtune")


async def test_files_beside_the_server_are_not_read_unless_a_root_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (tmp_path / "private.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "home" / "data" / "public.jsonl").write_text('{"a": 1}\n')
    monkeypatch.chdir(tmp_path)
    database = Database("sqlite://")
    catalogs = ModelCatalog(database, tmp_path), DatasetCatalog(database, tmp_path)
    deps = ProviderDeps("localfs", home, database, *catalogs, local_scheduler(database, home), {})
    policy = SourcePolicy.model_validate((await get_provider_impl(LocalFSConfig(), deps)).source_policy())
    assert list(open_rows(URIDataSource(uri="public.jsonl"), policy)) == [{"a": 1}]
    for name in ("private.jsonl", str(tmp_path / "private.jsonl")):
        with pytest.raises((DataInvalid, InvalidField)):
            open_rows(URIDataSource(uri=name), policy)


async def test_a_torn_append_is_invisible_and_the_next_one_replaces_it(catalog: DatasetCatalog, tmp_path: Path):
    await catalog.register_dataset(rows_request(ROWS))
    stored = next(path for path in files(tmp_path) if path.suffix == ".jsonl")
    with stored.open("ab") as file:
        file.write(b'{"prompt": "torn')
    assert (await catalog.iterrows("d1")).data == ROWS
    await catalog.append_rows("d1", [{"prompt": "three", "completion": "drei"}])
    assert (await catalog.iterrows("d1", 2)).data == [{"prompt": "three", "completion": "drei"}]


def test_every_acknowledged_row_survives_sigkill(tmp_path: Path):
    script = f"""
        import asyncio, os, pathlib, signal
        from test_dataset_catalog import open_catalog, rows_request
        async def main():
            catalog = open_catalog(pathlib.Path({str(tmp_path)!r}))
            await catalog.register_dataset(rows_request([{{"n": 0}}]))
            for n in range(1, 10):
                await catalog.append_rows("d1", [{{"n": n}}])
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parent, check=False)
    assert killed.returncode == -9
    assert read(open_catalog(tmp_path).reference("d1")) == [{"n": n} for n in range(10)]


async def test_concurrent_appends_lose_nothing(catalog: DatasetCatalog):
    await catalog.register_dataset(rows_request([{"n": -1}]))
    await asyncio.gather(*(catalog.append_rows("d1", [{"n": n}, {"n": n}]) for n in range(10)))
    rows = (await catalog.iterrows("d1")).data
    assert sorted(row["n"] for row in rows) == [-1, *(n for n in range(10) for _ in (0, 1))]


async def test_an_unregistered_data_set_is_gone_and_its_id_free(catalog: DatasetCatalog, tmp_path: Path):
    await catalog.register_dataset(rows_request(ROWS))
    accepted = catalog.reference("d1")
    await catalog.unregister_dataset("d1")
    assert files(tmp_path) == []
    await catalog.register_dataset(rows_request(ROWS[:1]))
    # A job accepted before never reads the rows of a later data set with the same id.
    with pytest.raises(DataInvalid, match="unregistered"):
        read(accepted)


async def test_an_unknown_data_set_is_not_found_by_any_verb(catalog: DatasetCatalog):
    for call in (
        catalog.get_dataset("nope"),
        catalog.unregister_dataset("nope"),
        catalog.iterrows("nope"),
        catalog.append_rows("nope", ROWS),
    ):
        with pytest.raises(DatasetNotFound, match="no data set 'nope'"):
            await call
    with pytest.raises(DatasetNotFound):
        catalog.reference("nope")


async def test_a_data_set_whose_provider_is_gone_names_it(catalog: DatasetCatalog):
    await catalog.register_dataset(rows_request(ROWS))
    catalog.attach_sources([])
    with pytest.raises(InvalidField, match="no datasetio provider 'localfs' is configured; there is none"):
        catalog.reference("d1")
    with pytest.raises(InvalidField, match="no configured datasetio provider"):
        await catalog.register_dataset(rows_request(ROWS, "d2"))


def test_localfs_fulfils_its_protocol_with_absolute_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    provider = LocalFiles("files", LocalFSConfig(allowed_roots=["data", "~"], kvstore={"type": "sqlite"}), [])
    assert isinstance(provider, DatasetIO)
    policy = SourcePolicy.model_validate(provider.source_policy())
    assert policy.allowed_roots == [str(tmp_path / "data"), str(Path.home().resolve())]
    hub = URIDataSource(uri="huggingface://datasets/org/name")
    assert not provider.accepts(hub)
    assert LocalFiles("files", LocalFSConfig(allow_hub=True), []).accepts(hub)


def test_ids_become_folder_names_that_never_meet():
    ids = [
        "d1",
        "D1",
        "a/b",
        "a%2fb".replace("%", "_"),
        "a:b",
        "a@b",
        "x" * 100,
        "x" * 101,
        "x" * 102,
        "X" * 255,
        "a.b-c",
    ]
    names = [folder_name(identifier) for identifier in ids]
    assert len({name.lower() for name in names}) == len(ids)
    assert all(len(name) <= MAX_FOLDER_NAME and "/" not in name for name in names)
    assert folder_name("d1") == "d1"
    assert folder_name("a/b") == "a%2Fb"
    assert folder_name("D1").startswith("D1+")
    for bad in ("..", "a/../b", "", "a/", ".a", "a b", "x" * 256, "a\0"):
        with pytest.raises(InvalidField):
            folder_name(bad)

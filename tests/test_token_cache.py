"""Cached tokens: a hit is what reading would give, byte for byte; whatever changes the tokens changes the key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from apis.datasets.models import DATA_SOURCE
from apis.errors import DataInvalid, InvalidField
from apis.post_training.models import LoraFinetuningConfig, TrainingConfig
from post_training.data import job_rows
from post_training.data.job_rows import read_job_rows
from post_training.data.preflight import TokenizedDataset
from post_training.data.sources import SourcePolicy, open_rows
from post_training.data.token_cache import (
    HASHES_FILE,
    INDEX_FILE,
    LIMIT_VARIABLE,
    REPORT_FILE,
    ROWS_FILE,
    TokenCache,
)
from post_training.data.token_key import cache_key, code_version, printed_dates
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings
from tests.job_bench import rows
from tests.tiny_llama import save_tiny_llama
from tests.token_cache_user import dataset, put, same

KEY = "0" * 64


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(plain_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain_model, tmp_path / "tiny")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(12)))
    return path


def spec_of(model: Path, file: Path, created_at: datetime = datetime(2026, 1, 1, tzinfo=UTC), **data: Any) -> JobSpec:
    config = {"data_config": {"dataset_id": "data", "max_seq_len": 64, **data}, "optimizer_config": {"lr": 3e-4}}
    source, policy = {"type": "uri", "uri": str(file)}, {"allowed_roots": [str(file.parent)]}
    return JobSpec(
        job_uuid="job",
        created_at=created_at,
        provider_id="p",
        model=ModelRef(identifier="tiny", base_identifier="tiny", base_dir=str(model)),
        training_config=TrainingConfig.model_validate(config),
        algorithm_config=LoraFinetuningConfig(),
        dataset=DatasetRef(dataset_id="data", source=source, policy=policy),
        worker=WorkerSettings(model_module="none"),
    )


# -- hits ------------------------------------------------------------------------------------------------------------


def test_a_hit_is_what_reading_gives_and_nothing_is_tokenized(
    tmp_path: Path, model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = spec_of(model, file, on_overlength="drop")
    first = read_job_rows(spec, tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(job_rows, "tokenize_dataset", refuse)
        second = read_job_rows(spec, tmp_path)
    assert same(first.training, second.training)
    assert first.report == second.report
    assert first.training.rows


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(0, 1, width=32)), min_size=1, max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_kept_comes_back_the_same(tmp_path_factory: pytest.TempPathFactory, content: Any):
    made = [
        TokenizedRow(
            3 * n, np.array([t for t, _ in row], dtype=np.int32), np.array([w for _, w in row], dtype=np.float32)
        )
        for n, row in enumerate(content)
    ]
    data = TokenizedDataset(made, {"sample": [{"text": "é\u2028", "supervised": True}]})
    cache = TokenCache(tmp_path_factory.mktemp("cache"))
    put(cache, KEY, data)
    found = cache.get(KEY)
    assert found is not None
    assert same(found, data)


# -- the key ---------------------------------------------------------------------------------------------------------


def key_of(spec: JobSpec) -> str:
    assert spec.dataset is not None
    reader = open_rows(DATA_SOURCE.validate_python(spec.dataset.source), SourcePolicy(**spec.dataset.policy))
    content = reader.digest()
    assert content is not None
    return cache_key(spec, content)


@pytest.mark.parametrize(
    "change",
    [
        {"data_format": "prompt_completion"},
        {"columns": {"prompt": "question"}},
        {"on_overlength": "drop"},
        {"on_overlength": "error"},
        {"max_seq_len": 65},
        {"train_on_input": True},
    ],
)
def test_each_setting_that_tokens_follow_from_changes_the_key(model: Path, file: Path, change: dict[str, Any]):
    assert key_of(spec_of(model, file, **change)) != key_of(spec_of(model, file))


@pytest.mark.parametrize("other", [{"batch_size": 3}, {"shuffle": False}, {"packed": True}, {"train_on_input": None}])
def test_settings_that_tokens_do_not_follow_from_share_them(model: Path, file: Path, other: dict[str, Any]):
    assert key_of(spec_of(model, file, **other)) == key_of(spec_of(model, file))


def _new_token(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["hen"])
    tokenizer.save(str(model / "tokenizer.json"))


def _edit(name: str, **fields: Any) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        path = model / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(content | fields))

    return edit


def _template(name: str) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{{ messages[0].content }}")

    return write


@pytest.mark.parametrize(
    "edit",
    [
        _new_token,
        _edit("tokenizer_config.json", eos_token="<|endoftext|>"),
        _edit("special_tokens_map.json", bos_token="<|im_start|>"),
        _edit("generation_config.json", eos_token_id=[1, 2]),
        _edit("config.json", eos_token_id=0),
        _template("chat_template.jinja"),
        _template("additional_chat_templates/tool_use.jinja"),
    ],
    ids=["tokenizer", "config", "special", "generation", "model", "template", "tool template"],
)
def test_each_file_of_the_tokenizer_changes_the_key(model: Path, file: Path, edit: Callable[[Path], None]):
    before = key_of(spec_of(model, file))
    edit(model)
    assert key_of(spec_of(model, file)) != before


def test_the_content_of_the_file_is_the_key_and_not_its_name_or_time(model: Path, file: Path, tmp_path: Path):
    before = key_of(spec_of(model, file))
    copy = shutil.copy(file, tmp_path / "other.jsonl")
    os.utime(copy, (1, 1))
    assert key_of(spec_of(model, Path(copy))) == before
    file.write_bytes(file.read_bytes().replace(b"hen", b"cat", 1))
    assert key_of(spec_of(model, file)) != before


def test_the_same_bytes_read_in_another_way_have_another_key(model: Path, file: Path, tmp_path: Path):
    assert key_of(spec_of(model, Path(shutil.copy(file, tmp_path / "rows.csv")))) != key_of(spec_of(model, file))


def test_rows_sent_inline_are_keyed_by_their_json(tmp_path: Path):
    def digest(sent: list[dict[str, Any]], **policy: Any) -> str | None:
        return open_rows(DATA_SOURCE.validate_python({"type": "rows", "rows": sent}), SourcePolicy(**policy)).digest()

    assert digest(rows(3)) == digest(rows(3)) != digest(rows(4))
    # The catalog keeps them in a file, of which only the first bytes are the data set.
    stored = tmp_path / "stored.jsonl"
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows(4)]
    stored.write_text("".join(lines))
    assert digest([], rows_file=str(stored), rows_bytes=sum(map(len, lines[:3]))) == digest(rows(3))
    assert digest([], rows_file=str(stored), rows_bytes=sum(map(len, lines))) == digest(rows(4))


def test_a_hub_data_set_is_cached_only_where_its_commit_is_named():
    def digest(uri: str) -> str | None:
        return open_rows(
            DATA_SOURCE.validate_python({"type": "uri", "uri": uri}), SourcePolicy(allow_hub=True)
        ).digest()

    base = "huggingface://datasets/org/name?split=train"
    assert digest(base) is None
    assert digest(f"{base}&revision=main") is None
    one, other = digest(f"{base}&revision={'a' * 40}"), digest(f"{base}&revision={'b' * 40}")
    assert None not in (one, other)
    assert one != other


def test_the_date_is_part_of_the_key_only_where_the_template_prints_it(model: Path, file: Path):
    days = [datetime(2026, 1, 1, 9, tzinfo=UTC), datetime(2026, 1, 1, 10, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)]
    assert len({key_of(spec_of(model, file, day)) for day in days}) == 1
    (model / "chat_template.jinja").write_text('{{ strftime_now("%d %b %Y") }}{{ messages[0].content }}')
    assert [key_of(spec_of(model, file, day)) == key_of(spec_of(model, file, days[0])) for day in days] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        ("{{ messages }}", []),
        ("{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}", ["02 Jan 2026"]),
        ('{{ strftime_now("%H:%M") }} {{ strftime_now( "%Y" ) }}', ["03:04", "2026"]),
        ("{% set now = strftime_now %}{{ now('%Y') }}", ["2026-01-02T03:04:05"]),
        ("{{ strftime_now(form) }}", ["2026-01-02T03:04:05"]),
    ],
)
def test_what_a_template_prints_of_the_date_is_found(template: str, printed: list[str]):
    assert printed_dates([template], datetime(2026, 1, 2, 3, 4, 5)) == printed


def test_the_code_that_makes_tokens_is_part_of_the_key(model: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    before = key_of(spec_of(model, file))
    monkeypatch.setattr("post_training.data.token_key.code_version", lambda: "another")
    assert key_of(spec_of(model, file)) != before
    assert code_version() == code_version()


def test_what_cannot_be_trained_on_is_not_cached(tmp_path: Path, model: Path, file: Path):
    file.write_text('{"prompt": "a", "completion": 5}\n')
    for _ in range(2):
        with pytest.raises(DataInvalid, match="row 0"):
            read_job_rows(spec_of(model, file), tmp_path)
    assert not list((tmp_path / "cache" / "tokens").iterdir())


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    tmp_path: Path, model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = job_rows.tokenize_dataset

    def changing(*arguments: Any, **options: Any) -> TokenizedDataset:
        data = whole(*arguments, **options)
        file.write_bytes(file.read_bytes() * 2)
        return data

    with monkeypatch.context() as patch:
        patch.setattr(job_rows, "tokenize_dataset", changing)
        read_job_rows(spec_of(model, file), tmp_path)
    assert not list((tmp_path / "cache" / "tokens").iterdir())
    assert len(read_job_rows(spec_of(model, file), tmp_path).training.rows) == 24


# -- damage, limits, company -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ROWS_FILE, INDEX_FILE, REPORT_FILE, HASHES_FILE])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_entry_is_a_miss_and_is_written_anew(tmp_path: Path, name: str, damage: str):
    cache = TokenCache(tmp_path)
    put(cache, KEY, dataset(3, 4))
    path = tmp_path / KEY / name
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {"flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], "cut": content[:-1]}
    path.unlink() if damage == "gone" else path.write_bytes(changed.get(damage, b""))
    assert cache.get(KEY) is None
    put(cache, KEY, dataset(3, 4))
    found = cache.get(KEY)
    assert found is not None
    assert same(found, dataset(3, 4))


def test_a_change_of_any_byte_of_an_entry_is_noticed(tmp_path: Path):
    cache, entry = TokenCache(tmp_path), tmp_path / KEY
    put(cache, KEY, dataset(3, 1))
    whole = {path: path.read_bytes() for path in entry.iterdir()}
    assert {path.name for path in whole} == {ROWS_FILE, INDEX_FILE, REPORT_FILE, HASHES_FILE}
    for path, content in whole.items():
        for position in range(len(content)):
            entry.mkdir(exist_ok=True)
            for each, kept in whole.items():
                each.write_bytes(kept)
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert cache.get(KEY) is None, (path.name, position)
    put(cache, KEY, dataset(3, 1))
    assert same(found(cache), dataset(3, 1))


def found(cache: TokenCache) -> TokenizedDataset:
    data = cache.get(KEY)
    assert data is not None
    return data


def test_rows_in_use_stay_readable_when_their_entry_goes(tmp_path: Path):
    cache = TokenCache(tmp_path)
    written, read = put(cache, KEY, dataset(3, 4, 5)), found(cache)
    shutil.rmtree(tmp_path / KEY)
    assert same(read, dataset(3, 4, 5))
    assert same(TokenizedDataset(written, read.report), read)


def test_rows_of_a_writer_that_is_still_at_work_are_not_abandoned(tmp_path: Path):
    cache = TokenCache(tmp_path)
    with cache.writing(KEY) as draft:
        draft.store(dataset(3).rows)
        (partial,) = tmp_path.iterdir()
        os.utime(partial, (1_000_000_000, 1_000_000_000))  # the folder is as old as its first file
        put(TokenCache(tmp_path), "1" * 64, dataset(4))
        draft.finish({})
    assert same(found(cache), TokenizedDataset(dataset(3).rows, {}))


def test_what_fails_while_it_is_made_leaves_nothing_behind(tmp_path: Path):
    def broken() -> Iterator[TokenizedRow]:
        yield from dataset(3).rows
        raise DataInvalid("no text", row=1)

    with pytest.raises(DataInvalid), TokenCache(tmp_path).writing(KEY) as draft:
        draft.store(broken())
    assert not list(tmp_path.iterdir())


def test_entries_hold_no_pickle(tmp_path: Path):
    put(TokenCache(tmp_path), KEY, dataset(3))
    assert not np.load(tmp_path / KEY / INDEX_FILE, allow_pickle=False).dtype.hasobject


def entry_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_over_the_limit_the_entry_not_used_for_the_longest_goes(tmp_path: Path):
    cache = TokenCache(tmp_path)
    keys = [letter * 64 for letter in "abc"]
    put(cache, keys[0], dataset(100))
    size = entry_bytes(tmp_path / keys[0])
    limited = TokenCache(tmp_path, 2 * size + size // 2)
    put(limited, keys[1], dataset(100))
    for age, key in ((200, keys[0]), (100, keys[1])):
        os.utime(tmp_path / key, (1_000_000_000 - age, 1_000_000_000 - age))
    assert limited.get(keys[0]) is not None  # used again, so the other is the oldest now
    put(limited, keys[2], dataset(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == [keys[0], keys[2]]


def test_what_is_over_the_limit_by_itself_is_not_kept_and_removes_nothing(tmp_path: Path):
    put(TokenCache(tmp_path), "a" * 64, dataset(10))
    limit = entry_bytes(tmp_path / ("a" * 64)) + 10
    put(TokenCache(tmp_path, limit), KEY, dataset(10_000))
    assert [path.name for path in tmp_path.iterdir()] == ["a" * 64]


def test_the_limit_is_set_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    put(TokenCache.under(tmp_path), KEY, dataset(3))
    assert TokenCache.under(tmp_path).get(KEY) is None
    monkeypatch.setenv(LIMIT_VARIABLE, "4 GiB")
    with pytest.raises(InvalidField, match=LIMIT_VARIABLE):
        TokenCache.under(tmp_path)
    monkeypatch.delenv(LIMIT_VARIABLE)
    put(TokenCache.under(tmp_path), KEY, dataset(3))
    assert TokenCache.under(tmp_path).get(KEY) is not None


def test_what_a_killed_writer_left_behind_goes_in_time(tmp_path: Path):
    for name, at in ((".old", 1_000_000_000), (".new", None)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, None if at is None else (at, at))
    put(TokenCache(tmp_path), KEY, dataset(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new", KEY]


@pytest.mark.parametrize("limit", [10, 0])
def test_rows_that_are_not_kept_are_readable_and_leave_no_file(tmp_path: Path, limit: int):
    stored = put(TokenCache(tmp_path, limit), KEY, dataset(30, 2))
    assert not list(tmp_path.iterdir())
    assert same(TokenizedDataset(stored, {}), TokenizedDataset(dataset(30, 2).rows, {}))


@pytest.mark.parametrize(("free", "kept"), [(20, False), (21, True)])
def test_an_entry_takes_at_most_a_twentieth_of_the_disk_that_was_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: bool
):
    put(TokenCache(tmp_path / "other"), KEY, dataset(100))
    size = entry_bytes(tmp_path / "other" / KEY)
    usage = shutil.disk_usage(tmp_path)._replace(free=free * size - size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    stored = put(TokenCache(tmp_path / "cache"), KEY, dataset(100))
    assert (TokenCache(tmp_path / "cache").get(KEY) is not None) is kept
    assert same(TokenizedDataset(stored, {}), TokenizedDataset(dataset(100).rows, {}))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "cache").write_text("a file is in the way")
    stored = put(TokenCache(tmp_path / "cache" / "tokens"), KEY, dataset(3))
    assert same(TokenizedDataset(stored, {}), TokenizedDataset(dataset(3).rows, {}))
    assert TokenCache(tmp_path / "cache2").get(KEY) is None


def test_processes_that_write_read_and_evict_at_once_see_whole_entries_only(tmp_path: Path):
    command = [sys.executable, "-m", "tests.token_cache_user", str(tmp_path)]
    processes = [subprocess.Popen([*command, str(seed)]) for seed in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    left = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert left
    for entry in left:
        assert TokenCache(tmp_path).get(entry.name) is not None
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_code_version_is_the_same_in_every_process():
    program = "from post_training.data.token_key import code_version; print(code_version())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == code_version()

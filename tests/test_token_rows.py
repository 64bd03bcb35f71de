"""Rows in a file: the rows that were written, wherever they are read from, and memory that does not grow with them."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import DiskFull, JobFailure
from post_training.data.job_rows import fingerprint
from post_training.data.planning import split_rows
from post_training.data.token_rows import TokenRows, open_token_rows, row_lengths, temporary_rows, write_rows
from post_training.data.types import TokenizedRow
from tests.tiny_llama import save_tiny_llama

MIB = 2**20


@st.composite
def row_lists(draw: st.DrawFn, most: int = 12) -> list[TokenizedRow]:
    """Numbers with gaps, lengths from 1."""
    lengths = draw(st.lists(st.integers(1, 9) | st.just(3000), max_size=most))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    numbers = np.cumsum(chance.integers(1, 9, len(lengths)))
    return [
        TokenizedRow(
            int(number),
            chance.integers(-(2**31), 2**31, length).astype(np.int32),
            chance.normal(size=length).astype(np.float32),
        )
        for number, length in zip(numbers, lengths, strict=True)
    ]


def plain(row: TokenizedRow) -> tuple[int, list[int], list[float], np.dtype, np.dtype]:
    return row.row, row.tokens.tolist(), row.weights.tolist(), row.tokens.dtype, row.weights.dtype


def same(rows: Sequence[TokenizedRow], expected: Sequence[TokenizedRow]) -> bool:
    return [plain(row) for row in rows] == [plain(row) for row in expected]


def by_hand(rows: Sequence[TokenizedRow]) -> str:
    """sha256 over each row's length, tokens and weights, number by number."""
    content = b""
    for row in rows:
        content += struct.pack("<Q", len(row.tokens))
        content += struct.pack(f"<{len(row.tokens)}i", *row.tokens.tolist())
        content += struct.pack(f"<{len(row.weights)}f", *row.weights.tolist())
    return hashlib.sha256(content).hexdigest()


# -- the same rows ---------------------------------------------------------------------------------------------------


@given(row_lists())
def test_rows_of_a_file_are_the_list_they_were_made_from(expected: list[TokenizedRow]):
    rows = temporary_rows(iter(expected))
    assert len(rows) == len(expected)
    assert same(rows, expected)
    assert same([rows[-1 - n] for n in range(len(expected))], expected[::-1])
    assert rows.lengths.dtype == np.int32
    assert rows.lengths.tolist() == row_lengths(expected).tolist() == [len(row.tokens) for row in expected]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            rows[index]


@given(row_lists(), st.lists(st.slices(12) | st.randoms(use_true_random=False), max_size=4))
def test_a_view_of_a_view_is_what_a_list_would_give(expected: list[TokenizedRow], views: list):
    rows = temporary_rows(expected)
    for view in views:
        if isinstance(view, slice):
            rows, expected = rows[view], expected[view]
        else:
            chosen = [view.randrange(-len(expected), len(expected)) for _ in expected]
            rows, expected = rows.take(np.array(chosen, dtype=np.int64)), [expected[index] for index in chosen]
        assert rows.lengths.tolist() == [len(row.tokens) for row in expected]
    assert same(rows, expected)
    assert fingerprint(rows) == by_hand(expected)


@given(row_lists())
def test_a_fingerprint_is_that_of_lengths_tokens_and_weights_wherever_the_rows_lie(expected: list[TokenizedRow]):
    assert fingerprint(temporary_rows(expected)) == fingerprint(expected) == by_hand(expected)


def test_a_fingerprint_that_jobs_have_stored_stays():
    rows = [
        TokenizedRow(5, np.array([1, 2, 300_000], np.int32), np.array([0, 1, 0.5], np.float32)),
        TokenizedRow(9, np.array([7], np.int32), np.array([0], np.float32)),
    ]
    known = "f409ebbaa784c30b47a73c317ba147c3adc37c8c49b32197d306eec890e05411"
    assert fingerprint(rows) == fingerprint(temporary_rows(rows)) == known


@given(row_lists(most=60), st.floats(0.01, 0.99), st.integers(0, 2**63 - 1))
def test_a_split_of_a_file_is_the_split_of_a_list(expected: list[TokenizedRow], part: float, seed: int):
    if len(expected) < 2:
        return
    found = split_rows(temporary_rows(expected), part, seed)
    assert all(isinstance(half, TokenRows) for half in found)
    for half, kept in zip(found, split_rows(expected, part, seed), strict=True):
        assert same(half, kept)


def test_the_rows_held_out_are_those_that_earlier_attempts_held_out():
    expected = [TokenizedRow(n, np.zeros(1, np.int32), np.zeros(1, np.float32)) for n in range(50)]
    order = np.random.Generator(np.random.PCG64([3, 2**32 - 1])).permutation(50).tolist()
    kept, held_out = split_rows(temporary_rows(expected), 0.2, 3)
    assert [row.row for row in held_out] == sorted(order[:10])
    assert [row.row for row in kept] == sorted(order[10:])


def test_rows_of_more_than_a_block_come_back(tmp_path: Path):
    chance = np.random.default_rng(0)
    expected = [
        TokenizedRow(n, chance.integers(0, 9, size).astype(np.int32), chance.random(size, np.float32))
        for n, size in enumerate([200_000, 1, 131_071, 5, 300_000])
    ]
    with (tmp_path / "rows").open("x+b", buffering=0) as file:
        written = write_rows(expected, file)
    assert same(written, expected)
    assert written.sha256 == by_hand(expected) == hashlib.sha256((tmp_path / "rows").read_bytes()).hexdigest()
    assert same(open_token_rows(tmp_path / "rows", written.entries, by_hand(expected)), expected)


def test_threads_read_the_same_rows_at_once():
    expected = [TokenizedRow(n, np.full(n + 1, n, np.int32), np.ones(n + 1, np.float32)) for n in range(200)]
    rows = temporary_rows(expected)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda seed: same(rows[seed:], expected[seed:]), range(40)))


# -- files and faults ------------------------------------------------------------------------------------------------


def two_rows(path: Path) -> TokenRows:
    rows = [TokenizedRow(n, np.full(4, n, np.int32), np.ones(4, np.float32)) for n in (3, 8)]
    with path.open("x+b", buffering=0) as file:
        return write_rows(rows, file)


def test_a_row_whose_bytes_have_changed_since_is_an_error_that_names_it(tmp_path: Path):
    rows = two_rows(tmp_path / "rows")
    whole = (tmp_path / "rows").read_bytes()
    assert len(whole) == 2 * (8 + 4 * 8)
    with (tmp_path / "rows").open("r+b") as file:
        for position, byte in enumerate(whole):
            file.seek(position)
            file.write(bytes([byte ^ 4]))
            file.flush()
            with pytest.raises(JobFailure, match=f"row {3 if position < 40 else 8} cannot be read back: its bytes"):
                list(rows)
            file.seek(position)
            file.write(bytes([byte]))
            file.flush()
    assert [row.row for row in rows] == [3, 8]


def test_a_file_that_was_cut_is_an_error_that_says_how_much_is_there(tmp_path: Path):
    rows = two_rows(tmp_path / "rows")
    os.truncate(tmp_path / "rows", 50)
    assert rows[0].row == 3
    with pytest.raises(JobFailure, match="row 8 cannot be read back: 10 of its 40 bytes are there"):
        rows[1]


def test_a_file_that_cannot_be_read_is_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = two_rows(tmp_path / "rows")

    def broken(*_: int) -> bytes:
        raise OSError(errno.EIO, "whatever")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(JobFailure, match=f"row 3 cannot be read back: {os.strerror(errno.EIO)}"):
        rows[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_words():
    rows = [TokenizedRow(0, np.zeros(9, np.int32), np.zeros(9, np.float32))]
    with Path("/dev/full").open("r+b", buffering=0) as file, pytest.raises(DiskFull, match="the tokenised rows"):
        write_rows(rows, file)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_a_file_is_closed_with_the_last_view_of_it(tmp_path: Path):
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    rows = temporary_rows([TokenizedRow(0, np.zeros(3, np.int32), np.zeros(3, np.float32))] * 5, tmp_path)
    view = rows[1:].take(np.array([2]))
    assert open_files() == before + 1
    del rows
    assert view[0].row == 0
    assert open_files() == before + 1
    del view
    assert open_files() == before


def test_a_temporary_file_lies_where_it_can_and_has_no_name(tmp_path: Path):
    rows = [TokenizedRow(1, np.zeros(3, np.int32), np.zeros(3, np.float32))]
    (tmp_path / "taken").write_text("a file is in the way")
    for folder in (None, tmp_path / "new" / "folder", tmp_path / "taken" / "folder"):
        assert same(temporary_rows(rows, folder), rows)
    assert not list((tmp_path / "new" / "folder").iterdir())


# -- memory ----------------------------------------------------------------------------------------------------------


def peak_of(what: str, count: int, *arguments: Path) -> int:
    command = [sys.executable, "-m", "tests.token_rows_memory", what, str(count), *map(str, arguments)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the peak in /proc")
def test_two_hundred_thousand_rows_take_a_few_mebibytes_more_than_a_thousand(tmp_path: Path):
    # In a list they would take 100 MiB for tokens and weights and 60 for the arrays around them.
    few, many = (peak_of("stored", count, tmp_path / str(count)) for count in (1_000, 200_000))
    assert many - few < 30 * MIB


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the peak in /proc")
def test_a_job_reads_and_plans_long_rows_in_the_same_memory_as_few(tmp_path: Path):
    model = save_tiny_llama(tmp_path / "tiny")
    peaks = []
    for count in (1_000, 10_000):
        (tmp_path / str(count)).mkdir()
        peaks.append(peak_of("job", count, tmp_path / str(count), model))
    # In a list 9,000 such rows would take 47 MiB.
    assert peaks[1] - peaks[0] < 24 * MIB

"""Data checked before compute: rows against their format when a job is submitted, tokens before it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from apis.datasets.models import Row
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.chat import ChatTokenizer, truncate
from post_training.data.formats import detect_format, to_example
from post_training.data.sources import RowReader
from post_training.data.types import Example, TokenizedRow

REQUEST_ROWS = 1_000
REQUEST_BYTES = 2**20
_FIRST_ROWS = 10
_NAMED_ROWS = 20
_SAMPLE_CHARACTERS = 2_000

OnOverlength = Literal["truncate", "drop", "error"]


@dataclass(frozen=True)
class RowReport:
    """What a check of format and schema found.

    Attributes:
        format: the one given, or told by the first row.
        rows: how many rows were checked.
        complete: whether these are all.
    """

    format: DatasetFormat
    rows: int
    complete: bool


@dataclass(frozen=True)
class TokenizedDataset:
    """Rows ready to train on, each with at least one supervised token, and the report on the whole data set."""

    rows: Sequence[TokenizedRow]
    report: dict[str, Any]


@dataclass
class _RowNumbers:
    """A count and the first few row numbers."""

    count: int = 0
    first_rows: list[int] = field(default_factory=list)

    def add(self, row: int) -> None:
        self.count += 1
        if len(self.first_rows) < _NAMED_ROWS:
            self.first_rows.append(row)

    def as_json(self) -> dict[str, Any]:
        return {"count": self.count, "first_rows": self.first_rows}


def check_rows(
    reader: RowReader,
    data_format: DatasetFormat | None,
    columns: Mapping[str, str] | None = None,
    *,
    limit_rows: int = REQUEST_ROWS,
    limit_bytes: int = REQUEST_BYTES,
) -> RowReport:
    """Check format and schema: every row of a small data set, the first ones of a large one.

    Raises:
        DataInvalid: naming the row and field.
        InvalidField: no format has all of `columns`.
    """
    small = reader.size_bytes is not None and reader.size_bytes <= limit_bytes
    limit = limit_rows if small else min(limit_rows, _FIRST_ROWS)
    rows = iter(reader)
    found, first_rows = _with_format(itertools.islice(rows, limit), data_format, columns)
    checked = sum(1 for _ in _examples(first_rows, found, columns))
    return RowReport(found, checked, complete=next(rows, None) is None)


def tokenize_dataset(
    reader: Iterable[Row],
    tokenizer: ChatTokenizer,
    data_format: DatasetFormat | None,
    train_on_input: bool,
    max_seq_len: int,
    columns: Mapping[str, str] | None = None,
    on_overlength: OnOverlength = "truncate",
    store: Callable[[Iterable[TokenizedRow]], Sequence[TokenizedRow]] = list,
) -> TokenizedDataset:
    """Tokenize every row. Rows without a supervised token, after truncation, are dropped.

    Args:
        max_seq_len: the most tokens of a row.
        columns: a format's columns to the data set's own names.
        on_overlength: a longer row loses tokens on the right, is dropped, or is an error.
        store: takes the rows one by one, as they are made, and gives them back as a sequence.

    Returns:
        The kept rows, and a report that JSON can hold: `rows` (read), `format`, `tokens` and `supervised_tokens` (of
        the kept rows), `longest_row_tokens` (before truncation), `sample` (the first kept row as runs of text with and
        without loss), and, each as a count and the first row numbers, `truncated`, `control_tokens` (rows whose own
        text holds the text of a control token) and `dropped`, which also has its reasons `overlength` and
        `unsupervised`.

    Raises:
        DataInvalid: a row cannot be used, or none has a supervised token.
    """
    counts = _Counts()
    found, rows = _with_format(reader, data_format, columns)
    examples = counts.noting(_examples(rows, found, columns), tokenizer)
    encoded = tokenizer.encode_examples(examples, train_on_input)
    kept = store(_usable(encoded, max_seq_len, on_overlength, counts))
    if not kept:
        raise DataInvalid(_nothing_left(counts, max_seq_len))
    report = {
        "rows": counts.rows,
        "format": found.value,
        "tokens": counts.tokens,
        "supervised_tokens": counts.supervised,
        **counts.as_json(),
        "sample": tokenizer.segments(kept[0], _SAMPLE_CHARACTERS),
    }
    return TokenizedDataset(kept, report)


@dataclass
class _Counts:
    """What happened to the rows read so far."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    truncated: _RowNumbers = field(default_factory=_RowNumbers)
    dropped: _RowNumbers = field(default_factory=_RowNumbers)
    overlength: _RowNumbers = field(default_factory=_RowNumbers)
    unsupervised: _RowNumbers = field(default_factory=_RowNumbers)
    control_tokens: _RowNumbers = field(default_factory=_RowNumbers)

    def noting(self, examples: Iterable[Example], tokenizer: ChatTokenizer) -> Iterator[Example]:
        for example in examples:
            self.rows += 1
            if tokenizer.has_control_text(example):
                self.control_tokens.add(example.row)
            yield example

    def drop(self, row: int, reason: _RowNumbers) -> None:
        self.dropped.add(row)
        reason.add(row)

    def as_json(self) -> dict[str, Any]:
        reasons = {"overlength": self.overlength.as_json(), "unsupervised": self.unsupervised.as_json()}
        return {
            "longest_row_tokens": self.longest,
            "truncated": self.truncated.as_json(),
            "dropped": self.dropped.as_json() | reasons,
            "control_tokens": self.control_tokens.as_json(),
        }


def _usable(
    encoded: Iterable[TokenizedRow], max_seq_len: int, on_overlength: OnOverlength, counts: _Counts
) -> Iterator[TokenizedRow]:
    """The rows that can be trained on, each within `max_seq_len`. Raises DataInvalid."""
    for whole in encoded:
        counts.longest = max(counts.longest, len(whole.tokens))
        row = _fitted(whole, max_seq_len, on_overlength, counts)
        if row is None:
            continue
        supervised = row.supervised
        if not supervised:
            counts.drop(row.row, counts.unsupervised)
            continue
        counts.tokens += len(row.tokens)
        counts.supervised += supervised
        yield row


def _fitted(row: TokenizedRow, max_seq_len: int, on_overlength: OnOverlength, counts: _Counts) -> TokenizedRow | None:
    """The row within `max_seq_len`, or None where it is dropped. Raises DataInvalid."""
    length = len(row.tokens)
    if length <= max_seq_len:
        return row
    if on_overlength == "error":
        raise DataInvalid(
            f"has {length} tokens, more than max_seq_len {max_seq_len}: raise that, shorten the row, or choose "
            "on_overlength 'truncate' or 'drop'",
            row=row.row,
        )
    if on_overlength == "drop":
        counts.drop(row.row, counts.overlength)
        return None
    counts.truncated.add(row.row)
    return truncate(row, max_seq_len)


def _nothing_left(counts: _Counts, max_seq_len: int) -> str:
    if counts.overlength.count == counts.rows:
        return (
            f"no row is left: each of the {counts.rows} has more than max_seq_len {max_seq_len} tokens, and "
            "on_overlength is 'drop'; raise max_seq_len or choose 'truncate'"
        )
    return (
        f"no supervised token: none of the {counts.rows} rows has an answer within the first {max_seq_len} tokens; "
        "raise max_seq_len, shorten the prompts, or give an assistant message weight 1"
    )


def _with_format(
    rows: Iterable[Row], data_format: DatasetFormat | None, columns: Mapping[str, str] | None
) -> tuple[DatasetFormat, Iterator[Row]]:
    """The format, told by the first row's columns where none is given, and the rows from the first on."""
    remaining = iter(rows)
    first = next(remaining, None)
    if first is None:
        raise DataInvalid("the data set has no rows; it needs at least one")
    return data_format or detect_format(first, columns), itertools.chain([first], remaining)


def _examples(rows: Iterable[Row], data_format: DatasetFormat, columns: Mapping[str, str] | None) -> Iterator[Example]:
    return (to_example(row, index, data_format, columns) for index, row in enumerate(rows))

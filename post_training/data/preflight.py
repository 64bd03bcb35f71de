"""Data checked before compute: rows against their format when a job is submitted, tokens before it trains."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from apis.datasets.models import Row
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.chat import ChatTokenizer, truncate
from post_training.data.formats import detect_format, to_conversation
from post_training.data.sources import RowReader
from post_training.data.types import Conversation, TokenizedRow

REQUEST_ROWS = 1_000
REQUEST_BYTES = 2**20
_FIRST_ROWS = 10
_NAMED_ROWS = 20
_SAMPLE_CHARACTERS = 2_000


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

    rows: list[TokenizedRow]
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
    limit_rows: int = REQUEST_ROWS,
    limit_bytes: int = REQUEST_BYTES,
) -> RowReport:
    """Check format and schema: every row of a small data set, the first ones of a large one.

    Raises:
        DataInvalid: naming the row and field.
    """
    small = reader.size_bytes is not None and reader.size_bytes <= limit_bytes
    limit = limit_rows if small else min(limit_rows, _FIRST_ROWS)
    rows = iter(reader)
    found, first_rows = _with_format(itertools.islice(rows, limit), data_format)
    checked = sum(1 for _ in _conversations(first_rows, found))
    return RowReport(found, checked, complete=next(rows, None) is None)


def tokenize_dataset(
    reader: Iterable[Row],
    tokenizer: ChatTokenizer,
    data_format: DatasetFormat | None,
    train_on_input: bool,
    max_seq_len: int,
) -> TokenizedDataset:
    """Tokenize every row. Longer rows lose tokens on the right; rows without a supervised token are dropped.

    Returns:
        The kept rows, and a report that JSON can hold: `rows` (read), `format`, `tokens` and `supervised_tokens` (of
        the kept rows), `longest_row_tokens` (before truncation), `truncated` and `dropped` (count and first row
        numbers), `sample` (the first kept row as runs of text with and without loss).

    Raises:
        DataInvalid: a row cannot be used, or none has a supervised token.
    """
    kept: list[TokenizedRow] = []
    truncated, dropped = _RowNumbers(), _RowNumbers()
    read = longest = 0
    found, rows = _with_format(reader, data_format)
    for conversation in _conversations(rows, found):
        whole = tokenizer.encode_conversation(conversation, train_on_input)
        read, longest = read + 1, max(longest, len(whole.tokens))
        row = truncate(whole, max_seq_len)
        if len(row.tokens) < len(whole.tokens):
            truncated.add(row.row)
        if row.supervised:
            kept.append(row)
        else:
            dropped.add(row.row)
    if not kept:
        raise DataInvalid(
            f"no supervised token: none of the {read} rows has an answer within the first {max_seq_len} tokens; "
            "raise max_seq_len, shorten the prompts, or give an assistant message weight 1"
        )
    report = {
        "rows": read,
        "format": found.value,
        "tokens": sum(len(row.tokens) for row in kept),
        "supervised_tokens": sum(row.supervised for row in kept),
        "longest_row_tokens": longest,
        "truncated": truncated.as_json(),
        "dropped": dropped.as_json(),
        "sample": tokenizer.segments(kept[0], _SAMPLE_CHARACTERS),
    }
    return TokenizedDataset(kept, report)


def _with_format(rows: Iterable[Row], data_format: DatasetFormat | None) -> tuple[DatasetFormat, Iterator[Row]]:
    """The format, told by the first row's columns where none is given, and the rows from the first on."""
    remaining = iter(rows)
    first = next(remaining, None)
    if first is None:
        raise DataInvalid("the data set has no rows; it needs at least one")
    return data_format or detect_format(first), itertools.chain([first], remaining)


def _conversations(rows: Iterable[Row], data_format: DatasetFormat) -> Iterator[Conversation]:
    return (to_conversation(row, index, data_format) for index, row in enumerate(rows))

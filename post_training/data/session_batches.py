"""The batch of one call of a session, in any of its three forms, as rows ready for `micro_batches`.

A batch is trained on as it is or refused: no row of it is left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from apis.datasets.models import Row
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from apis.sft_sessions.training_models import Batch, TokenSequence
from post_training.data.chat import ChatTokenizer, truncate
from post_training.data.formats import detect_format, to_example
from post_training.data.records import encode_row
from post_training.data.session_arrays import (
    Place,
    as_weights,
    check_ids,
    real_numbers,
    weights_of_labels,
    whole_numbers,
)
from post_training.data.session_tensors import PARAM as BATCH_DATA
from post_training.data.session_tensors import rows_of_tensors
from post_training.data.types import Example, TokenizedRow


class BatchReader:
    """Reads the batches of one session. The same reader serves training and validation.

    Args:
        tokenizer: the model's.
        data_format: of rows; None: told by the first row of each batch.
        columns: a format's columns to the rows' own names; all of them are columns of one format.
        train_on_input: of rows, as in a job.
        max_seq_len: the most tokens of a row.
        on_overlength: a longer row is cut on the right, or its batch refused.
        vocab_size: how many embeddings the model has; ids that are sent are below it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        data_format: DatasetFormat | None,
        columns: Mapping[str, str] | None,
        train_on_input: bool,
        max_seq_len: int,
        on_overlength: Literal["truncate", "error"],
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._data_format = data_format
        self._columns = columns
        self._train_on_input = train_on_input
        self._max_seq_len = max_seq_len
        self._on_overlength = on_overlength
        self._vocab_size = vocab_size

    def read(self, batch: Batch) -> list[TokenizedRow]:
        """The rows of the batch, in order and numbered from 0, each with a supervised token within `max_seq_len`.

        `rows` get the tokens and weights that a job gives them.

        Raises:
            DataInvalid: with the row and the field.
            ModelInvalid: rows need a chat template, and the model has none.
        """
        if batch.rows is not None:
            with _naming_rows():
                return [self._fitted(row, f"rows.{row.row}") for row in self._encoded(batch.rows)]
        if batch.sequences is not None:
            found = (self._sequence(sequence, number) for number, sequence in enumerate(batch.sequences))
            return [self._fitted(row, f"sequences.{row.row}") for row in found]
        assert batch.batch_data is not None  # a Batch has one of the three
        return [self._fitted(row, BATCH_DATA) for row in rows_of_tensors(batch.batch_data, self._vocab_size)]

    def _encoded(self, rows: list[Row]) -> Iterator[TokenizedRow]:
        data_format = self._data_format or detect_format(rows[0], self._columns)
        return self._tokenizer.encode_examples(self._examples(rows, data_format), self._train_on_input)

    def _examples(self, rows: list[Row], data_format: DatasetFormat) -> Iterator[Example]:
        for number, row in enumerate(rows):
            encode_row(row, number)  # refuses what a registered data set refuses
            yield to_example(row, number, data_format, self._columns)

    def _sequence(self, sequence: TokenSequence, number: int) -> TokenizedRow:
        place = Place(f"sequences.{number}.tokens", number)
        tokens = whole_numbers(sequence.tokens, place)
        if len(tokens) < 2:
            raise place.refuse(f"has {len(tokens)} tokens, and one to learn from and one to learn are two")
        check_ids(tokens, self._vocab_size, place)
        weights = _weights(sequence, tokens, number)
        weights[0] = 0
        return TokenizedRow(number, tokens.astype(np.int32), weights)

    def _fitted(self, row: TokenizedRow, param: str) -> TokenizedRow:
        """The row within `max_seq_len`. Raises DataInvalid, also where no supervised token is left."""
        length, limit = len(row.tokens), self._max_seq_len
        if length > limit:
            if self._on_overlength == "error":
                raise DataInvalid(
                    f"has {length} tokens, more than max_seq_len {limit}: shorten it, or open a session with a larger "
                    "max_seq_len or with on_overlength 'truncate'",
                    row=row.row,
                    param=param,
                )
            row = truncate(row, limit)
        if not row.supervised:
            raise DataInvalid(
                f"has no supervised token{f' within the first {limit}' if length > limit else ''}, so there is nothing "
                "to learn from it: leave it out of the batch",
                row=row.row,
                param=param,
            )
        return row


def _weights(sequence: TokenSequence, tokens: NDArray[np.int64], number: int) -> NDArray[np.float32]:
    """[n] loss weights of a sequence's tokens. Raises DataInvalid."""
    if sequence.labels is not None:
        place = Place(f"sequences.{number}.labels", number)
        labels = whole_numbers(sequence.labels, place)
        _check_length(labels, tokens, place)
        return weights_of_labels(labels, tokens, place)
    if sequence.weights is not None:
        place = Place(f"sequences.{number}.weights", number)
        weights = real_numbers(sequence.weights, place)
        _check_length(weights, tokens, place)
        return as_weights(weights, place)
    return np.ones(len(tokens), dtype=np.float32)


def _check_length(values: NDArray[Any], tokens: NDArray[np.int64], place: Place) -> None:
    if len(values) != len(tokens):
        raise place.refuse(f"has {len(values)} numbers for {len(tokens)} tokens")


@contextmanager
def _naming_rows() -> Iterator[None]:
    """Name the part of the batch that an error about a row is about."""
    try:
        yield
    except DataInvalid as error:
        if error.param is None:
            error.param = "rows" if error.row is None else f"rows.{error.row}"
        raise

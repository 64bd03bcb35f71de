"""Rows to examples: which data format a data set has, and the reader of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from apis.datasets.models import Row
from apis.errors import DataInvalid, InvalidField
from apis.post_training.models import DatasetFormat
from post_training.data.format_fields import Fields, seen
from post_training.data.format_messages import read_dialog, read_messages
from post_training.data.format_pairs import read_alpaca, read_instruct, read_prompt_completion, read_text
from post_training.data.format_sharegpt import read_sharegpt
from post_training.data.types import Example

_READERS: dict[DatasetFormat, Callable[[Fields], Example]] = {
    DatasetFormat.messages: read_messages,
    DatasetFormat.dialog: read_dialog,
    DatasetFormat.instruct: read_instruct,
    DatasetFormat.prompt_completion: read_prompt_completion,
    DatasetFormat.alpaca: read_alpaca,
    DatasetFormat.sharegpt: read_sharegpt,
    DatasetFormat.text: read_text,
}
"""In the order in which formats are recognised."""
_PREFERENCE = {"chosen", "rejected"}
# Preference rows have these columns too, and no answer in them.
_UNLESS_PREFERENCE = (DatasetFormat.sharegpt, DatasetFormat.text)
_NO_COLUMNS: Mapping[str, str] = {}
_PARAM = "training_config.data_config.columns"


def detect_format(row: Row, columns: Mapping[str, str] | None = None) -> DatasetFormat:
    """The format whose columns `row`, the first row of a data set, has.

    Args:
        columns: a format's columns to the data set's own names; only formats that have all of them are tried.

    Raises:
        InvalidField: no format has all of `columns`.
        DataInvalid: naming the columns seen and those that would do, or that the rows are preference pairs.
    """
    names = columns or _NO_COLUMNS
    candidates = [data_format for data_format in _READERS if names.keys() <= set(data_format.columns)]
    if not candidates:
        raise InvalidField(f"no data format reads {', '.join(map(repr, names))} together", param=_PARAM)
    preference = row.keys() >= _PREFERENCE and not names
    for data_format in candidates:
        fits = all(names.get(column, column) in row for column in data_format.required_columns)
        if fits and not (preference and data_format in _UNLESS_PREFERENCE):
            return data_format
    if preference:
        raise DataInvalid(_preference(row), row=0)
    known = "; ".join(f"{data_format}: {', '.join(data_format.required_columns)}" for data_format in candidates)
    under = f" under the names {dict(names)}" if names else ""
    raise DataInvalid(
        f"the columns {seen(row)} fit no data format{under}. Rename them, or map them with `columns`, "
        f"to those of one of: {known}",
        row=0,
    )


def _preference(row: Row) -> str:
    chosen = "; to fine-tune on the chosen answers give columns {'completion': 'chosen'}" if "prompt" in row else ""
    return f"the columns {seen(row)} are preference pairs, which preference_optimize trains on{chosen}"


def to_example(row: Row, index: int, data_format: DatasetFormat, columns: Mapping[str, str] | None = None) -> Example:
    """Read one row, the `index`-th (from 0) of its data set, as messages or as text.

    A `developer` message becomes a `system` one, content given as text parts becomes one string, and tool arguments
    given as a JSON string become an object: the shapes that chat templates read.

    A `dialog` may stand as `messages`, which is what Llama Stack's clients document for it: a row with that column and
    without `dialog` is read as one of the format `messages`.

    Args:
        columns: a format's columns to the data set's own names.

    Raises:
        DataInvalid: with row, JSON pointer (in the data set's own names), reason and remedy.
    """
    fields = Fields(row, index, columns or _NO_COLUMNS)
    if data_format is DatasetFormat.dialog and _stands_as_messages(fields):
        data_format = DatasetFormat.messages
    # A name that the request gives is meant: an optional column under it must be there, too.
    for column in (*data_format.required_columns, *fields.names):
        if fields.name(column) not in row:
            raise DataInvalid(
                f"the column {fields.name(column)!r}"
                + (f", given for {column!r}" if column in fields.names else "")
                + f" of data_format {data_format.value!r} is missing; the columns are {seen(row)}. "
                + ("A dialog is read from 'messages' as well. " if data_format is DatasetFormat.dialog else "")
                + "Rename one, map it with `columns`, or give another data_format",
                row=index,
                pointer=fields.pointer(column),
            )
    return _READERS[data_format](fields)


def _stands_as_messages(fields: Fields) -> bool:
    return not fields.names and "dialog" not in fields.row and "messages" in fields.row

"""Reading one row's fields under the names that its data set gives them, and the checks that formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apis.datasets.models import Row
from apis.errors import DataInvalid
from post_training.data.records import decode_value, json_type
from post_training.data.types import Conversation


@dataclass(frozen=True)
class Fields:
    """A row, asked by the column names of its format.

    Attributes:
        row: as the data set has it.
        index: its 0-based number.
        names: a format's column to the data set's own; a column that is not here has its own name.
    """

    row: Row
    index: int
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, column: str) -> str:
        return self.names.get(column, column)

    def pointer(self, column: str) -> str:
        """The JSON pointer (RFC 6901) to the column, by the data set's name for it."""
        return "/" + self.name(column).replace("~", "~0").replace("/", "~1")

    def value(self, column: str) -> Any:
        """What the column holds; None where the row has no such column."""
        return self.row.get(self.name(column))

    def text(self, column: str) -> str:
        return text(self.value(column), self.index, self.pointer(column))

    def optional_text(self, column: str) -> str:
        """Empty where the column is missing or null."""
        return "" if self.value(column) is None else self.text(column)

    def answer(self, column: str) -> str:
        """Text to learn. Raises DataInvalid where it is empty."""
        answer = self.text(column)
        if not answer:
            raise DataInvalid(
                "is empty, so there is nothing to learn; fill it or delete the row",
                row=self.index,
                pointer=self.pointer(column),
            )
        return answer

    def decoded(self, column: str) -> Any:
        """What the column holds, read from JSON where it is text."""
        return decoded(self.value(column), self.index, self.pointer(column))


def seen(row: Row) -> str:
    """The row's columns, for messages."""
    return ", ".join(repr(column) for column in row) or "(none)"


def exchange(question: str, answer: str, index: int) -> Conversation:
    """A user's question and the assistant's answer."""
    return Conversation(index, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def text(value: Any, index: int, pointer: str) -> str:
    if not isinstance(value, str):
        raise DataInvalid(f"must be a string, found {json_type(value)}", row=index, pointer=pointer)
    return value


def decoded(value: Any, index: int, pointer: str) -> Any:
    """The value, or what its text says as JSON. Raises DataInvalid where that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return decode_value(value)
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataInvalid(f"is a string and not valid JSON: {reason}", row=index, pointer=pointer) from None


def objects(values: Any, index: int, pointer: str) -> list[dict[str, Any]]:
    """Messages as a list of at least one object."""
    if not isinstance(values, list) or not values:
        found = "an empty list" if values == [] else json_type(values)
        raise DataInvalid(f"must be a list of messages, found {found}", row=index, pointer=pointer)
    for i, item in enumerate(values):
        if not isinstance(item, dict):
            raise DataInvalid(f"must be a message object, found {json_type(item)}", row=index, pointer=f"{pointer}/{i}")
    return values

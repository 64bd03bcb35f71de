"""Numbers as a session's client sends them, as numpy arrays: every size is checked before anything is decoded.

Nothing sent is executed or unpickled. A fault is a `DataInvalid` that names the field and, where there is one, the row.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apis.errors import DataInvalid
from apis.sft_sessions.training_models import ArrayData

IGNORED_LABEL = -100
"""The label of a token that is not trained on, as in transformers."""

_BFLOAT16, _BOOL = "bfloat16", "bool"
_STORED = {
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint16": "<u2",
    "uint8": "|u1",
    _BOOL: "|u1",
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    _BFLOAT16: "<u2",
}
"""How the numbers of each dtype lie in the data."""
DTYPES = tuple(_STORED)


@dataclass(frozen=True)
class Place:
    """Where in a batch something stands.

    Attributes:
        param: dotted path of the field.
        row: 0-based row of the batch; None for the batch as a whole.
    """

    param: str
    row: int | None = None

    def refuse(self, message: str, row: int | None = None) -> DataInvalid:
        return DataInvalid(message, row=self.row if row is None else row, param=self.param)


def decode(data: str, dtype: str, shape: Sequence[int], place: Place) -> NDArray[Any]:
    """The numbers in `data`, base64 of little-endian numbers of one of `DTYPES`; [*shape].

    bfloat16 becomes float32, bool stays one.

    Raises:
        DataInvalid: the data is no base64, or is not as long as dtype and shape say.
    """
    stored = np.dtype(_STORED[dtype])
    size = math.prod(shape) * stored.itemsize
    expected = 4 * -(-size // 3)
    if len(data) != expected:
        raise place.refuse(
            f"shape {list(shape)} of {dtype} takes {size} bytes, which are {expected} characters of base64, but the "
            f"data has {len(data)}"
        )
    try:
        content = binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise place.refuse(f"the data is no base64 (A-Z, a-z, 0-9, +, / and = at its end): {error}") from None
    if len(content) != size:
        raise place.refuse(f"shape {list(shape)} of {dtype} takes {size} bytes, but the data has {len(content)}")
    return _widened(np.frombuffer(content, stored).reshape(shape), dtype, place)


def _widened(values: NDArray[Any], dtype: str, place: Place) -> NDArray[Any]:
    if dtype == _BFLOAT16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == _BOOL:
        if values.max(initial=0) > 1:
            raise place.refuse(f"a bool is a byte that is 0 or 1, not {values.max()}")
        return values.astype(np.bool_)
    return values


def whole_numbers(numbers: list[int] | ArrayData, place: Place) -> NDArray[np.int64]:
    """[n] int64. Raises DataInvalid, also for an array of another kind than whole numbers."""
    if isinstance(numbers, ArrayData):
        return as_integers(decode(numbers.data, numbers.dtype, numbers.shape, place), place)
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        raise place.refuse("holds a number of more than 64 bits") from None


def real_numbers(numbers: list[float] | ArrayData, place: Place) -> NDArray[Any]:
    """[n] numbers of any kind. Raises DataInvalid."""
    if isinstance(numbers, ArrayData):
        return decode(numbers.data, numbers.dtype, numbers.shape, place)
    return np.array(numbers, dtype=np.float64)


def as_integers(values: NDArray[Any], place: Place) -> NDArray[np.int64]:
    """The same numbers as int64. Raises DataInvalid where they are of another kind."""
    if values.dtype.kind not in "iu":
        raise place.refuse(f"must be whole numbers (int64, int32, …), not {values.dtype}")
    return values.astype(np.int64)


def as_weights(values: NDArray[Any], place: Place) -> NDArray[np.float32]:
    """Loss weights as float32, a new array of the same shape.

    Raises:
        DataInvalid: one is negative, not finite, or too large for float32; names the first by its position.
    """
    with np.errstate(over="ignore"):  # what overflows is not finite then
        weights = values.astype(np.float32)
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        *rows, position = (int(index) for index in np.argwhere(wrong)[0])
        value = values[(*rows, position)]
        raise place.refuse(
            f"the weight at position {position} is {value}, and weights are finite in fp32 and not negative", *rows
        )
    return weights


def check_ids(tokens: NDArray[np.int64], vocab_size: int, place: Place) -> None:
    """Refuse ids that the model has no embedding for. Raises DataInvalid with the first one's position.

    Args:
        tokens: [n], or [B, T].
    """
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    *rows, position = (int(index) for index in np.argwhere((tokens < 0) | (tokens >= vocab_size))[0])
    raise place.refuse(
        f"the token at position {position} is {tokens[(*rows, position)]}, but the model's ids are 0 to "
        f"{vocab_size - 1}",
        *rows,
    )


def weights_of_labels(labels: NDArray[np.int64], tokens: NDArray[np.int64], place: Place) -> NDArray[np.float32]:
    """1 where a token is its own label, 0 where the label is -100; shapes as `labels` and `tokens`, which are equal.

    Labels are those that transformers' models take: not shifted.

    Raises:
        DataInvalid: a label is neither; names the first by its position.
    """
    supervised = labels != IGNORED_LABEL
    wrong = supervised & (labels != tokens)
    if wrong.any():
        *rows, position = (int(index) for index in np.argwhere(wrong)[0])
        where = (*rows, position)
        raise place.refuse(
            f"the label at position {position} is {labels[where]}, but the token there is {tokens[where]}: a label is "
            f"the token at its own place (not shifted), or {IGNORED_LABEL} where nothing is learnt",
            *rows,
        )
    return supervised.astype(np.float32)

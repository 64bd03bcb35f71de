"""Numbers as the training server of a session takes them, at a third of the bytes of a JSON list. Python alone."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from operator import index
from typing import Any

from apis.errors import InvalidField

_INTEGERS = (("uint16", "H", 0, 2**16 - 1), ("int32", "i", -(2**31), 2**31 - 1), ("int64", "q", -(2**63), 2**63 - 1))
"""Name, `array`'s code, least and greatest."""


def encode_tokens(values: Any) -> dict[str, Any]:
    """Token ids or labels, [n], in the smallest of uint16, int32 and int64 that holds them.

    Args:
        values: a list, or what gives one by `tolist()`, as arrays and tensors do.

    Raises:
        InvalidField: a value is no whole number, or has more than 64 bits.
    """
    numbers = [_whole(value) for value in _as_list(values)]
    least, greatest = min(numbers, default=0), max(numbers, default=0)
    for dtype, code, low, high in _INTEGERS:
        if low <= least and greatest <= high:
            return _encoded(dtype, array(code, numbers))
    raise InvalidField("a token id has more than 64 bits", param="tokens")


def encode_weights(values: Any) -> dict[str, Any]:
    """Loss weights, [n], in bfloat16 where that holds each of them as float32 would, else in float32.

    Args:
        values: as for `encode_tokens`.

    Raises:
        InvalidField: a value is no number, or not finite in float32.
    """
    try:
        numbers = array("f", _as_list(values))
    except TypeError as error:
        raise InvalidField(f"weights are numbers: {error}", param="weights") from None
    if not all(map(math.isfinite, numbers)):
        raise InvalidField("weights are finite in fp32", param="weights")
    content = _little_endian(numbers)
    if any(content[0::4]) or any(content[1::4]):
        return _wire("float32", len(numbers), content)
    upper = bytearray(2 * len(numbers))
    upper[0::2], upper[1::2] = content[2::4], content[3::4]
    return _wire("bfloat16", len(numbers), bytes(upper))


def _as_list(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _whole(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise InvalidField(f"token ids and labels are whole numbers, not {value!r}", param="tokens")


def _encoded(dtype: str, numbers: array[int]) -> dict[str, Any]:
    return _wire(dtype, len(numbers), _little_endian(numbers))


def _little_endian(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _wire(dtype: str, length: int, content: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [length], "data": b64encode(content).decode("ascii")}

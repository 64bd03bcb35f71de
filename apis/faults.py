"""What is wrong with a request, as those who sent it can use it: pydantic's faults without the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apis.errors import PostgradError, field_path

MAX_FAULTS = 20
_MAX_NAME = 100


def describe_faults(
    faults: Sequence[Mapping[str, Any]], body: Any, left_out: str | None = None
) -> list[dict[str, Any]]:
    """The first faults of a body, each with `loc`, `msg` and `type`.

    Args:
        left_out: parts of a place that begin so are no part of what was sent.
    """
    return [_fault(item, body, left_out) for item in faults[:MAX_FAULTS]]


def fault_of(error: PostgradError, part: str = "body") -> dict[str, Any]:
    """The fault that an error of ours tells, in the same shape; `part` of the request is where its `param` lies."""
    param = error.param.split(".") if error.param else []
    place = [part, *(int(name) if name.isdecimal() else name for name in param)]
    return {"loc": place, "msg": error.message, "type": error.code}


def first_fault(faults: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """The field of the first fault, None for the body as a whole, and what is wrong with it."""
    first = faults[0]
    field = ".".join(map(str, first["loc"][1:])) if first["type"] != "json_invalid" else ""
    return (field, f"{field}: {first['msg']}") if field else (None, first["msg"])


def _fault(item: Mapping[str, Any], body: Any, left_out: str | None) -> dict[str, Any]:
    loc = list(item["loc"])
    loc = [part for part in loc if left_out is None or not str(part).startswith(left_out)]
    plain = [loc[0], *field_path(loc[1:], body)] if loc and loc[0] == "body" else loc
    return {"loc": [_short(part) for part in plain], "msg": _message(item, body), "type": item["type"]}


def _short(part: Any) -> Any:
    return part if isinstance(part, int) or len(part) <= _MAX_NAME else part[:_MAX_NAME] + "…"


def _message(item: Mapping[str, Any], body: Any) -> str:
    """What is wrong, without the value: it may be long, or private."""
    kind, context = item["type"], item.get("ctx") or {}
    if kind == "json_invalid":
        return f"the body is not valid JSON: {context.get('error')} at character {item['loc'][-1]}"
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "union_tag_invalid":
        return f"{context.get('discriminator')} must be one of {context.get('expected_tags')}"
    if kind == "value_error":
        return str(context.get("error", item["msg"]))
    if list(item["loc"]) == ["body"] and isinstance(body, bytes):
        return "the body must be JSON, sent with content-type: application/json"
    return str(item["msg"])

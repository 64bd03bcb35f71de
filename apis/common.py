"""Types that every API shares: API names, identifiers, the strict request base."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema, model_validator

from apis.errors import InvalidField

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
MAX_IDENTIFIER_LENGTH = 255
# pydantic writes 255 levels, some of which are the answer's own.
MAX_NESTING = 200
# The largest number that a store keeps and a sequence can be indexed with.
MAX_INTEGER = 2**63 - 1
_UNIONS = (Union, UnionType)


class Api(StrEnum):
    """The APIs a stack can serve; the keys of `providers:` in a run.yaml."""

    post_training = "post_training"
    datasetio = "datasetio"
    datasets = "datasets"
    models = "models"
    inference = "inference"
    inspect = "inspect"


class RequestModel(BaseModel):
    """Base of everything a client sends: an unknown field is refused by name.

    SDKs send as null what their caller has not set, so null means absent wherever a field may be left out; a field that
    gives null a meaning of its own keeps it.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not any(item is None for item in value.values()):
            return value
        absent = _absent_when_null(cls)
        return {name: item for name, item in value.items() if item is not None or name not in absent}


@functools.cache
def _absent_when_null(model: type[RequestModel]) -> frozenset[str]:
    """The fields that may be left out and have no meaning for null."""
    fields = model.model_fields.items()
    return frozenset(name for name, field in fields if not (field.is_required() or _takes_null(field.annotation)))


def _takes_null(annotation: Any) -> bool:
    if annotation in (Any, None, NoneType):
        return True
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        parts = parts[:1]
    elif get_origin(annotation) not in _UNIONS:
        return False
    return any(_takes_null(part) for part in parts)


class ResponseModel(BaseModel):
    """Base of everything the server answers."""

    model_config = ConfigDict(protected_namespaces=())


def check_identifier(value: str, *, param: str = "id") -> str:
    """Return `value` if it is a well-formed id.

    An id has 1 to 255 characters; each `/`-separated segment starts with a letter, digit or `_`
    and goes on with those, `.`, `:`, `@` or `-`. So an id can never climb out of a folder.

    Raises:
        InvalidField: with the id and the rule.
    """
    if not 1 <= len(value) <= MAX_IDENTIFIER_LENGTH:
        raise InvalidField(f"an id has 1 to {MAX_IDENTIFIER_LENGTH} characters, this one has {len(value)}", param=param)
    for segment in value.split("/"):
        if not _SEGMENT.fullmatch(segment):
            raise InvalidField(
                f"{value!r} is not a valid id: each '/'-separated part must start with a letter, digit or '_' "
                "and hold only letters, digits and . _ : @ -",
                param=param,
            )
    return value


def _identifier(value: str) -> str:
    try:
        return check_identifier(value)
    except InvalidField as error:
        raise ValueError(error.message) from None


_IDENTIFIER_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_IDENTIFIER_LENGTH,
    "pattern": f"^{_SEGMENT.pattern}(/{_SEGMENT.pattern})*$",
}
Identifier = Annotated[str, AfterValidator(_identifier), WithJsonSchema(_IDENTIFIER_SCHEMA)]


def check_nesting(value: Any) -> None:
    """Refuse a JSON value that no answer could hold. Raises ValueError where it is over `MAX_NESTING` levels deep."""
    level, depth = [value], 0
    while level := [child for node in level for child in _children(node)]:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"is nested too deeply: {MAX_NESTING} levels at most")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    check_nesting(value)
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds an unpaired surrogate (\\ud800 to \\udfff), which is not text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"has no JSON form: {error}") from None
    return value


# What is stored and answered as JSON must have that form when it comes in: one that has not spoils every later list.
JsonObject = Annotated[dict[str, Any], AfterValidator(_json_object)]

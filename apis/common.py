"""Types that every API shares: API names, identifiers, the strict request base."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from apis.errors import InvalidField

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
MAX_IDENTIFIER_LENGTH = 255


class Api(StrEnum):
    """The APIs a stack can serve; the keys of `providers:` in a run.yaml."""

    post_training = "post_training"
    datasetio = "datasetio"
    datasets = "datasets"
    models = "models"
    inference = "inference"
    inspect = "inspect"


class RequestModel(BaseModel):
    """Base of everything a client sends: an unknown field is refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


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


Identifier = Annotated[str, AfterValidator(_identifier)]

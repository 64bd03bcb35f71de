"""Faults of a translated request, told as those of any other."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

SHAPE_TAG = "shape:"
"""Begins the name of one of several shapes that a route takes; it stands in pydantic's locations, not in the body."""

_Request = TypeVar("_Request", bound=BaseModel)


def validated(kind: type[_Request], fields: dict[str, Any]) -> _Request:
    """`fields` as `kind`. Raises RequestValidationError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise RequestValidationError(faults, body=fields) from None

"""Numbers as sessions take them: `true` is none, although Python counts it as 1."""

from __future__ import annotations

from pydantic import BeforeValidator


def no_boolean(value: object) -> object:
    """The same value. Raises ValueError for a boolean."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


NO_BOOLEAN = BeforeValidator(no_boolean)
"""Stands behind a field's limits: before them, the schema would not show them."""

"""Whose jobs, data sets and models are, and on whose behalf the store is asked.

A request's caller is set once, where its key is checked, and asked for where rows are read: no route, dialect or
provider passes it on, so none can forget it. The threads that a request's work is done in inherit it
(`anyio.to_thread`, `asyncio.to_thread`). Schedulers, workers and the command line set none and see everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from sqlalchemy import ColumnElement, true
from sqlalchemy.orm import InstrumentedAttribute

from apis.errors import Forbidden

EVERYBODY = "*"
"""Stands where an owner would, for what all may see. No key has this id."""
MAX_OWNER_LENGTH = 64


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        owner: whose what it makes is: the id of a key; `EVERYBODY`; None: the administrator's alone.
        sees_all: whether it sees and changes what belongs to others.
    """

    owner: str | None
    sees_all: bool


ADMINISTRATOR = Caller(None, sees_all=True)
NOBODY = Caller("", sees_all=False)
STACK = Caller(EVERYBODY, sees_all=True)
"""A stack that registers what its run.yaml lists."""

_caller: ContextVar[Caller] = ContextVar("caller", default=ADMINISTRATOR)


def key_holder(key_id: str) -> Caller:
    return Caller(key_id, sees_all=False)


def current_caller() -> Caller:
    return _caller.get()


@contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """Do what is in the block on behalf of `caller`."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def own(column: InstrumentedAttribute[str | None]) -> ColumnElement[bool]:
    """The condition that a row is the caller's own."""
    caller = current_caller()
    return true() if caller.sees_all else column == caller.owner


def is_own(owner: str | None) -> bool:
    """As `own`, for the owner of one row."""
    caller = current_caller()
    return caller.sees_all or owner == caller.owner


def visible(column: InstrumentedAttribute[str | None]) -> ColumnElement[bool]:
    """The condition that a row is the caller's own or everybody's."""
    caller = current_caller()
    return true() if caller.sees_all else column.in_((caller.owner, EVERYBODY))


def is_visible(owner: str | None) -> bool:
    """As `visible`, for the owner of one row."""
    caller = current_caller()
    return caller.sees_all or owner in (caller.owner, EVERYBODY)


def check_changeable(owner: str | None, what: str) -> None:
    """Raises Forbidden where the caller may see `what` and not change it."""
    if not is_own(owner):
        raise Forbidden(f"{what} is everybody's: only who runs this server may change it")

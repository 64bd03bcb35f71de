"""Two ends of a session's link: what is asked is answered once, with the other's result or its error."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from apis.errors import DataInvalid, PostgradError, Unavailable
from post_training.data.types import TokenizedRow
from post_training.worker.session_link import Link
from post_training.worker.session_messages import LoadWork, SaveWork, StepWork, UpdateWork

Handlers = Mapping[str, Callable[..., Any]]
Connect = Callable[[Handlers], tuple[Link, Connection]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A link and the connection at its other end, on which a test may do what it likes."""
    made: list[tuple[Link, Connection]] = []

    def make(handlers: Handlers) -> tuple[Link, Connection]:
        ours, theirs = socket.socketpair()
        other = Connection(theirs.detach())
        made.append((Link(Connection(ours.detach()), handlers, on_end=lambda: None), other))
        return made[-1]

    yield make
    for link, other in made:
        if not other.closed:
            other.close()
        link.close()


def two(handlers: Handlers) -> tuple[Link, Link]:
    left, right = socket.socketpair()
    ends = [Connection(each.detach()) for each in (left, right)]
    return Link(ends[0], {}, on_end=lambda: None), Link(ends[1], handlers, on_end=lambda: None)


def test_many_at_once_get_each_its_own_answer_in_whatever_order_they_are_done():
    waiting: list[tuple[int, Future[int]]] = []

    def later(number: int) -> Future[int]:
        waiting.append((number, Future()))
        return waiting[-1][1]

    asking, _ = two({"later": later, "now": lambda number: -number})
    asked = [asking.ask("later", number) for number in range(50)]
    assert asking.ask("now", 7).result(5) == -7  # so all before it have come
    for number, future in reversed(waiting):
        future.set_result(number * number)
    assert [each.result(5) for each in asked] == [number * number for number in range(50)]


def test_rows_come_over_as_they_were():
    asking, _ = two({"back": lambda work: work})
    row = TokenizedRow(3, np.arange(5, dtype=np.int32), np.array([0, 0.5, 1, 1, 0], np.float32))
    work = asking.ask("back", StepWork([row], 0.5, {"epoch": 1})).result(5)
    assert (work.lr, work.cursor, work.rows[0].row) == (0.5, {"epoch": 1}, 3)
    assert work.rows[0].tokens.tolist() == row.tokens.tolist()
    assert work.rows[0].weights.dtype == np.float32
    assert work.rows[0].weights.tolist() == row.weights.tolist()


CURSORS = ({"": 1}, {"rows": []}, ["error", {"code": "x"}], ["", 3], {"$": "StepWork"}, "\ud800", [["", 1]])


@pytest.mark.parametrize("cursor", CURSORS)
def test_nothing_in_a_clients_own_data_is_taken_for_a_message(cursor: Any):
    asking, _ = two({"back": lambda value: value})
    for value in (StepWork([], None, {"c": cursor}), UpdateWork(None, {"c": cursor}), {"cursor": cursor}):
        assert asking.ask("back", value).result(5) == value


@pytest.mark.parametrize("value", [SaveWork("a", {"b": 1}, 0.5, wait=False), LoadWork("a", True), UpdateWork(1e-3)])
def test_each_kind_of_work_comes_over(value: Any):
    asking, _ = two({"back": lambda work: work})
    assert asking.ask("back", value).result(5) == value


def test_an_error_is_raised_at_the_other_end_as_it_is():
    def refuse() -> None:
        raise DataInvalid("has no answer", row=4, param="rows.4")

    asking, _ = two({"refuse": refuse})
    with pytest.raises(DataInvalid, match="has no answer") as caught:
        asking.ask("refuse").result(5)
    assert (caught.value.row, caught.value.param) == (4, "rows.4")


def test_a_bug_is_told_without_its_details(caplog: pytest.LogCaptureFixture):
    failed: Future[int] = Future()
    failed.set_exception(ZeroDivisionError("of a secret"))
    asking, _ = two({"now": lambda: 1 // 0, "later": lambda: failed})
    for kind in ("now", "later"):
        with pytest.raises(PostgradError, match="the session's log says why"):
            asking.ask(kind).result(5)
    assert "of a secret" in caplog.text


def test_an_end_that_is_gone_answers_what_waits_and_what_comes(connect: Connect):
    link, other = connect({})
    waiting = [link.ask("anything") for _ in range(3)]
    other.close()
    for each in waiting:
        with pytest.raises(Unavailable):
            each.result(5)
    with pytest.raises(Unavailable):
        link.ask("more").result(5)


def test_half_a_message_is_the_end(connect: Connect):
    link, other = connect({})
    asked = link.ask("anything")
    os.write(other.fileno(), b"\0\0\0\x64half")
    other.close()
    with pytest.raises(Unavailable):
        asked.result(5)


def test_who_asks_and_leaves_disturbs_nobody(connect: Connect):
    began, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        began.set()
        assert go_on.wait(5)
        return "late"

    asking, _ = two({"slow": slow, "now": lambda: 1})
    left = asking.ask("slow")
    assert began.wait(5)
    left.cancel()
    go_on.set()
    assert asking.ask("now").result(5) == 1
    assert left.cancelled()

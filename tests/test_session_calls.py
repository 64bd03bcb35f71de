"""Each call of a session is done once, in the order of its number, however often and in whatever order it comes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.errors import Conflict, InvalidField, PostgradError, StepMissing, Unavailable
from post_training.worker.session_calls import KEPT_ANSWERS, WAIT_SECONDS, Call, CallQueue, Done


def step(number: int | None, digest: str = "") -> Call:
    return Call("train_step", None, changes=True, number=number, digest=digest or f"body {number}")


def look(after: int = 0) -> Call:
    return Call("validate", None, changes=False, after=after)


def work(queue: CallQueue, trained: list[int]) -> None:
    """Do all that can be done now."""
    while (call := queue.take(0)) is not None:
        if call.changes:
            assert call.number is not None
            trained.append(call.number)
        queue.finish(call, {"number": call.number, "done": queue.done})


def taken(queue: CallQueue) -> Call:
    call = queue.take(0)
    assert call is not None
    return call


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=40))
@settings(deadline=None)
def test_steps_are_done_once_and_in_order_however_they_arrive(window: int, arrivals: list[tuple[int, bool]]) -> None:
    total = 12
    queue, trained = CallQueue(window), list[int]()
    answers: dict[int, list[Future[dict[str, Any]]]] = {}
    # What arrives at random, some of it while nobody works, then all that is missing.
    for number, works in [*arrivals, *((number, True) for number in range(1, total + 1))]:
        if number <= queue.done + 1 + window:
            answers.setdefault(number, []).append(queue.submit(step(number)))
        if works:
            work(queue, trained)
    assert trained == list(range(1, total + 1))
    for number, futures in answers.items():
        assert {future.result(0)["number"] for future in futures} == {number}


@given(st.integers(0, 5), st.integers(1, 20))
def test_a_number_further_ahead_than_the_window_is_refused(window: int, number: int) -> None:
    queue = CallQueue(window)
    if number <= 1 + window:
        assert not queue.submit(step(number)).done()
    else:
        with pytest.raises(InvalidField, match=f"the next one is 1, and at most {window}"):
            queue.submit(step(number))


def test_another_body_under_a_number_is_refused_before_during_and_after_the_step() -> None:
    queue = CallQueue(4)
    queue.submit(step(1))
    with pytest.raises(Conflict, match="step 1"):
        queue.submit(step(1, "other"))
    call = taken(queue)
    with pytest.raises(Conflict):
        queue.submit(step(1, "other"))
    queue.finish(call, {"a": 1})
    with pytest.raises(Conflict):
        queue.submit(step(1, "other"))
    assert queue.submit(step(1)).result(0) == {"a": 1}


def test_a_replay_while_the_step_is_done_gets_its_answer() -> None:
    queue = CallQueue(4)
    first = queue.submit(step(1))
    call = taken(queue)
    again = queue.submit(step(1))
    queue.finish(call, {"a": 1})
    assert first.result(0) == again.result(0) == {"a": 1}
    assert queue.take(0) is None


def test_a_refused_call_leaves_its_number_to_another_body() -> None:
    queue = CallQueue(4)
    first = queue.submit(step(1, "bad"))
    queue.refuse(taken(queue), InvalidField("no"))
    with pytest.raises(InvalidField, match="no"):
        first.result(0)
    queue.submit(step(1, "good"))
    assert taken(queue).digest == "good"


def test_what_was_sent_ahead_of_a_refused_step_is_not_done_behind_the_back_of_its_sender() -> None:
    queue, trained = CallQueue(4), list[int]()
    ahead = [queue.submit(step(2)), queue.submit(step(3))]
    queue.refused(1)  # its batch could not be read
    late = step(4)
    with pytest.raises(StepMissing, match="step 1"):
        queue.submit(late)
    for each in ahead:
        with pytest.raises(StepMissing, match="step 1"):
            each.result(0)
    queue.submit(step(None, "by hand"))
    work(queue, trained)
    assert trained == [1]
    queue.submit(step(2, "again"))
    queue.submit(step(3, "again"))
    work(queue, trained)
    assert trained == [1, 2, 3]


def test_a_mended_step_lets_those_behind_it_come_again() -> None:
    queue, trained = CallQueue(4), list[int]()
    queue.submit(step(1, "bad"))
    behind = queue.submit(step(2))
    queue.refuse(taken(queue), InvalidField("no"))
    with pytest.raises(StepMissing):
        behind.result(0)
    queue.submit(step(1, "good"))
    queue.submit(step(2))
    work(queue, trained)
    assert trained == [1, 2]


def test_a_step_before_a_refused_one_lets_nothing_behind_it_through() -> None:
    queue, trained = CallQueue(4), list[int]()
    queue.refused(2)
    queue.submit(step(1))
    with pytest.raises(StepMissing, match="step 2"):
        queue.submit(step(3))
    work(queue, trained)
    assert trained == [1]


def test_a_numbered_step_that_is_overtaken_is_told_so() -> None:
    queue = CallQueue(4)
    first = queue.submit(step(None, "first"))
    numbered = queue.submit(step(1, "numbered"))
    queue.finish(taken(queue), {})
    assert first.result(0) == {}
    with pytest.raises(Conflict, match="step 1"):
        numbered.result(0)


def test_calls_without_a_number_take_the_next_one_in_the_order_they_come() -> None:
    queue, trained = CallQueue(4), list[int]()
    answers = [queue.submit(step(None, digest)) for digest in "abc"]
    work(queue, trained)
    assert [answer.result(0)["number"] for answer in answers] == trained == [1, 2, 3]


def test_a_look_waits_for_the_step_it_names() -> None:
    queue, trained = CallQueue(4), list[int]()
    waiting, at_once = queue.submit(look(after=2)), queue.submit(look())
    queue.submit(step(2))
    work(queue, trained)
    assert at_once.result(0)["done"] == 0
    assert not waiting.done()
    queue.submit(step(1))
    work(queue, trained)
    assert waiting.result(0)["done"] == 2


def test_what_waits_for_a_step_that_does_not_come_is_told_so() -> None:
    now = 0.0
    queue = CallQueue(4, monotonic=lambda: now)
    waiting = queue.submit(step(3))
    now = WAIT_SECONDS / 2
    assert queue.take(0) is None
    queue.submit(step(1))
    queue.finish(taken(queue), {})  # progress: the wait begins anew
    now += WAIT_SECONDS - 1
    assert queue.take(0) is None
    assert not waiting.done()
    now += 2
    assert queue.take(0) is None
    with pytest.raises(StepMissing, match="step 2"):
        waiting.result(0)


def test_a_queue_goes_on_where_a_checkpoint_was_made_and_knows_the_answers_before_it() -> None:
    queue, trained = CallQueue(4), list[int]()
    for number in (1, 2, 3):
        queue.submit(step(number))
    work(queue, trained)
    kept = queue.kept(up_to=2)
    assert [number for number, _ in kept] == [1, 2]
    again = CallQueue(4, done=2, answers=kept)
    assert again.submit(step(2)).result(0)["number"] == 2
    with pytest.raises(Conflict):
        again.submit(step(1, "other"))
    again.submit(step(3))
    assert taken(again).number == 3


def test_an_answer_that_is_no_longer_kept_is_not_made_up() -> None:
    queue = CallQueue(4, done=KEPT_ANSWERS + 5, answers=[(KEPT_ANSWERS + 5, Done("body", {}))])
    with pytest.raises(InvalidField, match="no longer kept"):
        queue.submit(step(5))


def test_only_the_newest_answers_are_kept() -> None:
    queue, trained = CallQueue(4), list[int]()
    for number in range(1, KEPT_ANSWERS + 3):
        queue.submit(step(number))
        work(queue, trained)
    assert [number for number, _ in queue.kept(up_to=10**9)] == list(range(3, KEPT_ANSWERS + 3))


def test_at_the_end_all_that_wait_and_all_that_come_are_told_why() -> None:
    queue = CallQueue(4)
    calls = [queue.submit(step(2)), queue.submit(look(after=1)), queue.submit(look())]
    queue.put_off(taken(queue))
    error: PostgradError = Unavailable("over")
    queue.end(error)
    for call in calls:
        with pytest.raises(Unavailable, match="over"):
            call.result(0)
    with pytest.raises(Unavailable, match="over"):
        queue.submit(step(1))


def test_a_worker_that_waits_is_woken_by_a_call() -> None:
    queue, found = CallQueue(4), list[Call | None]()
    worker = threading.Thread(target=lambda: found.append(queue.take(30)))
    worker.start()
    queue.submit(step(1))
    worker.join(10)
    assert found[0] is not None
    assert not queue.idle
    queue.finish(found[0], {})
    assert queue.idle

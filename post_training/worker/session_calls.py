"""The calls of a session's client: each done exactly once, in the order of their numbers, however they arrive.

Calls that change the model are numbered from 1. The next number is done as soon as it is there; a number further ahead
waits for those before it; one that is done already is answered as the first time. So a client may send ahead, and send
again whatever it got no answer to. No torch and no HTTP here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from apis.errors import Conflict, InvalidField, PostgradError, StepMissing

Answer = dict[str, Any]
KEPT_ANSWERS = 1000
"""So many of the newest answers are kept to be given again, by the process and in each checkpoint."""
WAIT_SECONDS = 60.0
"""So long a call waits for a number before it that does not come, while nothing else is done."""


@dataclass
class Call:
    """One call.

    Attributes:
        kind: what is to be done.
        work: what it is to be done with, as `kind` has it.
        changes: whether it changes the model, and so has a number.
        number: the client's; None: the next one when its turn comes.
        after: of a call that changes nothing: not before this number is done.
        digest: what tells whether another call under the same number is the same.
    """

    kind: str
    work: Any
    changes: bool
    number: int | None = None
    after: int = 0
    digest: str = ""
    answer: Future[Answer] = field(default_factory=Future)
    arrived: float = 0.0


@dataclass(frozen=True)
class Done:
    """A call that was done, as it may be asked for again."""

    digest: str
    answer: Answer


class CallQueue:
    """Takes calls from any thread and gives them to one worker, one at a time.

    Args:
        window: how many numbers may be sent ahead of the next one.
        done: the number of the newest call that was done before.
        answers: those of the newest calls up to `done`.
        monotonic: seconds.
    """

    def __init__(
        self,
        window: int,
        done: int = 0,
        answers: Sequence[tuple[int, Done]] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window = window
        self._done = done
        self._answers = OrderedDict(answers)
        self._numbered: dict[int, Call] = {}
        self._others: list[Call] = []
        self._later: list[Call] = []
        self._running: Call | None = None
        self._refused: int | None = None  # a number whose call was refused; none behind it waits for another one
        self._ended: PostgradError | None = None
        self._monotonic = monotonic
        self._progress_at = monotonic()
        self._changed = Condition()

    @property
    def done(self) -> int:
        """The number of the newest call that was done."""
        return self._done

    @property
    def idle(self) -> bool:
        """Whether nothing is done now and nothing could be."""
        with self._changed:
            return self._running is None and next(self._ready(), None) is None

    def kept(self, up_to: int) -> list[tuple[int, Done]]:
        """The answers of the newest calls up to a number, for a checkpoint."""
        with self._changed:
            return [(number, done) for number, done in self._answers.items() if number <= up_to]

    # -- the client's side ---------------------------------------------------------------------------------------

    def submit(self, call: Call) -> Future[Answer]:
        """Take a call. Its answer comes when its turn has come; the same call again shares it.

        Raises:
            Conflict: another call has this number.
            InvalidField: the number is too far ahead, or so old that its answer is no longer known.
            PostgradError: the session ends, by what `end` was given.
        """
        with self._changed:
            if self._ended is not None:
                raise self._ended
            known = self._known(call) if call.changes and call.number is not None else None
            if known is not None:
                return known
            call.arrived = self._monotonic()
            if call.changes and call.number is not None:
                refuse_far(call.number, self._done, self._window)
                self._refuse_behind(call.number)
                self._numbered[call.number] = call
            else:
                self._others.append(call)
            self._changed.notify_all()
            return call.answer

    def _known(self, call: Call) -> Future[Answer] | None:
        """The answer, or the call on its way, of this number."""
        assert call.number is not None
        if call.number <= self._done:
            return self._answered(call, call.number)
        running = self._running
        found = running if running and running.number == call.number else self._numbered.get(call.number)
        if found is None:
            return None
        if found.digest != call.digest:
            raise _other_body(call.number)
        return found.answer

    def _answered(self, call: Call, number: int) -> Future[Answer]:
        done = self._answers.get(number)
        if done is None:
            raise InvalidField(
                f"step {number} was done long ago and its answer is no longer kept; the next step is {self._done + 1}",
                param="step",
            )
        if done.digest != call.digest:
            raise _other_body(number)
        answer: Future[Answer] = Future()
        answer.set_result(done.answer)
        return answer

    def refused(self, number: int | None) -> None:
        """A call with this number came and cannot be done: what was sent ahead, behind it, is not to be done either.

        Its sender may mend the call, or leave it and go on otherwise; in both cases it sends the others again.
        """
        if number is None:
            return
        with self._changed:
            if number <= self._done:
                return
            self._refused = number if self._refused is None else min(number, self._refused)
            behind = [self._numbered.pop(each) for each in list(self._numbered) if each > number]
        for call in behind:
            _reject(call.answer, _behind(number))

    def _refuse_behind(self, number: int) -> None:
        if self._refused is not None and number > self._refused:
            raise _behind(self._refused)
        if number == self._refused:  # one before it does not mend it
            self._refused = None

    # -- the worker's side ---------------------------------------------------------------------------------------

    def take(self, timeout: float) -> Call | None:
        """The next call whose turn it is, within so many seconds; it must be `finish`ed before another is taken."""
        deadline = self._monotonic() + timeout
        with self._changed:
            while (call := next(self._ready(), None)) is None:
                self._give_up_waiting()
                left = deadline - self._monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            self._remove(call)
            if call.changes and call.number is None:
                call.number = self._done + 1
                overtaken = self._numbered.pop(call.number, None)
                if overtaken is not None:
                    _reject(overtaken.answer, _other_body(call.number))
            self._running = call
            return call

    def finish(self, call: Call, answer: Answer) -> None:
        """Answer a call that was taken."""
        with self._changed:
            self._running = None
            self._progress_at = self._monotonic()
            if call.changes:
                assert call.number is not None  # `take` gave it one
                self._done = call.number
                self._refused = None if self._refused is not None and self._refused <= self._done else self._refused
                self._answers[call.number] = Done(call.digest, answer)
                while len(self._answers) > KEPT_ANSWERS:
                    self._answers.popitem(last=False)
            self._changed.notify_all()
        _resolve(call.answer, answer)

    def put_off(self, call: Call) -> None:
        """Leave a call that was taken, and that changes nothing, to be answered later by `Call.answer`."""
        with self._changed:
            self._running = None
            self._progress_at = self._monotonic()
            self._later.append(call)

    def refuse(self, call: Call, error: PostgradError) -> None:
        """Answer a call that was taken and not done; its number is free again."""
        with self._changed:
            self._running = None
            self._progress_at = self._monotonic()
        _reject(call.answer, error)
        if call.changes:
            self.refused(call.number)

    def end(self, error: PostgradError) -> None:
        """Answer all that wait, and all that come, with an error."""
        with self._changed:
            self._ended = error
            left = [*self._numbered.values(), *self._others, *self._later]
            left += [self._running] if self._running else []
            self._numbered, self._others, self._later, self._running = {}, [], [], None
        for call in left:
            _reject(call.answer, error)

    def _ready(self) -> Iterator[Call]:
        """The calls that could be done now, the one that came first first."""
        ready = [call for call in self._others if call.changes or call.after <= self._done]
        following = self._numbered.get(self._done + 1)
        if following is not None:
            ready.append(following)
        yield from sorted(ready, key=lambda call: call.arrived)

    def _remove(self, call: Call) -> None:
        if call.changes and call.number is not None:
            del self._numbered[call.number]
        else:
            self._others.remove(call)

    def _give_up_waiting(self) -> None:
        """Refuse what has waited for too long for a number that does not come."""
        now = self._monotonic()
        for call in [*self._numbered.values(), *self._others]:
            if now - max(call.arrived, self._progress_at) > WAIT_SECONDS:
                self._remove(call)
                missing = self._done + 1
                _reject(call.answer, StepMissing(f"step {missing}, which comes first, did not come", param="step"))


def refuse_far(number: int, done: int, window: int) -> None:
    """Refuse a number that is more than `window` ahead of the next one after `done`. Raises InvalidField."""
    if number > done + 1 + window:
        raise InvalidField(
            f"step {number} is too far ahead: the next one is {done + 1}, and at most {window} may be sent ahead of "
            "it; wait for an answer first",
            param="step",
        )


def _other_body(number: int) -> Conflict:
    return Conflict(f"step {number} was sent before with another body; each step has a number of its own", param="step")


def _behind(number: int) -> StepMissing:
    return StepMissing(
        f"step {number}, which comes before, was refused: send that first, then this again", param="step"
    )


def _resolve(future: Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _reject(future: Future[Answer], error: PostgradError) -> None:
    if not future.done():
        future.set_exception(error)

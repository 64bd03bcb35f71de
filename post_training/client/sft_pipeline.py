"""Steps sent ahead of their answers, in order, and sent again where a server has lost them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from apis.errors import BadRequest, DataInvalid, JobFailure, PostgradError, StepMissing
from apis.sft_sessions.training_models import TrainingStatusResponse, TrainStepResponse
from post_training.client import sft_calls
from post_training.client.sft_data import Batches, Part
from post_training.client.sft_rows import as_batch, located
from post_training.client.sft_session import LOST, OnStatus, Session

T = TypeVar("T")
OnStep = Callable[[int, Part, TrainStepResponse | None], None]
# A server that comes back and goes again at the same step this often does not get over it.
_MOST_RECOVERIES = 8


class Pipeline:
    """The steps of one fit, numbered from 0 by this class and from `status.next_step` on by the server.

    Args:
        status: of the training server, when the fit begins.
        done: steps of the fit that were done then.
        cursor: what to send with a step, so that the fit can be resumed after it.
        on_step: told every step in order, once; without an answer where that was lost.
        on_status: told what the scheduler says while the server is away.
    """

    def __init__(
        self,
        session: Session,
        batches: Batches,
        status: TrainingStatusResponse,
        done: int,
        *,
        cursor: Callable[[int, Part], dict[str, Any]],
        on_step: OnStep,
        on_status: OnStatus | None = None,
    ) -> None:
        self._session, self._batches = session, batches
        self._base = status.next_step - done
        self._window = max(1, status.window)
        self._cursor, self._on_step, self._on_status = cursor, on_step, on_status
        self._sent: deque[tuple[int, Future[TrainStepResponse]]] = deque()
        self._next = self._goal = self._told = done
        self._known = done  # steps that the server had done when it was last asked
        self._recoveries = 0

    @property
    def answered(self) -> int:
        """Steps before this one are done."""
        return self._sent[0][0] if self._sent else self._next

    @property
    def last_number(self) -> int:
        """The server's number of the newest step that is done."""
        return self._base + self.answered - 1

    def push(self) -> bool:
        """Send the next step, once there is room for it. False where there is no batch for it.

        Raises:
            DataInvalid: a row cannot be used; it is named by its number in the data.
            JobFailure: the session has ended.
            Unavailable: a server stays away.
        """
        if self._batches.part(self._goal) is None:
            return False
        self._goal += 1
        while self._next < self._goal:
            if len(self._sent) < self._window:
                self._send(self._next)
            else:
                self._collect()
        return True

    def settle(self) -> None:
        """Wait until all that was sent is done. Raises as `push` does."""
        while self._next < self._goal or self._sent:
            if self._next < self._goal and len(self._sent) < self._window:
                self._send(self._next)
            else:
                self._collect()

    def drain(self) -> None:
        """Wait until nothing that was sent is on its way, whatever becomes of it."""
        for _, future in self._sent:
            with suppress(PostgradError, CancelledError):
                self._session.wait(future)
        self._sent.clear()

    def settled(self, action: Callable[[], T]) -> T:
        """The result of `action` with all steps done; settled and tried again where a server was lost meanwhile."""
        while True:
            self.settle()
            try:
                result = action()
            except LOST as error:
                self._recover(error)
            else:
                self._recoveries = 0
                return result

    def _part(self, step: int) -> Part:
        part = self._batches.part(step)
        assert part is not None, "only steps that have a batch are sent"
        return part

    def _send(self, step: int) -> None:
        part = self._part(step)
        fields = {**as_batch(part.rows), "step": self._base + step, "cursor": self._cursor(step, part)}
        self._sent.append((step, self._session.start(sft_calls.train_step(fields))))
        self._next = step + 1

    def _collect(self) -> None:
        """Take the oldest answer, or find out where the server is."""
        step, future = self._sent[0]
        try:
            answer = self._session.wait(future)
        except PostgradError as error:
            self._missed(step, error)
            return
        self._tell(step, answer)
        self._sent.popleft()
        self._batches.forget(min(answer.last_durable_step - self._base, step) + 1)

    def _tell(self, step: int, answer: TrainStepResponse | None) -> None:
        if step >= self._told:
            self._told = step + 1
            self._recoveries = 0
            self._on_step(step, self._part(step), answer)

    def _missed(self, step: int, error: PostgradError) -> None:
        if isinstance(error, BadRequest) and step < self._known:
            # It was done before the server was lost, and the answer was lost with it.
            self._tell(step, None)
            self._sent.popleft()
        elif isinstance(error, LOST):
            self._recover(error)
        elif isinstance(error, BadRequest):
            self._refused(step, error)
        else:
            self._drop()
            raise error

    def _refused(self, step: int, error: BadRequest) -> None:
        """Raise `error`, unless the server waits for an earlier step: one went astray, or it was restarted."""
        self._try_again(error)
        try:
            status = self._session.send(sft_calls.training_status())
        except LOST as lost:
            self._recover(lost)
            return
        self._drop()
        if not isinstance(error, StepMissing) and status.next_step - self._base >= self.answered:
            raise located(error, self._part(step).numbers) if isinstance(error, DataInvalid) else error
        self._go_on_from(status)

    def _recover(self, error: PostgradError) -> None:
        self._try_again(error)
        self._drop()
        self._go_on_from(self._session.connect(resume=True, on_status=self._on_status))

    def _try_again(self, error: PostgradError) -> None:
        self._recoveries += 1
        if self._recoveries > _MOST_RECOVERIES:
            raise error

    def _go_on_from(self, status: TrainingStatusResponse) -> None:
        self._known = status.next_step - self._base
        if self._known < 0:
            raise JobFailure(
                f"session {status.job_id!r} went back to step {status.next_step}, before the first of this fit: "
                "save a checkpoint between what you train by hand and a fit"
            )
        self._next = min(self._next, self._known)

    def _drop(self) -> None:
        """Forget what was sent and not answered; it is sent again."""
        self._next = self.answered
        for _, future in self._sent:
            future.cancel()
        self._sent.clear()

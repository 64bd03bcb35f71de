"""One SFT session: its job at the scheduler, and the way to its training server, found anew when that moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from apis.errors import BadRequest, JobFailure, PostgradError, Unauthorized, Unavailable
from apis.sft_sessions.models import SessionState, SessionStatusResponse
from apis.sft_sessions.training_models import EndResponse, TrainingStatusResponse
from post_training.client import sft_calls
from post_training.client.core import Call, Settings
from post_training.client.sft_link import Link, LoopThread, training_settings
from post_training.client.transport import AsyncTransport

T = TypeVar("T")
OnStatus = Callable[[SessionStatusResponse], None]
# What a training server that has gone, or whose port is another's by now, answers.
LOST = (Unavailable, Unauthorized)
_ENDED = (SessionState.COMPLETED, SessionState.FAILED, SessionState.CANCELLED)


@dataclass
class Patience:
    """How long something that should answer has not.

    Attributes:
        seconds: after so long without an answer, what went wrong is raised.
    """

    seconds: float
    since: float | None = None

    def over(self) -> None:
        """It answered."""
        self.since = None

    def went_on(self, error: PostgradError) -> None:
        """It did not. Raises `error` where the patience has run out."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if now - self.since >= self.seconds:
            raise error


class Session:
    """What `SFTClient` and `fit` share.

    Args:
        outage_seconds: how long a scheduler or a training server may be away.
        poll_seconds: time between two looks at a session that waits.
    """

    def __init__(self, settings: Settings, outage_seconds: float, poll_seconds: float) -> None:
        self.settings = settings
        self.loop = LoopThread()
        self._scheduler = AsyncTransport(settings)
        self._outage_seconds = outage_seconds
        self._poll_seconds = poll_seconds
        self._job_id: str | None = None
        self._link: Link | None = None
        self._over = False

    @property
    def is_open(self) -> bool:
        """Whether there is a session that this client has not ended."""
        return self._job_id is not None and not self._over

    @property
    def job_id(self) -> str:
        """Raises BadRequest where there is none yet."""
        if self._job_id is None:
            raise BadRequest("this client has no session yet: submit one, or resume an earlier one by its id")
        return self._job_id

    def adopt(self, job_id: str) -> None:
        """Talk about the session `job_id` from now on."""
        if job_id != self._job_id:
            self.disconnect()
        self._job_id, self._over = job_id, False

    def ask(self, call: Call[T]) -> T:
        """Send a call to the scheduler. Raises PostgradError."""
        return self.loop.run(self._scheduler.send(call))

    @property
    def link(self) -> Link:
        """The way to the training server, which is waited for if need be."""
        if self._link is None:
            self.connect()
        assert self._link is not None
        return self._link

    def send(self, call: Call[T]) -> T:
        """Send a call to the training server and wait for its answer. Raises PostgradError."""
        return self.link.send(call)

    def start(self, call: Call[T]) -> Future[T]:
        """Send a call to the training server; see `wait`."""
        return self.link.start(call)

    def wait(self, future: Future[T]) -> T:
        """The answer to a started call. Raises PostgradError."""
        return self.link.wait(future)

    def connect(
        self, *, resume: bool = False, timeout: float | None = None, on_status: OnStatus | None = None
    ) -> TrainingStatusResponse:
        """Wait until the training server answers.

        Args:
            resume: have a session that was paused go on.
            timeout: the longest wait in seconds; None for ever.
            on_status: told what the scheduler says, each time it is asked.

        Raises:
            JobFailure: the session has ended.
            Unavailable: not within `timeout`, or a server was away for `outage_seconds`.
        """
        self.disconnect()
        began, patience = time.monotonic(), Patience(self._outage_seconds)
        while True:
            try:
                status = self._look(resume, on_status)
                if status is not None and status.server_url is not None:
                    return self._open(status.server_url)
                patience.over()
            except LOST as error:
                if isinstance(error, Unauthorized) and self._link is None:
                    raise  # the scheduler refuses the API key
                self.disconnect()
                patience.went_on(error)
            self._pause(began, timeout)

    def _look(self, resume: bool, on_status: OnStatus | None) -> SessionStatusResponse | None:
        """The status of a session that runs; None while it waits."""
        status = self.ask(sft_calls.job_status(self.job_id))
        if on_status is not None:
            on_status(status)
        if status.status in _ENDED:
            raise JobFailure(_end(status))
        if status.paused and resume:
            self.ask(sft_calls.resume_job(self.job_id))
        if status.status is not SessionState.RUNNING:
            return None
        if status.server_url is None:
            raise Unavailable(
                f"session {self.job_id!r} runs, but the address of its training server is told only to the API key "
                "that submitted it"
            )
        return status

    def _open(self, server_url: str) -> TrainingStatusResponse:
        self._link = Link(self.loop, training_settings(server_url, self.settings.timeout, self.settings.max_retries))
        status = self._link.send(sft_calls.training_status())
        self._link.keep_alive(status.lease_seconds)
        return status

    def _pause(self, began: float, timeout: float | None) -> None:
        if timeout is not None and time.monotonic() - began >= timeout:
            raise Unavailable(f"session {self.job_id!r} does not run after {timeout:g} s; it goes on waiting")
        time.sleep(self._poll_seconds)

    def training_status(self, on_status: OnStatus | None = None) -> TrainingStatusResponse:
        """Where the session stands, once its training server answers. Raises as `connect` does."""
        if self._link is not None:
            try:
                return self._link.send(sft_calls.training_status())
            except LOST:
                pass  # it has moved since
        return self.connect(resume=True, on_status=on_status)

    def leave(self, job_id: str) -> None:
        """Disconnect from the session `job_id`, which was ended, if it is this one."""
        if job_id == self._job_id:
            self.disconnect()
            self._over = True

    def disconnect(self) -> None:
        """Leave the training server, which from now on hears nothing of this client."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def pause(self) -> EndResponse:
        """Have the session saved and its device given back, until it is resumed."""
        return self.send(sft_calls.pause())

    def complete(self) -> SessionStatusResponse:
        """Have the session saved and ended with success, and wait for that. Raises JobFailure where it does not."""
        self.disconnect()
        self.ask(sft_calls.complete_job(self.job_id))
        status = self.wait_for_end()
        self._over = True
        if status.status is not SessionState.COMPLETED:
            raise JobFailure(_end(status))
        return status

    def wait_for_end(self, timeout: float | None = None) -> SessionStatusResponse:
        """The status of a session that has ended, however it did. Raises Unavailable as `connect` does."""
        began, patience = time.monotonic(), Patience(self._outage_seconds)
        while True:
            try:
                status = self.ask(sft_calls.job_status(self.job_id))
                if status.status in _ENDED:
                    return status
                patience.over()
            except Unavailable as error:
                patience.went_on(error)
            self._pause(began, timeout)

    def close(self) -> None:
        self.disconnect()
        self.loop.run(self._scheduler.close())
        self.loop.close()


def _end(status: SessionStatusResponse) -> str:
    """What to say of a session that has ended."""
    if status.status is SessionState.FAILED:
        return f"session {status.job_id!r} failed: {status.error_message or 'its log says why'}"
    if status.status is SessionState.CANCELLED:
        return f"session {status.job_id!r} was cancelled"
    return f"session {status.job_id!r} is completed: submit another one to train on"

"""When to stop waiting for a job: decided from statuses and clock times, without I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from apis.errors import JobFailure, PostgradError, Unavailable
from apis.post_training.models import JobStatus, PostTrainingJobStatusResponse
from post_training.client.errors import build_error

OUTAGE_SECONDS = 60.0


@dataclass
class Outage:
    """How long a server has been away. A job outlives its server, so a short outage ends nothing."""

    seen: bool = False
    since: float | None = None

    def over(self) -> None:
        """The server answered."""
        self.seen, self.since = True, None

    def went_on(self, error: Unavailable) -> None:
        """The server did not. Raises `error` where it was never there or has been away for `OUTAGE_SECONDS`."""
        now = time.monotonic()
        if self.since is None:
            self.since = now
        if not self.seen or now - self.since >= OUTAGE_SECONDS:
            raise error


@dataclass
class Wait:
    """One wait for one job.

    Attributes:
        poll_seconds: time between two looks.
        timeout: the longest wait in seconds; None for ever.
    """

    job_uuid: str
    poll_seconds: float
    timeout: float | None
    began: float = field(default_factory=time.monotonic)
    outage: Outage = field(default_factory=Outage)

    def after_status(self, status: PostTrainingJobStatusResponse) -> float | None:
        """Seconds until the next look; None where the job has ended. Raises Unavailable after `timeout`."""
        self.outage.over()
        return None if status.status.terminal else self._pause()

    def after_outage(self, error: Unavailable) -> float:
        """Seconds until the next try. Raises `error` where the outage is no short one."""
        self.outage.went_on(error)
        return self._pause()

    def _pause(self) -> float:
        if self.timeout is None:
            return self.poll_seconds
        left = self.began + self.timeout - time.monotonic()
        if left <= 0:
            raise Unavailable(
                f"job {self.job_uuid!r} did not end within {self.timeout:g} s; it goes on: wait again, or cancel it"
            )
        return min(self.poll_seconds, left)


def job_failure(status: PostTrainingJobStatusResponse) -> PostgradError | None:
    """Why a job that has ended has no result, as its exception; None for a completed one."""
    if status.status is JobStatus.completed:
        return None
    if status.error is None:
        return JobFailure(f"job {status.job_uuid!r} is {status.status}")
    return build_error(status.error.model_dump(), message=f"job {status.job_uuid!r}: {status.error.message}")

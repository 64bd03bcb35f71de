"""A worker's hold on its job: a heartbeat, and every reason to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from apis.post_training.models import JobError, JobProgress, JobStatus
from post_training.checkpoints.layout import disk_full
from post_training.jobs.leases import Leases
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.jobs.tables import CheckpointRow
from post_training.jobs.watching import LEASE_SECONDS
from post_training.processes import process_identity

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
LOOK_SECONDS = 1.0
RETRY_SECONDS = 0.5
StopReason = Literal["cancelled", "stopped", "lost"]
_AWAY = (OperationalError, InterfaceError, PoolTimeout)


class Lease:
    """Beats in a thread of its own, so that a long step does not look like a death.

    The lease holds for `lease_seconds` after the store last confirmed it, measured on the monotonic clock from before
    that write began. So it is over here before any scheduler can think so, and a worker that was stopped for a while
    or cut off from the store knows it before it writes.

    Attributes:
        stop_reason: None while the job should go on; `cancelled` by a user, `stopped` by SIGTERM, `lost` where the
            lease is over or another's, in which case nothing more may be written.
    """

    def __init__(
        self,
        store: JobStore,
        job_uuid: str,
        owner: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.store = store
        self.job_uuid = job_uuid
        self._leases = Leases(store.database, clock=store.clock)
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds
        self._look_seconds = look_seconds
        self._confirmed = time.monotonic()
        self._stop_reason: StopReason | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Lease:
        """Raises LeaseLost where the job is another's by now."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        pid = os.getpid()
        self._write(lambda: self._leases.started(self.job_uuid, self._owner, pid, process_identity(pid)))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def stop_reason(self) -> StopReason | None:
        if self._stop_reason != "lost" and not self._ended.is_set() and self._over():
            self._stop_reason = "lost"
        return self._stop_reason

    def should_stop(self) -> bool:
        return self.stop_reason is not None

    # -- writes; each raises LeaseLost where the job is no longer this worker's ----------------------------------

    def confirm(self) -> None:
        """Prove that the job is still this worker's."""
        self._write(lambda: self._note(self._leases.beat(self.job_uuid, self._owner)))

    def update(
        self,
        *,
        progress: JobProgress | None = None,
        report: dict[str, Any] | None = None,
        resources: dict[str, Any] | None = None,
        message: str | None = None,
        step: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """As Leases.update."""
        self._write(
            lambda: self._leases.update(
                self.job_uuid,
                self._owner,
                progress=progress,
                report=report,
                resources=resources,
                message=message,
                step=step,
                data=data,
            )
        )

    def record_checkpoint(self, make_row: Callable[[], CheckpointRow]) -> None:
        """As Leases.record_checkpoint; `make_row` makes a fresh row for each try."""
        self._write(lambda: self._leases.record_checkpoint(self._owner, make_row()))

    def announce(
        self,
        step: int,
        identifier: str,
        verification: dict[str, Any] | None,
        register: Callable[[Session, CheckpointRow], None],
    ) -> None:
        """As Leases.announce."""
        self._write(lambda: self._leases.announce(self.job_uuid, self._owner, step, identifier, verification, register))

    def forget_checkpoints(self, steps: Collection[int]) -> None:
        """As Leases.forget_checkpoints."""
        self._write(lambda: self._leases.forget_checkpoints(self.job_uuid, self._owner, steps))

    def finish(
        self,
        status: JobStatus,
        reason: str,
        error: JobError | None = None,
        also: Callable[[Session], None] | None = None,
    ) -> None:
        """End the attempt; as Leases.finish."""
        self._write(lambda: self._leases.finish(self.job_uuid, self._owner, status, reason, error=error, also=also))
        self._ended.set()

    def _write(self, write: Callable[[], None]) -> None:
        """Write while the lease holds: hours of training must not end with a hiccup of the store."""
        while True:
            if self._over():
                self._stop_reason = "lost"
                raise LeaseLost(f"the store could not be reached for {self._lease_seconds:.0f} s")
            began = time.monotonic()
            try:
                write()
                self._confirmed = began
                return
            except LeaseLost:
                self._stop_reason = "lost"
                raise
            except _AWAY as error:
                if full := disk_full(error, "the job store"):
                    raise full from error
                logger.warning("the job store cannot be reached (%s); trying again", type(error).__name__)
                time.sleep(RETRY_SECONDS)

    def _over(self) -> bool:
        return time.monotonic() - self._confirmed > self._lease_seconds

    # -- the thread ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._ended.wait(self._look_seconds):
            try:
                self._beat_once()
            except LeaseLost:
                # Also the normal end: `finish` gave the lease back between two looks, and is about to say so.
                if not self._ended.wait(RETRY_SECONDS):
                    self._stop_reason = "lost"
                return
            except SQLAlchemyError as error:
                logger.warning("the job store cannot be reached (%s); trying again", type(error).__name__)

    def _beat_once(self) -> None:
        began = time.monotonic()
        if began - self._confirmed < self._beat_seconds:
            self._note(self._leases.look(self.job_uuid, self._owner))
            return
        if self._over():
            raise LeaseLost("the lease ran out")
        self._note(self._leases.beat(self.job_uuid, self._owner))
        self._confirmed = max(self._confirmed, began)

    def _note(self, cancel: bool) -> None:
        # Also over "stopped": a job that is to be cancelled does not go back to the queue, and keeps nothing to go on
        # from.
        if cancel and self._stop_reason != "lost":
            self._stop_reason = "cancelled"

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self._stop_reason = self._stop_reason or "stopped"

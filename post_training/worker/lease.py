"""A worker's hold on its job: a heartbeat, and every reason to stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from apis.post_training.models import JobError, JobProgress, JobStatus
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.jobs.tables import CheckpointRow

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
STORE_PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 1.0
StopReason = Literal["cancelled", "stopped", "lost"]


class Lease:
    """Beats in a thread of its own, so that a long step does not look like a death.

    Attributes:
        stop_reason: None while the job should go on; `cancelled` by a user, `stopped` by SIGTERM, `lost` to another
            owner, in which case nothing more may be written.
    """

    def __init__(self, store: JobStore, job_uuid: str, owner: str) -> None:
        self.store = store
        self.job_uuid = job_uuid
        self._owner = owner
        self.stop_reason: StopReason | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Lease:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def should_stop(self) -> bool:
        return self.stop_reason is not None

    def update(
        self,
        *,
        progress: JobProgress | None = None,
        report: dict[str, Any] | None = None,
        resources: dict[str, Any] | None = None,
        message: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """As JobStore.update, for this job. Raises LeaseLost."""
        _persist(
            lambda: self.store.update(
                self.job_uuid,
                self._owner,
                progress=progress,
                report=report,
                resources=resources,
                message=message,
                data=data,
            )
        )

    def announce(self, checkpoint: Callable[[], CheckpointRow], register: Callable[[Session], None]) -> None:
        """As JobStore.announce_checkpoint; `checkpoint` makes a fresh row for each try. Raises LeaseLost."""
        _persist(lambda: self.store.announce_checkpoint(self._owner, checkpoint(), register))

    def finish(
        self,
        status: JobStatus,
        reason: str,
        error: JobError | None = None,
        also: Callable[[Session], None] | None = None,
    ) -> None:
        """End the attempt; as JobStore.finish. Raises LeaseLost."""
        _persist(lambda: self.store.finish(self.job_uuid, self._owner, status, reason, error=error, also=also))
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                if self.store.heartbeat(self.job_uuid, self._owner):
                    self.stop_reason = self.stop_reason or "cancelled"
            except LeaseLost:
                # Also the normal end: `finish` gave the lease back between two beats.
                if not self._ended.is_set():
                    self.stop_reason = "lost"
                return
            except SQLAlchemyError:
                logger.exception("the job store cannot be reached; trying again")

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self.stop_reason = self.stop_reason or "stopped"


def _persist(write: Callable[[], None]) -> None:
    """Try again for a while where the store is locked or away: hours of training must not end with a hiccup of it."""
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS
    while True:
        try:
            return write()
        except OperationalError:
            if time.monotonic() > deadline:
                raise
            logger.exception("the job store cannot be reached; trying again")
            time.sleep(RETRY_SECONDS)

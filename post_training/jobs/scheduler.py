"""Starts a worker for each waiting job in turn, and notices every way in which a worker can end.

One thread in the server. What it knows beyond the store is only which child belongs to which claim, so a restarted
server needs nothing from the one before: a worker that still runs goes on and is watched by its heartbeat.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from apis.errors import WorkerDied
from apis.post_training.models import JobError, JobStatus
from post_training.jobs.database import now
from post_training.jobs.launchers.local import Launcher, WorkerHandle
from post_training.jobs.spec import JobSpec
from post_training.jobs.store import JobStore
from post_training.jobs.tables import JobRow

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
POLL_SECONDS = 0.2
CANCEL_GRACE_SECONDS = 5.0
STOP_GRACE_SECONDS = 8.0


@dataclass
class _Attempt:
    job_uuid: str
    owner: str
    worker: WorkerHandle


class Scheduler:
    """First come, first served, `slots` at a time, for one provider.

    Args:
        job_folder: where a job's files lie; its worker's output goes to `worker.log` there.
        clean: removes the partial files of an ended attempt.
    """

    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        provider_id: str,
        job_folder: Callable[[str], Path],
        clean: Callable[[str], None],
        *,
        slots: int = 1,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._provider_id = provider_id
        self._job_folder = job_folder
        self._clean = clean
        self._slots = slots
        self._lease_seconds = lease_seconds
        self._attempts: list[_Attempt] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look at the queue now instead of at the next poll."""
        self._wake.set()

    def stop(self) -> None:
        """Have running workers give their jobs back to the queue, and end those that do not in time."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_GRACE_SECONDS)
        for attempt in self._attempts:
            attempt.worker.terminate()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        while any(attempt.worker.poll() is None for attempt in self._attempts) and time.monotonic() < deadline:
            time.sleep(0.05)
        for attempt in self._attempts:
            # Also those that ended by themselves: one that was still starting had no chance to give its job back.
            attempt.worker.kill()
            if self._store.end(attempt.job_uuid, attempt.owner, JobStatus.scheduled, "the server stopped", None):
                self._clean(attempt.job_uuid)
        self._attempts.clear()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick()
            except SQLAlchemyError:
                # A store that is locked or away for a while must not end the scheduler; nothing is lost by waiting.
                logger.exception("the job store cannot be reached; trying again")
            except Exception:
                logger.exception("the scheduler met an error; going on")
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _tick(self) -> None:
        self._reap()
        self._stop_cancelled()
        self._expire()
        while self._slots > len(self._store.running(self._provider_id)) and not self._stopping.is_set():
            job = self._store.claim(self._provider_id)
            if job is None:
                return
            self._launch(job)

    def _launch(self, job: JobRow) -> None:
        assert job.owner is not None  # claim() set it
        threads = JobSpec.model_validate(job.spec).worker.threads
        log_path = self._job_folder(job.job_uuid) / "worker.log"
        try:
            worker = self._launcher.launch(job.job_uuid, job.owner, log_path, threads)
        except OSError as error:
            logger.exception("no worker could be started for job %s", job.job_uuid)
            self._fail(job.job_uuid, job.owner, f"no worker could be started: {error.strerror}")
            return
        self._attempts.append(_Attempt(job.job_uuid, job.owner, worker))

    def _reap(self) -> None:
        for attempt in list(self._attempts):
            status = attempt.worker.poll()
            if status is None:
                continue
            self._attempts.remove(attempt)
            attempt.worker.kill()  # whatever the worker itself had started
            self._fail(attempt.job_uuid, attempt.owner, f"its worker ended {_describe(status)}")

    def _stop_cancelled(self) -> None:
        for job in self._store.running(self._provider_id):
            if job.cancel_requested_at is None:
                continue
            attempt = next((a for a in self._attempts if a.owner == job.owner), None)
            if attempt is None or (now() - job.cancel_requested_at).total_seconds() < CANCEL_GRACE_SECONDS:
                continue
            attempt.worker.kill()
            self._attempts.remove(attempt)
            self._store.end(job.job_uuid, job.owner, JobStatus.cancelled, "cancelled; the worker was ended", None)
            self._clean(job.job_uuid)

    def _expire(self) -> None:
        ours = {attempt.owner for attempt in self._attempts}
        for job in self._store.stale(self._provider_id, self._lease_seconds):
            if job.owner in ours:
                continue  # a child: its exit says more than its silence, and a stopped one may go on
            if job.cancel_requested_at is not None:
                self._store.end(job.job_uuid, job.owner, JobStatus.cancelled, "cancelled; the worker was lost", None)
                self._clean(job.job_uuid)
            else:
                self._fail(job.job_uuid, job.owner, f"its worker was silent for {self._lease_seconds:.0f} s")

    def _fail(self, job_uuid: str, owner: str | None, what: str) -> None:
        """Record a death, unless the worker ended the job by itself before it went."""
        error = WorkerDied(f"{what}; submit the job again under another id")
        if self._store.end(job_uuid, owner, JobStatus.failed, what, JobError(code=error.code, message=error.message)):
            self._clean(job_uuid)


def _describe(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
    return f"by {name}{hint}"

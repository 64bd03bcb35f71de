"""Gives each free slot the next job that can run on it, and notices every way in which a worker can end.

One thread in the server, one for all providers. What it knows lies in the store: leases say who runs what, so a
restarted server finds running workers again and takes them over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from apis.post_training.models import JobStatus
from post_training.checkpoints.layout import checkpoints_root, clean_partial, disk_full
from post_training.jobs.backoff import Backoff
from post_training.jobs.database import Database
from post_training.jobs.devices import Slot, slots_of, threads_each
from post_training.jobs.launchers.local import Launcher, LocalLauncher, WorkerHandle
from post_training.jobs.launchers.ray import RayLauncher, RaySettings
from post_training.jobs.leases import Claim, HeldLease, Leases
from post_training.jobs.store import JobStore
from post_training.jobs.tables import JobRow
from post_training.jobs.waiting import Waiting, describe_wait
from post_training.jobs.watching import Watch
from post_training.processes import host_identity

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
CANCEL_GRACE_SECONDS = 4.0
STOP_GRACE_SECONDS = 8.0


@dataclass(frozen=True)
class SchedulerSettings:
    """How many jobs run, wait, and are tried again.

    Attributes:
        slots: room for one job each.
        max_queued: waiting jobs beyond which a submit is refused.
        max_attempts: attempts without a result, since the newest checkpoint, after which a job fails.
        warm_seconds: how long a worker that has ended its job waits for the next; 0: a new process for each.
        session_host: the address that training servers of sessions listen on, on the machine of their worker.
        ray: the cluster whose nodes the workers run on; None: this machine.
    """

    slots: tuple[Slot, ...] = field(default_factory=lambda: slots_of("auto"))
    max_queued: int = 100
    max_attempts: int = 3
    warm_seconds: float = 0.0
    session_host: str = "127.0.0.1"
    ray: RaySettings | None = None


class Scheduler:
    """First come, first served, one job in each slot.

    Args:
        job_folder: where a job's files lie; its worker's output goes to `worker.log` there.
        clean: removes the partial files of an ended attempt.
    """

    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        job_folder: Callable[[str], Path],
        clean: Callable[[str], None],
        settings: SchedulerSettings | None = None,
        *,
        host: str | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self.provider_ids: set[str] = set()
        self._store = store
        self._leases = Leases(store.database, clock=store.clock)
        self._launcher = launcher
        self._job_folder = job_folder
        self.clean = clean
        self._host = host or host_identity()
        self._workers: dict[str, WorkerHandle] = {}  # by owner token
        self._watch = Watch()
        self._backoff = Backoff()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def serve(self, provider_id: str) -> None:
        """From now on run the jobs of this provider."""
        self.provider_ids.add(provider_id)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look at the queue now instead of at the next poll."""
        self._wake.set()

    def waiting(self, job: JobRow) -> Waiting:
        """Where a job stands in the queue, and what it waits for."""
        return describe_wait(self._store, job, self.settings.slots, self.provider_ids)

    def stop(self) -> None:
        """Have running workers save and give their jobs back to the queue, and end those that do not in time."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_GRACE_SECONDS)
        # A copy: a thread that hangs in the store may still go on.
        workers = list(self._workers.values())
        for worker in workers:
            worker.terminate()
        self._launcher.close()
        deadline = time.monotonic() + STOP_GRACE_SECONDS
        never = threading.Event()
        while any(worker.ended() is None for worker in workers) and time.monotonic() < deadline:
            never.wait(0.05)
        for worker in workers:
            worker.kill()
        if self._workers:
            self._try(self._give_back_all)
        self._workers.clear()

    def _give_back_all(self) -> None:
        """Also the jobs of workers that ended by themselves: one that was still starting had no chance to."""
        for lease in self._leases.held():
            if lease.owner in self._workers:
                self._leases.give_back(lease.job_uuid, lease.owner, "the server stopped")
                self.clean(lease.job_uuid)

    def _run(self) -> None:
        self._try(self._sweep)
        while not self._stopping.is_set():
            self._try(self._tick)
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SQLAlchemyError as error:
            # A store that is locked or away for a while must not end the scheduler; nothing is lost by waiting.
            logger.error("the job store cannot be reached (%s); trying again", type(error).__name__)
        except Exception:
            logger.exception("the scheduler met an error; going on")

    def _tick(self) -> None:
        held = self._leases.held()
        self._watch.look(held)
        for lease in held:
            self._look_after(lease)
        self._forget_ended(held)
        self._launcher.reap()
        while self._has_room() and (slots := self._open_slots()):
            claim = self._leases.claim(self._host, slots, self.provider_ids)
            if claim is None:
                return
            self._launch(claim)

    def _has_room(self) -> bool:
        return len(self._workers) < len(self.settings.slots) and not self._stopping.is_set()

    def _open_slots(self) -> Sequence[Slot]:
        """Where a worker can be started, as far as is known; taken ones among them."""
        slots = self.settings.slots
        return [slot for slot in slots if self._launcher.at_hand(slot.kind)] if self._backoff.pausing else slots

    def _sweep(self) -> None:
        """Remove what jobs that were cancelled left on disk when the server was killed before it could."""
        for job_uuid in self._store.with_status(JobStatus.cancelled):
            self.clean(job_uuid)

    # -- one lease -----------------------------------------------------------------------------------------------

    def _look_after(self, lease: HeldLease) -> None:
        worker = self._worker(lease)
        how = None if worker is None else worker.ended()
        if how is not None:
            self._lost(lease, f"its worker {how}")
        elif self._watch.silent(lease):
            self._lost(lease, f"its worker was silent for {self._watch.lease_seconds:.0f} s")
        elif worker is not None and self._watch.cancelling_for(lease) > CANCEL_GRACE_SECONDS:
            worker.kill()
            self._leases.cancelled(lease.job_uuid, lease.owner, "cancelled; the worker was ended")
            self._workers.pop(lease.owner)
            self.clean(lease.job_uuid)

    def _worker(self, lease: HeldLease) -> WorkerHandle | None:
        """The worker's process, where it is on this machine and known."""
        known = self._workers.get(lease.owner)
        if known is not None or lease.host != self._host or lease.pid is None:
            return known
        logger.info("job %s: found its worker again, process %d", lease.job_uuid, lease.pid)
        return self._workers.setdefault(lease.owner, self._launcher.adopt(lease.pid, lease.process_started))

    def _lost(self, lease: HeldLease, reason: str) -> None:
        """Record an attempt without a result, unless its worker ended the job by itself before it went."""
        worker = self._workers.get(lease.owner)
        if worker is not None:
            worker.kill()  # a silent one must not wake up beside its successor; nor may anything that it started
        if self._leases.lost(lease.job_uuid, lease.owner, reason, self.settings.max_attempts):
            logger.warning("job %s: %s", lease.job_uuid, reason)
            if lease.host == self._host:
                self.clean(lease.job_uuid)
        self._workers.pop(lease.owner, None)

    def _forget_ended(self, held: Iterable[HeldLease]) -> None:
        """Let go of workers whose lease is gone: they wait for another job by now, or are about to exit."""
        owners = {lease.owner for lease in held}
        for owner, worker in list(self._workers.items()):
            if owner in owners:
                continue
            if worker.ended() is None and worker.idle():
                self._launcher.keep(worker)
            elif worker.ended() is not None or self._watch.overdue(owner):
                worker.kill()
            else:
                continue
            del self._workers[owner]
            self._watch.forget(owner)

    def _launch(self, claim: Claim) -> None:
        threads = claim.spec.worker.threads or threads_each(self.settings.slots)
        log_path = self._job_folder(claim.job_uuid) / "worker.log"
        try:
            self._workers[claim.owner] = self._launcher.launch(claim, log_path, threads)
            self._backoff.worked()
        except OSError as error:
            self._could_not_launch(claim, error)

    def _could_not_launch(self, claim: Claim, error: OSError) -> None:
        """No fault of the job, so it goes back to the queue; what is wrong here would fail every other one as well."""
        if full := disk_full(error, "the job's log"):
            self._leases.failed(claim.job_uuid, claim.owner, full)
            return
        seconds = self._backoff.failed()
        logger.error(
            "no worker could be started for job %s; next try in %.0f s", claim.job_uuid, seconds, exc_info=error
        )
        reason = f"no worker could be started ({error.strerror}); the next try is in {seconds:.0f} s"
        self._leases.give_back(claim.job_uuid, claim.owner, reason)


def local_scheduler(database: Database, home: Path, settings: SchedulerSettings | None = None) -> Scheduler:
    """A scheduler whose jobs lie in `home` and whose workers are processes on this machine, or on a Ray cluster.

    Raises:
        StackError: Ray is asked for and not installed.
    """
    store = JobStore(database)

    def clean(job_uuid: str) -> None:
        root = checkpoints_root(home, job_uuid)
        if root.is_dir():
            clean_partial(root, store.recorded_steps(job_uuid))

    def folder(job_uuid: str) -> Path:
        return checkpoints_root(home, job_uuid).parent

    settings = settings or SchedulerSettings()
    if settings.ray is not None:
        on_ray = RayLauncher(database.url, home, settings.ray, len(settings.slots), settings.warm_seconds)
        return Scheduler(store, on_ray, folder, clean, settings, host=on_ray.host)
    return Scheduler(store, LocalLauncher(database.url, home, settings.warm_seconds), folder, clean, settings)

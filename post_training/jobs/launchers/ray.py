"""Workers on the nodes of a Ray cluster: each a detached actor that runs one worker process after another.

Ray decides where; the store stays the truth. Ray's library is loaded in a driver process only (`ray_link`), so nothing
here waits for a cluster longer than it says. An actor outlives server and driver while its worker has a job, as a local
worker does; the next server finds it by its name in the state folder's namespace.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from apis.errors import InvalidField, StackError
from post_training.jobs.devices import DeviceKind, Slot, usable_cores
from post_training.jobs.launchers.local import WorkerHandle
from post_training.jobs.launchers.orders import Order
from post_training.jobs.launchers.ray_link import DriverLink
from post_training.jobs.launchers.ray_messages import (
    HOME_MARKER,
    Begin,
    Connect,
    Connected,
    Kill,
    Pending,
    Place,
    Seen,
    Site,
    State,
    Terminate,
    machine_identity,
)
from post_training.jobs.leases import Claim

logger = logging.getLogger(__name__)

PLACE_SECONDS = 2.0
"""How long the scheduler waits for an actor before the job goes back to the queue; Ray goes on placing it."""
BEGIN_SECONDS = 3.0
KILL_SECONDS = 3.0
UNUSED_SECONDS = 120.0
"""An actor that got no job is given back by then: longer than the scheduler's longest pause between two tries."""
_NOT_HERE = 113  # EHOSTUNREACH


@dataclass(frozen=True)
class RaySettings:
    """Which cluster, and what each worker takes of it; the names are Ray's.

    Attributes:
        address: `auto`, the cluster that this machine belongs to (or `$RAY_ADDRESS`); `host:port` of its head; `local`,
            one on this machine that ends with the server.
        num_cpus: CPUs of a worker, and its threads.
        num_gpus: GPUs of a worker on a `cuda` entry; below 1, several share one.
        resources: custom resources of each worker, by which nodes can be chosen.
    """

    address: str = "auto"
    num_cpus: int = 1
    num_gpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)


def ray_slots(devices: Literal["auto"] | Sequence[str]) -> tuple[Slot, ...]:
    """The slots that a `devices` setting means on a cluster: an entry for each worker, `cpu` or `cuda`.

    Raises:
        InvalidField: `auto`, a numbered GPU, or none at all.
    """
    if isinstance(devices, str) or not devices:
        message = "with launcher: ray, devices lists cpu or cuda once for each worker of the cluster: [cuda, cuda]"
        raise InvalidField(message, param="devices")
    slots = []
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise InvalidField(f"{device!r} is no device of a Ray worker: use cpu, or cuda: Ray chooses the GPU")
        count = sum(slot.kind == device for slot in slots)
        # Ray shows a worker its own GPUs only, so the first is the one.
        slots.append(Slot(f"ray-{device}:{count}", device, "cpu" if device == "cpu" else "cuda:0"))
    return tuple(slots)


def home_id(home: Path) -> str:
    """What tells this state folder from every other, stored in it by the first call."""
    marker = home / HOME_MARKER
    try:
        with marker.open("x", encoding="ascii") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return marker.read_text(encoding="ascii")


class RayWorker:
    """A worker on some node.

    Attributes:
        name: its actor's; None while an adopted one has not been found.
        kind: of device, for which it was placed.
        seen: what was last heard of it.
        sent: orders given to it.
        wanted: when a job last asked for one like it.
        held: a scheduler has it, or may get it; False for one of an earlier server that nobody asked for.
    """

    def __init__(
        self,
        launcher: RayLauncher,
        name: str | None,
        kind: str = "",
        identity: tuple[int, str | None] | None = None,
        *,
        held: bool = True,
    ) -> None:
        self._launcher = launcher
        self.name, self.kind, self.identity, self.held = name, kind, identity, held
        self.seen = Seen()
        self.sent = 0
        self.wanted = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether it is on a node that it may run on."""
        return self.seen.node is not None and self.seen.refused is None and self.seen.ended is None

    def ended(self) -> str | None:
        self._launcher.look()
        if self.name is None and self._launcher.knows_all():
            return "ended while no server watched it"
        return self.seen.ended

    def idle(self) -> bool:
        self._launcher.look()
        return self.seen.idle and self.seen.took >= self.sent

    def terminate(self) -> None:
        self._launcher.terminate(self)

    def kill(self) -> None:
        self._launcher.drop(self)


class RayLauncher:
    """A `Launcher` on a Ray cluster. At most as many actors of a kind live as jobs of it may run.

    Args:
        home: the state folder, under the same path on every node.

    Raises:
        StackError: Ray is not installed.
    """

    def __init__(self, database_url: str, home: Path, settings: RaySettings, slots: int, warm_seconds: float) -> None:
        if importlib.util.find_spec("ray") is None:
            raise StackError("jobs.launcher: ray needs Ray: pip install 'postgrad[ray]', here and on every node")
        self._settings, self._warm_seconds, self._database_url = settings, warm_seconds, database_url
        identity = home_id(home)
        self.host = f"ray {identity}"
        site = Site(
            home=os.path.abspath(home),
            home_id=identity,
            database_url=database_url,
            machine=machine_identity(),
            version=version("postgrad"),
        )
        cpus = max(usable_cores(), slots * settings.num_cpus)
        connect = Connect(address=settings.address, namespace=f"postgrad-{identity}", local_cpus=cpus, site=site)
        self._home = site.home
        self._link = DriverLink(connect)
        self._lock = threading.RLock()  # a stop comes from another thread than the scheduler's
        self._workers: dict[str, RayWorker] = {}
        self._spare: list[RayWorker] = []  # placed, or being placed, and without a job
        self._pending = ""
        self._unseen: set[str] = set()  # actors of an earlier server that have not said anything yet
        self._adopting: list[RayWorker] = []
        self._closing = False

    # -- the Launcher protocol -----------------------------------------------------------------------------------

    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> RayWorker:
        """As `Launcher.launch`. A worker has as many threads as CPUs, unless the job says otherwise."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        order = Order(
            database_url=self._database_url,
            job_uuid=claim.job_uuid,
            owner=claim.owner,
            device=claim.slot.device,
            model_module=claim.spec.worker.model_module,
            log=os.path.abspath(log_path),
            warm_seconds=self._warm_seconds,
        )
        with self._lock:
            worker = self._placed(claim.slot.kind)
            worker.sent = worker.seen.took + 1
            threads = claim.spec.worker.threads or self._settings.num_cpus
            self._link.send(Begin(worker=str(worker.name), order=order, threads=threads))
            self._until(lambda: worker.seen.took >= worker.sent or worker.seen.ended is not None, BEGIN_SECONDS)
            if worker.seen.ended is not None and worker.seen.took < worker.sent:
                self.drop(worker)
                raise OSError(_NOT_HERE, f"the one on {worker.seen.node} {worker.seen.ended}")
            logger.info("job %s: its worker is on node %s", claim.job_uuid, worker.seen.node)
            return worker

    def adopt(self, pid: int, process_started: str | None) -> RayWorker:
        """As `Launcher.adopt`, wherever in the cluster it is."""
        identity = (pid, process_started)
        with self._lock:
            self._link.tend()
            for worker in self._workers.values():
                if not worker.held and (worker.seen.pid, worker.seen.process_started) == identity:
                    worker.held, worker.sent = True, worker.seen.took
                    return worker
            self._adopting.append(RayWorker(self, None, identity=identity))
            return self._adopting[-1]

    def keep(self, worker: WorkerHandle) -> None:
        """As `Launcher.keep`."""
        assert isinstance(worker, RayWorker)
        self._spare.append(worker)

    def reap(self) -> None:
        """As `Launcher.reap`; also looks after the connection, and gives back what nobody used."""
        with self._lock:
            self._link.tend()
            self.look()
            for worker in list(self._spare):
                unused = not worker.sent and time.monotonic() - worker.wanted > UNUSED_SECONDS
                if worker.seen.ended is not None or unused:
                    self._let_go(worker)
            for worker in [each for each in self._workers.values() if not each.held]:
                if worker.seen.ended is not None or worker.seen.idle:
                    self._let_go(worker)

    def at_hand(self, kind: DeviceKind) -> bool:
        """As `Launcher.at_hand`: Ray has found room meanwhile, or a worker has ended its job."""
        with self._lock:
            self.look()
            return any(each.kind == kind and each.ready for each in self._spare)

    def close(self) -> None:
        """As `Launcher.close`. The connection goes with the last worker."""
        with self._lock:
            self._closing = True
            for worker in list(self._spare):
                self._let_go(worker)
            self._close_if_done()

    # -- for its workers -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what has been said."""
        with self._lock:
            while self._take_in(0):
                pass

    def knows_all(self) -> bool:
        """Whether all actors that an earlier server left have said which process is theirs."""
        return self._link.connected and not self._unseen

    def terminate(self, worker: RayWorker) -> None:
        with self._lock:
            if worker.name is not None:
                self._link.send(Terminate(worker=worker.name))

    def drop(self, worker: RayWorker) -> None:
        """End a worker, and wait a little until it is known to be gone; its lease fences one that is out of reach."""
        with self._lock:
            if worker.name in self._workers and worker.seen.ended is None and self._link.connected:
                self._link.send(Kill(worker=str(worker.name)))
                self._until(lambda: worker.seen.ended is not None, KILL_SECONDS)
            self._forget(worker)
            self._close_if_done()

    # -- inside --------------------------------------------------------------------------------------------------

    def _placed(self, kind: str) -> RayWorker:
        """A worker without a job that is on a node. Raises OSError."""
        if not self._until(lambda: self._link.connected, PLACE_SECONDS):
            raise OSError(_NOT_HERE, self._link.why)
        spare = [each for each in self._spare if each.kind == kind and not each.seen.ended]
        worker = max(spare, key=lambda each: each.ready, default=None) or self._place(kind)
        worker.wanted = time.monotonic()
        self._until(lambda: bool(worker.seen.node or worker.seen.ended), PLACE_SECONDS)
        if wrong := worker.seen.refused or worker.seen.ended:
            self._let_go(worker)
            raise OSError(_NOT_HERE, wrong)
        if worker.seen.node is None:
            raise OSError(_NOT_HERE, self._pending if self._link.connected else self._link.why)
        self._spare.remove(worker)
        return worker

    def _place(self, kind: str) -> RayWorker:
        name = f"worker-{secrets.token_hex(8)}"
        gpus = self._settings.num_gpus if kind == "cuda" else 0.0
        place = Place(
            worker=name, num_cpus=self._settings.num_cpus, num_gpus=gpus, resources=dict(self._settings.resources)
        )
        self._pending = "Ray has not placed it yet"
        self._link.send(place)
        worker = self._workers[name] = RayWorker(self, name, kind)
        self._spare.append(worker)
        return worker

    def _until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Take in what is said until something is so, at most for so long. Returns whether it is."""
        deadline = time.monotonic() + seconds
        while not reached() and (left := deadline - time.monotonic()) > 0:
            self._link.tend()
            self._take_in(min(left, 0.2))
        return reached()

    def _take_in(self, timeout: float) -> bool:
        """One event; False where there was none."""
        match self._link.next(timeout):
            case None:
                return False
            case Connected(workers=names):
                self._compare(set(names))
            case Pending(why=why):
                self._pending = why
            case State(worker=name, seen=seen) if name in self._workers:
                self._workers[name].seen = seen
                self._meet(name)
        return True

    def _compare(self, names: set[str]) -> None:
        """With what a cluster that was just connected to really has."""
        for name, worker in self._workers.items():
            if name not in names and worker.seen.ended is None:
                worker.seen = worker.seen.model_copy(update={"ended": "is gone from the Ray cluster"})
        for name in names - self._workers.keys():
            self._workers[name] = RayWorker(self, name, held=False)
            self._unseen.add(name)

    def _meet(self, name: str) -> None:
        """The first word of an actor that an earlier server left."""
        if name not in self._unseen:
            return
        self._unseen.remove(name)
        found = self._workers[name]
        found.kind = (found.seen.device or "").partition(":")[0]
        identity = (found.seen.pid, found.seen.process_started)
        waiting = next((each for each in self._adopting if each.identity == identity), None)
        if waiting is not None:
            self._adopting.remove(waiting)
            waiting.name, waiting.kind, waiting.seen, waiting.sent = name, found.kind, found.seen, found.seen.took
            self._workers[name] = waiting
        elif found.seen.pid is None:
            self._let_go(found)

    def _let_go(self, worker: RayWorker) -> None:
        """End a worker that has no job; nobody needs to wait for that."""
        if worker.seen.ended is None and worker.name is not None:
            self._link.send(Kill(worker=worker.name))
        self._forget(worker)

    def _forget(self, worker: RayWorker) -> None:
        for crowd in (self._spare, self._adopting):
            if worker in crowd:
                crowd.remove(worker)
        if worker.name is not None:
            self._workers.pop(worker.name, None)
            self._unseen.discard(worker.name)

    def _close_if_done(self) -> None:
        if self._closing and not any(worker.held for worker in self._workers.values()):
            self._link.close()

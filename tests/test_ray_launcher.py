"""Jobs on a real Ray cluster of several nodes on this machine: nodes, actors, drivers and servers that end."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from apis.errors import RunConfigInvalid
from distributions.run_config import load_run_config
from post_training.jobs.launchers.ray import RayLauncher, RaySettings, ray_slots
from post_training.jobs.launchers.ray_link import LOOPBACK_ONLY
from post_training.jobs.launchers.ray_messages import HOME_MARKER
from post_training.jobs.scheduler import Scheduler, SchedulerSettings, local_scheduler
from post_training.jobs.spec import SessionSettings
from post_training.jobs.tables import JobRow
from post_training.processes import process_identity
from post_training.session_tokens import token_digest
from post_training.sessions import server_url
from tests.job_bench import PROVIDER, Bench, rows
from tests.tiny_llama import save_tiny_llama

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'postgrad[ray]'"
)
pytestmark = pytest.mark.timeout(240)

# Some 100 steps, a checkpoint every 10: long enough to be disturbed.
JOB: dict[str, Any] = {"data": rows(100), "n_epochs": 2, "save_every_n_steps": 10}
_OBJECT_STORE = 80 * 2**20
# A node that is gone is noticed in a second or two instead of half a minute.
_SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


def until(reached: Callable[[], Any], seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := reached()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return result


class RayBench(Bench):
    """Jobs run by worker processes on a Ray cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedulers: list[Scheduler] = []

    def serve(self, address: str, *, devices: tuple[str, ...] = ("cpu",), **settings: Any) -> Scheduler:
        """What a server does at its start."""
        made = SchedulerSettings(ray_slots(devices), warm_seconds=60, ray=RaySettings(address, **settings))
        scheduler = local_scheduler(self.store.database, self.home, made)
        scheduler.serve(PROVIDER)
        self.schedulers.append(scheduler)
        scheduler.start()
        return scheduler

    def job(self, job_uuid: str) -> JobRow:
        return self.store.get(job_uuid)

    def completed(self, job_uuid: str) -> None:
        until(lambda: self.job(job_uuid).status != "in_progress")
        until(lambda: self.job(job_uuid).status not in ("in_progress", "scheduled"))
        assert self.job(job_uuid).status == "completed", self.job(job_uuid).error

    def pid(self, job_uuid: str) -> int:
        """The process of its worker, once it has said so."""
        return until(lambda: next((x.pid for x in self.leases.held() if x.job_uuid == job_uuid), None))

    def reached(self, job_uuid: str, step: int) -> None:
        """Wait until it has a checkpoint of the step or of a later one."""
        until(lambda: max(self.store.recorded_steps(job_uuid), default=0) >= step)

    def step_counts(self, job_uuid: str) -> list[int]:
        """How often each step was made, over all attempts, by its number."""
        steps = [event.step for event in self.store.events(job_uuid, 0, 10_000) if event.step is not None]
        return [steps.count(step) for step in range(max(steps) + 1)]

    def end(self) -> None:
        for scheduler in self.schedulers:
            scheduler.stop()
        self.store.database.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture
def bench(tmp_path: Path, base: Path) -> Iterator[RayBench]:
    made = RayBench(tmp_path / "home", base, model_module="tests.quick_llama")
    yield made
    made.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that runs no worker and two nodes that run one each."""
    with pytest.MonkeyPatch.context() as patch, started_cluster(patch) as made:
        for _ in range(2):
            add_node(made)
        yield made


@contextmanager
def started_cluster(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    patch.setenv(LOOPBACK_ONLY, "0")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE, "_system_config": _SYSTEM}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        made.shutdown()


def add_node(cluster: Any, cpus: int = 1, gpus: int = 0) -> Any:
    return cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=_OBJECT_STORE, include_dashboard=False)


def node_of(cluster: Any, pid: int) -> Any:
    """The node whose raylet is an ancestor of the process."""
    ancestors = set()
    while pid > 1:
        ancestors.add(pid)
        pid = parent(pid)
    return next(n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid in ancestors)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_ray
def test_a_job_whose_node_is_lost_goes_on_on_another_and_ends_with_the_bytes_of_an_undisturbed_one(
    bench: RayBench, cluster: Any
):
    bench.serve(cluster.address)
    bench.submit("calm", **JOB)
    bench.completed("calm")
    bench.submit("disturbed", **JOB)
    bench.reached("disturbed", 20)
    pid = bench.pid("disturbed")
    lost = node_of(cluster, pid)
    cluster.remove_node(lost, allow_graceful=False)
    until(lambda: process_identity(pid) is None, seconds=10)
    bench.completed("disturbed")
    add_node(cluster)
    assert bench.outcome("disturbed") == bench.outcome("calm")
    assert bench.job("disturbed").attempt >= 2
    assert any("its worker was" in (move.reason or "") for move in bench.store.transitions("disturbed"))
    assert bench.step_counts("calm")[1:] == [1] * 100
    assert bench.step_counts("disturbed")[1:21] == [1] * 20, "it resumed from its newest checkpoint"


@needs_ray
def test_a_worker_ends_with_its_actor_and_the_next_job_has_a_new_one(bench: RayBench, cluster: Any):
    bench.serve(cluster.address)
    bench.submit("one", **JOB)
    bench.reached("one", 10)
    pid = bench.pid("one")
    os.kill(parent(pid), signal.SIGKILL)
    until(lambda: process_identity(pid) is None, seconds=5)
    until(lambda: bench.pid("one") != pid, seconds=20)
    assert any("was lost" in (move.reason or "") for move in bench.store.transitions("one"))


@needs_ray
def test_a_restarted_server_finds_a_worker_on_another_node_again_and_can_stop_it(bench: RayBench, cluster: Any):
    first = bench.serve(cluster.address)
    bench.submit("one", **{**JOB, "n_epochs": 20})
    bench.reached("one", 10)
    pid, attempt = bench.pid("one"), bench.job("one").attempt
    launcher = first._launcher
    assert isinstance(launcher, RayLauncher)
    # Its driver is no more than a line to the cluster.
    assert launcher._link._process is not None
    os.kill(launcher._link._process.pid, signal.SIGKILL)
    until(lambda: not launcher._link.connected)
    until(lambda: launcher._link.connected)
    # A server that is killed takes its driver with it, and ends nothing else.
    first._stopping.set()
    first._thread.join()
    launcher._link.close()
    first._workers.clear()
    second = bench.serve(cluster.address)
    worker = until(lambda: next(iter(second._workers.values()), None))
    until(lambda: worker.name is not None)
    assert worker.ended() is None
    assert (bench.job("one").attempt, bench.pid("one")) == (attempt, pid)
    done = max(bench.store.recorded_steps("one"))
    second.stop()
    assert process_identity(pid) is None
    assert bench.job("one").status == "scheduled"
    assert max(bench.store.recorded_steps("one")) >= done
    assert bench.store.transitions("one")[-1].reason == "the server stopped; the job waits for its next start"


@needs_ray
def test_a_session_is_served_on_a_node_and_goes_on_on_another_when_that_is_lost(bench: RayBench, cluster: Any):
    job = bench.submit("stepped", rows(1), save_every_n_steps=1)
    settings = SessionSettings(token_sha256=token_digest("secret"), lease_seconds=300, window=4)
    with bench.store.database.session() as session:
        row = session.scalars(select(JobRow)).one()
        row.spec = job.model_copy(update={"dataset": None, "session": settings}).model_dump(mode="json")
        row.is_session = True
    bench.serve(cluster.address)
    with training_server(bench, "stepped") as client:
        assert client.post("/train_step", json={"rows": rows(2), "step": 1}).json()["step"] == 1
        until(lambda: client.get("/status").json()["last_durable_step"] == 1)
    cluster.remove_node(node_of(cluster, bench.pid("stepped")), allow_graceful=False)
    add_node(cluster)
    until(lambda: bench.job("stepped").attempt == 2)
    with training_server(bench, "stepped") as client:
        assert client.get("/status").json()["next_step"] == 2
        assert client.post("/train_step", json={"rows": rows(2), "step": 2}).json()["global_steps"] == 2
        assert client.post("/complete").status_code == 200
    bench.completed("stepped")


@contextmanager
def training_server(bench: RayBench, job_uuid: str) -> Iterator[httpx.Client]:
    url = until(lambda: server_url(bench.job(job_uuid)))
    with httpx.Client(base_url=f"{url}/api/v1", headers={"authorization": "Bearer secret"}, timeout=60) as client:
        yield client


@needs_ray
def test_a_cancelled_job_ends_and_gives_its_node_back(bench: RayBench, cluster: Any):
    bench.serve(cluster.address, devices=("cpu", "cpu"))
    for name in ("one", "two"):
        bench.submit(name, **{**JOB, "n_epochs": 20})
    pids = {bench.pid(name) for name in ("one", "two")}
    assert len({parent(parent(pid)) for pid in pids}) == 2, "on a node each"
    for name in ("one", "two"):
        bench.store.request_cancel(name)
        until(lambda name=name: bench.job(name).status == "cancelled", seconds=8)


@needs_ray
def test_a_node_that_does_not_see_the_state_folder_is_named(bench: RayBench, cluster: Any):
    scheduler = bench.serve(cluster.address)
    (bench.home / HOME_MARKER).write_text("another folder")
    bench.submit("one", **JOB)
    reason = until(lambda: waiting(scheduler, bench, "one", "does not see"))
    assert f"does not see the server's state folder at {bench.home}: mount the same folder there" in reason
    assert bench.job("one").lost_attempts == 0


@needs_ray
def test_a_job_waits_for_room_on_the_cluster_without_losing_attempts(bench: RayBench, cluster: Any):
    scheduler = bench.serve(cluster.address, num_cpus=64)
    bench.submit("one", **JOB)
    reason = until(lambda: waiting(scheduler, bench, "one", "no node of the Ray cluster has room"))
    assert "free in all are 2 of 2 CPU, 0 of 0 GPU" in reason
    assert bench.job("one").lost_attempts == 0


@needs_ray
def test_a_job_that_found_no_room_starts_as_soon_as_there_is_some(bench: RayBench, cluster: Any):
    scheduler = bench.serve(cluster.address, devices=("cpu",) * 3)
    for name in ("one", "two", "three"):
        bench.submit(name, **JOB)
    until(lambda: waiting(scheduler, bench, "three", "no worker could be started"))
    scheduler._backoff._until = time.monotonic() + 1000  # as after many tries
    for name in ("one", "two", "three"):
        bench.completed(name)


@needs_ray
def test_each_worker_sees_the_gpu_that_ray_gave_it_and_no_other(bench: RayBench, cluster: Any):
    # Ray believes what it is told; a worker that finds no GPU would say so later.
    node = add_node(cluster, cpus=2, gpus=2)
    bench.serve(cluster.address, devices=("cuda", "cuda"), num_cpus=1)
    seen: set[str] = set()
    stopped: list[int] = []
    for name in ("one", "two"):
        bench.submit(name, **JOB, device="cuda")
        pid = bench.pid(name)
        os.kill(pid, signal.SIGSTOP)  # it would end for want of a GPU, and the second be given the same
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        seen |= {pair for pair in environment if pair.startswith("CUDA_VISIBLE_DEVICES=")}
        assert "OMP_NUM_THREADS=1" in environment
        stopped.append(pid)
    assert seen == {"CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"}
    for pid in stopped:
        with suppress(ProcessLookupError):  # on a slow machine the scheduler has given it up already
            os.kill(pid, signal.SIGKILL)
    bench.end()
    cluster.remove_node(node)


@needs_ray
def test_a_cluster_that_is_away_costs_a_job_time_and_nothing_else(bench: RayBench):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    scheduler = bench.serve(address)
    bench.submit("one", **JOB)
    reason = until(lambda: waiting(scheduler, bench, "one", f"Ray cluster at {address}"))
    assert "no worker could be started (the Ray cluster at" in reason
    until(lambda: waiting(scheduler, bench, "one", "does not answer"))
    began = time.monotonic()
    bench.store.request_cancel("one")
    assert bench.job("one").status == "cancelled"
    scheduler.stop()
    assert time.monotonic() - began < 10
    assert bench.job("one").lost_attempts == 0


@needs_ray
def test_a_cluster_of_the_servers_own_ends_with_it(bench: RayBench):
    scheduler = bench.serve("local")
    bench.submit("one", **{**JOB, "n_epochs": 20})
    pid = bench.pid("one")
    raylet = parent(parent(pid))
    bench.reached("one", 10)
    scheduler.stop()
    assert bench.job("one").status == "scheduled"
    assert bench.store.transitions("one")[-1].reason == "the server stopped; the job waits for its next start"
    until(lambda: process_identity(pid) is None and process_identity(raylet) is None, seconds=10)


def waiting(scheduler: Scheduler, bench: RayBench, job_uuid: str, words: str) -> str | None:
    reason = scheduler.waiting(bench.job(job_uuid)).reason or ""
    return reason if words in reason else None


# -- settings ----------------------------------------------------------------------------------------------------


def load(folder: Path, jobs: str) -> Any:
    (folder / "run.yaml").write_text(f"version: 2\njobs: {jobs}\n")
    return load_run_config(str(folder / "run.yaml"), {"POSTGRAD_HOME": str(folder)})


def test_jobs_run_on_this_machine_unless_a_cluster_is_named(tmp_path: Path):
    config = load(tmp_path, "{max_queued: 7}")
    assert config.jobs.settings(config.environ).ray is None


def test_what_a_worker_takes_of_a_cluster_is_said_in_rays_own_words(tmp_path: Path):
    ray = "{address: 'head:6379', num_cpus: 4, num_gpus: 0.5, resources: {a100: 1}}"
    config = load(tmp_path, f"{{launcher: ray, devices: [cuda, cpu, cuda], ray: {ray}}}")
    settings = config.jobs.settings(config.environ)
    assert settings.ray == RaySettings("head:6379", num_cpus=4, num_gpus=0.5, resources={"a100": 1.0})
    assert [(slot.name, slot.kind, slot.device) for slot in settings.slots] == [
        ("ray-cuda:0", "cuda", "cuda:0"),
        ("ray-cpu:0", "cpu", "cpu"),
        ("ray-cuda:1", "cuda", "cuda:0"),
    ]


def test_a_cluster_needs_no_settings_but_its_workers(tmp_path: Path):
    config = load(tmp_path, "{launcher: ray, devices: [cpu]}")
    assert config.jobs.settings(config.environ).ray == RaySettings(address="auto", num_cpus=1, num_gpus=1.0)


@pytest.mark.parametrize(
    ("jobs", "what"),
    [
        ("{launcher: slurm}", "jobs.launcher"),
        ("{launcher: ray}", "jobs.devices: Value error, with launcher: ray, devices lists cpu or cuda once for each"),
        ("{launcher: ray, devices: ['cuda:0']}", "'cuda:0' is no device of a Ray worker: use cpu, or cuda"),
        ("{devices: [cpu], ray: {address: auto}}", "jobs.ray: Value error, a cluster is used with launcher: ray only"),
        ("{launcher: ray, devices: [cpu], ray: {adress: auto}}", "jobs.ray.adress"),
        ("{launcher: ray, devices: [cpu], ray: {address: 'ray://head:10001'}}", "ray:// does not serve"),
        ("{launcher: ray, devices: [cpu], ray: {num_cpus: 0}}", "jobs.ray.num_cpus"),
        ("{launcher: ray, devices: [cpu], ray: {num_gpus: 2}}", "jobs.ray.num_gpus"),
        ("{launcher: ray, devices: [cpu], ray: {resources: {a100: 0}}}", "jobs.ray.resources.a100"),
    ],
)
def test_a_setting_of_a_cluster_that_cannot_be_used_is_refused_by_its_path(tmp_path: Path, jobs: str, what: str):
    with pytest.raises(RunConfigInvalid) as refused:
        load(tmp_path, jobs)
    assert what in refused.value.message

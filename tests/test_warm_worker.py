"""One worker process for one job after another: the same bytes as a process for each, nothing left of the one before,
and an end in good time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from post_training.jobs.devices import Slot
from post_training.jobs.launchers.local import LocalLauncher, LocalWorker
from post_training.jobs.leases import Claim
from post_training.jobs.scheduler import Scheduler, SchedulerSettings
from tests.job_bench import PROVIDER, Bench, Outcome, rows
from tests.quick_llama import BROKEN_SEED
from tests.tiny_llama import save_tiny_llama

CPU = Slot("cpu:0", "cpu", "cpu")
# Two jobs that share nothing but the model: rows, epochs, steps in one, optimizer, a validation.
JOBS: dict[str, dict[str, Any]] = {
    "one": {"data": rows(6), "n_epochs": 1, "save_every_n_steps": 1},
    "two": {
        "data": rows(9)[3:],
        "validation": rows(2),
        "data_config": {"packed": True},
        "gradient_accumulation_steps": 2,
        "optimizer_config": {"optimizer_type": "adam", "lr": 1e-2, "weight_decay": 0.1},
    },
}


class WarmBench(Bench):
    """Jobs run by real worker processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workers: list[LocalWorker] = []
        self.launcher = self.new_launcher()

    def new_launcher(self, warm_seconds: float = 60.0) -> LocalLauncher:
        return LocalLauncher(self.store.database.url, self.home, warm_seconds)

    def log_path(self, job_uuid: str) -> Path:
        return self.root(job_uuid).parent / "worker.log"

    def launch(self, claim: Claim | None = None) -> LocalWorker:
        """Have the oldest waiting job begun."""
        claim = claim or self.claim()
        self.workers.append(self.launcher.launch(claim, self.log_path(claim.job_uuid), 1))
        return self.workers[-1]

    def done(self, worker: LocalWorker) -> None:
        """Wait until a worker has ended its job, and have it wait for the next."""
        until(lambda: worker.idle() or worker.ended())
        assert worker.ended() is None
        self.launcher.keep(worker)

    def run_job(self, job_uuid: str, **job: Any) -> LocalWorker:
        self.submit(job_uuid, **job)
        worker = self.launch()
        self.done(worker)
        return worker


def until(reached: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def resident(worker: LocalWorker) -> int:
    return int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture
def bench(tmp_path: Path, base: Path) -> Iterator[WarmBench]:
    made = WarmBench(tmp_path, base, model_module="tests.quick_llama")
    yield made
    made.launcher.close()
    for worker in made.workers:
        worker.kill()
    made.store.database.close()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, base: Path) -> dict[str, Outcome]:
    """What the jobs come to in a process each."""
    bench = WarmBench(tmp_path_factory.mktemp("fresh"), base, model_module="tests.quick_llama")
    bench.launcher = bench.new_launcher(0)
    outcomes = {}
    for name, job in JOBS.items():
        bench.submit(name, **job)
        assert bench.launch().process.wait(60) == 0
        outcomes[name] = bench.outcome(name)
        assert outcomes[name].status == "completed"
    for worker in bench.workers:
        worker.kill()
    bench.store.database.close()
    return outcomes


def test_jobs_in_one_warm_worker_come_to_the_bytes_of_a_process_for_each_and_keep_their_logs_apart(
    bench: WarmBench, fresh: dict[str, Outcome]
):
    first = bench.run_job("one", **JOBS["one"])
    assert bench.run_job("two", **JOBS["two"]) is first
    assert bench.run_job("again", **JOBS["one"]) is first
    assert bench.outcome("one") == bench.outcome("again") == fresh["one"]
    assert bench.outcome("two") == fresh["two"]
    # A failure is logged with its traceback, in the log of its own job and in no other.
    bad = bench.run_job("bad", data=[{"prompt": "x", "completion": 7}])
    assert bad is first
    assert (bench.outcome("bad").error, bench.outcome("bad").status) == ("data_invalid", "failed")
    assert "job bad failed" in bench.log_path("bad").read_text()
    for name in ("one", "two", "again"):
        assert "bad" not in bench.log_path(name).read_text()


def test_the_memory_of_a_waiting_worker_does_not_grow_with_the_jobs_it_has_done(bench: WarmBench):
    sizes = [resident(bench.run_job(f"job-{number}", **JOBS["one"])) for number in range(6)]
    assert len({worker.process.pid for worker in bench.workers}) == 1
    print([f"{size / 2**20:.0f} MiB" for size in sizes])
    assert sizes[-1] < sizes[1] + 8 * 2**20
    # The peak that a job is told of is its own.
    peaks = [(bench.store.get(f"job-{n}").resources or {})["peak_memory_bytes"] for n in (1, 5)]
    assert peaks[1] < 1.1 * peaks[0]


def test_a_waiting_worker_ends_when_its_server_is_gone_is_told_to_or_waits_for_too_long(bench: WarmBench):
    quick = {"data": [{"prompt": "x", "completion": 7}]}  # a job that fails before it loads a model
    gone = bench.run_job("gone", **quick)
    assert gone.process.stdin is not None
    gone.process.stdin.close()
    assert gone.process.wait(5) == 0
    told = bench.run_job("told", **quick)
    assert told is not gone
    told.process.send_signal(signal.SIGTERM)
    assert told.process.wait(5) == 0
    bench.launcher = bench.new_launcher(0.3)
    assert bench.run_job("bored", **quick).process.wait(10) == 0


def test_a_worker_goes_on_with_its_job_when_its_server_dies_and_then_ends(bench: WarmBench, fresh: dict[str, Outcome]):
    bench.submit("one", **JOBS["one"])
    worker = bench.launch()
    for pipe in (worker.process.stdin, worker.process.stdout):
        assert pipe is not None
        pipe.close()
    assert worker.process.wait(60) == 0
    assert bench.outcome("one") == fresh["one"]


def test_a_waiting_worker_that_does_not_take_its_job_is_replaced(bench: WarmBench, fresh: dict[str, Outcome]):
    stuck = bench.run_job("bad", data=[{"prompt": "x", "completion": 7}])
    stuck.process.send_signal(signal.SIGSTOP)
    successor = bench.run_job("one", **JOBS["one"])
    assert stuck.process.returncode == -signal.SIGKILL
    assert successor is not stuck
    assert (bench.outcome("one"), bench.store.get("one").attempt) == (fresh["one"], 1)


def test_a_worker_that_met_what_nobody_foresaw_ends_and_one_for_other_settings_is_not_used(bench: WarmBench):
    bench.run_job("bad", data=[{"prompt": "x", "completion": 7}])
    bench.submit("other-threads", **JOBS["one"])
    claim = bench.claim()
    other = bench.launcher.launch(claim, bench.log_path("other-threads"), 2)
    assert other is not bench.workers[0]
    assert bench.workers[0].process.returncode == -signal.SIGKILL, "its memory is the other's"
    bench.workers.append(other)
    bench.done(other)
    bench.seed = BROKEN_SEED
    bench.submit("unforeseen", **JOBS["one"])
    worker = bench.launcher.launch(bench.claim(), bench.log_path("unforeseen"), 2)
    assert worker is other
    assert worker.process.wait(30) == 0
    assert bench.outcome("unforeseen").error == "internal_error"
    assert "nobody foresaw this" in bench.log_path("unforeseen").read_text()


def test_the_scheduler_hands_the_next_job_to_the_waiting_worker_and_a_crash_in_it_is_a_lost_attempt(
    bench: WarmBench, fresh: dict[str, Outcome]
):
    launched: list[LocalWorker] = []

    class Watched(LocalLauncher):
        def launch(self, claim: Claim, log_path: Path, threads: int | None) -> LocalWorker:
            launched.append(super().launch(claim, log_path, threads))
            return launched[-1]

    settings = SchedulerSettings((CPU,), warm_seconds=60)
    scheduler = Scheduler(
        bench.store,
        Watched(bench.store.database.url, bench.home, settings.warm_seconds),
        lambda job_uuid: bench.root(job_uuid).parent,
        lambda _: None,
        settings,
    )
    scheduler.serve(PROVIDER)
    scheduler.start()
    try:
        for name, job in JOBS.items():
            bench.submit(name, **job)
        until(lambda: bench.store.get("two").status == "completed")
        bench.submit("long", rows(40), n_epochs=200)
        until(lambda: (bench.store.get("long").progress or {}).get("step", 0) > 1)
        assert {worker.process.pid for worker in launched} == {launched[0].process.pid}
        launched[0].process.send_signal(signal.SIGKILL)
        until(lambda: bench.store.get("long").attempt == 2 and (bench.store.get("long").progress or {}).get("step"))
        assert bench.store.get("long").lost_attempts == 1
        assert len(launched) == 4
        bench.store.request_cancel("long")
        until(lambda: bench.store.get("long").status == "cancelled")
        until(lambda: launched[-1].idle())
        time.sleep(0.5)
    finally:
        scheduler.stop()
    assert launched[-1].process.returncode == 0, "the stop ended the waiting worker"
    assert {name: bench.outcome(name) for name in JOBS} == fresh

"""The scheduler with real processes that stand for workers: every way in which an attempt can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from apis.post_training.models import JobStatus
from post_training.jobs.database import Database
from post_training.jobs.devices import DeviceKind, Slot
from post_training.jobs.launchers.local import AdoptedWorker, LocalWorker, WorkerHandle
from post_training.jobs.leases import Claim, Leases
from post_training.jobs.scheduler import Scheduler, SchedulerSettings
from post_training.jobs.store import JobStore
from post_training.processes import process_identity
from tests.test_job_store import CPU, PROVIDER, SECOND_CPU, make_spec

SLEEPING = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


class ProgramLauncher:
    """Starts a small program where a worker would be; says for it which process it is, as a worker does."""

    def __init__(self, program: str, leases: Leases | None = None) -> None:
        self.program = program
        self.leases = leases
        self.launched: list[LocalWorker] = []
        self.threads: list[int | None] = []

    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> LocalWorker:
        command = [sys.executable, "-c", self.program]
        worker = LocalWorker(subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE))
        if self.program == STUBBORN and worker.process.stdout is not None:
            worker.process.stdout.readline()  # it is deaf by now
        if self.leases is not None:
            pid = worker.process.pid
            self.leases.started(claim.job_uuid, claim.owner, pid, process_identity(pid))
        self.launched.append(worker)
        self.threads.append(threads)
        return worker

    def adopt(self, pid: int, process_started: str | None) -> AdoptedWorker:
        return AdoptedWorker(pid, process_started)

    def keep(self, worker: WorkerHandle) -> None:
        raise AssertionError("these programs do one job")

    def reap(self) -> None: ...

    def at_hand(self, kind: DeviceKind) -> bool:
        return False

    def close(self) -> None: ...

    def end(self) -> None:
        for worker in self.launched:
            worker.kill()
            if worker.process.stdout is not None:
                worker.process.stdout.close()


class BrokenLauncher(ProgramLauncher):
    error = OSError(12, "Cannot allocate memory")

    def __init__(self) -> None:
        super().__init__("")

    def launch(self, claim: Claim, log_path: Path, threads: int | None) -> LocalWorker:
        raise self.error


class Bench:
    """A store and the schedulers of a test."""

    def __init__(self, folder: Path) -> None:
        database = Database(f"sqlite:///{folder / 'store.db'}")
        database.migrate()
        self.folder = folder
        self.store = JobStore(database)
        self.leases = Leases(database)
        self.cleaned: list[str] = []
        self.launchers: list[ProgramLauncher] = []
        self.schedulers: list[Scheduler] = []

    def scheduler(self, launcher: ProgramLauncher, *slots: Slot, max_attempts: int = 3) -> Scheduler:
        made = Scheduler(
            self.store,
            launcher,
            lambda _: self.folder,
            self.cleaned.append,
            SchedulerSettings(slots or (CPU,), max_attempts=max_attempts),
            host="here",
        )
        made.serve(PROVIDER)
        self.launchers.append(launcher)
        self.schedulers.append(made)
        return made

    def submit(self, *names: str) -> None:
        for name in names:
            self.store.submit(make_spec(name), "body", max_queued=10)

    def status(self, name: str) -> str:
        return self.store.get(name).status


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for scheduler in made.schedulers:
        scheduler.stop()
    for launcher in made.launchers:
        launcher.end()
    made.store.database.close()


def until(reached: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_that_ends_without_a_result_is_tried_again_and_then_fails_its_job_and_the_next_one_starts(
    bench: Bench,
):
    bench.submit("first", "second")
    launcher = ProgramLauncher("raise SystemExit(3)")
    bench.scheduler(launcher).start()
    until(lambda: all(bench.status(name) == "failed" for name in ("first", "second")))
    error = bench.store.get("first").error
    assert error is not None
    assert error["code"] == "worker_died"
    assert "its worker ended with exit status 3; 3 attempts in a row" in error["message"]
    assert len(launcher.launched) == 6
    assert [t.attempt for t in bench.store.transitions("first") if t.new == "in_progress"] == [1, 2, 3]
    assert bench.cleaned == ["first"] * 3 + ["second"] * 3


def test_a_worker_that_cannot_be_started_is_no_fault_of_the_job_and_is_tried_again_after_a_growing_pause(
    bench: Bench,
):
    bench.submit("one", "two")
    scheduler = bench.scheduler(BrokenLauncher())
    scheduler.start()
    until(lambda: bench.store.get("one").attempt == 2)
    first, second = (t.at for t in bench.store.transitions("one") if t.new == "in_progress")
    assert 1 <= (second - first).total_seconds() < 2
    job = bench.store.get("one")
    until(lambda: bench.status("one") == "scheduled")
    assert (job.lost_attempts, bench.store.get("two").attempt) == (0, 0)
    reason = scheduler.waiting(bench.store.get("one")).reason or ""
    assert "no worker could be started (Cannot allocate memory)" in reason


def test_a_disk_that_is_too_full_to_start_a_worker_fails_the_job_with_disk_full(bench: Bench):
    bench.submit("one")
    launcher = BrokenLauncher()
    launcher.error = OSError(28, "No space left on device")
    bench.scheduler(launcher)._tick()
    assert (bench.store.get("one").error or {})["code"] == "disk_full"


def test_what_a_cancelled_job_left_when_the_server_was_killed_goes_at_the_next_start(bench: Bench):
    bench.submit("one")
    bench.store.request_cancel("one")
    bench.scheduler(ProgramLauncher(SLEEPING)).start()
    until(lambda: bench.cleaned == ["one"])


def test_a_killed_worker_is_named_by_its_signal_and_leaves_nothing_running(bench: Bench, tmp_path: Path):
    bench.submit("one")
    file = tmp_path / "grandchild"
    launcher = ProgramLauncher(
        f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); open({str(file)!r}, 'w').write(str(p.pid)); "
        "time.sleep(60)"
    )
    scheduler = bench.scheduler(launcher, max_attempts=1)
    scheduler.start()
    until(lambda: file.exists() and file.read_text() != "")
    os.kill(launcher.launched[0].process.pid, signal.SIGKILL)
    until(lambda: bench.status("one") == "failed")
    assert "was ended by SIGKILL" in (bench.store.get("one").error or {})["message"]
    until(lambda: process_identity(int(file.read_text())) is None)


def test_a_worker_that_ignores_a_cancel_is_ended_within_five_seconds_and_its_job_cancelled(bench: Bench):
    bench.submit("one", "two")
    launcher = ProgramLauncher(STUBBORN)
    bench.scheduler(launcher).start()
    until(lambda: bench.status("one") == "in_progress")
    start = time.monotonic()
    bench.store.request_cancel("one")
    until(lambda: bench.status("one") == "cancelled", seconds=8)
    assert time.monotonic() - start < 5
    assert launcher.launched[0].process.wait(5) == -9
    until(lambda: bench.status("two") == "in_progress")


@pytest.mark.parametrize("program", [SLEEPING, "raise SystemExit(0)"])
def test_stopping_gives_back_a_job_whose_worker_had_no_chance_to(bench: Bench, program: str):
    bench.submit("one")
    launcher = ProgramLauncher(program)
    scheduler = bench.scheduler(launcher)
    # Claimed and launched, but not looked after: the stop comes before the next look.
    scheduler._tick()
    launcher.launched[0].process.poll() if program == SLEEPING else launcher.launched[0].process.wait()
    scheduler.stop()
    assert (bench.status("one"), bench.store.get("one").lost_attempts) == ("scheduled", 0)
    assert launcher.launched[0].process.poll() is not None


def test_a_cancelled_job_is_not_given_back_by_a_stop(bench: Bench):
    bench.submit("one")
    scheduler = bench.scheduler(ProgramLauncher(SLEEPING))
    scheduler._tick()
    bench.store.request_cancel("one")
    scheduler.stop()
    assert bench.status("one") == "cancelled"


def test_each_slot_has_a_job_with_its_share_of_the_cores(bench: Bench):
    bench.submit("one", "two", "three")
    launcher = ProgramLauncher(SLEEPING)
    bench.scheduler(launcher, CPU, SECOND_CPU)._tick()
    assert [bench.status(name) for name in ("one", "two", "three")] == ["in_progress", "in_progress", "scheduled"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert launcher.threads == [max(1, cores // 2)] * 2
    launcher.launched[0].kill()
    bench.schedulers[0]._tick()
    assert [t.reason for t in bench.store.transitions("one")][-1].startswith("attempt 2"), "it keeps its place"


# -- what an earlier server left ---------------------------------------------------------------------------------


def test_a_restarted_server_finds_a_running_worker_again_and_neither_runs_its_job_twice(bench: Bench):
    bench.submit("one", "two")
    launcher = ProgramLauncher(SLEEPING, bench.leases)
    bench.scheduler(launcher)._tick()
    after = ProgramLauncher(SLEEPING)
    second = bench.scheduler(after)
    for _ in range(3):
        second._tick()
    assert (bench.status("one"), bench.status("two"), after.launched) == ("in_progress", "scheduled", [])
    launcher.launched[0].kill()
    second._tick()
    assert bench.store.transitions("one")[2].reason == "its worker ended while no server watched it"
    assert len(after.launched) == 1
    assert bench.store.get("one").attempt == 2


def test_a_restarted_server_stops_and_cancels_workers_that_it_did_not_start(bench: Bench):
    bench.submit("one")
    launcher = ProgramLauncher(STUBBORN, bench.leases)
    bench.scheduler(launcher)._tick()
    bench.store.request_cancel("one")
    second = bench.scheduler(BrokenLauncher())
    second.start()
    assert launcher.launched[0].process.wait(8) == -9
    until(lambda: bench.status("one") == "cancelled")


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_worker(bench: Bench):
    bench.submit("one")
    launcher = ProgramLauncher(SLEEPING)
    bench.scheduler(launcher)._tick()
    held = bench.leases.held()[0]
    bystander = subprocess.Popen([sys.executable, "-c", SLEEPING], start_new_session=True)
    bench.leases.started("one", held.owner, bystander.pid, "an earlier process")
    bench.scheduler(BrokenLauncher(), max_attempts=1)._tick()
    assert bench.status("one") == "failed"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_worker_of_another_machine_is_judged_by_its_beats_alone(bench: Bench):
    bench.submit("one")
    claim = bench.leases.claim("elsewhere", (CPU,), {PROVIDER})
    assert claim is not None
    bench.leases.started("one", claim.owner, os.getpid(), process_identity(os.getpid()))
    scheduler = bench.scheduler(BrokenLauncher(), max_attempts=1)
    scheduler._watch.lease_seconds = 0.3
    for _ in range(4):
        scheduler._tick()
        bench.leases.beat("one", claim.owner)
        time.sleep(0.1)
    assert bench.status("one") == "in_progress"
    until(lambda: scheduler._tick() is None and bench.status("one") == "failed", seconds=3)
    assert "silent" in (bench.store.get("one").error or {})["message"]
    assert bench.cleaned == [], "its files may be in use there"


def test_a_stopped_worker_is_ended_before_its_job_goes_on_elsewhere(bench: Bench):
    bench.submit("one")
    launcher = ProgramLauncher(SLEEPING, bench.leases)
    scheduler = bench.scheduler(launcher)
    scheduler._watch.lease_seconds = 0.3
    scheduler._tick()
    launcher.launched[0].process.send_signal(signal.SIGSTOP)
    until(lambda: scheduler._tick() is None and bench.store.get("one").attempt == 2, seconds=5)
    assert launcher.launched[0].process.poll() == -9


def test_the_identity_of_a_process_is_its_own_and_goes_with_it():
    child = subprocess.Popen([sys.executable, "-c", SLEEPING])
    first = process_identity(child.pid)
    assert first is not None
    assert first == process_identity(child.pid) != process_identity(os.getpid())
    child.kill()
    until(lambda: process_identity(child.pid) is None, seconds=5)  # ended, though not waited for
    child.wait()
    assert process_identity(child.pid) is None
    assert process_identity(2**22 + 1) is None


def test_the_scheduler_goes_on_after_the_store_was_away(bench: Bench, caplog: pytest.LogCaptureFixture):
    database_file = bench.folder / "store.db"
    hidden = bench.folder / "hidden.db"
    bench.submit("one")
    scheduler = bench.scheduler(ProgramLauncher(SLEEPING))
    bench.store.database.close()
    database_file.rename(hidden)
    database_file.mkdir()
    scheduler.start()
    until(lambda: "cannot be reached" in caplog.text)
    database_file.rmdir()
    hidden.rename(database_file)
    until(lambda: bench.status("one") == JobStatus.in_progress)

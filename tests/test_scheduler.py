"""The scheduler with real child processes that stand for workers: every way an attempt can end."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from apis.post_training.models import JobStatus
from post_training.jobs.database import Database
from post_training.jobs.launchers.local import LocalWorker
from post_training.jobs.scheduler import Scheduler
from post_training.jobs.store import JobStore
from post_training.worker.lease import Lease
from tests.test_job_store import PROVIDER, make_spec

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


class ProgramLauncher:
    """Starts a small program where a worker would be."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.launched: list[LocalWorker] = []

    def launch(self, job_uuid: str, owner: str, log_path: Path, threads: int | None) -> LocalWorker:
        worker = LocalWorker(subprocess.Popen([sys.executable, "-c", self.program], start_new_session=True))
        self.launched.append(worker)
        return worker


class BrokenLauncher:
    def launch(self, job_uuid: str, owner: str, log_path: Path, threads: int | None) -> LocalWorker:
        raise OSError(12, "Cannot allocate memory")


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.create_tables()
    return JobStore(database)


@pytest.fixture
def start(store: JobStore, tmp_path: Path) -> Iterator[Callable[..., Scheduler]]:
    started: list[Scheduler] = []

    def make(launcher: ProgramLauncher | BrokenLauncher, **options: float) -> Scheduler:
        scheduler = Scheduler(store, launcher, PROVIDER, lambda _: tmp_path, cleaned.append, **options)  # pyright: ignore[reportArgumentType]
        started.append(scheduler)
        scheduler.start()
        return scheduler

    cleaned: list[str] = []
    yield make
    for scheduler in started:
        scheduler.stop()


def submit(store: JobStore, *names: str) -> None:
    for name in names:
        store.submit(make_spec(name), "body", max_queued=10)


def until(reached: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_that_ends_without_a_result_fails_its_job_and_the_next_one_starts(
    store: JobStore, start: Callable[..., Scheduler]
):
    submit(store, "first", "second")
    launcher = ProgramLauncher("raise SystemExit(3)")
    start(launcher)
    until(lambda: all(store.get(name).status == JobStatus.failed for name in ("first", "second")))
    error = store.get("first").error
    assert error is not None
    assert error["code"] == "worker_died"
    assert "exit status 3" in error["message"]
    assert len(launcher.launched) == 2


def test_a_worker_that_cannot_be_started_fails_its_job(store: JobStore, start: Callable[..., Scheduler]):
    submit(store, "one")
    start(BrokenLauncher())
    until(lambda: store.get("one").status == JobStatus.failed)
    assert "Cannot allocate memory" in (store.get("one").error or {})["message"]


def test_a_worker_that_ignores_a_cancel_is_ended_and_its_job_cancelled(
    store: JobStore, start: Callable[..., Scheduler]
):
    submit(store, "one")
    launcher = ProgramLauncher(STUBBORN)
    start(launcher)
    until(lambda: store.get("one").status == JobStatus.in_progress)
    store.request_cancel("one")
    until(lambda: store.get("one").status == JobStatus.cancelled, seconds=8)
    assert launcher.launched[0].process.wait(5) == -9


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "raise SystemExit(0)"])
def test_stopping_gives_back_a_job_whose_worker_had_no_chance_to(store: JobStore, tmp_path: Path, program: str):
    submit(store, "one")
    launcher = ProgramLauncher(program)
    scheduler = Scheduler(store, launcher, PROVIDER, lambda _: tmp_path, lambda _: None)
    # Claimed and launched, but not looked after: the stop comes before the next look.
    scheduler._tick()
    launcher.launched[0].poll() if "sleep" in program else launcher.launched[0].process.wait()
    scheduler.stop()
    assert store.get("one").status == JobStatus.scheduled
    assert launcher.launched[0].process.poll() is not None


def test_a_cancelled_job_is_not_given_back_by_a_stop(store: JobStore, tmp_path: Path):
    submit(store, "one")
    scheduler = Scheduler(store, ProgramLauncher(STUBBORN), PROVIDER, lambda _: tmp_path, lambda _: None)
    scheduler._tick()
    store.request_cancel("one")
    scheduler.stop()
    assert store.get("one").status == JobStatus.cancelled


def test_a_job_of_an_earlier_server_is_left_alone_while_its_worker_beats_and_failed_when_it_is_silent(
    tmp_path: Path,
):
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.create_tables()
    offset = [timedelta()]
    store = JobStore(database, clock=lambda: datetime.now(UTC) + offset[0])
    submit(store, "one")
    job = store.claim(PROVIDER)
    assert job is not None
    scheduler = Scheduler(store, BrokenLauncher(), PROVIDER, lambda _: tmp_path, lambda _: None, lease_seconds=15)
    scheduler._tick()
    assert store.get("one").status == JobStatus.in_progress
    offset[0] = timedelta(seconds=20)
    scheduler._tick()
    assert store.get("one").status == JobStatus.failed
    assert "silent" in (store.get("one").error or {})["message"]


def test_a_lease_waits_for_a_store_that_another_process_has_locked(store: JobStore):
    submit(store, "one")
    job = store.claim(PROVIDER)
    assert job is not None
    assert job.owner is not None
    impatient = Database(store.database.url)

    @event.listens_for(impatient.engine, "connect")
    def _give_up_soon(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA busy_timeout=50")

    lease = Lease(JobStore(impatient), "one", job.owner)
    locked = threading.Event()

    def hold() -> None:
        with store.database.session():
            locked.set()
            time.sleep(1.0)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    lease.update(message="written in the end")
    holder.join()
    assert store.events("one", 0)[-1].message == "written in the end"


def test_a_reader_does_not_wait_for_a_writer(store: JobStore):
    submit(store, "one")
    with store.database.session():
        start = time.monotonic()
        assert store.get("one").status == JobStatus.scheduled
        assert time.monotonic() - start < 0.5

"""Clocks that are set back while jobs run: times stay in order and no living worker is taken for dead."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from post_training.jobs.database import Database
from post_training.jobs.launchers.local import LocalLauncher
from post_training.jobs.scheduler import Scheduler, SchedulerSettings
from post_training.jobs.store import JobStore
from tests.faults.conftest import Calm
from tests.faults.harness import (
    assert_ended_once,
    assert_equal_results,
    make_home,
    open_store,
    register_rows,
    request,
    result,
    until,
    wait,
)
from tests.served_stack import served
from tests.test_job_store import CPU

pytestmark = pytest.mark.timeout(300)


def times_are_in_order(home: Path, job_uuid: str) -> None:
    store = open_store(home)
    job = store.get(job_uuid)
    series = [
        [move.at for move in store.transitions(job_uuid)],
        [at for at in (job.scheduled_at, job.started_at, job.completed_at) if at is not None],
    ]
    store.database.close()
    for times in series:
        assert times == sorted(times)


def test_a_scheduler_whose_clock_jumps_about_keeps_a_living_worker_and_times_in_order(
    tmp_path: Path, tiny: Path, calm: Calm
):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, process), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("timeless"))
        process.terminate()
        process.wait(30)
    shift = [timedelta()]
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    store = JobStore(database, clock=lambda: datetime.now(UTC) + shift[0])
    launcher = LocalLauncher(database.url, home)
    folder = home / "jobs" / "timeless"
    scheduler = Scheduler(store, launcher, lambda _: folder, lambda _: None, SchedulerSettings((CPU,)))
    scheduler.serve("torchtune")
    scheduler.start()
    stop = threading.Event()

    def set_the_clock() -> None:
        for hours in (-5, 3, -100_000, 7, 0) * 1000:
            shift[0] = timedelta(hours=hours)
            if stop.wait(0.5):
                return

    setter = threading.Thread(target=set_the_clock)
    setter.start()
    try:
        until(lambda: JobStatus(store.get("timeless").status).terminal, seconds=120)
    finally:
        stop.set()
        setter.join()
        scheduler.stop()
        database.close()
    assert assert_ended_once(home, "timeless") == 2  # one for the server that was stopped
    assert_equal_results(result(home, "timeless"), calm.result)
    times_are_in_order(home, "timeless")


@pytest.fixture(scope="module")
def moved_clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library under which the wall clock can be set."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a library that moves the clock is made on Linux, by cc")
    library = tmp_path_factory.mktemp("clock") / "moved_clock.so"
    source = Path(__file__).with_name("moved_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return str(library)


def test_a_whole_stack_whose_wall_clock_is_set_back_an_hour_completes_its_job(
    tmp_path: Path, tiny: Path, calm: Calm, moved_clock: str
):
    home = make_home(tmp_path, tiny)
    setting = tmp_path / "clock"
    setting.write_text("0")
    moved: dict[str, Any] = {"LD_PRELOAD": moved_clock, "MOVED_CLOCK": str(setting)}
    with served(home, **moved) as (url, _), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("back"))
        until(lambda: (p := client.post_training.status("back").progress) and p.step > 5, every=0.01)
        setting.write_text("-3600")
        assert wait(client, "back").status is JobStatus.completed
        client.post_training.supervised_fine_tune(**request("after", n_epochs=1))
        scheduled = client.post_training.status("after").scheduled_at
        assert scheduled is not None
        assert 3500 < time.time() - scheduled.timestamp() < 3700, "the clock was really set back"
        assert wait(client, "after").status is JobStatus.completed
    for name in ("back", "after"):
        assert assert_ended_once(home, name) == 1
        times_are_in_order(home, name)
    assert_equal_results(result(home, "back"), calm.result)

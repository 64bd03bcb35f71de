"""A worker that sleeps past its lease: its job goes on without it, and when it wakes it writes nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from apis.post_training.models import JobStatus
from post_training.client import StackClient
from post_training.jobs.devices import slots_of
from post_training.jobs.launchers.local import LocalLauncher
from post_training.jobs.leases import Claim, Leases
from tests.faults.conftest import Calm
from tests.faults.harness import (
    assert_ended_once,
    assert_equal_results,
    assert_nothing_partial,
    make_home,
    open_store,
    register_rows,
    request,
    result,
    until,
    wait,
    worker_pid,
)
from tests.served_stack import served


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "worker.log"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def stop_outside_a_write(pid: int, database: Path) -> None:
    """Stop a process at a moment at which it doesn't hold the lock that every other writer waits for."""
    prober = sqlite3.connect(database, timeout=0, isolation_level=None)
    while True:
        os.kill(pid, signal.SIGSTOP)
        try:
            prober.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.003)
            continue
        prober.execute("ROLLBACK")
        prober.close()
        return


def test_a_worker_that_wakes_after_its_lease_notices_and_writes_nothing(tmp_path: Path, tiny: Path):
    """No server is there that could end it: it has to find out by itself."""
    home = make_home(tmp_path, tiny)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client, 3000)
        client.post_training.supervised_fine_tune(**request("slept", save_every_n_steps=2))
    store = open_store(home)
    leases = Leases(store.database)
    claim = _claim(leases)  # the server gave it back when it stopped
    launcher = LocalLauncher(store.database.url, home)
    worker = launcher.launch(claim, tmp_path / "worker.log", 1)
    try:
        seen = store.recorded_steps("slept")
        until(lambda: store.recorded_steps("slept") - seen, every=0.005)
        stop_outside_a_write(worker.process.pid, home / "postgrad.db")
        leases.lost("slept", claim.owner, "silent", 3)
        successor = _claim(leases)
        before = (snapshot(home / "jobs"), len(store.events("slept", 0, 100_000)), store.recorded_steps("slept"))
        time.sleep(16)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert worker.process.wait(20) == 3
        after = (snapshot(home / "jobs"), len(store.events("slept", 0, 100_000)), store.recorded_steps("slept"))
        assert after == before
        assert leases.held()[0].owner == successor.owner
    finally:
        worker.kill()
        store.database.close()


def test_a_stopped_worker_of_a_running_server_is_replaced_and_the_bytes_are_the_same(
    tmp_path: Path, tiny: Path, calm: Calm
):
    home = make_home(tmp_path, tiny)
    with served(home) as (url, _), StackClient(url) as client:
        register_rows(client)
        client.post_training.supervised_fine_tune(**request("stopped"))
        status = lambda: client.post_training.status("stopped").progress  # noqa: E731
        until(lambda: (seen := status()) and seen.step > 5, every=0.01)
        pid = worker_pid(home, "stopped")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        until(lambda: client.post_training.status("stopped").attempt == 2, seconds=30)
        assert time.monotonic() - start < 17, "noticed within three heartbeats"
        assert worker_pid(home, "stopped") != pid
        assert wait(client, "stopped").status is JobStatus.completed
    assert assert_ended_once(home, "stopped") == 2
    assert_equal_results(result(home, "stopped"), calm.result)
    assert_nothing_partial(home, "stopped")


def _claim(leases: Leases) -> Claim:
    claim = leases.claim("test", slots_of(["cpu"]), {"torchtune"})
    assert claim is not None
    return claim


pytestmark = pytest.mark.timeout(300)

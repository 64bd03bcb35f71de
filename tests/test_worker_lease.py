"""A worker's lease against a real store: what it waits out, and when it must let go."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from apis.post_training.models import JobStatus
from post_training.jobs.database import Database
from post_training.jobs.leases import Leases
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.processes import process_identity
from post_training.worker.lease import Lease
from tests.test_job_store import claim, submit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.migrate()
    yield JobStore(database)
    database.close()


@pytest.fixture(autouse=True)
def _default_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def lease_of(store: JobStore, **seconds: float) -> Lease:
    submit(store, "one")
    return Lease(store, "one", claim(Leases(store.database)).owner, **seconds)


def test_it_says_which_process_it_is_and_beats(store: JobStore):
    with lease_of(store, beat_seconds=0.1, look_seconds=0.05):
        time.sleep(0.6)
        held = Leases(store.database).held()[0]
    assert (held.pid, held.process_started) == (os.getpid(), process_identity(os.getpid()))
    assert held.beats >= 3


def test_a_cancel_is_heard_between_two_beats(store: JobStore):
    with lease_of(store, beat_seconds=60, look_seconds=0.05) as lease:
        assert lease.stop_reason is None
        store.request_cancel("one")
        time.sleep(0.3)
        assert lease.stop_reason == "cancelled"


def test_a_store_locked_by_another_process_for_ten_seconds_is_waited_out(store: JobStore):
    other = Database(store.database.url)
    locked = threading.Event()

    def hold() -> None:
        with other.session():
            locked.set()
            time.sleep(10)

    with lease_of(store) as lease:
        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        lease.update(message="written in the end")
        holder.join()
        assert lease.stop_reason is None
        lease.finish(JobStatus.completed, "done")
    assert [event.message for event in store.events("one", 0)][-2:] == ["written in the end", "completed: done"]
    other.close()


def test_a_store_away_for_longer_than_the_lease_ends_it_and_nothing_is_written(store: JobStore):
    with lease_of(store, lease_seconds=0.5, beat_seconds=0.1, look_seconds=0.05) as lease:
        file = Path(store.database.url.removeprefix("sqlite:///"))
        store.database.close()
        file.rename(file.with_suffix(".away"))
        file.mkdir()
        start = time.monotonic()
        with pytest.raises(LeaseLost, match="could not be reached"):
            lease.update(message="late")
        assert 0.2 < time.monotonic() - start < 3
        assert lease.stop_reason == "lost"
        file.rmdir()
        file.with_suffix(".away").rename(file)
        with pytest.raises(LeaseLost):
            lease.update(message="later")
    assert "late" not in " ".join(event.message for event in store.events("one", 0))


def test_a_worker_that_slept_past_its_lease_knows_it_before_it_writes(store: JobStore):
    """As after SIGSTOP: no thread of it ran, and another owner may be at work."""
    lease = lease_of(store, lease_seconds=0.2)
    time.sleep(0.4)
    assert lease.stop_reason == "lost"
    with pytest.raises(LeaseLost):
        lease.update(message="late")


def test_a_job_that_is_anothers_by_now_is_let_go_within_a_look(store: JobStore):
    leases = Leases(store.database)
    with lease_of(store, look_seconds=0.05) as lease:
        leases.lost("one", leases.held()[0].owner, "silent", 3)
        successor = claim(leases)
        time.sleep(1)
        assert lease.stop_reason == "lost"
        with pytest.raises(LeaseLost):
            lease.finish(JobStatus.completed, "done")
    assert leases.held()[0].owner == successor.owner


def test_its_own_end_of_the_job_is_not_taken_for_a_loss(store: JobStore):
    with lease_of(store, look_seconds=0.01) as lease:
        lease.finish(JobStatus.completed, "done")
        time.sleep(0.8)
        assert lease.stop_reason is None


def test_sigterm_asks_to_stop_and_a_cancel_goes_before_it(store: JobStore):
    with lease_of(store, look_seconds=0.05) as lease:
        os.kill(os.getpid(), signal.SIGTERM)
        assert lease.stop_reason == "stopped"
        store.request_cancel("one")
        time.sleep(0.3)
        assert lease.stop_reason == "cancelled"
        os.kill(os.getpid(), signal.SIGTERM)
        assert lease.stop_reason == "cancelled"

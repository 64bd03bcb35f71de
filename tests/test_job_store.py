"""The job store: what it keeps, what it refuses, who may write."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apis.errors import Conflict, JobNotFound, PostgradError, QueueFull, StackError
from apis.post_training.models import JobError, JobProgress, JobStatus, LoraFinetuningConfig, TrainingConfig
from post_training.jobs.database import Database, SchemaRow
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings
from post_training.jobs.states import EDGES, IllegalTransition, LeaseLost, check_transition
from post_training.jobs.store import JobStore

PROVIDER = "torchtune"


def make_spec(job_uuid: str, provider_id: str = PROVIDER) -> JobSpec:
    return JobSpec(
        job_uuid=job_uuid,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        provider_id=provider_id,
        model=ModelRef(identifier="base", base_identifier="base", base_dir="models/base"),
        training_config=TrainingConfig(),
        algorithm_config=LoraFinetuningConfig(),
        dataset=DatasetRef(dataset_id="data", source={"type": "rows", "rows": []}, policy={}),
        worker=WorkerSettings(model_module="providers.torchtune.model"),
    )


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.create_tables()
    return JobStore(database)


def submit(store: JobStore, job_uuid: str, body: str = "a", max_queued: int = 100) -> bool:
    return store.submit(make_spec(job_uuid), body, max_queued=max_queued)


def test_a_submitted_job_is_there_for_another_process_with_its_transition(store: JobStore) -> None:
    assert submit(store, "one")

    again = JobStore(Database(store.database.url))
    assert again.get("one").status == JobStatus.scheduled
    assert JobSpec.model_validate(again.get("one").spec) == make_spec("one")
    assert [(t.old, t.new) for t in again.transitions("one")] == [(None, "scheduled")]


def test_the_same_body_again_is_one_job_and_another_body_is_refused(store: JobStore) -> None:
    assert submit(store, "one", "a")
    assert not submit(store, "one", "a")
    with pytest.raises(Conflict, match="another request"):
        submit(store, "one", "b")
    assert [job.job_uuid for job in store.all()] == ["one"]


def test_fifty_parallel_submits_of_one_id_with_different_bodies_have_one_winner(store: JobStore) -> None:
    outcomes: list[str] = []
    lock = threading.Lock()

    def race(number: int) -> None:
        try:
            outcome = "won" if submit(store, "one", str(number)) else "replayed"
        except Conflict:
            outcome = "refused"
        with lock:
            outcomes.append(outcome)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 49 + ["won"]
    assert len(store.all()) == 1


def test_a_full_queue_refuses_with_its_limit(store: JobStore) -> None:
    submit(store, "one", max_queued=1)
    with pytest.raises(QueueFull, match="limit is 1"):
        submit(store, "two", max_queued=1)


def test_jobs_are_claimed_oldest_first_and_only_by_their_provider(store: JobStore) -> None:
    store.submit(make_spec("theirs", "other"), "x", max_queued=10)
    for name in ("first", "second"):
        submit(store, name)

    assert [store.queue_position(store.get(name)) for name in ("first", "second")] == [0, 1]
    claimed = [store.claim(PROVIDER), store.claim(PROVIDER), store.claim(PROVIDER)]
    assert [job.job_uuid if job else None for job in claimed] == ["first", "second", None]
    assert store.get("first").attempt == 1
    assert store.queue_position(store.get("first")) is None


def test_two_schedulers_never_claim_the_same_job(store: JobStore) -> None:
    for number in range(20):
        submit(store, f"job-{number}")
    claimed: list[str] = []

    def drain() -> None:
        other = JobStore(Database(store.database.url))
        while (job := other.claim(PROVIDER)) is not None:
            claimed.append(job.job_uuid)

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(f"job-{number}" for number in range(20))


def test_a_worker_that_lost_its_job_can_write_nothing(store: JobStore) -> None:
    submit(store, "one")
    first = store.claim(PROVIDER)
    assert first is not None
    assert first.owner is not None
    assert store.end("one", first.owner, JobStatus.scheduled, "server stopped", None)
    second = store.claim(PROVIDER)
    assert second is not None
    assert second.attempt == 2

    writes = [
        lambda: store.heartbeat("one", first.owner or ""),
        lambda: store.update("one", first.owner or "", progress=JobProgress(step=99)),
        lambda: store.finish("one", first.owner or "", JobStatus.completed, "done"),
    ]
    for write in writes:
        with pytest.raises(LeaseLost):
            write()
    assert not store.end("one", first.owner, JobStatus.failed, "late", None)
    assert store.get("one").status == JobStatus.in_progress
    assert store.get("one").progress is None


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked(store: JobStore) -> None:
    submit(store, "waiting")
    store.request_cancel("waiting")
    assert store.get("waiting").status == JobStatus.cancelled

    submit(store, "running")
    job = store.claim(PROVIDER)
    assert job is not None
    assert job.owner is not None
    assert store.heartbeat("running", job.owner) is False
    store.request_cancel("running")
    assert store.get("running").status == JobStatus.in_progress
    assert store.heartbeat("running", job.owner) is True


def test_cancelling_a_finished_job_changes_nothing_and_an_unknown_one_is_an_error(store: JobStore) -> None:
    submit(store, "one")
    job = store.claim(PROVIDER)
    assert job is not None
    assert job.owner is not None
    store.finish("one", job.owner, JobStatus.failed, "broke", error=JobError(code="disk_full", message="full"))
    before = store.transitions("one")
    store.request_cancel("one")
    assert [t.id for t in store.transitions("one")] == [t.id for t in before]
    assert store.get("one").error == {"code": "disk_full", "message": "full", "param": None}
    with pytest.raises(JobNotFound, match="no job 'two'"):
        store.request_cancel("two")


def test_only_a_silent_worker_is_stale(tmp_path: Path) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    database = Database(f"sqlite:///{tmp_path / 'store.db'}")
    database.create_tables()
    times = [at]
    store = JobStore(database, clock=lambda: times[0])
    submit(store, "one")
    job = store.claim(PROVIDER)
    assert job is not None
    assert job.owner is not None
    times[0] = at + timedelta(seconds=14)
    assert not store.stale(PROVIDER, 15)
    store.heartbeat("one", job.owner)
    times[0] = at + timedelta(seconds=28)
    assert not store.stale(PROVIDER, 15)
    times[0] = at + timedelta(seconds=30)
    assert [job.job_uuid for job in store.stale(PROVIDER, 15)] == ["one"]


def test_events_come_in_order_and_from_where_the_reader_was(store: JobStore) -> None:
    submit(store, "one")
    job = store.claim(PROVIDER)
    assert job is not None
    assert job.owner is not None
    for number in range(5):
        store.update("one", job.owner, message=f"step {number}", data={"step": number})
    events = store.events("one", 0)
    assert [event.message for event in events][-5:] == [f"step {number}" for number in range(5)]
    assert [event.id for event in store.events("one", events[2].id)] == [event.id for event in events[3:]]


@given(moves=st.lists(st.sampled_from(list(JobStatus)), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_job_moves_only_along_the_edges_and_its_times_only_grow(
    tmp_path_factory: pytest.TempPathFactory, moves: list[JobStatus]
) -> None:
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('store') / 'store.db'}")
    database.create_tables()
    store = JobStore(database)
    submit(store, "one")
    for new in moves:
        old = JobStatus(store.get("one").status)
        try:
            if new is JobStatus.in_progress:
                store.claim(PROVIDER)
            elif new is JobStatus.cancelled and old is JobStatus.scheduled:
                store.request_cancel("one")
            else:
                store.end("one", store.get("one").owner, new, "moved", None)
        except PostgradError:
            pass
        assert store.get("one").status == old or JobStatus(store.get("one").status) in EDGES[old]
    transitions = store.transitions("one")
    assert [t.at for t in transitions] == sorted(t.at for t in transitions)
    assert [t.old for t in transitions[1:]] == [t.new for t in transitions[:-1]]
    job = store.get("one")
    assert (job.completed_at is not None) == JobStatus(job.status).terminal
    database.close()


def test_terminal_states_have_no_way_out() -> None:
    for status in JobStatus:
        for new in JobStatus:
            if status.terminal:
                with pytest.raises(IllegalTransition):
                    check_transition(status, new)


def test_a_store_of_a_newer_layout_is_refused(store: JobStore) -> None:
    with store.database.session() as session:
        session.query(SchemaRow).delete()
        session.add(SchemaRow(version=99))
    with pytest.raises(StackError, match="layout 99"):
        Database(store.database.url).create_tables()

"""The job store as a client meets it: what it keeps, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from apis.errors import Conflict, JobNotFound, QueueFull
from apis.post_training.models import JobError, JobStatus, LoraFinetuningConfig, TrainingConfig
from post_training.jobs.database import Database
from post_training.jobs.devices import Slot
from post_training.jobs.leases import Claim, Leases
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings
from post_training.jobs.store import JobStore
from post_training.jobs.tables import CheckpointRow
from post_training.jobs.waiting import describe_wait

PROVIDER = "torchtune"
CPU = Slot("cpu:0", "cpu", "cpu")
SECOND_CPU = Slot("cpu:1", "cpu", "cpu")
GPU = Slot("cuda:0", "cuda", "cuda:0")


def make_spec(job_uuid: str, provider_id: str = PROVIDER, model: str = "base", **training: Any) -> JobSpec:
    return JobSpec(
        job_uuid=job_uuid,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        provider_id=provider_id,
        model=ModelRef(identifier=model, base_identifier="base", base_dir="models/base"),
        training_config=TrainingConfig.model_validate(training),
        algorithm_config=LoraFinetuningConfig(),
        dataset=DatasetRef(dataset_id="data", source={"type": "rows", "rows": []}, policy={}),
        worker=WorkerSettings(model_module="providers.torchtune.model"),
    )


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


def submit(store: JobStore, job_uuid: str, body: str = "a", max_queued: int = 100, **training: Any) -> bool:
    return store.submit(make_spec(job_uuid, **training), body, max_queued=max_queued)


def claim(leases: Leases, *slots: Slot) -> Claim:
    claimed = leases.claim("here", slots or (CPU,), {PROVIDER})
    assert claimed is not None
    return claimed


def in_parallel(count: int, work: Callable[[int], str]) -> list[str]:
    """What `work` returned in each of `count` threads that run at once, sorted."""
    outcomes: list[str] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        together.wait()
        outcomes.append(work(number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes)


def test_a_submitted_job_is_there_for_another_process_with_its_transition(store: JobStore):
    assert submit(store, "one")

    again = JobStore(Database(store.database.url))
    assert again.get("one").status == JobStatus.scheduled
    assert JobSpec.model_validate(again.get("one").spec) == make_spec("one")
    assert [(t.old, t.new) for t in again.transitions("one")] == [(None, "scheduled")]
    again.database.close()


def test_the_same_body_again_is_one_job_and_another_body_is_refused(store: JobStore):
    assert submit(store, "one", "a")
    assert not submit(store, "one", "a")
    with pytest.raises(Conflict, match="another request"):
        submit(store, "one", "b")
    assert [job.job_uuid for job in store.summaries()] == ["one"]


def test_fifty_parallel_submits_of_one_id_with_different_bodies_have_one_winner(store: JobStore):
    def race(number: int) -> str:
        try:
            return "won" if submit(store, "one", str(number)) else "replayed"
        except Conflict:
            return "refused"

    assert in_parallel(50, race) == ["refused"] * 49 + ["won"]
    assert len(store.summaries()) == 1


def test_one_submit_replayed_fifty_times_in_parallel_is_one_job(store: JobStore):
    outcomes = in_parallel(50, lambda _: "new" if submit(store, "one") else "replayed")
    assert outcomes == ["new"] + ["replayed"] * 49
    assert [(t.old, t.new) for t in store.transitions("one")] == [(None, "scheduled")]


def test_a_full_queue_refuses_with_its_limit_however_many_ask_at_once(store: JobStore):
    def race(number: int) -> str:
        try:
            submit(store, f"job-{number}", max_queued=3)
        except QueueFull as error:
            return "full: " + error.message
        return "accepted"

    full = "full: 3 jobs wait already and the limit is 3; submit again later"
    assert in_parallel(12, race) == ["accepted"] * 3 + [full] * 9
    assert not submit(store, store.summaries()[0].job_uuid, max_queued=3), "a replay needs no room"


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_is_asked(store: JobStore, leases: Leases):
    submit(store, "waiting")
    store.request_cancel("waiting")
    assert store.get("waiting").status == JobStatus.cancelled

    submit(store, "running")
    running = claim(leases)
    assert leases.beat("running", running.owner) is False
    store.request_cancel("running")
    assert store.get("running").status == JobStatus.in_progress
    assert leases.look("running", running.owner) is True
    assert leases.beat("running", running.owner) is True


def test_cancelling_a_finished_job_changes_nothing_and_an_unknown_one_is_an_error(store: JobStore, leases: Leases):
    submit(store, "one")
    held = claim(leases)
    leases.finish("one", held.owner, JobStatus.failed, "broke", error=JobError(code="disk_full", message="full"))
    before = store.transitions("one")
    store.request_cancel("one")
    assert [t.id for t in store.transitions("one")] == [t.id for t in before]
    assert store.get("one").error == {"code": "disk_full", "message": "full", "param": None}
    with pytest.raises(JobNotFound, match="no job 'two'"):
        store.request_cancel("two")


def test_events_come_in_order_and_from_where_the_reader_was(store: JobStore, leases: Leases):
    submit(store, "one")
    held = claim(leases)
    for number in range(1, 6):
        leases.update("one", held.owner, message=f"step {number}", step=number, data={"step": number})
    events = store.events("one", 0)
    assert [event.message for event in events][-5:] == [f"step {number}" for number in range(1, 6)]
    assert [event.kind for event in events] == ["status", "status", *["step"] * 5]
    assert [event.id for event in store.events("one", events[2].id)] == [event.id for event in events[3:]]
    assert [event.id for event in store.last_events("one", 2)] == [event.id for event in events[-2:]]


def test_a_message_that_quotes_a_nul_is_stored(store: JobStore, leases: Leases):
    submit(store, "one")
    leases.update("one", claim(leases).owner, message="row 3 holds 'a\0b'")
    assert store.last_events("one", 1)[0].message == "row 3 holds 'a\\0b'"


def test_a_step_that_a_later_attempt_makes_again_has_the_later_numbers(store: JobStore, leases: Leases):
    submit(store, "one")
    first = claim(leases)
    for step in (1, 2, 3):
        leases.update("one", first.owner, message="step", step=step, data={"step": step, "attempt": 1})
    leases.lost("one", first.owner, "lost", 3)
    second = claim(leases)
    for step in (2, 3, 4):
        leases.update("one", second.owner, message="step", step=step, data={"step": step, "attempt": 2})
    told = [row.data for row in store.metrics("one", 0, 10)]
    assert told == [{"step": 1, "attempt": 1}, *({"step": n, "attempt": 2} for n in (2, 3, 4))]
    assert [row.step for row in store.metrics("one", 1, 2)] == [2, 3]


def test_a_job_that_ended_is_deleted_whole_and_one_that_did_not_is_kept(store: JobStore, leases: Leases):
    submit(store, "one")
    for _ in range(2):
        with pytest.raises(Conflict, match="cancel it"):
            store.delete("one", lambda _: None)
        claim(leases) if store.get("one").status == JobStatus.scheduled else None
    held = leases.held()[0]
    leases.finish("one", held.owner, JobStatus.completed, "done")
    told: list[str] = []
    store.delete("one", lambda session: told.append("also"))
    assert told == ["also"]
    assert (store.transitions("one"), store.summaries()) == ([], [])
    with pytest.raises(JobNotFound):
        store.delete("one", lambda _: None)
    assert submit(store, "one", "another body"), "its id is free again"
    assert [event.message for event in store.events("one", 0)] == ["scheduled: submitted"]


def test_a_job_whose_checkpoint_another_one_needs_is_not_deleted(store: JobStore, leases: Leases):
    submit(store, "first")
    held = claim(leases)
    row = CheckpointRow(job_uuid="first", epoch=0, step=5, path="p", created_at=datetime.now(UTC), metrics=None)
    leases.record_checkpoint(held.owner, row)
    leases.announce("first", held.owner, 5, "base-sft-first-0", {}, lambda session, row: None)
    leases.finish("first", held.owner, JobStatus.completed, "done")
    store.submit(make_spec("second", model="base-sft-first-0"), "b", max_queued=9)
    with pytest.raises(Conflict, match="'second' goes on from"):
        store.delete("first", lambda _: None)
    store.request_cancel("second")
    store.delete("first", lambda _: None)


def test_a_waiting_job_says_its_place_and_what_it_waits_for(store: JobStore, leases: Leases):
    for name, device in (("a", "cuda"), ("b", "cpu"), ("c", None), ("d", "cpu")):
        submit(store, name, device=device)

    def told(name: str, *slots: Slot) -> tuple[int | None, str | None]:
        waiting = describe_wait(store, store.get(name), slots or (GPU, CPU), {PROVIDER})
        return waiting.position, waiting.reason

    assert told("a") == (0, "next in the queue: starts as soon as cuda:0 is free")
    assert told("b") == (0, "next in the queue: starts as soon as cpu:0 is free")
    assert told("c") == (2, "2 jobs are ahead in the queue")
    assert told("d") == (2, "2 jobs are ahead in the queue")
    assert told("c", CPU) == (1, "1 job is ahead in the queue"), "the one that needs a GPU takes nobody's place"
    assert told("a", CPU) == (0, "it needs a cuda device and this stack has cpu:0")
    assert "no provider" in (describe_wait(store, store.get("a"), (GPU,), set()).reason or "")
    held = claim(leases, GPU)
    assert told("a") == (None, None)
    leases.lost("a", held.owner, "its worker was ended by SIGKILL", 3)
    assert "attempt 1 ended without a result (its worker was ended by SIGKILL)" in (told("a")[1] or "")

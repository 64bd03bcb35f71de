"""Leases: who may write, who comes next, and when a job is given up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from sqlalchemy import update

from apis.post_training.models import JobError, JobProgress, JobStatus
from post_training.jobs.database import Database
from post_training.jobs.leases import Leases
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.jobs.tables import CheckpointRow, JobRow
from tests.test_job_store import CPU, GPU, PROVIDER, SECOND_CPU, claim, in_parallel, make_spec, submit


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database)


def checkpoint(job_uuid: str, step: int) -> CheckpointRow:
    return CheckpointRow(
        job_uuid=job_uuid, epoch=0, step=step, path=f"{job_uuid}/{step}", created_at=datetime.now(UTC), metrics=None
    )


def test_jobs_are_claimed_oldest_first_and_only_those_of_served_providers(store: JobStore, leases: Leases):
    store.submit(make_spec("theirs", "other"), "x", max_queued=10)
    for name in ("first", "second"):
        submit(store, name)
    claimed = [leases.claim("here", (CPU, SECOND_CPU), {PROVIDER}) for _ in range(3)]
    assert [job and job.job_uuid for job in claimed] == ["first", "second", None]
    assert [job and job.slot for job in claimed] == [CPU, SECOND_CPU, None]
    assert store.get("first").attempt == 1
    assert store.get("theirs").status == JobStatus.scheduled


def test_a_job_that_cannot_run_now_keeps_none_behind_it_waiting(store: JobStore, leases: Leases):
    for name, device in (("gpu-1", "cuda"), ("gpu-2", "cuda"), ("cpu-1", "cpu"), ("any", None)):
        submit(store, name, device=device)
    slots = (GPU, CPU)
    claimed = [leases.claim("here", slots, {PROVIDER}) for _ in range(3)]
    assert [job and (job.job_uuid, job.slot.name) for job in claimed] == [
        ("gpu-1", "cuda:0"),
        ("cpu-1", "cpu:0"),
        None,
    ]
    assert claimed[1] is not None
    leases.finish("cpu-1", claimed[1].owner, JobStatus.completed, "done")
    assert claim(leases, *slots).job_uuid == "any"


def test_a_stored_job_that_cannot_be_read_fails_and_holds_up_none_behind_it(
    store: JobStore, leases: Leases, database: Database
):
    for name in ("newer", "broken", "fine"):
        submit(store, name)
    with database.session() as session:
        for name, spec in (("newer", {**make_spec("newer").model_dump(mode="json"), "mesh": [2, 2]}), ("broken", {})):
            session.execute(update(JobRow).where(JobRow.job_uuid == name).values(spec=spec))
    assert claim(leases).job_uuid == "fine"
    for name in ("newer", "broken"):
        job = store.get(name)
        assert job.status == JobStatus.failed
        assert job.error is not None
        assert job.error["code"] == "job_failed"
        assert "newer" in job.error["message"]


def test_a_job_that_ran_on_one_kind_of_device_goes_on_on_that_kind(store: JobStore, leases: Leases):
    submit(store, "one")
    held = claim(leases, CPU)
    leases.update("one", held.owner, resources={"device": "cpu"})
    leases.lost("one", held.owner, "lost", 3)
    assert leases.claim("here", (GPU,), {PROVIDER}) is None
    assert claim(leases, GPU, CPU).slot == CPU


def test_parallel_claims_of_several_schedulers_never_share_a_job_or_a_slot(store: JobStore, database: Database):
    slots = [*(CPU,), SECOND_CPU, GPU]
    for number in range(20):
        submit(store, f"job-{number}")

    def race(_: int) -> str:
        other = Database(database.url)
        found = Leases(other).claim("here", slots, {PROVIDER})
        other.close()
        return "none" if found is None else f"{found.job_uuid} {found.slot.name}"

    assert in_parallel(8, race) == sorted(["none"] * 5 + ["job-0 cpu:0", "job-1 cpu:1", "job-2 cuda:0"])


def test_a_job_that_did_not_come_to_run_is_not_tied_to_the_kind_of_device_it_was_claimed_for(
    store: JobStore, leases: Leases
):
    submit(store, "one")
    leases.give_back("one", claim(leases, GPU).owner, "the server stopped")
    assert claim(leases, CPU).slot == CPU


def test_slots_of_two_machines_are_their_own(store: JobStore, leases: Leases):
    for name in ("one", "two"):
        submit(store, name)
    assert leases.claim("here", (CPU,), {PROVIDER})
    assert leases.claim("here", (CPU,), {PROVIDER}) is None
    assert leases.claim("there", (CPU,), {PROVIDER})


def test_a_worker_that_lost_its_job_can_write_nothing(store: JobStore, leases: Leases):
    submit(store, "one")
    first = claim(leases)
    assert leases.give_back("one", first.owner, "the server stopped")
    second = claim(leases)
    owner = first.owner
    writes: list[Callable[[], object]] = [
        lambda: leases.beat("one", owner),
        lambda: leases.look("one", owner),
        lambda: leases.started("one", owner, 1, None),
        lambda: leases.update("one", owner, progress=JobProgress(step=99), message="late"),
        lambda: leases.record_checkpoint(owner, checkpoint("one", 1)),
        lambda: leases.announce("one", owner, 1, "id", {}, lambda session, row: None),
        lambda: leases.forget_checkpoints("one", owner, [1]),
        lambda: leases.finish("one", owner, JobStatus.completed, "done"),
    ]
    for write in writes:
        with pytest.raises(LeaseLost):
            write()
    assert not leases.lost("one", owner, "late", 1)
    assert not leases.cancelled("one", owner, "late")
    assert not leases.give_back("one", owner, "late")
    job = store.get("one")
    assert (job.status, job.attempt, job.progress, job.lost_attempts) == ("in_progress", 2, None, 0)
    assert not store.all_checkpoints("one")
    assert "late" not in [event.message for event in store.events("one", 0)]
    assert leases.held()[0].owner == second.owner


def test_lost_attempts_fail_a_job_with_the_last_reason_and_a_new_checkpoint_starts_the_count_again(
    store: JobStore, leases: Leases
):
    submit(store, "one")
    for reason, status in (("first", "scheduled"), ("second", "scheduled")):
        assert leases.lost("one", claim(leases).owner, reason, 3)
        assert store.get("one").status == status
    third = claim(leases)
    leases.record_checkpoint(third.owner, checkpoint("one", 10))
    for reason in ("third", "fourth"):
        leases.lost("one", third.owner, reason, 3)
        assert store.get("one").status == JobStatus.scheduled
        third = claim(leases)
    leases.lost("one", third.owner, "its worker was ended by SIGSEGV", 3)
    job = store.get("one")
    assert (job.status, job.attempt, job.lost_attempts) == ("failed", 5, 3)
    assert job.error is not None
    assert job.error["code"] == "worker_died"
    assert "its worker was ended by SIGSEGV; 3 attempts in a row" in job.error["message"]
    assert [t.reason for t in store.transitions("one") if t.new == "scheduled"][1:] == [
        "first",
        "second",
        "third",
        "fourth",
    ]


def test_a_job_that_is_given_up_says_where_its_unverified_work_is_and_a_cancelled_one_keeps_none(
    store: JobStore, leases: Leases
):
    for name in ("given-up", "cancelled"):
        submit(store, name)
        leases.record_checkpoint(claim(leases).owner, checkpoint(name, 7))
        leases.lost(name, leases.held()[0].owner, "lost", 1 if name == "given-up" else 3)
        if name == "cancelled":
            assert store.request_cancel(name) is True
    error = store.get("given-up").error
    assert error is not None
    assert "its checkpoint of step 7 is kept under given-up/7" in error["message"]
    assert (store.recorded_steps("given-up"), store.recorded_steps("cancelled")) == ({7}, frozenset())


def test_a_jobs_own_limit_goes_before_the_stacks(store: JobStore, leases: Leases):
    submit(store, "patient", max_attempts=5)
    for _ in range(4):
        leases.lost("patient", claim(leases).owner, "lost", 1)
        assert store.get("patient").status == JobStatus.scheduled
    leases.lost("patient", claim(leases).owner, "lost", 1)
    assert store.get("patient").status == JobStatus.failed


def test_a_stopped_server_is_no_fault_of_the_job(store: JobStore, leases: Leases):
    submit(store, "one")
    for _ in range(5):
        leases.give_back("one", claim(leases).owner, "the server stopped")
    assert (store.get("one").status, store.get("one").lost_attempts) == ("scheduled", 0)


@pytest.mark.parametrize("end", ["give_back", "lost", "last"])
def test_a_job_to_be_cancelled_does_not_go_back_to_the_queue(store: JobStore, leases: Leases, end: str):
    submit(store, "one")
    held = claim(leases)
    store.request_cancel("one")
    if end == "give_back":
        leases.give_back("one", held.owner, "the server stopped")
    else:
        leases.lost("one", held.owner, "its worker was lost", 1 if end == "last" else 3)
    job = store.get("one")
    assert (job.status, job.error) == ("cancelled", None)
    assert job.completed_at is not None


def test_a_checkpoint_is_listed_once_it_is_announced_and_an_announced_one_is_not_forgotten(
    store: JobStore, leases: Leases
):
    submit(store, "one")
    held = claim(leases)
    for step in (5, 10, 15):
        leases.record_checkpoint(held.owner, checkpoint("one", step))
    leases.record_checkpoint(held.owner, checkpoint("one", 5))  # a write whose answer was lost
    leases.announce("one", held.owner, 10, "base-sft-one-0", {"ok": True}, lambda session, row: None)
    assert [row.identifier for row in store.checkpoints("one")] == ["base-sft-one-0"]
    assert store.recorded_steps("one") == {5, 10, 15}
    leases.forget_checkpoints("one", held.owner, [5, 10])
    assert store.recorded_steps("one") == {10, 15}
    event = store.events("one", 0)[-1]
    assert (event.kind, event.data) == ("checkpoint", {"identifier": "base-sft-one-0", "epoch": 0, "step": 10})


def test_what_is_done_along_with_the_end_of_a_job_is_done_with_it_or_not_at_all(store: JobStore, leases: Leases):
    submit(store, "one")
    held = claim(leases)

    def fail(_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        leases.finish("one", held.owner, JobStatus.completed, "done", also=fail)
    assert store.get("one").status == JobStatus.in_progress
    error = JobError(code="data_invalid", message="row 3")
    leases.finish("one", held.owner, JobStatus.failed, "row 3", error=error)
    assert store.get("one").error == error.model_dump()
    assert leases.held() == []

"""The state machine, driven at random: whatever is asked in whatever order, and wherever the clock goes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from apis.errors import Conflict
from apis.post_training.models import JobStatus
from post_training.jobs.database import Database
from post_training.jobs.leases import Claim, Leases
from post_training.jobs.states import EDGES, IllegalTransition, LeaseLost, check_transition
from post_training.jobs.store import JobStore
from tests.test_job_store import CPU, GPU, SECOND_CPU, make_spec

SLOTS = (GPU, CPU, SECOND_CPU)
PICK = st.integers(min_value=0, max_value=1000)


class Jobs(RuleBasedStateMachine):
    """A few jobs in one store; ids are never used twice, so that every run may share the database."""

    database: ClassVar[Database]
    numbers: ClassVar[Any] = count()

    def __init__(self) -> None:
        super().__init__()
        self.time = datetime(2026, 6, 1, tzinfo=UTC)
        self.store = JobStore(self.database, clock=lambda: self.time)
        self.leases = Leases(self.database, clock=lambda: self.time)
        self.provider = f"provider-{next(self.numbers)}"
        self.host = self.provider
        self.names: list[str] = []
        self.claims: list[Claim] = []
        self.ended: dict[str, tuple[Any, ...]] = {}

    @rule(seconds=st.integers(min_value=-100_000, max_value=100_000))
    def the_clock_is_set(self, seconds: int) -> None:
        self.time += timedelta(seconds=seconds)

    @rule(device=st.sampled_from([None, "cpu", "cuda"]), attempts=st.integers(min_value=1, max_value=3))
    def submit(self, device: str | None, attempts: int) -> None:
        name = f"job-{next(self.numbers)}"
        spec = make_spec(name, self.provider, device=device, max_attempts=attempts)
        assert self.store.submit(spec, name, max_queued=1000)
        self.names.append(name)

    @rule(pick=PICK)
    def submit_again(self, pick: int) -> None:
        if self.names:
            name = self.names[pick % len(self.names)]
            assert not self.store.submit(make_spec(name, self.provider), name, max_queued=1)
            with pytest.raises(Conflict):
                self.store.submit(make_spec(name, self.provider), "other", max_queued=1)

    @rule()
    def claim(self) -> None:
        if (claim := self.leases.claim(self.host, SLOTS, {self.provider})) is not None:
            self.claims.append(claim)

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if self.names:
            self.store.request_cancel(self.names[pick % len(self.names)])

    @rule(
        pick=PICK, how=st.sampled_from(["completed", "failed", "cancelled", "scheduled", "lost", "give_back", "beat"])
    )
    def a_worker_or_its_watcher_acts(self, pick: int, how: str) -> None:
        """Whether it still holds the lease or not."""
        if not self.claims:
            return
        claim = self.claims[pick % len(self.claims)]
        held = claim.owner in {lease.owner for lease in self.leases.held()}
        try:
            if how == "beat":
                self.leases.beat(claim.job_uuid, claim.owner)
                done = True
            elif how == "lost":
                done = self.leases.lost(claim.job_uuid, claim.owner, "lost", 3)
            elif how == "give_back":
                done = self.leases.give_back(claim.job_uuid, claim.owner, "stopped")
            else:
                self.leases.finish(claim.job_uuid, claim.owner, JobStatus(how), "said so")
                done = True
        except LeaseLost:
            done = False
        assert done == held

    @invariant()
    def moves_follow_the_edges_and_times_only_grow(self) -> None:
        held = {lease.job_uuid for lease in self.leases.held()}
        for name in self.names:
            job, moves = self.store.get(name), self.store.transitions(name)
            assert [move.old for move in moves] == [None, *(move.new for move in moves[:-1])]
            assert all(JobStatus(m.new) in EDGES[JobStatus(m.old)] for m in moves if m.old is not None)
            assert job.status == moves[-1].new
            events = [event.at for event in self.store.events(name, 0)]
            times = [t for t in (job.scheduled_at, job.started_at, job.completed_at) if t is not None]
            for series in ([move.at for move in moves], events, times):
                assert series == sorted(series)
            assert (name in held) == (job.status == JobStatus.in_progress)
            assert (job.completed_at is not None) == JobStatus(job.status).terminal

    @invariant()
    def what_has_ended_never_changes(self) -> None:
        for name in self.names:
            job = self.store.get(name)
            seen = (job.status, job.completed_at, job.error, job.attempt, len(self.store.events(name, 0)))
            if JobStatus(job.status).terminal:
                assert self.ended.setdefault(name, seen) == seen

    @invariant()
    def a_slot_has_one_job(self) -> None:
        slots = [lease.slot for lease in self.leases.held() if lease.host == self.host]
        assert len(slots) == len(set(slots))


def test_only_allowed_moves_happen_whatever_is_asked_in_whatever_order(database: Database):
    Jobs.database = database
    examples = 40 if database.url.startswith("sqlite") else 15
    run_state_machine_as_test(
        Jobs,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


def test_terminal_states_have_no_way_out():
    for status in JobStatus:
        for new in JobStatus:
            if status.terminal:
                with pytest.raises(IllegalTransition):
                    check_transition(status, new)

"""Events of steps: what is read is what was told, in few bytes."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from apis.post_training.models import JobProgress
from post_training.jobs.database import Database
from post_training.jobs.leases import Leases
from post_training.jobs.moves import add_step
from post_training.jobs.step_events import pack_step, step_line, unpack_step
from post_training.jobs.store import JobStore
from post_training.training.trainer import StepResult
from post_training.worker.progress import memory_numbers, step_numbers
from tests.test_job_store import claim, leases, store, submit

__all__ = ["leases", "store"]

CPU_DEVICE = torch.device("cpu")
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**31)


def numbers(step: int = 7, **changed: Any) -> dict[str, Any]:
    """What a worker tells of a step."""
    fields = {"loss": 1.2345678901234567, "grad_norm": 0.1, "lr": 2.9e-4, "tokens": 612, "supervised_tokens": 99}
    result = StepResult(step=step, **{**fields, "seconds": 0.37, "skipped": False, "weight": 99.0, **changed})
    return step_numbers(result, epoch=2) | memory_numbers(CPU_DEVICE)


@st.composite
def told(draw: st.DrawFn) -> dict[str, Any]:
    tokens, seconds = draw(COUNT), draw(st.floats(1e-9, 1e6))
    data = {"step": draw(st.integers(1, 2**31)), "epoch": draw(COUNT), "loss": draw(st.none() | NUMBER)}
    data |= {"lr": draw(NUMBER), "grad_norm": draw(st.none() | NUMBER), "tokens": tokens, "seconds": seconds}
    data |= {"supervised_tokens": draw(COUNT), "tokens_per_second": tokens / seconds, "skipped": draw(st.booleans())}
    data["memory_bytes"] = draw(st.integers(0, 2**63))
    return data | draw(st.sampled_from([{}, {"device_memory_bytes": draw(st.integers(0, 2**63))}]))


@given(told(), st.none() | st.integers(1, 2**31))
def test_a_step_is_unpacked_as_it_was_told(data: dict[str, Any], total: int | None):
    message = step_line(data, total)
    packed = pack_step(message, data, total)
    assert packed is not None
    assert len(packed) < 70
    again = unpack_step(data["step"], packed)
    assert again == (message, data)
    assert {name: type(value) for name, value in again[1].items()} == {name: type(data[name]) for name in data}


@given(st.dictionaries(st.sampled_from([*numbers(), "beta"]), st.none() | st.booleans() | COUNT | NUMBER | st.text()))
def test_what_a_trainer_does_not_tell_is_never_packed_into_something_else(changed: dict[str, Any]):
    data = numbers() | changed
    packed = pack_step("step 7 and more", data, None)
    assert packed is None, "the message is another one"
    packed = pack_step(step_line(numbers(), 9), data, 9)
    if packed is not None:
        assert unpack_step(7, packed) == (step_line(numbers(), 9), data)


def test_the_line_of_a_step_says_what_it_did():
    assert step_line(numbers(), 90) == "step 7/90 loss 1.2346 lr 0.00029 grad norm 0.1 1654 tokens/s"
    assert step_line(numbers(), None).startswith("step 7 loss")
    bad = numbers(loss=math.nan, grad_norm=math.inf, skipped=True)
    assert step_line(bad, 90) == "step 7/90 skipped: loss or gradient not finite"
    assert step_line(numbers(supervised_tokens=0, skipped=True), 90) == "step 7/90 skipped: no supervised token"


def tell(leases: Leases, owner: str, step: int, total: int, **changed: Any) -> tuple[str, dict[str, Any]]:
    data = numbers(step, **changed)
    message = step_line(data, total)
    progress = JobProgress(step=step, total_steps=total)
    leases.update("one", owner, progress=progress, message=message, step=step, data=data)
    return message, data


def test_stored_steps_are_read_as_they_were_told_packed_or_not(store: JobStore, leases: Leases):
    submit(store, "one")
    owner = claim(leases).owner
    expected = [tell(leases, owner, 1, 3), tell(leases, owner, 2, 3, loss=math.nan, skipped=True)]
    other = {"step": 3, "reward": 0.5}
    leases.update("one", owner, message="a line of its own", step=3, data=other)
    expected.append(("a line of its own", other))
    rows = store.last_events("one", 3)
    assert [(row.message, row.data) for row in rows] == expected
    assert [(row.kind, row.step, row.packed is None) for row in rows] == [
        ("step", 1, False),
        ("step", 2, False),
        ("step", 3, True),
    ]
    assert [row.data for row in store.metrics("one", 0, 9)] == [data for _, data in expected]


def size_of_events(database: Database) -> int:
    with database.reading() as session:
        if database.engine.dialect.name == "sqlite":
            pages = session.scalar(text("PRAGMA page_count")) or 0
            return pages * (session.scalar(text("PRAGMA page_size")) or 0)
        return session.scalar(text("SELECT pg_total_relation_size('events')")) or 0


# Half of what they took with their numbers by name, and the id of the job in the row and in two indexes.
_MOST_BYTES = {"sqlite": 160, "postgresql": 260}


def test_a_step_takes_few_bytes_with_its_indexes(database: Database, store: JobStore, leases: Leases):
    job_uuid = "3f2a8a52-5be2-4b3e-a16c-6b8a8a1c0f0e"
    submit(store, job_uuid)
    job = store.get(job_uuid)
    generator, count = random.Random(0), 3000
    before = size_of_events(database)
    with database.session() as session:
        for step in range(1, count + 1):
            made = {"loss": generator.random(), "grad_norm": generator.random(), "lr": generator.random() * 1e-4}
            data = numbers(step, **made, tokens=generator.randrange(4000), seconds=generator.random())
            add_step(session, job, job.moved_at, step_line(data, count), step, data, count)
    per_step = (size_of_events(database) - before) / count
    print(f"{database.engine.dialect.name}: {per_step:.0f} bytes a step")
    assert per_step < _MOST_BYTES[database.engine.dialect.name]

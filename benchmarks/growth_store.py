"""How cost grows with what the store holds: jobs, and events of one job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from apis.post_training.models import JobStatus
from benchmarks.report import table
from benchmarks.stack import JOBS, latencies, running, timed
from post_training.jobs.database import Base, Database
from post_training.jobs.leases import Leases
from post_training.jobs.step_events import pack_step, step_line
from post_training.jobs.store import JobStore
from post_training.jobs.tables import EventRow
from tests.many_jobs import FIRST, fill
from tests.test_job_store import CPU, PROVIDER, make_spec

WAITING = 50
BULK = 10_000


def by_jobs(folder: Path, sizes: list[int], calls: int) -> str:
    """A page, a status and a claim; the first two over HTTP from a stack, the last in the store itself."""
    rows = []
    for size in sizes:
        rows += [[f"{size:,}", *cells] for cells in _http_calls(folder / f"jobs-{size}", size, calls)]
        rows.append([f"{size:,}", "claim", *latencies(_claims(folder / f"claims-{size}", size, calls))])
    return table(["jobs in the store", "call, ms", "median", "p99", "largest", "calls"], rows)


def _filled(folder: Path, size: int, waiting: int) -> Database:
    """A new store with so many jobs."""
    home = folder / "home"
    home.mkdir(parents=True)
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    database.migrate()
    fill(database, size, waiting=waiting)
    return database


def _http_calls(folder: Path, size: int, calls: int) -> list[list[str]]:
    # None waits, so that the stack runs nothing.
    _filled(folder, size, waiting=0).close()
    with running(folder / "home", 1, folder / "log") as stack, httpx.Client(base_url=stack.url, timeout=60) as http:

        def some(number: int) -> str:
            return f"job-{number * 7919 % size}"

        asked: dict[str, Callable[[int], httpx.Response]] = {
            "a page of 100, the newest": lambda _: http.get(JOBS, params={"limit": 100, "order": "desc"}),
            "a page of 100, anywhere": lambda number: http.get(JOBS, params={"limit": 100, "after": some(number)}),
            "a page of 100 failed ones": lambda _: http.get(JOBS, params={"limit": 100, "status": "failed"}),
            "status": lambda number: http.get(f"{JOBS}/{some(number)}/status"),
        }
        return [[name, *latencies(timed(calls, call))] for name, call in asked.items()]


def _claims(folder: Path, size: int, calls: int) -> list[float]:
    database = _filled(folder, size, waiting=min(WAITING, size))
    leases = Leases(database)
    durations = []
    for _ in range(calls):
        began = time.perf_counter()
        claim = leases.claim("here", (CPU,), {PROVIDER})
        durations.append(time.perf_counter() - began)
        assert claim is not None
        leases.give_back(claim.job_uuid, claim.owner, "measured")
    database.close()
    return durations


def by_events(folder: Path, sizes: list[int], calls: int) -> str:
    """Of one job: reading its numbers and the tail of its log over HTTP, and telling one more."""
    rows = []
    for size in sizes:
        here = folder / f"events-{size}"
        database = _with_steps(here, size)
        told = latencies(_tells(database, size, calls))
        database.close()
        per_event = (here / "home" / "postgrad.db").stat().st_size / size
        rows += [
            [f"{size:,}", f"{per_event:.0f}", *cells] for cells in (["one step more", *told], *_reads(here, calls))
        ]
    header = ["steps of a job", "bytes of the store a step", "call, ms", "median", "p99", "largest", "calls"]
    return table(header, rows)


def _with_steps(folder: Path, size: int) -> Database:
    """A store with one running job that has told so many steps."""
    home = folder / "home"
    home.mkdir(parents=True)
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    database.migrate()
    JobStore(database).submit(make_spec("long"), "0" * 64, max_queued=10)
    events = Base.metadata.tables[EventRow.__tablename__]
    for begin in range(1, size + 1, BULK):
        rows = [_step_row(step, size) for step in range(begin, min(begin + BULK, size + 1))]
        with database.session() as session:
            session.execute(events.insert(), rows)
    return database


def _numbers(step: int) -> dict[str, float | int | bool]:
    return {
        "step": step,
        "epoch": 0,
        "loss": 1.0 + 1.0 / step,
        "lr": 3e-4,
        "grad_norm": 0.5,
        "tokens": 700,
        "supervised_tokens": 500,
        "seconds": 0.7,
        "tokens_per_second": 700 / 0.7,
        "skipped": False,
        "memory_bytes": 2**31,
    }


def _step_row(step: int, total: int) -> dict[str, object]:
    numbers = _numbers(step)
    packed = pack_step(step_line(numbers, total), numbers, total)
    return {"job_sequence": 1, "at": FIRST, "kind": "step", "step": step, "packed": packed}


def _tells(database: Database, size: int, calls: int) -> list[float]:
    leases = Leases(database)
    claim = leases.claim("here", (CPU,), {PROVIDER})
    assert claim is not None
    durations = []
    for number in range(calls):
        numbers = _numbers(size + 1 + number)
        line = step_line(numbers, None)
        began = time.perf_counter()
        leases.update(claim.job_uuid, claim.owner, message=line, step=size + 1 + number, data=numbers)
        durations.append(time.perf_counter() - began)
    leases.finish(claim.job_uuid, claim.owner, JobStatus.completed, "measured")
    return durations


def _reads(folder: Path, calls: int) -> list[list[str]]:
    with running(folder / "home", 1, folder / "log") as stack, httpx.Client(base_url=stack.url, timeout=60) as http:
        asked: dict[str, Callable[[int], httpx.Response]] = {
            "1,000 metrics": lambda _: http.get(f"{JOBS}/long/metrics"),
            "the last 20 lines": lambda _: http.get(f"{JOBS}/long/logs", params={"tail": 20}),
            "status": lambda _: http.get(f"{JOBS}/long/status"),
        }
        return [[name, *latencies(timed(calls, call))] for name, call in asked.items()]

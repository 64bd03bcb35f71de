"""The service around the training: how long users wait for it, and what it costs.

    python -m benchmarks.service
    python -m benchmarks.service --only start,latencies --calls 50

A stack as users run it, measured from outside over HTTP, on a state folder of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from apis.post_training.models import JobEventKind
from benchmarks.cases import OURS, Order, Settings
from benchmarks.checkpoint_cost import Cost, epoch_costs, inside_costs, undisturbed
from benchmarks.generation import compare_generation
from benchmarks.preflights import ROWS, preflight_seconds
from benchmarks.processes import measure, prepare
from benchmarks.report import publish, table
from benchmarks.stack import (
    JOBS,
    SUBMIT,
    Stack,
    descendants,
    first_event,
    latencies,
    make_home,
    offline,
    request,
    resident,
    running,
    timed,
)
from benchmarks.workspace import real_model_dir
from post_training.jobs.devices import usable_cores

MIB = 2**20


@dataclass(frozen=True)
class Bench:
    """What all parts need."""

    home: Path
    model_dir: Path
    threads: int
    calls: int
    repeats: int
    tokens: int
    dtype: str

    @property
    def log(self) -> Path:
        return self.home.parent / "server.log"


def start(bench: Bench) -> str:
    """A new state folder, then one that is there; the server's memory once it answers."""
    seconds, memory = [], []
    for _ in range(bench.repeats):
        with running(bench.home, 1, bench.log) as stack:
            seconds.append(stack.started)
            memory.append(resident(stack.pid))
    return table(
        ["server", "median", "smallest", "largest"],
        [
            ["start to first answer, s", *_spread(seconds, "{:.2f}")],
            ["memory, MiB", *_spread([value / MIB for value in memory], "{:.0f}")],
        ],
    )


def _spread(values: Sequence[float], form: str) -> list[str]:
    return [form.format(value) for value in (statistics.median(values), min(values), max(values))]


def first_steps(bench: Bench) -> str:
    """Seconds from sending a job to the event of its first step, in a new worker process and in a waiting one."""
    rows = []
    for name, warm_seconds in (("a new process for each job", 0), ("a worker that waits", 300)):
        with running(bench.home, bench.threads, bench.log, warm_seconds=warm_seconds) as stack:
            stack.register(64)
            _first_step(stack, f"first-{warm_seconds}", bench.dtype)  # reads files that no later one has to
            found = [
                _first_step(stack, f"next-{warm_seconds}-{number}", bench.dtype) for number in range(bench.repeats)
            ]
            begun, ended = zip(*found, strict=True)
            workers = [resident(pid) / MIB for pid, command in descendants(stack.pid) if "worker.main" in command]
            memory = f"{max(workers, default=0):.0f}"
            rows.append([name, *_spread(begun, "{:.2f}"), f"{statistics.median(ended):.2f}", memory])
            _forget(stack)
    rows += _compiling(bench)
    header = ["submit to first step, s", "median", "smallest", "largest", "to its end", "worker at rest, MiB"]
    return table(header, rows)


def _first_step(stack: Stack, job_uuid: str, dtype: str) -> tuple[float, float]:
    """From before the request to the first step's beginning and to its end. The job then ends by itself."""
    sent = datetime.now(UTC)
    stack.client.post_training.supervised_fine_tune(**request(job_uuid, max_steps_per_epoch=2, dtype=dtype))
    event = first_event(stack, job_uuid, lambda each: each.kind is JobEventKind.step)
    stack.client.post_training.wait(job_uuid, poll_seconds=0.2, timeout=600, raise_on_failure=True)
    ended = (event.at - sent).total_seconds()
    assert event.data is not None
    return ended - event.data["seconds"], ended


def _forget(stack: Stack) -> None:
    for job in stack.client.post_training.jobs():
        stack.client.post_training.delete(job.job_uuid)
    stack.client.datasets.unregister("rows")


def _compiling(bench: Bench) -> list[list[str]]:
    """What a first compile adds: a training process with an empty compile cache, and one with that of the first."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, bench.model_dir, ["--rows", "80", "--longest", "2048"])
        plan = [[0, 1, 2, 3], [4, 5, 6, 7]]
        rows = []
        for name in ("process to first step, compiled anew", "process to first step, compiled before"):
            order = Order(folder, folder / "out", OURS[0], Settings(), bench.dtype, bench.threads, plan)
            result = measure(order, TORCHINDUCTOR_CACHE_DIR=str(folder / "compiled"))
            rows.append([name, "", "", "", f"{result.setup + result.ends[0]:.1f}", ""])
        return rows


def preflights(bench: Bench) -> str:
    with running(bench.home, bench.threads, bench.log) as stack:
        first, again, tokens = preflight_seconds(stack, bench.repeats)
    rows = [["rows never seen", *_spread(first, "{:.2f}")], ["the same rows once more", *_spread(again, "{:.2f}")]]
    header = [f"preflight of {ROWS:,} rows of {tokens:.0f} tokens, s", "median", "smallest", "largest"]
    return table(header, rows)


def call_latencies(bench: Bench) -> str:
    """While a job trains on every core."""
    with running(bench.home, bench.threads, bench.log) as stack, httpx.Client(base_url=stack.url, timeout=60) as http:
        stack.register(400)
        busy = request("busy", epochs=100, dtype=bench.dtype)
        stack.client.post_training.supervised_fine_tune(**busy)
        first_event(stack, "busy", lambda each: each.kind is JobEventKind.step)
        calls: dict[str, Callable[[int], httpx.Response]] = {
            "submit": lambda number: http.post(SUBMIT, json=request(f"waiting-{number}")),
            "status": lambda _: http.get(f"{JOBS}/busy/status"),
            "a page of 20 jobs": lambda _: http.get(JOBS, params={"limit": 20}),
            "health": lambda _: http.get("/v1/health"),
        }
        rows = [[name, *latencies(timed(bench.calls, call, pause=0.01))] for name, call in calls.items()]
        if stack.client.post_training.status("busy").status.terminal:
            raise RuntimeError("the job ended before the calls did: train on more epochs, or make fewer calls")
        for job in stack.client.post_training.jobs():
            stack.client.post_training.cancel(job.job_uuid)
        stack.client.post_training.wait("busy", poll_seconds=0.2, timeout=600)
        _forget(stack)
    header = ["call, ms", "median", "p99", "largest", "calls"]
    return f"While a job trains on {bench.threads} threads:\n\n" + table(header, rows)


def checkpoints(bench: Bench) -> str:
    """Three epochs, the first two of whose checkpoints training goes on after, and checkpoints inside the epochs."""
    with running(bench.home, bench.threads, bench.log) as stack:
        stack.register(120)
        job = request("saving", epochs=3, save_every_n_steps=20, dtype=bench.dtype)
        stack.client.post_training.supervised_fine_tune(**job)
        stack.client.post_training.wait("saving", poll_seconds=1, timeout=3600, raise_on_failure=True)
        events = list(stack.client.post_training.events("saving"))
        _forget(stack)
    usual = undisturbed(events)
    kinds = {"after an epoch, verified": epoch_costs(events), "inside an epoch": inside_costs(events)}
    rows = [_cost_row(name, costs, usual) for name, costs in kinds.items() if costs]
    header = ["checkpoint", "stands still, s", "lost, s", "lost, steps", "to its announcement, s"]
    return f"A step takes {usual:.2f} s. " + "Medians:\n\n" + table(header, rows)


def _cost_row(name: str, costs: list[Cost], usual: float) -> list[str]:
    lost = statistics.median(cost.lost for cost in costs)
    stalled = statistics.median(cost.stalled for cost in costs)
    verified = statistics.median(cost.verified for cost in costs)
    return [name, f"{stalled:.2f}", f"{lost:.2f}", f"{lost / usual:.1f}", f"{verified:.1f}" if verified else ""]


def generation(bench: Bench) -> str:
    with running(bench.home, bench.threads, bench.log) as stack:
        return compare_generation(stack, bench.model_dir, bench.threads, bench.tokens, bench.repeats)


PARTS: dict[str, Callable[[Bench], str]] = {
    "start": start,
    "preflight": preflights,
    "first-step": first_steps,
    "latencies": call_latencies,
    "checkpoints": checkpoints,
    "generation": generation,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--calls", type=int, default=300, help="of each kind")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args(arguments)
    offline()
    model_dir = options.model or real_model_dir()
    with tempfile.TemporaryDirectory() as temporary:
        home = make_home(Path(temporary), model_dir)
        bench = Bench(home, model_dir, options.threads, options.calls, options.repeats, options.tokens, options.dtype)
        parts = []
        for name in options.only.split(","):
            parts.append(PARTS[name](bench))
            print(parts[-1], flush=True)
    publish("service", "Service", "\n\n".join([f"{model_dir.name}, {options.dtype}.", *parts]), write=options.write)


if __name__ == "__main__":
    main()

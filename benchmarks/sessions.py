"""What driving a session over HTTP costs, against the same steps in a loop of one process.

    python -m benchmarks.sessions
    python -m benchmarks.sessions --steps 60 --repeats 1

Both train one short row a step, so that a step takes about a tenth of a second on two cores and whatever comes on top
of it shows. In turn: the loop (model and trainer, no HTTP, no store), then `SFTClient.fit`, which sends ahead. Then
a session makes long steps and saves, while `health` is asked all the time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.cases import CASES, Order, Settings
from benchmarks.processes import measure, prepare
from benchmarks.report import publish, table
from benchmarks.stack import MODEL, Stack, make_home, quantile, running
from benchmarks.workspace import Workspace, data_rows, real_model_dir
from post_training.client import SFTClient
from post_training.jobs.devices import usable_cores

SKIP = 5
LONGEST = 96
ROWS = 400
KERNELS = "compiled"


@dataclass(frozen=True)
class Rate:
    """Of the steps after the first ones."""

    tokens_per_second: float
    step_seconds: float


def in_process(workspace: Path, steps: int, threads: int) -> Rate:
    """The loop: steps of one row, in file order."""
    count = len(Workspace.open(workspace).rows)
    settings = Settings(batch=1, longest=LONGEST, warmup=0)
    plan = [[step % count] for step in range(steps)]
    case = next(each for each in CASES.values() if each.options == {"kernels": KERNELS})
    with tempfile.TemporaryDirectory() as out:
        result = measure(Order(workspace, Path(out), case, settings, "bf16", threads, plan))
    return Rate(result.rate(SKIP), result.step_seconds(SKIP))


def over_http(stack: Stack, workspace: Path, steps: int, job_id: str) -> Rate:
    """The same rows by `SFTClient.fit`; times are those at which the worker stored each step."""
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in _texts(workspace)]
    with SFTClient(stack.url) as client:
        client.submit(
            model=MODEL, kernels=KERNELS, optimizer_config={"lr": 3e-4}, lora={"lora_rank": 16}, job_id=job_id
        )
        client.fit(rows, batch_size=1, steps=steps)
    found = stack.client.post_training.metrics(job_id, limit=10_000).data
    seconds = (found[-1].at - found[SKIP - 1].at).total_seconds()
    tokens = sum(step.tokens or 0 for step in found[SKIP:])
    return Rate(tokens / seconds, seconds / len(found[SKIP:]))


def _texts(workspace: Path) -> list[tuple[str, str]]:
    """Prompts and answers of the rows that the loop trains on."""
    _, rows = data_rows(ROWS)
    by_answer = {row["output"].strip(): " ".join(filter(None, (row["instruction"], row["input"]))) for row in rows}
    texts = [answer.strip() for _, answer in Workspace.open(workspace).texts]
    return [(by_answer[answer], answer) for answer in texts if answer in by_answer]


def health_times(stack: Stack) -> list[float]:
    """Seconds of each answer of `health` while long steps and a save are done."""
    times, ended = list[float](), threading.Event()
    with SFTClient(stack.url) as client:
        client.submit(model=MODEL, kernels=KERNELS, job_id="health")
        url = httpx.URL(client.job_status().server_url or "").copy_with(userinfo=b"")

        def work() -> None:
            try:
                for _ in range(5):
                    client.train_step(sequences=[{"tokens": list(range(100, 400))}] * 8)
                client.save_checkpoint("once")
            finally:
                ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        with httpx.Client(base_url=url) as looker:
            while not ended.is_set():
                began = time.perf_counter()
                looker.get("/api/v1/health").raise_for_status()
                times.append(time.perf_counter() - began)
                time.sleep(0.02)
        thread.join()
        client.cancel()
    return times


def body(pairs: Sequence[tuple[Rate, Rate]], health: Sequence[float], steps: int, threads: int) -> str:
    """The section without its heading."""
    shares = [http.tokens_per_second / loop.tokens_per_second for loop, http in pairs]
    lines = [
        [f"{number + 1}", *(f"{rate.tokens_per_second:.0f}" for rate in pair), f"{pair[0].step_seconds:.3f}",
         f"{pair[1].step_seconds:.3f}", f"{share:.3f}"]
        for number, (pair, share) in enumerate(zip(pairs, shares, strict=True))
    ]  # fmt: skip
    header = ["repetition", "loop, tokens/s", "SFTClient, tokens/s", "loop, s/step", "SFTClient, s/step", "share"]
    told = (
        f"{MODEL}, {steps} steps of one row of at most {LONGEST} tokens, bf16, {threads} threads, without the first "
        f"{SKIP}. Median of the shares: **{statistics.median(shares):.3f}**."
    )
    asked = (
        f"`health` while a session makes steps of 2,400 tokens and saves, {len(health):,} answers: median "
        f"{1000 * statistics.median(health):.1f} ms, p99 {1000 * quantile(list(health), 0.99):.1f} ms, largest "
        f"{1000 * max(health):.1f} ms."
    )
    return "\n\n".join([told, table(header, lines), asked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    model_dir = options.model or real_model_dir()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workspace = folder / "workspace"
        prepare(workspace, model_dir, ["--longest", str(LONGEST), "--rows", str(ROWS)])
        home = make_home(folder, model_dir)
        pairs = []
        for number in range(options.repeats):
            loop = in_process(workspace, options.steps, options.threads)
            with running(home, options.threads, folder / "log") as stack:
                pairs.append((loop, over_http(stack, workspace, options.steps, f"run-{number}")))
            print(f"{number}: {pairs[-1]}", flush=True)
        with running(home, options.threads, folder / "log") as stack:
            health = health_times(stack)
    told = body(pairs, health, options.steps, options.threads)
    publish("sessions", "Sessions", told, write=options.write)


if __name__ == "__main__":
    main()

"""What driving a session over HTTP costs, against the same steps in a loop of one process and as a whole job.

    python -m benchmarks.sessions
    python -m benchmarks.sessions --steps 90 --repeats 1

All train one short row a step on the model's first layers, so that a step takes about a tenth of a second on two cores
and whatever comes on top of it shows. In turn: the loop (model and trainer, no HTTP, no store), a job, `SFTClient.fit`,
which sends ahead. Then a session on the whole model makes long steps and saves, while `health` is asked all the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from safetensors.torch import load_file, save_file

from apis.datasets.models import Row
from benchmarks.cases import CASES, Order, Settings
from benchmarks.processes import measure, prepare
from benchmarks.report import publish, table
from benchmarks.stack import DATASET, MODEL, Stack, make_home, quantile, request, running
from benchmarks.workspace import Workspace, data_rows, real_model_dir
from post_training.client import SFTClient
from post_training.jobs.devices import usable_cores

SKIP = 30
LONGEST = 96
ROWS = 400
LAYERS = 8
KERNELS = "fused"


@dataclass(frozen=True)
class Rate:
    """Of the steps after the first ones."""

    tokens_per_second: float
    step_seconds: float


def shortened(model_dir: Path, layers: int, folder: Path) -> Path:
    """A copy of a Hugging Face directory with the model's first layers only: as fast as a smaller model."""
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    gone = tuple(f"model.layers.{number}." for number in range(layers, config["num_hidden_layers"]))
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(gone)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_process(workspace: Path, steps: int, threads: int) -> Rate:
    """The loop: steps of one row, in file order."""
    count = len(Workspace.open(workspace).rows)
    settings = Settings(batch=1, longest=LONGEST, warmup=0)
    plan = [[step % count] for step in range(steps)]
    case = next(each for each in CASES.values() if each.options == {"kernels": KERNELS})
    with tempfile.TemporaryDirectory() as out:
        result = measure(Order(workspace, Path(out), case, settings, "bf16", threads, plan))
    return Rate(result.rate(SKIP), result.step_seconds(SKIP))


def as_job(stack: Stack, rows: list[Row], steps: int) -> Rate:
    """The same rows as a whole job; times are those at which the worker stored each step."""
    stack.client.datasets.register({"type": "rows", "rows": rows}, dataset_id=DATASET)
    # The form of the kernels is what a job of so few steps takes by itself.
    content = request("job", batch=1, max_steps_per_epoch=steps, optimizer_config={"lr": 3e-4})
    stack.client.post_training.supervised_fine_tune(**content)
    ended = stack.client.post_training.wait("job")
    assert KERNELS in str(ended.report), ended.report
    return _rate(stack, "job")


def over_http(stack: Stack, rows: list[Row], steps: int) -> Rate:
    """The same rows by `SFTClient.fit`."""
    with SFTClient(stack.url) as client:
        client.submit(
            model=MODEL, kernels=KERNELS, optimizer_config={"lr": 3e-4}, lora={"lora_rank": 16}, job_id="session"
        )
        client.fit(rows, batch_size=1, steps=steps)
    return _rate(stack, "session")


def _rate(stack: Stack, job_id: str) -> Rate:
    found = stack.client.post_training.metrics(job_id, limit=10_000).data
    seconds = (found[-1].at - found[SKIP - 1].at).total_seconds()
    tokens = sum(step.tokens or 0 for step in found[SKIP:])
    return Rate(tokens / seconds, seconds / len(found[SKIP:]))


def rows_of(workspace: Path) -> list[Row]:
    """The rows that the loop trains on, as text."""
    _, rows = data_rows(ROWS)
    by_answer = {row["output"].strip(): " ".join(filter(None, (row["instruction"], row["input"]))) for row in rows}
    texts = [answer.strip() for _, answer in Workspace.open(workspace).texts]
    return [{"prompt": by_answer[answer], "completion": answer} for answer in texts if answer in by_answer]


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


def body(runs: Sequence[tuple[Rate, Rate, Rate]], health: Sequence[float], options: argparse.Namespace) -> str:
    """The section without its heading; `runs`: loop, job and session of each repetition."""
    shares = [
        [session.tokens_per_second / other.tokens_per_second for other in (loop, job)] for loop, job, session in runs
    ]
    lines = [
        [f"{number + 1}", *(f"{1000 * rate.step_seconds:.0f}" for rate in rates),
         *(f"{rate.tokens_per_second:.0f}" for rate in rates), *(f"{share:.3f}" for share in both)]
        for number, (rates, both) in enumerate(zip(runs, shares, strict=True))
    ]  # fmt: skip
    names = ("loop", "job", "session")
    header = ["repetition", *(f"{name}, ms/step" for name in names), *(f"{name}, tokens/s" for name in names),
              "session / loop", "session / job"]  # fmt: skip
    by_loop, by_job = (statistics.median(both[index] for both in shares) for index in (0, 1))
    told = (
        f"The first {options.layers} layers of smollm2-135m-instruct, {options.steps} steps of one row of at most "
        f"{LONGEST} tokens, bf16, {options.threads} threads, kernels: {KERNELS}, without the first {SKIP} steps. "
        f"`SFTClient.fit` reaches **{by_loop:.3f}** of the loop's tokens/s, which stores and serves nothing, and "
        f"**{by_job:.3f}** of a whole job's (medians)."
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
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model that are kept")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_dir = shortened(options.model or real_model_dir(), options.layers, folder / "short")
        workspace = folder / "workspace"
        prepare(workspace, model_dir, ["--longest", str(LONGEST), "--rows", str(ROWS)])
        runs: list[tuple[Rate, Rate, Rate]] = []
        for number in range(options.repeats):
            runs.append(repetition(folder / str(number), model_dir, workspace, options))
            print(f"{number}: {runs[-1]}", flush=True)
        whole = folder / "whole"
        whole.mkdir()
        with running(make_home(whole, options.model or real_model_dir()), options.threads, whole / "log") as stack:
            health = health_times(stack)
    publish("sessions", "Sessions", body(runs, health, options), write=options.write)


def repetition(folder: Path, model_dir: Path, workspace: Path, options: argparse.Namespace) -> tuple[Rate, Rate, Rate]:
    """The loop, a job and a session, one after the other."""
    folder.mkdir()
    rows = rows_of(workspace)
    loop = in_process(workspace, options.steps, options.threads)
    with running(make_home(folder, model_dir), options.threads, folder / "log") as stack:
        return loop, as_job(stack, rows, options.steps), over_http(stack, rows, options.steps)


if __name__ == "__main__":
    main()

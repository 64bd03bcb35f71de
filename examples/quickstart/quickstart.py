"""The whole way in some minutes: a real model, asked before and after it is fine-tuned, served by one stack.

    make quickstart        (or: python examples/quickstart/quickstart.py)

Fetches SmolLM2-135M-Instruct, starts the stack of the template `experimental-post-training` on a free port, has the
model turn 50 support messages into JSON, fine-tunes it with the `postgrad` command on 270 others, asks again, compares.
Every figure is measured in the run. Everything it keeps lies in `$POSTGRAD_HOME`, or `.cache/quickstart`. Ends with
exit code 1 where the tuned model gains less than 50 points.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from evaluate import DATA, Evaluation, evaluate, read_rows
from fetch_model import CACHE, fetch_model
from rich.console import Console
from rich.table import Table
from rich.text import Text
from server import TEMPLATE, postgrad, running_stack

from apis.errors import JobFailure, PostgradError
from post_training.client import StackClient

HOME = Path(os.environ.get("POSTGRAD_HOME") or CACHE / "quickstart").absolute()
MODEL = "smollm2-135m-instruct"
RECIPE = ["--epochs", "2", "--lr", "1e-3", "--rank", "16", "--alpha", "32", "--batch-size", "4"]
EXAMPLES = 3
WANTED_GAIN = 50  # points
ANSWER_SECONDS = 600
"""The first answer waits for the model to load, which takes long where other programs keep the machine busy."""

console = Console(highlight=False, markup=False, soft_wrap=True, force_terminal=sys.stdout.isatty())


def main() -> int:
    started = time.perf_counter()
    step(1, "Get the model")
    source = fetch_model()
    HOME.mkdir(parents=True, exist_ok=True)
    run("models", "import", relative(source), "--model-id", MODEL)

    step(2, "Start the stack")
    log = HOME / "server.log"
    with running_stack(HOME, log) as url, StackClient(url, timeout=ANSWER_SECONDS) as client:
        client.inspect.health()
        console.print(f"{TEMPLATE} at {url}, log in {relative(log)}")
        cancel_unfinished(client)
        before, checkpoint, after, training_seconds = train_between_evaluations(client)

    step(6, "Before and after")
    print_comparison(before, after)
    gain = after.percent - before.percent
    console.print(f"\nGain: {gain:+.0f} points.", style="bold")
    console.print(
        f"Fine-tuning took {training_seconds:.0f} s, everything {time.perf_counter() - started:.0f} s. "
        "The server is stopped."
    )
    print_next_steps(checkpoint, after)
    if gain < WANTED_GAIN:
        print(f"Error: the tuned model gained {gain:.0f} points, expected were {WANTED_GAIN}", file=sys.stderr)
        return 1
    return 0


def cancel_unfinished(client: StackClient) -> None:
    """Cancel what an interrupted quickstart left: a stack goes on with unfinished jobs when it starts again."""
    for job in client.post_training.jobs():
        if not job.status.terminal:
            console.print(f"cancelling {job.job_uuid} of an earlier, interrupted run")
            client.post_training.cancel(job.job_uuid)


def train_between_evaluations(client: StackClient) -> tuple[Evaluation, str, Evaluation, float]:
    """Ask the base model, fine-tune it, ask the tuned one.

    Returns:
        the first evaluation, the checkpoint's id, the second evaluation, the seconds that fine-tuning took.
    """
    rows = read_rows(DATA / "eval.jsonl")
    step(3, f"Ask the base model to turn {len(rows)} support messages into JSON")
    before = evaluate(client, MODEL, rows, console)
    print_evaluation(before)

    step(4, "Fine-tune it")
    os.environ["POSTGRAD_BASE_URL"] = client.base_url
    job = time.strftime("quickstart-%Y%m%d-%H%M%S")
    started = time.perf_counter()
    data = relative(DATA / "train.jsonl")
    run("post_training", "supervised_fine_tune", "--job-uuid", job, "--model", MODEL, "--dataset", data, *RECIPE,
        "--follow")  # fmt: skip
    training_seconds = time.perf_counter() - started
    checkpoint = newest_checkpoint(job)

    step(5, f"Ask {checkpoint} the same")
    after = evaluate(client, checkpoint, rows, console)
    print_evaluation(after)
    return before, checkpoint, after, training_seconds


def newest_checkpoint(job: str) -> str:
    """The id of the job's last checkpoint. Raises JobFailure where it has none."""
    answer = json.loads(run("post_training", "artifacts", "--job-uuid", job, "--json", capture=True))
    if not answer["checkpoints"]:
        raise JobFailure(f"job {job} completed without a checkpoint; see `postgrad post_training logs {job}`")
    return answer["checkpoints"][-1]["identifier"]


def run(*arguments: str, capture: bool = False) -> str:
    """Show and run `postgrad ARGUMENTS`; its standard output if `capture`, else it goes where ours goes.

    Raises:
        subprocess.CalledProcessError: it failed; it has said why.
    """
    console.print(f"$ postgrad {shlex.join(arguments)}", style="cyan")
    environment = {**os.environ, "POSTGRAD_HOME": str(HOME)}
    result = subprocess.run(
        [*postgrad(), *arguments], env=environment, check=True, text=True, stdout=subprocess.PIPE if capture else None
    )
    return result.stdout or ""


def step(number: int, title: str) -> None:
    console.print(f"\n[{number}/6] {title}", style="bold")


def print_evaluation(result: Evaluation) -> None:
    console.print(f"{result.right} of {len(result.answers)} exactly right, in {result.seconds:.0f} s")


def print_comparison(before: Evaluation, after: Evaluation) -> None:
    # Evenly spaced over the rows, whatever the model made of them.
    for old, new in list(zip(before.answers, after.answers, strict=True))[:: len(after.answers) // EXAMPLES][:EXAMPLES]:
        console.print(f"message  {old.message}")
        for name, answer in (("before", old), ("after", new)):
            verdict = "right" if answer.right else f"wrong, wanted {answer.expected}"
            text = f"{name:8} {one_line(answer.text)}  [{verdict}]"
            console.print(text, style="green" if answer.right else "red")
        console.print()
    table = Table(box=None, pad_edge=False)
    for title in ("", "exact match", "seconds"):
        table.add_column(title, justify="left" if not title else "right")
    for name, result in (("base", before), ("tuned", after)):
        score = f"{result.right}/{len(result.answers)} = {result.percent:.0f} %"
        table.add_row(name, Text(score, style="bold"), f"{result.seconds:.0f}")
    console.print(table)


def one_line(text: str, longest: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def print_next_steps(checkpoint: str, after: Evaluation) -> None:
    system = read_rows(DATA / "eval.jsonl")[0][0]
    user = {"role": "user", "content": after.answers[0].message}
    body = json.dumps({"model": checkpoint, "messages": [system, user], "temperature": 0}, ensure_ascii=False)
    console.print("\nChat with it: start the stack again, then ask from another terminal.", style="bold")
    program, *rest = postgrad()
    start = shlex.join([relative(Path(program)), *rest, "stack", "run", TEMPLATE])
    console.print(f"POSTGRAD_HOME={shlex.quote(relative(HOME))} {start}")
    console.print(
        "curl http://127.0.0.1:8321/v1/chat/completions -H 'content-type: application/json' -d " + shlex.quote(body)
    )


def relative(path: Path) -> str:
    """`path` as seen from where the user stands, if it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the server is stopped.")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"Error: `postgrad {shlex.join(failed.cmd[1:])}` ended with exit code {failed.returncode}")
    except PostgradError as failure:
        sys.exit(f"Error: {failure.message}")

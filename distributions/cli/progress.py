"""Following a job: a bar on a terminal, lines elsewhere, and an exit code at the end."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

import typer

from distributions.cli.output import clock, console, print_error, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from apis.post_training.models import PostTrainingJobStatusResponse
    from post_training.client import StackClient

EXIT_FAILED, EXIT_CANCELLED, EXIT_INTERRUPTED = 1, 3, 130
POLL_SECONDS = 0.5
LINE_SECONDS = 5.0


class Display(AbstractContextManager["Display"], Protocol):
    def show(self, status: PostTrainingJobStatusResponse) -> None: ...


def follow(client: StackClient, job_uuid: str, *, as_json: bool = False) -> NoReturn:
    """Show a job until it ends, then leave with 0 (completed), 1 (failed) or 3 (cancelled).

    With `as_json` the last status is the only thing on stdout, and progress goes to stderr. Ctrl-C leaves the job
    running and exits with 130.
    """
    stream = sys.stderr if as_json else sys.stdout
    try:
        with display(stream) as shown:
            status = client.post_training.wait(job_uuid, poll_seconds=POLL_SECONDS, on_status=shown.show)
    except KeyboardInterrupt:
        _say_how_to_go_on(job_uuid)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print_json(status)
    raise typer.Exit(_report_end(status, stream))


def display(stream: TextIO) -> Display:
    """A bar where `stream` is a terminal that can redraw a line, else plain lines."""
    out = console(stream)
    return BarDisplay(out) if out.is_terminal and not out.is_dumb_terminal else LineDisplay(stream)


def _say_how_to_go_on(job_uuid: str) -> None:
    print(
        f"No longer following; job {job_uuid} goes on.\n"
        f"  see it:     postgrad post_training status {job_uuid} --follow\n"
        f"  cancel it:  postgrad post_training cancel {job_uuid}",
        file=sys.stderr,
    )


def _report_end(status: PostTrainingJobStatusResponse, stream: TextIO) -> int:
    from apis.post_training.models import JobStatus
    from post_training.client.waiting import job_failure

    if status.status is JobStatus.completed:
        print(f"completed{_duration(status)}", file=stream)
        for checkpoint in status.checkpoints:
            print(f"checkpoint {checkpoint.identifier}", file=stream)
        return 0
    if status.status is JobStatus.cancelled:
        print(f"cancelled{_duration(status)}", file=stream)
        return EXIT_CANCELLED
    failure = job_failure(status)
    if failure is not None:
        failure.message += f" [{status.error.code}]" if status.error else ""
        print_error(failure)
    return EXIT_FAILED


def _duration(status: PostTrainingJobStatusResponse) -> str:
    if status.started_at is None or status.completed_at is None:
        return ""
    return f" in {clock((status.completed_at - status.started_at).total_seconds())}"


def phase(status: PostTrainingJobStatusResponse) -> str:
    """What a job does now, in a word or two."""
    if status.status != "in_progress":
        place = status.queue_position
        waits = f", {place} ahead" if place else ""
        return f"{status.status}{waits}" + (f" ({status.waiting_reason})" if status.waiting_reason else "")
    return (status.progress and status.progress.phase) or "starting"


def numbers(status: PostTrainingJobStatusResponse) -> str:
    """Epoch, loss, speed and time left, as far as they are known."""
    progress = status.progress
    if progress is None or status.status != "in_progress":
        return ""
    parts = [f"epoch {progress.epoch}"] if progress.step else []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.skipped_steps:
        parts.append(f"{progress.skipped_steps} steps skipped")
    if progress.seconds_left is not None:
        parts.append(f"{clock(progress.seconds_left)} left")
    return "  ".join(parts)


class LineDisplay:
    """A line at each change of phase, and at most one every `LINE_SECONDS` between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase: str | None = None
        self._line: str | None = None
        self._printed_at = 0.0

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""

    def show(self, status: PostTrainingJobStatusResponse) -> None:
        if status.status.terminal:
            return
        line, now = summary(status), time.monotonic()
        if phase(status) == self._phase and (line == self._line or now - self._printed_at < LINE_SECONDS):
            return
        self._phase, self._line, self._printed_at = phase(status), line, now
        print(line, file=self._stream, flush=True)


def summary(status: PostTrainingJobStatusResponse) -> str:
    """One line about a job: phase, step, numbers."""
    progress = status.progress
    step = ""
    if progress is not None and progress.step and status.status == "in_progress":
        step = f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
        step += f" ({progress.percent:.0f}%)" if progress.percent is not None else ""
    return "  ".join(part for part in (phase(status), step, numbers(status)) if part)


class BarDisplay:
    """One line that is redrawn: phase, bar, steps, loss, tokens/s, time left."""

    def __init__(self, out: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=out,
            transient=True,
        )
        self._task = self._bar.add_task("connecting", total=None, numbers="")

    def __enter__(self) -> BarDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, status: PostTrainingJobStatusResponse) -> None:
        progress = status.progress
        self._bar.update(
            self._task,
            description=phase(status),
            total=progress.total_steps if progress else None,
            completed=progress.step if progress else 0,
            numbers=numbers(status),
        )

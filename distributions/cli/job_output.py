"""What `postgrad post_training list`, `logs` and `metrics` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from distributions.cli.output import print_json, print_table

if TYPE_CHECKING:
    from apis.post_training.models import JobSummary, PostTrainingJobLogStream, StepMetric
    from post_training.client import StackClient

_HEADER = ("STEP", "EPOCH", "LOSS", "LR", "GRAD NORM", "TOKENS/S", "SUPERVISED", "MEMORY")
_LARGEST_PAGE = 1000


def listed_jobs(client: StackClient, limit: int | None, status: str | None) -> list[JobSummary]:
    """All jobs, or the newest `limit` of them; the oldest first in both cases."""
    if limit is None:
        return client.post_training.jobs(status=status)
    newest = client.post_training.iter_jobs(order="desc", status=status, page_size=min(limit, _LARGEST_PAGE))
    return list(islice(newest, limit))[::-1]


def print_log(client: StackClient, job_uuid: str, tail: int | None, *, as_json: bool) -> None:
    """The lines there are; as JSON, one LogStream object."""
    pages = [client.post_training.logs(job_uuid, tail=tail)] if tail else _log_pages(client, job_uuid)
    if as_json:
        print_json(_joined(pages))
        return
    for page in pages:
        if page.log_lines:
            print("\n".join(page.log_lines), flush=True)


def follow_log(client: StackClient, job_uuid: str, tail: int | None, *, as_json: bool) -> None:
    """The lines there are and each new one until the job has ended; as JSON, one event a line."""
    after = 0
    if tail:
        page = client.post_training.logs(job_uuid, tail=tail)
        after = page.next
        if not as_json and page.log_lines:
            print("\n".join(page.log_lines), flush=True)
    for event in client.post_training.events(job_uuid, after):
        if as_json:
            print(event.model_dump_json(), flush=True)
        else:
            print(f"{event.at:%Y-%m-%d %H:%M:%S} {event.message}", flush=True)


def _log_pages(client: StackClient, job_uuid: str) -> Iterator[PostTrainingJobLogStream]:
    after = 0
    while True:
        page = client.post_training.logs(job_uuid, after)
        yield page
        if page.next <= after:
            return
        after = page.next


def _joined(pages: Iterable[PostTrainingJobLogStream]) -> PostTrainingJobLogStream:
    held = list(pages)
    lines = [line for page in held for line in page.log_lines]
    return held[-1].model_copy(update={"log_lines": lines})


def print_metrics(client: StackClient, job_uuid: str, *, as_json: bool) -> None:
    """Every optimizer step, in a table or as one JSON object."""
    answer = client.post_training.metrics(job_uuid)
    data, page = list(answer.data), answer
    while page.data:
        page = client.post_training.metrics(job_uuid, page.next)
        data += page.data
    if as_json:
        print_json(answer.model_copy(update={"data": data, "next": data[-1].step if data else answer.next}))
    else:
        print_table(_HEADER, [_row(metric) for metric in data])


def _row(metric: StepMetric) -> tuple[str, ...]:
    memory = metric.memory_bytes if metric.device_memory_bytes is None else metric.device_memory_bytes
    return (
        str(metric.step),
        _number(metric.epoch, "d"),
        "skipped" if metric.skipped else _number(metric.loss, ".4f"),
        _number(metric.lr, ".3g"),
        _number(metric.grad_norm, ".3g"),
        _number(metric.tokens_per_second, ",.0f"),
        _number(metric.supervised_tokens, "d"),
        "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

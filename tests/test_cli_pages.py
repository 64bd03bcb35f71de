"""What the server gives in pieces, the command line prints whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from apis.datasets.models import IterrowsResponse
from apis.post_training.models import PostTrainingJobLogStream, SupervisedFineTuneRequest
from distributions.cli.main import app
from tests.in_memory_stack import BASE_MODEL, InMemoryStack, Job, running


@pytest.fixture(scope="module")
def stack() -> Iterator[InMemoryStack]:
    with running() as made:
        yield made


def run(stack: InMemoryStack, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["--endpoint", stack.url, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_log_of_many_pages_is_printed_to_its_last_line(stack: InMemoryStack, monkeypatch: pytest.MonkeyPatch):
    lines = [f"line {number}" for number in range(2500)]

    async def paged(job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        page = lines[after : after + 1000]
        return PostTrainingJobLogStream(job_uuid=job_uuid, log_lines=page, next=after + len(page))

    request = SupervisedFineTuneRequest(job_uuid="j1", model=BASE_MODEL)
    monkeypatch.setitem(stack.post_training.jobs, "j1", Job(request, cancelled=True))
    monkeypatch.setattr(stack.post_training, "get_job_logs", paged)
    assert run(stack, "post_training", "logs", "j1").splitlines() == lines
    whole = json.loads(run(stack, "post_training", "logs", "j1", "--json"))
    assert whole == {"job_uuid": "j1", "log_lines": lines, "next": 2500}


def test_rows_are_asked_for_until_there_are_as_many_as_wanted(stack: InMemoryStack, monkeypatch: pytest.MonkeyPatch):
    rows = [{"n": n} for n in range(7)]

    async def paged(dataset_id: str, start_index: int | None = None, limit: int | None = None) -> IterrowsResponse:
        start = start_index or 0
        size = 3 if limit is None or limit == -1 else min(3, limit)
        return IterrowsResponse(data=rows[start : start + size], has_more=start + size < len(rows))

    monkeypatch.setattr(stack.datasets, "iterrows", paged)
    for options, expected in ((("--limit", "-1"), rows), (("--start", "1", "--limit", "5"), rows[1:6])):
        assert [json.loads(line) for line in run(stack, "datasets", "rows", "d", *options).splitlines()] == expected
    assert json.loads(run(stack, "datasets", "rows", "d", "--limit", "4", "--json"))["has_more"] is True

"""Lists of jobs, whole and page by page: over HTTP, through both clients, in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.errors import InvalidField
from apis.post_training.models import JobStatus, ListOrder
from post_training.client import StackClient
from post_training.jobs.leases import Leases
from post_training.jobs.store import JobStore
from tests.client_session import Session
from tests.job_server import JOBS, JobServer, job_server
from tests.test_cli import run
from tests.test_job_store import claim, leases, store, submit

__all__ = ["leases", "store"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    with job_server(tmp_path / "home") as made:
        yield made


@pytest.fixture(params=["sync", "async"])
def session(request: pytest.FixtureRequest, server: JobServer) -> Iterator[Session]:
    made = Session(request.param, server.url)
    yield made
    made.close()


def listed(server: JobServer, query: str = "") -> dict[str, Any]:
    answer = httpx.get(f"{server.url}{JOBS}{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(answer: dict[str, Any]) -> list[str]:
    return [job["job_uuid"] for job in answer["data"]]


def submit_all(server: JobServer, count: int) -> list[str]:
    names = [f"job-{number}" for number in range(count)]
    for name in names:
        server.submit(name)
    return names


# -- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ListOrder)
@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 8])
def test_pages_make_up_the_list_whatever_their_size(store: JobStore, order: ListOrder, limit: int):
    for number in range(7):
        submit(store, f"job-{number}")
    pages, after = [], None
    while True:
        page = store.page(limit=limit, after=after, order=order)
        pages.append([job.job_uuid for job in page.jobs])
        if (after := page.next) is None:
            break
    expected = [f"job-{number}" for number in range(7)][:: 1 if order is ListOrder.asc else -1]
    assert [name for page in pages for name in page] == expected
    assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1), "only the last page is short"
    assert 1 <= len(pages[-1]) <= limit


def test_jobs_that_come_and_go_between_two_pages_neither_hide_nor_repeat_others(store: JobStore):
    for number in range(6):
        submit(store, f"job-{number}")
    page = store.page(limit=3)
    for name in ("job-1", "job-2", "job-4"):
        store.request_cancel(name)
        store.delete(name, lambda _: None)
    submit(store, "new")
    assert [job.job_uuid for job in store.page(limit=9, after=page.next).jobs] == ["job-3", "job-5", "new"]
    newest = store.page(limit=2, order=ListOrder.desc)
    submit(store, "newer")
    rest = store.page(limit=9, after=newest.next, order=ListOrder.desc)
    assert [[job.job_uuid for job in page.jobs] for page in (newest, rest)] == [["new", "job-5"], ["job-3", "job-0"]]


def test_a_status_is_listed_alone_and_paged_alike(store: JobStore, leases: Leases):
    for number in range(5):
        submit(store, f"job-{number}")
    for name in ("job-1", "job-4"):
        store.request_cancel(name)
    claim(leases)
    told = {status: [job.job_uuid for job in store.page(status=status).jobs] for status in JobStatus}
    assert told == {
        JobStatus.scheduled: ["job-2", "job-3"],
        JobStatus.in_progress: ["job-0"],
        JobStatus.completed: [],
        JobStatus.failed: [],
        JobStatus.cancelled: ["job-1", "job-4"],
    }
    page = store.page(limit=1, status=JobStatus.cancelled)
    assert [job.job_uuid for job in page.jobs] == ["job-1"]
    behind = store.page(limit=1, status=JobStatus.cancelled, after=page.next)
    assert ([job.job_uuid for job in behind.jobs], behind.next) == (["job-4"], None)


@pytest.mark.parametrize("after", ["gone", "", "~", "~1x", "~-1", "~²", "~" + "9" * 400, "a" * 400, "~1~"])
def test_a_place_that_never_was_is_refused(store: JobStore, after: str):
    submit(store, "one")
    with pytest.raises(InvalidField, match="list the jobs behind") as refused:
        store.page(after=after)
    assert refused.value.param == "after"


# -- HTTP ------------------------------------------------------------------------------------------------------------


def test_a_call_without_parameters_is_answered_as_before_there_were_pages(server: JobServer):
    assert listed(server) == {"data": []}
    submit_all(server, 3)
    answer = listed(server)
    assert answer.keys() == {"data"}
    assert ids(answer) == ["job-0", "job-1", "job-2"]
    assert [job.keys() for job in answer["data"]] == [{"job_uuid", "status", "model", "created_at"}] * 3
    assert {(job["status"], job["model"]) for job in answer["data"]} == {("scheduled", "base")}


def test_a_page_says_whether_there_are_more_and_goes_on_behind_a_job_or_its_own_end(server: JobServer):
    submit_all(server, 5)
    page = listed(server, "?limit=2")
    assert (ids(page), page["has_more"]) == (["job-0", "job-1"], True)
    assert ids(listed(server, f"?limit=2&after={page['next']}")) == ["job-2", "job-3"]
    assert ids(listed(server, "?limit=2&after=job-1")) == ["job-2", "job-3"]
    last = listed(server, "?limit=2&after=job-2")
    assert last == {"data": last["data"], "has_more": False, "next": None}
    assert ids(last) == ["job-3", "job-4"]
    assert ids(listed(server, "?limit=2&order=desc")) == ["job-4", "job-3"]
    assert ids(listed(server, "?order=desc&after=job-2")) == ["job-1", "job-0"]
    assert listed(server, "?limit=5&status=failed") == {"data": [], "has_more": False, "next": None}
    assert len(ids(listed(server, "?status=scheduled"))) == 5


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("order=newest", "order"),
        ("status=done", "status"),
        ("after=no-job", "after"),
    ],
)
def test_a_parameter_that_cannot_be_met_is_refused_by_its_name(server: JobServer, query: str, param: str):
    answer = httpx.get(f"{server.url}{JOBS}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# -- clients ---------------------------------------------------------------------------------------------------------


def test_a_client_iterates_over_all_jobs_in_few_requests(server: JobServer, session: Session):
    names = submit_all(server, 7)
    taken: list[Any] = []
    session.collect(lambda client: client.post_training.iter_jobs(page_size=3), taken)
    assert [job.job_uuid for job in taken] == names
    assert len(server.requests) == 3
    taken.clear()
    session.collect(lambda client: client.post_training.iter_jobs(order="desc", status="scheduled"), taken)
    assert [job.job_uuid for job in taken] == names[::-1]
    taken.clear()
    session.collect(lambda client: client.post_training.iter_jobs(status=JobStatus.failed), taken)
    assert taken == []


def test_a_client_reads_a_page_or_all_of_a_status(server: JobServer, session: Session):
    submit_all(server, 3)
    server.store.request_cancel("job-1")
    page = session.do(lambda client: client.post_training.jobs_page(2, "job-0", order=ListOrder.asc))
    assert ([job.job_uuid for job in page.data], page.has_more, page.next) == (["job-1", "job-2"], False, None)
    cancelled = session.do(lambda client: client.post_training.jobs(status="cancelled"))
    assert [job.job_uuid for job in cancelled] == ["job-1"]
    with pytest.raises(InvalidField) as refused:
        session.do(lambda client: client.post_training.jobs_page(2000))
    assert refused.value.param == "limit"


def test_jobs_may_be_deleted_while_they_are_iterated_over(server: JobServer):
    names = submit_all(server, 7)
    for name in names:
        server.store.request_cancel(name)
    with StackClient(server.url) as client:
        for job in client.post_training.iter_jobs(status=JobStatus.cancelled, page_size=3):
            client.post_training.delete(job.job_uuid)
    assert server.store.summaries() == []


def test_the_terminal_shows_all_jobs_or_the_newest_ones_with_the_newest_last(server: JobServer):
    def shown(*options: str) -> list[str]:
        lines = run("--endpoint", server.url, "post_training", "list", *options).splitlines()
        return [line.split()[0] for line in lines[1:]]

    names = submit_all(server, 5)
    server.store.request_cancel("job-2")
    assert shown() == names
    assert shown("--limit", "2") == ["job-3", "job-4"]
    assert shown("-n", "99") == names
    assert shown("--status", "cancelled") == ["job-2"]
    assert shown("--status", "scheduled", "--limit", "3") == ["job-1", "job-3", "job-4"]

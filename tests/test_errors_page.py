"""docs/errors.md lists every error there is, and what fails below the routes is answered as it says."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import event as database_event
from sqlalchemy.exc import OperationalError
from starlette.testclient import TestClient

from apis.errors import JOB_FAILURE_CODES, JobFailure, PostgradError, StackError, error_classes
from distributions.errors import CatchAll, add_exception_handlers
from tests.job_server import JOBS, job_server

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def tables() -> dict[str, dict[str, str]]:
    """Per heading of the page: code to what its status column says."""
    found: dict[str, dict[str, str]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, flags=re.M)
        assert all(meaning.strip() and remedy.strip() for _, _, meaning, remedy in rows)
        assert len({code for code, *_ in rows}) == len(rows)
        found[section.partition("\n")[0]] = {code: status for code, status, *_ in rows}
    return found


def ours() -> list[type[PostgradError]]:
    # States and leases have errors of their own, which never leave the server.
    return [kind for kind in error_classes() if kind.__module__ == "apis.errors"]


def test_every_code_is_on_the_page_where_it_belongs_and_none_else():
    answers, failures, starts = tables().values()
    assert set(failures) == JOB_FAILURE_CODES
    assert set(starts) == {kind.code for kind in ours() if issubclass(kind, StackError)}
    assert set(answers) | set(failures) | set(starts) == {kind.code for kind in ours()}
    answered = {
        kind.code: str(kind.http_status)
        for kind in ours()
        if not issubclass(kind, StackError) and (kind.http_status != 500 or kind is PostgradError)
    }
    assert answers == answered


def test_every_kind_of_job_failure_may_be_a_jobs():
    assert {kind.code for kind in error_classes(JobFailure) if kind.__module__ == "apis.errors"} <= JOB_FAILURE_CODES


def test_a_store_that_cannot_be_read_is_a_503_to_be_tried_again(tmp_path: Path):
    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        raise OperationalError(statement, None, Exception("/secret/path is away"))

    with job_server(tmp_path / "home") as server:
        server.submit("j")
        database_event.listen(server.database.engine, "before_cursor_execute", fail)
        for path in ("/j/status", "/j/events", ""):
            answer = httpx.get(f"{server.url}{JOBS}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert int(answer.headers["retry-after"]) > 0
            assert "x-should-retry" not in answer.headers
            assert "/secret" not in answer.text
        database_event.remove(server.database.engine, "before_cursor_execute", fail)
        assert httpx.get(f"{server.url}{JOBS}/j/status").status_code == 200


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (errno.ENOSPC, 503, "disk_full"),
        (errno.EDQUOT, 503, "disk_full"),
        (errno.EACCES, 500, "internal_error"),
    ],
)
def test_a_disk_that_is_full_is_said_so(number: int, status: int, code: str):
    app = FastAPI()
    add_exception_handlers(app)
    app.add_middleware(CatchAll)

    @app.get("/write")
    def write() -> None:
        raise OSError(number, os.strerror(number), "/secret/path")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/write")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert "/secret" not in answer.text

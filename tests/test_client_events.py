"""Our clients read a job's events to its end, through cut connections and servers that are killed."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.errors import JobNotFound, PostgradError, Unavailable
from apis.post_training.models import JobStatus
from post_training.client import StackClient, waiting
from post_training.client.following import Following
from post_training.jobs.database import Database
from post_training.jobs.store import JobStore
from tests.client_session import Session
from tests.job_server import JobServer, job_server
from tests.served_stack import served
from tests.test_job_store import make_spec

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def connected(kind: str, url: str, **options: Any) -> Iterator[Session]:
    session = Session(kind, url, **options)
    try:
        yield session
    finally:
        session.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """`tests.job_server` as a process that can be killed and started again on the same port."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "tests.job_server", str(home), str(self.port)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT)
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"{self.url}/v1/models")
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def test_events_metrics_and_the_tail_of_the_log_are_read(kind: str, tmp_path: Path):
    with job_server(tmp_path / "home") as server, connected(kind, server.url) as session:
        owner = server.claim("lab/j")
        for step in range(1, 6):
            server.step("lab/j", owner, step, loss=None if step == 3 else 1 / step, skipped=step == 3)
        server.step("lab/j", owner, 2, loss=0.25)  # a later attempt tells of it again
        server.finish("lab/j", owner)
        events: list[Any] = []
        session.collect(lambda client: client.post_training.events("lab/j"), events)
        assert [event.kind.value for event in events] == ["status", "status", *["step"] * 6, "status"]
        assert [event.id for event in events] == [row.id for row in server.store.events("lab/j", 0)]
        assert (events[-1].message, events[-1].data["status"]) == ("completed: done", "completed")
        again: list[Any] = []
        session.collect(lambda client: client.post_training.events("lab/j", after=events[3].id), again)
        assert again == events[4:]
        metrics = session.do(lambda client: client.post_training.metrics("lab/j"))
        assert [(one.step, one.loss, one.skipped) for one in metrics.data] == [
            (1, 1.0, False), (2, 0.25, False), (3, None, True), (4, 0.25, False), (5, 0.2, False),
        ]  # fmt: skip
        page = session.do(lambda client: client.post_training.metrics("lab/j", 1, limit=2))
        assert ([one.step for one in page.data], page.next) == ([2, 3], 3)
        tail = session.do(lambda client: client.post_training.logs("lab/j", tail=2))
        assert [line[20:] for line in tail.log_lines] == ["step 2", "completed: done"]
        assert session.do(lambda client: client.post_training.logs("lab/j", after=tail.next)).log_lines == []


def test_a_killed_server_costs_a_reader_nothing(kind: str, tmp_path: Path):
    """Killed twice while a writer goes on; every event comes once, in order."""
    home = tmp_path / "home"
    writer = JobServer(home)  # another process of the same store
    owner = writer.claim("j")
    process = ServerProcess(home)
    done = threading.Event()

    def disturb() -> None:
        for _ in range(2):
            time.sleep(0.5)
            process.kill()
            time.sleep(0.3)
            process.start()
        done.set()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            writer.step("j", owner, step)
            time.sleep(0.02)
        writer.finish("j", owner)

    threads = [threading.Thread(target=work) for work in (disturb, write)]
    events: list[Any] = []
    with connected(kind, process.url) as session:
        for thread in threads:
            thread.start()
        session.collect(lambda client: client.post_training.events("j"), events)
    for thread in threads:
        thread.join()
    process.kill()
    assert [event.id for event in events] == [row.id for row in writer.store.events("j", 0, 100_000)]
    assert events[-1].data["status"] == "completed"
    writer.database.close()


def test_a_server_that_was_never_there_is_unavailable_at_once(kind: str):
    with connected(kind, f"http://127.0.0.1:{free_port()}", max_retries=0) as session:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="is the server running"):
            session.collect(lambda client: client.post_training.events("j"), [])
        assert time.monotonic() - began < 5


def test_a_server_that_stays_away_ends_the_reading(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "OUTAGE_SECONDS", 0.5)
    home = tmp_path / "home"
    writer = JobServer(home)
    writer.submit("j")
    process = ServerProcess(home)
    events: list[Any] = []
    killer = threading.Timer(0.8, process.kill)
    killer.start()
    with connected(kind, process.url, max_retries=0) as session, pytest.raises(Unavailable):
        session.collect(lambda client: client.post_training.events("j"), events)
    killer.join()
    assert [event.message for event in events] == ["scheduled: submitted"]
    writer.database.close()


def test_a_job_that_is_deleted_meanwhile_is_not_found(kind: str, tmp_path: Path):
    with job_server(tmp_path / "home") as server, connected(kind, server.url) as session:
        server.submit("j")

        def delete() -> None:
            server.store.request_cancel("j")
            server.store.delete("j", lambda session: None)

        timer = threading.Timer(0.5, delete)
        timer.start()
        with contextlib.suppress(JobNotFound):  # it may see the end before the job is gone
            session.collect(lambda client: client.post_training.events("j"), [])
        timer.join()
        with pytest.raises(JobNotFound):
            session.collect(lambda client: client.post_training.events("j"), [])


def test_a_reader_may_stop_at_any_event(tmp_path: Path):
    with job_server(tmp_path / "home") as server, StackClient(server.url) as client:
        owner = server.claim("j")
        reading = client.post_training.events("j")
        seen = next(event for event in reading if event.message.startswith("in_progress"))
        server.finish("j", owner, JobStatus.cancelled)
        assert [event.message for event in client.post_training.events("j", seen.id)] == ["cancelled: done"]
        client.post_training.delete("j")
        assert client.post_training.jobs() == []


def test_what_a_newer_server_tells_is_passed_over():
    following = Following("j", 0)
    known = (
        b'id: 1\nevent: log\ndata: {"id": 1, "at": "2026-01-01T00:00:00Z", "kind": "log", "message": "x", "new": 1}\n\n'
    )
    newer = b'id: 2\nevent: weather\ndata: {"id": 2, "sky": "blue"}\n\n'
    assert [event.message for event in following.feed(newer[:10])] == []
    following.connected()  # what was half there is asked for again
    assert [event.message for event in following.feed(known + newer + known)] == ["x"]
    assert following.call().headers["Last-Event-ID"] == "2"
    with pytest.raises(PostgradError, match="not expected"):
        list(following.feed(b"event: log\ndata: <html>\n\n"))


def test_a_server_that_stops_ends_its_streams_and_its_successor_goes_on(tmp_path: Path):
    home = tmp_path / "home"
    log = tmp_path / "log"
    port = free_port()
    events: list[Any] = []
    with StackClient(f"http://127.0.0.1:{port}") as client:
        with log.open("w") as stderr, served(home, "--port", str(port), stderr=stderr) as (_, process):
            store = JobStore(Database(f"sqlite:///{home / 'postgrad.db'}"))
            # Of a provider that this stack does not have, so that no worker takes it up.
            store.submit(make_spec("j", "elsewhere"), "body", max_queued=10)
            reading = threading.Thread(target=lambda: events.extend(client.post_training.events("j")))
            reading.start()
            time.sleep(1)  # for the stream to be open and quiet
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - began < 2
        with log.open("a") as stderr, served(home, "--port", str(port), stderr=stderr):
            store.request_cancel("j")
            reading.join(20)
            assert not reading.is_alive()
    store.database.close()
    assert [event.message for event in events] == ["scheduled: submitted", "cancelled: cancelled while waiting"]
    assert "Traceback" not in log.read_text()
    assert "exceeded" not in log.read_text()

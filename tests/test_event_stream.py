"""A job's events as a stream: nothing missed, nothing twice, however often the connection is cut."""

from __future__ import annotations

import gc
import inspect
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event as database_event
from sqlalchemy.exc import OperationalError

import apis.post_training.event_stream as wire
from apis.errors import InvalidField
from apis.post_training.models import JobEvent, JobEventKind, JobStatus
from apis.post_training.protocol import PostTraining
from post_training.client.following import EventParser
from tests.job_server import JOBS, JobServer, job_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    with job_server(tmp_path / "home") as made:
        yield made


class Reader:
    """A connection read by hand, as the HTTP and HTML standards have it, to be cut at any byte."""

    def __init__(self, server: JobServer, job_uuid: str, after: int = 0, **options: int) -> None:
        parts = urlsplit(server.url)
        self._socket = socket.socket()
        for name, value in options.items():
            self._socket.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        self._socket.settimeout(20)
        self._socket.connect((parts.hostname, parts.port))
        request = f"GET {JOBS}/{job_uuid}/events HTTP/1.0\r\nHost: here\r\nLast-Event-ID: {after}\r\n\r\n"
        self._socket.sendall(request.encode())
        self._text = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes more; all of them are kept. Empty at the end."""
        piece = self._socket.recv(size)
        self._text += piece
        return piece

    def until(self, text: str) -> None:
        while text.encode() not in self._text:
            assert self.read(4096), self._text

    def to_end(self) -> None:
        while self.read(65536):
            pass

    def events(self) -> list[dict[str, Any]]:
        """The whole events so far: fields of those that a blank line has closed."""
        _, _, body = self._text.partition(b"\r\n\r\n")
        blocks = body.split(b"\n\n")[:-1]
        lines = [
            dict(line.split(": ", 1) for line in block.decode().split("\n")) for block in blocks if block[:1] != b":"
        ]
        return [fields for fields in lines if "event" in fields]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # An abrupt end, as of a machine that is gone.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self._socket.close()


def open_streams() -> int:
    """How many streams the service still follows in this process."""
    gc.collect()
    # By exact type: `isinstance` runs code of whatever objects other tests have left.
    streams = [one for one in gc.get_objects() if type(one) is AsyncGeneratorType]
    return sum(stream.ag_code.co_qualname.endswith("EventStreams._events") for stream in streams)


def until(reached: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def stored_ids(server: JobServer, job_uuid: str) -> list[int]:
    return [event.id for event in server.store.events(job_uuid, 0, 100_000)]


def ended_job(server: JobServer, steps: int = 2, status: JobStatus = JobStatus.completed) -> None:
    owner = server.claim("j")
    for step in range(1, steps + 1):
        server.step("j", owner, step)
    server.finish("j", owner, status)


def test_the_stream_of_an_ended_job_tells_all_then_the_end_and_closes(server: JobServer):
    owner = server.claim("j")
    server.step("j", owner, 1)
    server.checkpoint("j", owner, 1)
    server.log("j", owner, "line separators \u2028 and \u0085\r\nin a message")
    server.finish("j", owner)
    answer = httpx.get(f"{server.url}{JOBS}/j/events", timeout=10)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-store", "no")
    first, *blocks = answer.text.removesuffix("\n\n").split("\n\n")
    assert first == "retry: 3000"
    assert answer.text.isascii()
    fields = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    assert [one["event"] for one in fields] == ["status", "status", "step", "checkpoint", "log", "status", "end"]
    told = [json.loads(one["data"]) for one in fields]
    assert [one.get("id") for one in fields] == [*(str(event["id"]) for event in told[:-1]), None]
    rows = server.store.events("j", 0)
    assert [event["id"] for event in told[:-1]] == [row.id for row in rows]
    assert [event["message"] for event in told[:-1]] == [row.message for row in rows]
    assert told[2]["step"] == told[2]["data"]["step"] == 1
    assert told[3]["data"] == {"identifier": "base-sft-j-1", "epoch": 1, "step": 1}
    assert told[4].keys() == {"id", "at", "kind", "message"}
    assert told[-1]["data"] == {"job_uuid": "j", "status": "completed", "error": None}


def test_the_end_of_a_failed_job_carries_its_error(server: JobServer):
    ended_job(server, status=JobStatus.failed)
    last = httpx.get(f"{server.url}{JOBS}/j/events").text.split("data: ")[-1]
    assert json.loads(last)["data"]["error"] == {"code": "disk_full", "message": "no space", "param": None}


def test_a_reader_that_comes_back_after_the_end_gets_what_it_missed_and_the_end_again(server: JobServer):
    ended_job(server)
    ids = stored_ids(server, "j")
    for seen in range(len(ids) + 1):
        after = ids[seen - 1] if seen else 0
        # The header goes before the query, which an EventSource repeats as it was.
        answer = httpx.get(f"{server.url}{JOBS}/j/events?after=1", headers={"Last-Event-ID": str(after)})
        got = [int(line[4:]) for line in answer.text.split("\n") if line.startswith("id: ")]
        assert got == ids[seen:]
        assert answer.text.count("event: end") == 1
    assert f"id: {ids[0]}" not in httpx.get(f"{server.url}{JOBS}/j/events?after={ids[0]}").text


def test_new_events_come_as_they_are_written(server: JobServer):
    owner = server.claim("j")
    with Reader(server, "j") as reader:
        reader.until("claimed")
        began = time.monotonic()
        server.step("j", owner, 1)
        reader.until("step 1")
        assert time.monotonic() - began < 2
        server.finish("j", owner)
        reader.to_end()
        assert [int(event["id"]) for event in reader.events()[:-1]] == stored_ids(server, "j")


def test_a_quiet_stream_says_that_it_lives(server: JobServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.05)
    server.submit("j")
    with Reader(server, "j") as reader:
        reader.until(": keep-alive\n\n: keep-alive\n\n")
        assert [event["event"] for event in reader.events()] == ["status"]


def test_a_hundred_cuts_lose_nothing_and_repeat_nothing(server: JobServer):
    owner = server.claim("j")
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            server.step("j", owner, step)
            time.sleep(0.002)
        server.finish("j", owner)

    writing = threading.Thread(target=write)
    writing.start()
    got: list[int] = []
    dice = random.Random(7)
    try:
        for _ in range(100):
            with Reader(server, "j", got[-1] if got else 0) as reader:
                left = dice.randrange(1, 4000)
                while left > 0 and (piece := reader.read(left)):
                    left -= len(piece)
                got += [int(event["id"]) for event in reader.events()]
    finally:
        done.set()
        writing.join()
    with Reader(server, "j", got[-1]) as reader:
        reader.to_end()
        *rest, end = reader.events()
    assert end["event"] == "end"
    assert got + [int(event["id"]) for event in rest] == stored_ids(server, "j")
    until(lambda: open_streams() == 0)
    until(lambda: server.database.engine.pool.checkedout() == 0)  # type: ignore[attr-defined]


def test_a_reader_that_takes_nothing_is_cut_off_and_can_read_on(server: JobServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "SLOW_READER_SECONDS", 0.3)
    owner = server.claim("j")
    for number in range(100):
        server.log("j", owner, f"{number} " + "x" * 100_000)
    server.finish("j", owner)
    with Reader(server, "j", SO_RCVBUF=4096) as reader:
        reader.until("retry")
        until(lambda: open_streams() == 0)
        reader.to_end()
        got = [int(event["id"]) for event in reader.events()]
    ids = stored_ids(server, "j")
    assert 0 < len(got) < len(ids)
    monkeypatch.undo()
    with Reader(server, "j", got[-1]) as again:
        again.to_end()
        assert got + [int(event["id"]) for event in again.events()[:-1]] == ids


def test_a_job_that_is_deleted_ends_its_streams(server: JobServer):
    owner = server.claim("j")
    with Reader(server, "j") as reader:
        reader.until("claimed")
        server.finish("j", owner)
        server.store.delete("j", lambda session: None)
        reader.to_end()
    assert httpx.get(f"{server.url}{JOBS}/j/events").status_code == 404


def test_a_store_that_fails_for_a_while_is_waited_for(server: JobServer):
    owner = server.claim("j")
    failed = threading.Event()

    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT"):
            failed.set()
            raise OperationalError(statement, None, Exception("away"))

    with Reader(server, "j") as reader:
        reader.until("claimed")
        database_event.listen(server.database.engine, "before_cursor_execute", fail)
        assert failed.wait(10)
        time.sleep(0.5)
        database_event.remove(server.database.engine, "before_cursor_execute", fail)
        server.finish("j", owner)
        reader.to_end()
        assert [int(event["id"]) for event in reader.events()[:-1]] == stored_ids(server, "j")


def test_other_requests_stay_quick_while_many_read_and_a_job_writes(server: JobServer):
    owner = server.claim("j")
    readers = [Reader(server, "j") for _ in range(20)]
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.wait(0.1):
            step += 1
            server.step("j", owner, step)

    writing = threading.Thread(target=write)
    writing.start()
    durations: list[float] = []
    with httpx.Client(base_url=server.url) as http:
        for _ in range(100):
            start = time.perf_counter()
            assert http.get(f"{JOBS}/j/status").status_code == 200
            durations.append(time.perf_counter() - start)
    done.set()
    writing.join()
    for reader in readers:
        reader.close()
    p99 = sorted(durations)[int(0.99 * len(durations))]
    print(f"p50 {1000 * sorted(durations)[50]:.1f} ms, p99 {1000 * p99:.1f} ms")
    assert p99 < 0.1


def test_the_service_keeps_the_protocol(server: JobServer):
    assert isinstance(server.service, PostTraining)
    assert inspect.iscoroutinefunction(server.service.stream_job_events)


_EVENTS = st.builds(
    JobEvent,
    id=st.integers(1, 2**53),
    at=st.datetimes(),
    kind=st.sampled_from(JobEventKind),
    message=st.text(),
    data=st.none()
    | st.dictionaries(
        st.text(max_size=5), st.none() | st.text() | st.floats(allow_nan=False, allow_infinity=False), max_size=3
    ),
)


@given(events=st.lists(_EVENTS, max_size=5), data=st.data())
def test_events_survive_the_wire_in_any_pieces(events: list[JobEvent], data: st.DataObject):
    sent = b"retry: 3000\n\n: keep-alive\n\n" + "".join(map(wire.frame, events)).encode("ascii")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    parser = EventParser()
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    got = [event for piece in pieces for event in parser.feed(piece)]
    assert [JobEvent.model_validate_json("\n".join(event.data)) for event in got] == events
    assert [(event.name, event.id) for event in got] == [
        (event.kind, None if event.kind == "end" else str(event.id)) for event in events
    ]


def test_a_number_that_json_does_not_have_is_null():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    event = JobEvent(id=1, at=at, kind=JobEventKind.step, message="x", data={"loss": float("nan"), "lr": float("inf")})
    assert json.loads(wire.frame(event).split("data: ")[1])["data"] == {"loss": None, "lr": None}


@pytest.mark.parametrize("header", ["", " 1", "+1", "-1", "1e3", "1_0", "¹", "9" * 19, "last"])
def test_what_is_no_event_id_is_refused(header: str):
    with pytest.raises(InvalidField, match="Last-Event-ID"):
        wire.event_id(header)
    assert wire.event_id("0123") == 123

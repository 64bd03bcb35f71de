"""What a client sees of a stream whose key is revoked: the events so far, then the end that HTTP has for it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import apis.post_training.event_stream as wire
from distributions.authentication import Authenticate, KeyRing
from post_training.catalog.keys import ApiKeys
from post_training.client.following import EventParser
from post_training.owners import acting_as, key_holder
from tests.in_memory_stack import serving
from tests.job_server import JOBS, JobServer


@dataclass
class Keyed:
    """A served job of a key, whose events go on."""

    jobs: JobServer
    keys: ApiKeys
    url: str
    key_id: str
    key: str
    owner: str

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=20)

    def follow(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        connection.request("GET", f"{JOBS}/j/events", headers={"Authorization": f"Bearer {self.key}"})
        return connection.getresponse()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    jobs = JobServer(tmp_path / "home")
    keys = ApiKeys(jobs.database)
    row, key = keys.create("alice")
    with acting_as(key_holder(row.id)):
        owner = jobs.claim("j")
    app = Authenticate(jobs.app(), KeyRing(keys), None)
    with serving(app) as url:
        yield Keyed(jobs, keys, url, row.id, key, owner)
    jobs.database.close()


def ended_stream(keyed: Keyed, step: int) -> bytes:
    """Read a stream until its end, its key revoked once the event of `step` has come."""
    connection = keyed.connect()
    answer = keyed.follow(connection)
    assert answer.getheader("transfer-encoding") == "chunked"
    body = b""
    while f"step {step}".encode() not in body:
        body += answer.read1(65536)
    keyed.keys.revoke(keyed.key_id)
    time.sleep(1.1)  # a server knows of it within a second
    keyed.jobs.step("j", keyed.owner, step + 1)
    # http.client raises IncompleteRead where the last chunk is missing.
    body += answer.read()
    # The connection is whole, too: the next request on it is answered, and refused.
    connection.request("GET", f"{JOBS}/j/status", headers={"Authorization": f"Bearer {keyed.key}"})
    assert connection.getresponse().status == 401
    connection.close()
    return body


def test_a_stream_whose_key_is_revoked_ends_between_events_as_http_has_it(keyed: Keyed):
    keyed.jobs.step("j", keyed.owner, 1)
    body = ended_stream(keyed, 1)
    assert body.endswith(b"\n\n")
    told = list(EventParser().feed(body))
    assert (told[-1].name, "step 1" in told[-1].data[0]) == ("step", True)
    assert b"step 2" not in body
    # Nothing says that the job ended.
    assert "end" not in [event.name for event in told]


def test_a_quiet_stream_ends_as_well(keyed: Keyed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.2)
    connection = keyed.connect()
    answer = keyed.follow(connection)
    assert answer.read1(65536)
    keyed.keys.revoke(keyed.key_id)
    began = time.monotonic()
    rest = answer.read()
    assert time.monotonic() - began < 3
    assert rest.endswith(b"\n\n")
    connection.close()

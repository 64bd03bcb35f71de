"""Data sets at URLs: fetched once, from listed hosts only, and never from inside a network."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpcore
import pyarrow
import pyarrow.parquet
import pytest

from apis.datasets.models import DATA_SOURCE, RegisterDatasetRequest, URIDataSource
from apis.errors import DataInvalid, InvalidField, PostgradError, TooLarge, Unavailable
from post_training.catalog import fetching
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.fetching import fetch
from post_training.data.addresses import check_url
from post_training.data.sources import SourcePolicy, open_rows
from post_training.jobs.database import Database
from providers.localfs.config import LocalFSConfig
from providers.localfs.provider import LocalFiles

ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
CSV = b"prompt,completion\none,eins\ntwo,zwei\n"

Answer = Callable[[BaseHTTPRequestHandler], None]


def give(content: bytes, content_type: str = "application/octet-stream", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def send_to(location: str, status: int = 302) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Location", location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def fail_with(status: int) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(status)

    return answer


@dataclass
class Site:
    """A web server on this machine.

    Attributes:
        pages: what it answers, by path.
        asked: path and Host header of every request, in order.
    """

    port: int
    pages: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.asked.append((self.path, self.headers["Host"]))
            with contextlib.suppress(ConnectionError):
                made.pages.get(self.path.partition("?")[0], fail_with(404))(self)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made = Site(server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def policy_for(site: Site, *hosts: str, **settings: Any) -> SourcePolicy:
    """A policy that lets this machine's own addresses through, as `allow_private_addresses` says."""
    allowed = [f"{host}:{site.port}" for host in hosts or ("127.0.0.1",)]
    return SourcePolicy(allowed_hosts=allowed, allow_private_addresses=True, **{"fetch_seconds": 10.0, **settings})


def fetched(url: str, policy: SourcePolicy) -> tuple[bytes, str]:
    file = io.BytesIO()
    kind = fetch(url, policy, file)
    return file.getvalue(), kind


def refusal(url: str, policy: SourcePolicy) -> PostgradError:
    with pytest.raises(PostgradError) as caught:
        fetched(url, policy)
    assert caught.value.param == "source.uri"
    return caught.value


# -- what is fetched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type", "kind"),
    [
        ("/a.jsonl", "text/html", "jsonl"),
        ("/A.CSV?download=1", "application/octet-stream", "csv"),
        ("/rows", "application/json", "json"),
        ("/rows", "text/csv; charset=utf-8", "csv"),
        ("/rows", "text/plain", "sniff"),
    ],
)
def test_a_file_arrives_as_it_is_with_its_kind(site: Site, path: str, content_type: str, kind: str):
    site.pages[path.partition("?")[0]] = give(JSONL, content_type)
    assert fetched(site.url(path), policy_for(site)) == (JSONL, kind)
    assert site.asked == [(path, f"127.0.0.1:{site.port}")]


def test_a_page_that_is_no_file_of_rows_is_refused_before_it_is_read(site: Site):
    site.pages["/page"] = give(b"<html>", "text/html")
    error = refusal(site.url("/page"), policy_for(site))
    assert isinstance(error, InvalidField)
    assert "text/html" in error.message
    assert ".jsonl" in error.message


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_to_listed_hosts(site: Site, status: int):
    site.pages |= {"/a": send_to("/b?x=1", status), "/b": send_to(site.url("/c.csv"), status), "/c.csv": give(CSV)}
    assert fetched(site.url("/a"), policy_for(site)) == (CSV, "csv")
    assert [path for path, _ in site.asked] == ["/a", "/b?x=1", "/c.csv"]


def test_a_circle_of_redirects_ends(site: Site):
    site.pages["/a.csv"] = send_to("/a.csv")
    assert "more than 5 times" in refusal(site.url("/a.csv"), policy_for(site)).message
    assert len(site.asked) == fetching.MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, DataInvalid), (403, DataInvalid), (206, DataInvalid), (500, Unavailable), (429, Unavailable)],
)
def test_any_other_answer_is_an_error_with_its_status(site: Site, status: int, kind: type[PostgradError]):
    site.pages["/a.csv"] = fail_with(status)
    error = refusal(site.url("/a.csv"), policy_for(site))
    assert isinstance(error, kind)
    assert f"status {status}" in error.message


def test_a_compressed_answer_is_refused_since_it_could_be_of_any_size(site: Site):
    site.pages["/a.csv"] = give(b"\x1f\x8b", Content_Encoding="gzip")
    assert "compresses" in refusal(site.url("/a.csv"), policy_for(site)).message


def test_a_proxy_of_the_environment_is_not_used(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    site.pages["/a.csv"] = give(CSV)
    assert fetched(site.url("/a.csv"), policy_for(site))[0] == CSV


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_file_over_the_limit_is_refused_by_its_length_or_as_it_arrives(site: Site):
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        sent.clear()
        for _ in range(10_000):
            handler.wfile.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
            sent.append(1024)

    sent: list[int] = []
    site.pages |= {"/long.csv": give(b"x" * 5000), "/exact.csv": give(b"x" * 4096), "/endless.csv": endless}
    policy = policy_for(site, max_fetch_bytes=4096)
    assert len(fetched(site.url("/exact.csv"), policy)[0]) == 4096
    for path in ("/long.csv", "/endless.csv"):
        file = io.BytesIO()
        with pytest.raises(TooLarge, match="4096 bytes") as caught:
            fetch(site.url(path), policy, file)
        assert caught.value.http_status == 413
        assert len(file.getvalue()) <= 4096


@pytest.mark.parametrize("dripping", ["head", "body", "silence"])
def test_a_server_that_takes_its_time_is_given_up_in_time(site: Site, dripping: str):
    def drip(handler: BaseHTTPRequestHandler) -> None:
        if dripping == "silence":
            time.sleep(3)
        if dripping == "body":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.03)

    site.pages["/a.csv"] = drip
    began = time.monotonic()
    error = refusal(site.url("/a.csv"), policy_for(site, fetch_seconds=0.5))
    assert isinstance(error, Unavailable)
    assert "longer than 0.5 s" in error.message
    assert time.monotonic() - began < 1.5


def test_a_file_that_breaks_off_is_not_taken_for_whole(site: Site):
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(JSONL)
        handler.close_connection = True

    site.pages["/a.jsonl"] = cut
    assert isinstance(refusal(site.url("/a.jsonl"), policy_for(site)), Unavailable)
    gone = site.port
    site.pages.clear()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = free.getsockname()[1]
    policy = SourcePolicy(allowed_hosts=[f"127.0.0.1:{gone}"], allow_private_addresses=True)
    assert "cannot be reached" in refusal(f"http://127.0.0.1:{gone}/a.csv", policy).message


# -- which hosts and addresses ---------------------------------------------------------------------------------------


def test_a_redirect_to_a_host_that_is_not_listed_is_not_followed(site: Site):
    site.pages |= {"/a.csv": send_to(site.url("/b.csv", "localhost")), "/b.csv": give(CSV)}
    assert "allowed_hosts" in refusal(site.url("/a.csv"), policy_for(site)).message
    assert [path for path, _ in site.asked] == ["/a.csv"]
    assert fetched(site.url("/a.csv"), policy_for(site, "127.0.0.1", "localhost"))[0] == CSV
    for location in ("file:///etc/passwd", "ftp://127.0.0.1/a.csv", "//user@127.0.0.1/", "http://[", "data:text/csv,a"):
        site.pages["/a.csv"] = send_to(location)
        assert isinstance(refusal(site.url("/a.csv"), policy_for(site)), InvalidField)


def test_a_redirect_from_https_to_http_is_not_followed():
    here = check_url("https://data.example.org/a.csv", ["data.example.org"])
    policy = SourcePolicy(allowed_hosts=["data.example.org"])
    assert fetching._next(here, "/b.csv", policy).url == "https://data.example.org:443/b.csv"
    with pytest.raises(InvalidField, match="from https to http"):
        fetching._next(here, "http://data.example.org/b.csv", policy)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0"])
def test_this_machine_is_refused_however_its_address_is_written(site: Site, host: str):
    site.pages["/a.csv"] = give(CSV)
    policy = SourcePolicy(allowed_hosts=[f"{host}:{site.port}"])
    assert "not one of the public internet" in refusal(site.url("/a.csv", host), policy).message
    assert site.asked == []


PUBLIC_ADDRESS = "93.184.216.34"


@dataclass
class Names:
    """A resolver that answers each time as told, and a network where the public address is the site's.

    Attributes:
        answers: the addresses of the name `moving.test`, for one question after the other; the last one stays.
        questions: how often it was asked.
        connected: the addresses that were connected to.
    """

    answers: list[list[str]] = field(default_factory=list)
    questions: int = 0
    connected: list[str] = field(default_factory=list)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made, resolve, connect = Names(), socket.getaddrinfo, vars(httpcore.AnyIOBackend)["connect_tcp"]

    def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "moving.test":
            return resolve(host, port, *args, **options)
        given = made.answers[min(made.questions, len(made.answers) - 1)]
        made.questions += 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in given]

    async def reach(backend: Any, host: str, port: int, *args: Any, **options: Any) -> Any:
        made.connected.append(host)
        there = "127.0.0.1" if host == PUBLIC_ADDRESS else host
        return await connect(backend, there, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", reach)
    return made


def moving(site: Site) -> tuple[str, SourcePolicy]:
    return site.url("/a.csv", "moving.test"), SourcePolicy(allowed_hosts=[f"moving.test:{site.port}"], fetch_seconds=10)


def test_a_name_is_asked_for_once_and_the_address_that_was_checked_is_connected_to(site: Site, names: Names):
    site.pages["/a.csv"] = give(CSV)
    names.answers = [[PUBLIC_ADDRESS], ["127.0.0.1"]]
    assert fetched(*moving(site))[0] == CSV
    assert (names.questions, names.connected) == (1, [PUBLIC_ADDRESS])
    # The name leads inside now.
    assert "not one of the public internet" in refusal(*moving(site)).message
    assert names.connected == [PUBLIC_ADDRESS]


def test_a_name_that_has_also_an_address_inside_is_refused_whole(site: Site, names: Names):
    names.answers = [[PUBLIC_ADDRESS, "10.0.0.1"]]
    assert "not one of the public internet" in refusal(*moving(site)).message
    assert names.connected == []


def test_a_redirect_is_resolved_and_checked_anew(site: Site, names: Names):
    def move(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/inside.csv")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True

    site.pages |= {"/a.csv": move, "/inside.csv": give(CSV)}
    names.answers = [[PUBLIC_ADDRESS], ["127.0.0.1"]]
    assert "not one of the public internet" in refusal(*moving(site)).message
    assert names.connected == [PUBLIC_ADDRESS]
    assert [path for path, _ in site.asked] == ["/a.csv"]


def test_a_name_without_an_address_is_said_to_have_none(site: Site, names: Names):
    names.answers = [[]]
    with pytest.raises(Unavailable):
        fetched(*moving(site))
    assert (
        "has no address"
        in refusal("http://no-such-host.invalid/a.csv", SourcePolicy(allowed_hosts=["no-such-host.invalid"])).message
    )


# -- as a data set ---------------------------------------------------------------------------------------------------


def catalog_for(home: Path, site: Site, **config: Any) -> DatasetCatalog:
    database = Database(f"sqlite:///{home}/postgrad.db")
    database.migrate()
    settings = {"allowed_hosts": [f"127.0.0.1:{site.port}"], "allow_private_addresses": True, **config}
    catalog = DatasetCatalog(database, home)
    catalog.attach_sources([LocalFiles("localfs", LocalFSConfig(**settings), [home / "data"])])
    return catalog


def request(url: str, dataset_id: str = "d") -> RegisterDatasetRequest:
    return RegisterDatasetRequest(source=URIDataSource(uri=url), dataset_id=dataset_id)


def files(home: Path) -> list[Path]:
    return [path for path in (home / "datasets").rglob("*") if path.is_file()] if (home / "datasets").exists() else []


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/a.jsonl", JSONL),
        ("/a.json", json.dumps(ROWS).encode()),
        ("/a.csv", CSV),
        ("/a.parquet", parquet()),
        ("/a", CSV),
    ],
)
async def test_a_data_set_at_a_url_is_fetched_once_and_read_from_its_copy(
    tmp_path: Path, site: Site, path: str, content: bytes
):
    catalog = catalog_for(tmp_path, site)
    site.pages[path] = give(content)
    made = await catalog.register_dataset(request(site.url(path)))
    assert made.source == URIDataSource(uri=site.url(path))
    site.pages.clear()
    assert (await catalog.iterrows("d", limit=-1)).data == ROWS
    assert await catalog.register_dataset(request(site.url(path))) == made
    reference = catalog.reference("d")
    reader = open_rows(DATA_SOURCE.validate_python(reference.source), SourcePolicy.model_validate(reference.policy))
    assert list(reader) == ROWS
    assert len(site.asked) == 1
    assert [file.read_bytes() for file in files(tmp_path)] == [content]
    with pytest.raises(InvalidField, match="cannot be appended to"):
        await catalog.append_rows("d", [{"prompt": "x"}])
    await catalog.unregister_dataset("d")
    assert files(tmp_path) == []


async def test_the_digest_follows_from_what_was_fetched_as_that_of_a_file(tmp_path: Path, site: Site):
    catalog = catalog_for(tmp_path, site)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "same.csv").write_bytes(CSV)
    site.pages |= {"/a.csv": give(CSV), "/b.csv": give(CSV + b"three,drei\n")}
    digests = []
    for name, uri in (("a", site.url("/a.csv")), ("b", site.url("/b.csv")), ("c", "same.csv")):
        await catalog.register_dataset(request(uri, name))
        reference = catalog.reference(name)
        source, policy = DATA_SOURCE.validate_python(reference.source), SourcePolicy.model_validate(reference.policy)
        digests.append(open_rows(source, policy).digest())
    assert digests[0] == digests[2] == hashlib.sha256(b"csv\n" + CSV).hexdigest()
    assert digests[1] != digests[0]


async def test_what_is_refused_leaves_nothing_behind(tmp_path: Path, site: Site):
    catalog = catalog_for(tmp_path, site, max_fetch_bytes=100)
    site.pages |= {
        "/bad.jsonl": give(b'{"a": 1}\n{"a": }\n'),
        "/empty.csv": give(b""),
        "/long.csv": give(b"x" * 200),
        "/pickle.pkl": give(b"\x80\x04K\x01.", "application/x-pickle"),
        "/pickle.csv": give(b"\x80\x04K\x01."),
    }
    for path, said in (
        ("/bad.jsonl", "row 1"),
        ("/empty.csv", "no rows"),
        ("/long.csv", "100 bytes"),
        ("/pickle.pkl", "x-pickle"),
        ("/pickle.csv", "not UTF-8"),
        ("/gone.csv", "status 404"),
    ):
        with pytest.raises(PostgradError, match=said):
            await catalog.register_dataset(request(site.url(path)))
    with pytest.raises(InvalidField, match="allowed_hosts"):
        await catalog.register_dataset(request("http://169.254.169.254/latest/meta-data"))
    assert files(tmp_path) == []
    assert (await catalog.list_datasets()).data == []


async def test_slow_servers_do_not_take_the_threads_of_other_requests(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
):
    catalog = catalog_for(tmp_path, site)
    let_go = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        let_go.wait(10)
        give(CSV)(handler)

    site.pages["/a.csv"] = wait
    waiting = [asyncio.create_task(catalog.register_dataset(request(site.url("/a.csv"), f"d{n}"))) for n in range(60)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    assert (await catalog.list_datasets()).data == []
    assert time.monotonic() - began < 1
    let_go.set()
    await asyncio.gather(*waiting)
    assert len((await catalog.list_datasets()).data) == 60


async def test_without_listed_hosts_no_url_is_read(tmp_path: Path, site: Site):
    catalog = catalog_for(tmp_path, site, allowed_hosts=[])
    with pytest.raises(InvalidField, match=r"not read over 'http' from 127\.0\.0\.1"):
        await catalog.register_dataset(request(site.url("/a.csv")))
    assert site.asked == []

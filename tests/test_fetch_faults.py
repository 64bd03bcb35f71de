"""Fetching a data set where something fails: names, TLS, the network, the disk, the server itself, other requests."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpcore._async.connection
import pytest

from apis.datasets.models import RegisterDatasetRequest, RowsDataSource, URIDataSource
from apis.errors import DataInvalid, DiskFull, PostgradError, Unavailable
from post_training.catalog import datasets as catalog_datasets
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.fetching import fetch
from post_training.data.sources import SourcePolicy
from post_training.jobs.database import Database
from providers.localfs.config import LocalFSConfig
from providers.localfs.provider import LocalFiles

CSV = b"prompt,completion\none,eins\ntwo,zwei\n"
ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/csv\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(CSV) + CSV
LONG = HEAD + b"Content-Length: 100000\r\n\r\n" + CSV
# A certificate for localhost, good until 2099, whose key is no secret.
PEM = Path(__file__).parent / "data" / "localhost.pem"

Behaviour = Callable[[socket.socket], None]


@contextmanager
def listening(behave: Behaviour) -> Iterator[int]:
    """A server that does with each connection, once it was asked, what `behave` says; gives its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    behave(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def tls(behave: Behaviour) -> Behaviour:
    """The same behaviour inside TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)

    def wrapped(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            behave(secured)

    return wrapped


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the test's certificate trusted, as one of a known authority is."""
    monkeypatch.setattr(
        httpcore._async.connection, "default_ssl_context", lambda: ssl.create_default_context(cafile=str(PEM))
    )


def saying(*pieces: bytes) -> Behaviour:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)

    return behave


def policy_for(port: int, host: str = "localhost", **settings: Any) -> SourcePolicy:
    defaults = {"allow_private_addresses": True, "fetch_seconds": 10.0}
    return SourcePolicy(allowed_hosts=[f"{host}:{port}"], **{**defaults, **settings})


def refusal(port: int, scheme: str = "http", **settings: Any) -> PostgradError:
    with pytest.raises(PostgradError) as caught:
        fetch(f"{scheme}://localhost:{port}/a.csv", policy_for(port, **settings), io.BytesIO())
    assert caught.value.param == "source.uri"
    return caught.value


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_server_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch):
    let_go = threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        let_go.wait(20)
        raise socket.gaierror("too late")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    began = time.monotonic()
    error = refusal(80, fetch_seconds=0.3)
    assert time.monotonic() - began < 2
    assert isinstance(error, Unavailable)
    assert "address of localhost could not be found out within 0.3 s (`fetch_seconds`" in error.message
    let_go.set()


def test_a_process_ends_although_a_name_server_has_not_answered():
    program = """
import io, socket, threading
from post_training.catalog.fetching import fetch
from post_training.data.sources import SourcePolicy
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
try:
    fetch("http://a.test/a.csv", SourcePolicy(allowed_hosts=["a.test"], fetch_seconds=0.1), io.BytesIO())
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "Unavailable\n"


# -- the network -----------------------------------------------------------------------------------------------------


def garbled(connection: socket.socket) -> None:
    """In the middle of the body, what no key has encrypted."""
    connection.recv(65536)
    connection.sendall(LONG)
    time.sleep(0.05)
    os.write(connection.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
    time.sleep(0.2)


def reset(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(LONG)
    time.sleep(0.05)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.usefixtures("trusted")
def test_a_file_arrives_over_tls():
    file = io.BytesIO()
    with listening(tls(saying(WHOLE))) as port:
        assert fetch(f"https://localhost:{port}/a.csv", policy_for(port), file) == "csv"
    assert file.getvalue() == CSV


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("behave", [garbled, reset, saying(LONG)], ids=["garbled", "reset", "cut"])
def test_tls_that_breaks_in_the_middle_of_a_body_is_no_fault_of_this_server(behave: Behaviour):
    with listening(tls(behave)) as port:
        error = refusal(port, "https")
    assert isinstance(error, Unavailable)
    assert "broke off" in error.message


def test_a_certificate_that_is_not_trusted_is_said_to_be_none():
    with listening(tls(saying(WHOLE))) as port:
        error = refusal(port, "https")
    assert isinstance(error, DataInvalid)
    assert "certificate of the data set's server is not trusted here (self-signed certificate)" in error.message


@pytest.mark.usefixtures("trusted")
def test_a_certificate_of_another_host_is_not_taken():
    with listening(tls(saying(WHOLE))) as port, pytest.raises(DataInvalid, match="IP address mismatch"):
        fetch(f"https://127.0.0.1:{port}/a.csv", policy_for(port, "127.0.0.1"), io.BytesIO())


@pytest.mark.parametrize(
    ("pieces", "scheme"),
    [
        ((), "http"),
        ((b"",), "https"),
        ((b"nonsense\r\n\r\n",), "http"),
        ((b"nonsense\r\n\r\n",), "https"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",), "http"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",), "http"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",), "http"),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,), "http"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",), "http"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",), "http"),
        ((HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + CSV,), "http"),
        ((b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",), "http"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), "http"),
        ((b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",), "http"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n",), "http"),
        ((b"HTTP/1.1 302 Found\r\nLocation: /\xff\r\nContent-Length: 0\r\n\r\n",), "http"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://localhost:99999/\r\nContent-Length: 0\r\n\r\n",), "http"),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://.localhost:0/\r\nContent-Length: 0\r\n\r\n",), "http"),
    ],
)
def test_an_answer_that_is_no_http_is_an_error_of_ours_and_no_other(pieces: tuple[bytes, ...], scheme: str):
    with listening(saying(*pieces)) as port:
        error = refusal(port, scheme)
    assert error.http_status in (400, 503)


def test_a_connection_that_is_reset_in_the_body_is_no_fault_of_this_server():
    with listening(reset) as port:
        assert isinstance(refusal(port), Unavailable)


def test_a_host_name_that_no_resolver_takes_is_said_to_have_no_address():
    for host in ("a..example", f"{'x' * 64}.example", "_.", "xn--a.example"):
        policy = SourcePolicy(allowed_hosts=[host.removesuffix(".")])
        with pytest.raises(PostgradError) as caught:
            fetch(f"http://{host}/a.csv", policy, io.BytesIO())
        assert caught.value.http_status in (400, 503)


# -- the disk --------------------------------------------------------------------------------------------------------


def open_catalog(home: Path, *ports: int) -> DatasetCatalog:
    database = Database(f"sqlite:///{home}/postgrad.db")
    database.migrate()
    catalog = DatasetCatalog(database, home)
    config = LocalFSConfig(allowed_hosts=[f"localhost:{port}" for port in ports], allow_private_addresses=True)
    catalog.attach_sources([LocalFiles("localfs", config, [home / "data"])])
    return catalog


def from_url(port: int, dataset_id: str = "d") -> RegisterDatasetRequest:
    return RegisterDatasetRequest(source=URIDataSource(uri=f"http://localhost:{port}/a.csv"), dataset_id=dataset_id)


def stored(home: Path) -> list[Path]:
    return [path for path in (home / "datasets").rglob("*") if path.is_file()]


class _Device(io.RawIOBase):
    """A file that takes nothing."""

    def __init__(self, error: int) -> None:
        self._error = error

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_file_that_cannot_be_written_is_told_from_a_network_that_fails(number: int):
    device: Any = _Device(number)
    with listening(saying(WHOLE)) as port, pytest.raises(OSError) as caught:
        fetch(f"http://localhost:{port}/a.csv", policy_for(port), device)
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, DiskFull, "no space left"),
        (errno.EDQUOT, DiskFull, "no space left"),
        (errno.EIO, Unavailable, "could not be written"),
        (errno.EROFS, Unavailable, "could not be written"),
    ],
)
async def test_a_disk_that_fails_is_a_503_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[PostgradError], said: str
):
    def failing(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    inline = RegisterDatasetRequest(source=RowsDataSource(rows=ROWS), dataset_id="inline")
    with listening(saying(WHOLE)) as port:
        catalog = open_catalog(tmp_path, port)
        for request in (from_url(port), inline):
            with monkeypatch.context() as patch:
                patch.setattr(catalog_datasets.os, "fsync", failing)
                with pytest.raises(kind, match=said) as caught:
                    await catalog.register_dataset(request)
            assert caught.value.http_status == 503
            assert stored(tmp_path) == []
            await catalog.register_dataset(request)
            await catalog.unregister_dataset(request.dataset_id or "")


async def test_a_state_folder_without_the_right_to_write_is_a_503(tmp_path: Path):
    with listening(saying(WHOLE)) as port:
        catalog = open_catalog(tmp_path, port)
        (tmp_path / "datasets").write_text("in the way")
        with pytest.raises(Unavailable, match="could not be written"):
            await catalog.register_dataset(from_url(port))


# -- a server that breaks off ----------------------------------------------------------------------------------------


def test_what_a_killed_server_had_fetched_so_far_is_gone_once_the_next_one_starts(tmp_path: Path):
    def stall(connection: socket.socket) -> None:
        saying(LONG)(connection)
        time.sleep(30)

    program = """
import asyncio, sys
from pathlib import Path
from tests.test_fetch_faults import from_url, open_catalog
port = int(sys.argv[2])
asyncio.run(open_catalog(Path(sys.argv[1]), port).register_dataset(from_url(port)))
"""
    catalog = open_catalog(tmp_path)
    asyncio.run(catalog.register_dataset(RegisterDatasetRequest(source=RowsDataSource(rows=ROWS), dataset_id="kept")))
    kept = stored(tmp_path)
    with listening(stall) as port:
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(port)])
        deadline = time.monotonic() + 30
        while stored(tmp_path) == kept and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert len(stored(tmp_path)) == 2
    catalog.discard_unfinished()
    assert stored(tmp_path) == kept
    assert asyncio.run(catalog.iterrows("kept")).data == ROWS


def test_a_stack_that_starts_discards_what_is_unfinished(tmp_path: Path):
    from tests.test_keys import asked_stack

    async def start() -> None:
        async with asked_stack(tmp_path / "home", None):
            pass

    asyncio.run(start())
    leftover = tmp_path / "home" / "datasets" / "+unfinished" / "0123"
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(CSV)
    asyncio.run(start())
    assert not leftover.exists()


# -- other requests --------------------------------------------------------------------------------------------------


def test_registering_and_unregistering_one_id_at_once_fails_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each removes the folder that the others are about to write to."""
    faults: list[BaseException] = []
    make = Path.mkdir

    def make_and_wait(self: Path, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        time.sleep(0.01)

    monkeypatch.setattr(Path, "mkdir", make_and_wait)
    with listening(saying(WHOLE)) as port:
        catalog = open_catalog(tmp_path, port)

        def work(request: RegisterDatasetRequest) -> None:
            try:
                for _ in range(15):
                    catalog._register(request, None)
                    with suppress(PostgradError):
                        catalog._unregister("d")
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=[from_url(port)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    assert stored(tmp_path) == []
    with closing(catalog._database):
        assert catalog._list().data == []

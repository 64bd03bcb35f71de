"""What a data set on the hub may make this machine read: files on the hub, whatever its README names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from apis.datasets.models import URIDataSource
from apis.errors import DataInvalid
from post_training.data.sources import SourcePolicy, open_rows

COMMIT = "a" * 40
ROWS = [{"n": 0}, {"n": 1}]


@dataclass
class Hub:
    """A server that answers for one data set, `org/name`, as the hub does.

    Attributes:
        readme: the data set's card.
        rows: of its one file.
        asked: every path that was asked for.
    """

    url: str
    readme: str = ""
    rows: list[dict[str, Any]] = field(default_factory=lambda: ROWS)
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        content = b"".join(json.dumps(row).encode() + b"\n" for row in self.rows)
        files = {"README.md": self.readme.encode(), "train.jsonl": content}
        described = [{"type": "file", "path": n, "size": len(b), "oid": f"{len(b):040}"} for n, b in files.items()]
        if path.startswith("/api/datasets/org/name/"):
            wanted = "/tree/" in path or "/paths-info/" in path
            return (200, json.dumps(described if wanted else []).encode()) if wanted else (200, self._info())
        if path == "/api/datasets/org/name":
            return 200, self._info()
        if path.startswith(f"/datasets/org/name/resolve/{COMMIT}/"):
            found = files.get(path.rpartition("/")[2])
            return (404, b"{}") if found is None else (200, found)
        return 404, b"{}"

    def _info(self) -> bytes:
        named = {"id": "org/name", "sha": COMMIT, "private": False, "gated": False, "tags": [], "downloads": 0}
        return json.dumps({**named, "siblings": [{"rfilename": "README.md"}, {"rfilename": "train.jsonl"}]}).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = made.answer(self.path.partition("?")[0])
            headers = {"ETag": f'"{len(body):040}"', "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
            if status == 404:
                headers["X-Error-Code"] = "EntryNotFound"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    for name, value in {"HF_ENDPOINT": made.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def read() -> list[dict[str, Any]]:
    source = URIDataSource(uri="huggingface://datasets/org/name?split=train")
    return list(open_rows(source, SourcePolicy(allow_hub=True)))


def card(hub: Hub, **config: str) -> None:
    lines = [f"  {name}: {json.dumps(value)}" for name, value in config.items()]
    hub.readme = "\n".join(["---", "configs:", "- config_name: default", *lines, "---", "# A data set"])


def test_files_of_the_data_set_itself_are_read(hub: Hub):
    card(hub, data_files="train.jsonl")
    assert read() == ROWS


def test_a_cell_that_names_a_file_or_url_as_its_image_stays_what_it_is(hub: Hub, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    hub.rows = [{"n": {"path": place, "bytes": None}} for place in (str(secret), f"{hub.url}/inside.png")]
    hub.readme = "\n".join(
        (
            "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl",
            "dataset_info:\n  features:\n  - name: n\n    dtype: image\n---\n# A data set",
        )
    )
    assert read() == hub.rows
    assert "/inside.png" not in hub.asked


@pytest.mark.parametrize(
    "place", ["{file}", "file:{file}", "{folder}/*.jsonl", "{url}", "a b::{url}", "zip://*::{url}"]
)
def test_files_elsewhere_are_not_even_looked_for(hub: Hub, tmp_path: Path, place: str):
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"secret": 1}\n')
    card(hub, data_files=place.format(file=secret, folder=tmp_path, url=f"{hub.url}/inside.jsonl"))
    with pytest.raises(DataInvalid) as caught:
        read()
    assert caught.value.message == "the data set's README names files that do not lie on the hub"
    assert hub.asked
    assert "/inside.jsonl" not in hub.asked

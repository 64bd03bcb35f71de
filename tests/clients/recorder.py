"""A proxy between a client and the server that remembers what was asked for: methods, paths and shapes of bodies."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive"}
_PIECE = 65536


class Recorder(ThreadingHTTPServer):
    """Passes everything on to `target` and answers with what it answers, streams piece by piece.

    Attributes:
        names: what stands in a record for each id of the run, so that records of two runs are equal.
    """

    daemon_threads = True

    def __init__(self, target: str, names: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        # The longest first: one id may be the beginning of another.
        self.names = dict(sorted(names.items(), key=lambda item: -len(item[0])))
        self.requests: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def remember(self, method: str, path: str, body: bytes, user_agent: str) -> None:
        split = urlsplit(path)
        entry: dict[str, Any] = {"method": method, "path": self._named(unquote(split.path))}
        if query := sorted(name for name, _ in parse_qsl(split.query, keep_blank_values=True)):
            entry["query"] = query
        if quote(unquote(split.path)) != split.path:
            entry["quoted"] = True
        if body:
            entry["body"] = shape(json.loads(body))
        # Made by the standard library, where the client lacks the verb.
        if user_agent.startswith("Python-urllib"):
            entry["by"] = "http"
        with self._lock:
            self.requests[json.dumps(entry, sort_keys=True)] = entry

    def _named(self, path: str) -> str:
        for value, name in self.names.items():
            path = path.replace(value, name)
        return path

    def recorded(self) -> list[dict[str, Any]]:
        """Each request once, by path and method."""
        with self._lock:
            return [self.requests[key] for key in sorted(self.requests, key=self._place)]

    def _place(self, key: str) -> tuple[str, str, str]:
        return self.requests[key]["path"], self.requests[key]["method"], key


def shape(value: Any) -> Any:
    """The names of a JSON value's fields with the kinds of their values; of a list, the shape of its first item."""
    if isinstance(value, dict):
        return {name: shape(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "number"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.remember(self.command, self.path, body, self.headers.get("user-agent", ""))
        connection = http.client.HTTPConnection(self.server.target, timeout=120)
        try:
            connection.request(self.command, self.path, body or None, self._headers(self.headers.items()))
            self._answer(connection.getresponse())
        finally:
            connection.close()

    def _headers(self, items: Any) -> dict[str, str]:
        return {name: value for name, value in items if name.lower() not in _OF_THE_CONNECTION}

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in self._headers(answer.getheaders()).items():
            self.send_header(name, value)
        chunked = answer.chunked
        if chunked:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(_PIECE):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = do_HEAD = _pass_on


@contextmanager
def recording(target: str, names: Mapping[str, str]) -> Iterator[Recorder]:
    """A recorder that serves on a free port of the loopback address."""
    with Recorder(target, names) as recorder:
        thread = threading.Thread(target=recorder.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield recorder
        finally:
            recorder.shutdown()
            thread.join()

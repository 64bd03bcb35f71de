"""A whole stack to throw anything at, called in this process: real stores, files, catalogs and routes.

No job runs: its scheduler is never started. Around its state folder lies a tree that it must neither read nor change.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import requests
from fastapi import FastAPI
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from urllib3 import HTTPResponse

from apis.datasets.models import RegisterDatasetRequest
from distributions.resolver import plan
from distributions.run_config import StackRunConfig
from distributions.server import create_app
from distributions.stack import Stack, build_stack
from post_training.jobs.scheduler import Scheduler
from tests.job_server import JobServer
from tests.tiny_llama import save_tiny_llama

MODEL, DATASET = "lab/tiny", "lab/data"
ENDED, WAITING, STEP, FILE = "lab/ended", "lab/waiting", 4, "adapter/adapter_config.json"
ROWS = [{"prompt": "one", "completion": "eins"}, {"prompt": "two", "completion": "zwei"}]
SECRET = "hunter2-3141592653589793"
_SECONDS = 60
_STREAM_PARTS, _STREAM_SECONDS = 8, 0.2


@dataclass
class Answer:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class FuzzedStack:
    """Use as made by `fuzzed_stack`.

    Attributes:
        outside: a folder beside the state folder and the allowed root, with secrets in it.
        opened: every path of `outside` that was opened or listed in this process, while `watching`.
    """

    def __init__(self, root: Path) -> None:
        self.home, self.outside, self.data = root / "home", root / "outside", root / "data"
        self.opened: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.stack, self.app = self._run(self._build())

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_SECONDS)

    async def _build(self) -> tuple[Stack, FastAPI]:
        self._plant()
        config = StackRunConfig.model_validate(
            {
                "providers": {
                    "post_training": [{"provider_id": "torchtune", "provider_type": "inline::torchtune"}],
                    "datasetio": [
                        {
                            "provider_id": "localfs",
                            "provider_type": "inline::localfs",
                            "config": {"allowed_roots": [str(self.data)]},
                        }
                    ],
                    "inference": [
                        {
                            "provider_id": "transformers",
                            "provider_type": "inline::transformers",
                            "config": {"device": "cpu", "dtype": "fp32", "threads": 1, "default_max_tokens": 2},
                        }
                    ],
                },
                "jobs": {"devices": ["cpu"], "max_queued": 100_000},
            }
        )
        config._environ = {"POSTGRAD_HOME": str(self.home)}
        stack = await build_stack(config, plan(config))
        request = {"dataset_id": DATASET, "source": {"type": "rows", "rows": ROWS}}
        await stack.datasets.register_dataset(RegisterDatasetRequest.model_validate(request))
        with stack.models.database.session() as session:
            stack.models.add_base(session, MODEL, save_tiny_llama(self.home / "models" / "tiny", context=32), {})
        await stack.start()
        return stack, create_app(stack)

    def _plant(self) -> None:
        for folder in (self.outside, self.data):
            folder.mkdir(parents=True)
        for name in (
            "secret.jsonl",
            "secret.json",
            "secret.csv",
            "config.json",
            "adapter_config.json",
            "manifest.json",
        ):
            (self.outside / name).write_text(f'{{"prompt": "{SECRET}", "completion": "{SECRET}"}}\n')
        (self.data / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        (self.data / "link.jsonl").symlink_to(self.outside / "secret.jsonl")
        (self.data / "folder").symlink_to(self.outside)
        jobs = JobServer(self.home)
        owner = jobs.claim(ENDED)
        checkpoint = jobs.checkpoint(ENDED, owner, STEP)
        jobs.finish(ENDED, owner)
        jobs.submit(WAITING)
        jobs.database.close()
        (checkpoint / "link").symlink_to(self.outside / "secret.json")
        (self.home / "models").mkdir(exist_ok=True)
        (self.home / "models" / "link").symlink_to(self.outside)

    def close(self) -> None:
        self._run(self.stack.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(
        self,
        method: str,
        target: str | bytes,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request, its target taken apart as a server does it. A stream is left after some of its parts."""
        return self._run(self._call(method, target, body, headers or {}))

    async def _call(self, method: str, target: str | bytes, body: bytes, headers: dict[str, str]) -> Answer:
        raw = target.encode("latin-1", "surrogateescape") if isinstance(target, str) else target
        path, _, query = raw.partition(b"?")
        fields = {"host": "localhost", "content-length": str(len(body)), **{k.lower(): v for k, v in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method.upper(),
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in fields.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        answer, parts, streams, given = Answer(), 0, False, False
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal parts, streams
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]]
                streams = any(v.startswith("text/event-stream") for k, v in answer.headers if k == "content-type")
                if streams:
                    self._loop.call_later(_STREAM_SECONDS, over.set)
            elif message["type"] == "http.response.body":
                answer.body += message.get("body", b"")
                parts += 1
                if not message.get("more_body", False) or (streams and parts >= _STREAM_PARTS):
                    over.set()

        task = asyncio.create_task(self.app(scope, receive, send))
        left = asyncio.create_task(over.wait())
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not task.done():
            await asyncio.wait({task}, timeout=5)
            task.cancel()
        await asyncio.gather(task, return_exceptions=not task.done())
        return answer

    def session(self) -> requests.Session:
        """A `requests` session whose every call is answered by this stack."""
        session = requests.Session()
        session.mount("http://", _Adapter(self))
        return session

    def tree_outside(self) -> dict[str, str]:
        """Every file below `outside` with its content's hash, and every folder."""
        return {
            str(path.relative_to(self.outside)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            for path in sorted(self.outside.rglob("*"))
        }


class _Adapter(BaseAdapter):
    def __init__(self, stack: FuzzedStack) -> None:
        super().__init__()
        self._stack = stack

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        url = urlsplit(str(request.url))
        body: Any = request.body or b""
        content = body.encode() if isinstance(body, str) else bytes(body)
        answer = self._stack.call(
            str(request.method),
            url.path + (f"?{url.query}" if url.query else ""),
            content,
            {
                key: value if isinstance(value, str) else value.decode("latin-1")
                for key, value in request.headers.items()
            },
        )
        response = requests.Response()
        response.status_code, response.url, response.request = answer.status, str(request.url), request
        response.headers = CaseInsensitiveDict(answer.headers)
        response.reason = HTTPStatus(answer.status).phrase
        response.raw = HTTPResponse(io.BytesIO(answer.body), dict(answer.headers), answer.status, preload_content=False)
        response._content = answer.body
        return response

    def close(self) -> None:
        pass


_watched: list[FuzzedStack] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _watched and isinstance(arguments[0], str | os.PathLike):
        path = os.path.realpath(os.fspath(arguments[0]))
        for stack in _watched:
            if path.startswith(str(stack.outside)):
                stack.opened.append(path)


sys.addaudithook(_watch)


@contextmanager
def fuzzed_stack(root: Path) -> Iterator[FuzzedStack]:
    """Build a stack in `root`; its folders are `home`, `data` (an allowed root) and `outside`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "start", lambda self: None)
        stack = FuzzedStack(root)
        try:
            yield stack
        finally:
            stack.close()


@contextmanager
def watching(stack: FuzzedStack) -> Iterator[None]:
    """Note every path of `outside` that this process opens or lists."""
    _watched.append(stack)
    try:
        yield
    finally:
        _watched.remove(stack)

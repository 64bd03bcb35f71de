"""Our two clients behind one face, so that a test is written once for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from post_training.client import AsyncStackClient, StackClient


class Session:
    """One of the two clients, driven alike: `do` returns a verb's result, `collect` a stream's items."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner() if kind == "async" else None
        self._client: Any = AsyncStackClient(url, **options) if self._runner else StackClient(url, **options)

    def do(self, verb: Callable[[Any], Any]) -> Any:
        if self._runner is None:
            return verb(self._client)

        async def call() -> Any:
            return await verb(self._client)

        return self._runner.run(call())

    def collect(self, verb: Callable[[Any], Any], into: list[Any]) -> None:
        if self._runner is None:
            into.extend(item for item in verb(self._client))
            return

        async def read() -> None:
            async for item in verb(self._client):
                into.append(item)

        self._runner.run(read())

    def close(self) -> None:
        self.do(lambda client: client.close())
        if self._runner is not None:
            self._runner.close()

"""The connection to one training server: calls side by side, and a heartbeat that goes on whatever the caller does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from apis.errors import PostgradError, Unavailable
from post_training.client import sft_calls
from post_training.client.core import Call, Settings
from post_training.client.transport import AsyncTransport

T = TypeVar("T")
HEARTBEATS_PER_LEASE = 5
_LOOK_SECONDS = 1.0
_HEARTBEAT_TIMEOUT = 15.0
_MISSED_HEARTBEATS = 2


class LoopThread:
    """An event loop in a thread of its own, so that calls and heartbeats go on while the caller reads its data."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgrad-sft", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which an exception in this thread (Ctrl-C) cancels."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self.start(_cancel_others()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def training_settings(server_url: str, timeout: float, max_retries: int) -> Settings:
    """How to reach the training server at `http://session:<token>@host:port`.

    The token goes into a header: a URL is what errors and logs quote.
    """
    parts = urlsplit(server_url)
    base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    return Settings(base, unquote(parts.password) if parts.password else None, timeout, max_retries)


class Link:
    """One training server. From `keep_alive` on it is told that its client lives, until `close`."""

    def __init__(self, loop: LoopThread, settings: Settings) -> None:
        self._loop = loop
        self._transport = AsyncTransport(settings)
        self._heartbeat: Future[None] | None = None
        self._missed = 0

    @property
    def address(self) -> str:
        return self._transport.settings.base_url

    def start(self, call: Call[T]) -> Future[T]:
        """Send `call` without waiting for its answer."""
        return self._loop.start(self._transport.send(call))

    def send(self, call: Call[T]) -> T:
        """Send `call` and wait for its answer. Raises PostgradError."""
        future = self.start(call)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise

    def wait(self, future: Future[T]) -> T:
        """The answer to a started call. Raises PostgradError; Unavailable also once the server misses heartbeats."""
        while not wait([future], _LOOK_SECONDS).done:
            if self._missed >= _MISSED_HEARTBEATS:
                raise Unavailable(f"the training server at {self.address} no longer answers")
        return future.result()

    def keep_alive(self, lease_seconds: float) -> None:
        """Send a heartbeat every fifth of the lease."""
        if self._heartbeat is None:
            self._heartbeat = self._loop.start(self._beat(lease_seconds / HEARTBEATS_PER_LEASE))

    async def _beat(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                await asyncio.wait_for(self._transport.send(sft_calls.heartbeat()), _HEARTBEAT_TIMEOUT)
                self._missed = 0
            except (PostgradError, TimeoutError):
                # The calls that wait find out why; a heartbeat only says that they wait in vain.
                self._missed += 1

    def close(self) -> None:
        """Stop the heartbeat and drop the connections, with what still waits on them."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._loop.run(self._transport.close())

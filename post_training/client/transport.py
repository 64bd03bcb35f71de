"""The I/O of both clients: send a `Call`, retry what may be retried, read the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast

import httpx

from apis.errors import PostgradError
from post_training.client.core import END_OF_STREAM, Call, Settings, read, read_event, retry_delay
from post_training.client.errors import unreachable

T = TypeVar("T")


class _Transport:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def _arguments(self, call: Call[Any]) -> dict[str, Any]:
        params = {key: value for key, value in call.params.items() if value is not None}
        arguments: dict[str, Any] = {"method": call.method, "url": self.settings.base_url + call.path, "params": params}
        arguments["headers"] = call.headers
        if call.patience > self.settings.timeout:
            arguments["timeout"] = httpx.Timeout(self.settings.timeout, read=call.patience)
        if call.body is not None:
            arguments["json"] = call.body
        return arguments

    def _delay(self, call: Call[Any], attempt: int, outcome: httpx.Response | httpx.TransportError) -> float | None:
        if attempt >= self.settings.max_retries:
            return None
        if isinstance(outcome, httpx.Response) and not outcome.is_error:
            return None
        return retry_delay(call, attempt, outcome)

    def _unreachable(self, cause: httpx.TransportError) -> PostgradError:
        return unreachable(self.settings.base_url, cause, self.settings.timeout)


class SyncTransport(_Transport):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._http = httpx.Client(**settings.httpx_options())

    def send(self, call: Call[T]) -> T:
        """Send, retrying what may be retried, and read the answer. Raises PostgradError."""
        return read(call, self._answer(call, stream=False))

    def stream(self, call: Call[T]) -> Iterator[T]:
        """Yield each event of a server-sent stream. Retries only before the stream begins. Raises PostgradError."""
        with self.opened(call) as response:
            for line in response.iter_lines():
                if (event := read_event(call, line)) is END_OF_STREAM:
                    return
                if event is not None:
                    yield cast(T, event)

    @contextmanager
    def opened(self, call: Call[Any]) -> Iterator[httpx.Response]:
        """A success whose body the block reads. Raises PostgradError; Unavailable also where the body is cut short."""
        response = self._answer(call, stream=True)
        try:
            if response.is_error:
                response.read()
                read(call, response)
            yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        finally:
            response.close()

    def _answer(self, call: Call[Any], *, stream: bool) -> httpx.Response:
        attempt = 0
        while True:
            outcome = self._try_once(call, stream=stream)
            delay = self._delay(call, attempt, outcome)
            if delay is None:
                break
            if isinstance(outcome, httpx.Response):
                outcome.close()
            time.sleep(delay)
            attempt += 1
        if isinstance(outcome, httpx.TransportError):
            raise self._unreachable(outcome) from outcome
        return outcome

    def _try_once(self, call: Call[Any], *, stream: bool) -> httpx.Response | httpx.TransportError:
        try:
            return self._http.send(self._http.build_request(**self._arguments(call)), stream=stream)
        except httpx.TransportError as error:
            return error

    def close(self) -> None:
        self._http.close()


class AsyncTransport(_Transport):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._http = httpx.AsyncClient(**settings.httpx_options())

    async def send(self, call: Call[T]) -> T:
        """As `SyncTransport.send`."""
        return read(call, await self._answer(call, stream=False))

    async def stream(self, call: Call[T]) -> AsyncIterator[T]:
        """As `SyncTransport.stream`."""
        async with self.opened(call) as response:
            async for line in response.aiter_lines():
                if (event := read_event(call, line)) is END_OF_STREAM:
                    return
                if event is not None:
                    yield cast(T, event)

    @asynccontextmanager
    async def opened(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        """As `SyncTransport.opened`."""
        response = await self._answer(call, stream=True)
        try:
            if response.is_error:
                await response.aread()
                read(call, response)
            yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        finally:
            await response.aclose()

    async def _answer(self, call: Call[Any], *, stream: bool) -> httpx.Response:
        attempt = 0
        while True:
            outcome = await self._try_once(call, stream=stream)
            delay = self._delay(call, attempt, outcome)
            if delay is None:
                break
            if isinstance(outcome, httpx.Response):
                await outcome.aclose()
            await asyncio.sleep(delay)
            attempt += 1
        if isinstance(outcome, httpx.TransportError):
            raise self._unreachable(outcome) from outcome
        return outcome

    async def _try_once(self, call: Call[Any], *, stream: bool) -> httpx.Response | httpx.TransportError:
        try:
            return await self._http.send(self._http.build_request(**self._arguments(call)), stream=stream)
        except httpx.TransportError as error:
            return error

    async def close(self) -> None:
        await self._http.aclose()

"""The worker process as the server sees it: started when needed, many requests over one pipe, never orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable

from apis.errors import PostgradError, QueueFull, Unavailable
from post_training.processes import python_module, torch_environment
from providers.inference.config import TransformersInferenceConfig
from providers.inference.wire import Done, GenerateRequest, WireError

WORKER_MODULE = "providers.inference.worker"
MAX_LINE_BYTES = 16 * 2**20
GRACE_SECONDS = 2.0
Event = str | Done | PostgradError
_log = logging.getLogger(__name__)


class WorkerProcess:
    """One running worker. Over once `closed` is set; a new one takes its place."""

    def __init__(self, process: Process, on_idle: Callable[[], None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._on_idle = on_idle
        self._numbers = itertools.count(1)
        self._events: dict[int, asyncio.Queue[Event]] = {}
        self._fatal: str | None = None
        self._reader = asyncio.create_task(self._read())
        self.closed = False

    @classmethod
    async def start(cls, config: TransformersInferenceConfig, on_idle: Callable[[], None]) -> WorkerProcess:
        """Start the process; it gets ready while the first request waits in its pipe."""
        process = await asyncio.create_subprocess_exec(
            *(*python_module(WORKER_MODULE), config.model_dump_json()),
            stdin=PIPE,
            stdout=PIPE,
            env=_environment(),
            limit=MAX_LINE_BYTES,
            # Its own group: Ctrl-C in the server's terminal is the server's to handle.
            process_group=0,
        )
        _log.info("inference worker started, process %d", process.pid)
        return cls(process, on_idle)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pending(self) -> int:
        return len(self._events)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[str | Done]:
        """Text as it comes, then Done. Closing the generator early cancels the generation in the worker.

        Raises:
            PostgradError: what the worker raised; Unavailable if it died.
        """
        number = next(self._numbers)
        events = self._events[number] = asyncio.Queue()
        finished = False
        try:
            await self._send({"id": number, "generate": request.model_dump(mode="json")})
            while not finished:
                event = await events.get()
                finished = not isinstance(event, str)
                if isinstance(event, PostgradError):
                    raise event
                yield event
        finally:
            del self._events[number]
            if not finished and not self.closed:
                self._stdin.write(_line({"id": number, "cancel": True}))
            if not self._events:
                self._on_idle()

    async def _send(self, message: dict[str, object]) -> None:
        if self.closed:
            raise self._gone()
        try:
            self._stdin.write(_line(message))
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            await self._reader
            raise self._gone() from None

    async def _read(self) -> None:
        """Hand out the worker's events until it ends, then fail whatever still waits."""
        try:
            async for line in self._stdout:
                self._hand_out(json.loads(line))
        except Exception:
            _log.exception("the inference worker cannot be read any more; it is stopped")
            self._kill()
        except BaseException:  # cancelled: nobody will read what the worker says
            self._kill()
            raise
        finally:
            await self._process.wait()
            self.closed = True
            self._stdin.close()
            for events in self._events.values():
                events.put_nowait(self._gone())

    def _hand_out(self, message: dict[str, object]) -> None:
        if "fatal" in message:
            self._fatal = str(message["fatal"])
            return
        events = self._events.get(int(str(message["id"])))
        if events is None:
            return  # cancelled meanwhile
        if "text" in message:
            events.put_nowait(str(message["text"]))
        elif "done" in message:
            events.put_nowait(Done.model_validate(message["done"]))
        else:
            events.put_nowait(WireError.model_validate(message["error"]).to_exception())

    def _gone(self) -> Unavailable:
        if self._fatal:
            return Unavailable(self._fatal)
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended ({code})"
        return Unavailable(f"the inference worker {how}; the next request starts a new one, so send it again")

    async def stop(self) -> None:
        """End the process: it ends by itself when its stdin does, and is killed if it has not in two seconds."""
        self._stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._reader), GRACE_SECONDS)
        except TimeoutError:
            self._kill()
            await self._reader

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class WorkerPool:
    """Keeps one worker for those who ask: starts it, replaces it when it died, ends it when idle."""

    def __init__(self, config: TransformersInferenceConfig) -> None:
        self._config = config
        self._worker: WorkerProcess | None = None
        self._starting = asyncio.Lock()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._shut_down = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[str | Done]:
        """As WorkerProcess.generate. Raises QueueFull where too many requests wait."""
        worker = await self._ready_worker()
        if worker.pending >= self._config.max_pending_requests:
            raise QueueFull(f"{worker.pending} requests wait for inference already: try again later")
        async with contextlib.aclosing(worker.generate(request)) as events:
            async for event in events:
                yield event

    async def _ready_worker(self) -> WorkerProcess:
        async with self._starting:
            if self._shut_down:
                raise Unavailable("the server is shutting down")
            self._cancel_timer()
            if self._worker is None or self._worker.closed:
                self._worker = await WorkerProcess.start(self._config, self._start_timer)
            return self._worker

    @property
    def worker(self) -> WorkerProcess | None:
        """The running worker, or None."""
        return None if self._worker is None or self._worker.closed else self._worker

    def _start_timer(self) -> None:
        self._cancel_timer()
        if self._config.idle_unload_seconds is not None and not self._shut_down:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._config.idle_unload_seconds, self._unload)

    def _cancel_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _unload(self) -> None:
        if self._worker is None or self._worker.pending:
            return
        worker, self._worker = self._worker, None
        _log.info("inference worker unused for %s s, unloading", self._config.idle_unload_seconds)
        self._stopping = asyncio.create_task(worker.stop())

    async def shutdown(self) -> None:
        """End the worker within seconds; requests that run get Unavailable."""
        self._shut_down = True
        async with self._starting:
            self._cancel_timer()
            if self._stopping is not None:
                await self._stopping
            if self._worker is not None:
                await self._worker.stop()


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _environment() -> dict[str, str]:
    """The worker never asks a hub for anything."""
    return torch_environment() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

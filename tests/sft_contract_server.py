"""A scheduler of SFT sessions and their training servers behind real HTTP, with a model of exact arithmetic.

The "weights" are a hash that each optimizer step folds its batch into, so that an order that is wrong, a batch that is
lost or one that is trained twice shows in every later checkpoint. Servers can be killed at a chosen step; what was not
durable is lost with them, as with a real one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from apis.errors import CheckpointNotFound, Conflict, DataInvalid, InvalidField, JobNotFound, Unauthorized, Unavailable
from apis.sft_sessions.models import (
    ListSessionsResponse,
    SessionActionResponse,
    SessionState,
    SessionStatusResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from apis.sft_sessions.routes import create_scheduler_router, create_training_router
from apis.sft_sessions.training_models import (
    Batch,
    CallResponse,
    EndResponse,
    ForwardBackwardRequest,
    ForwardBackwardResponse,
    HealthResponse,
    ListCheckpointsResponse,
    LoadCheckpointRequest,
    OptimStepRequest,
    SaveCheckpointRequest,
    SaveCheckpointResponse,
    SessionCheckpoint,
    TrainingStatusResponse,
    TrainStepRequest,
    TrainStepResponse,
    ValidateRequest,
    ValidateResponse,
)
from distributions.errors import add_exception_handlers, error_response
from tests.sft_contract_parts import Served, Weights, batch_bytes, canonical, folded

T = TypeVar("T")
MODEL = "lab/exact"
_ENDED = (SessionState.COMPLETED, SessionState.FAILED, SessionState.CANCELLED)


@dataclass
class Record:
    """What the store knows of a session.

    Attributes:
        trained: the number of each call that was done and the weights after it, in every life of the server.
        answers: to calls that were done, with a hash of each.
        heartbeats: how many came.
        most_ahead: how far ahead of the next step one was sent.
    """

    job_id: str
    body: bytes
    request: SubmitJobRequest
    state: SessionState = SessionState.QUEUED
    paused: bool = False
    error: str | None = None
    server: TrainingApp | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    durable: Weights = field(default_factory=Weights)
    named: dict[str, Weights] = field(default_factory=dict)
    checkpoints: list[SessionCheckpoint] = field(default_factory=list)
    trained: list[tuple[int, bytes]] = field(default_factory=list)
    answers: dict[int, tuple[bytes, BaseModel]] = field(default_factory=dict)
    lives: int = 0
    heartbeats: int = 0
    most_ahead: int = 0
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def weights(self) -> str:
        """Of the newest checkpoint."""
        return self.durable.weights


class TrainingApp:
    """One life of a session's training server; implements apis.sft_sessions.TrainingServer."""

    def __init__(self, stack: Stack, record: Record) -> None:
        self._stack, self._record = stack, record
        self._now = record.durable.copy()
        kept = record.answers if stack.keep_answers else {}
        self._answers = record.answers = {n: one for n, one in kept.items() if n <= record.durable.number}
        self._waiting: dict[int, tuple[bytes, asyncio.Future[Any]]] = {}
        self._moved = asyncio.Condition()
        self._busy = asyncio.Lock()
        self._heard_at = time.monotonic()
        self.dead = False
        app = FastAPI()
        add_exception_handlers(app)
        app.include_router(create_training_router(self))
        self.served = Served(self._guarded(app))
        self._watch = asyncio.create_task(self._watch_lease())

    @property
    def url(self) -> str:
        return f"http://session:{self._record.token}@127.0.0.1:{self.served.port}"

    def kill(self) -> None:
        self.dead = True
        self._watch.cancel()
        self.served.kill()

    def save(self) -> None:
        self._record.durable = self._now.copy()

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        login = base64.b64encode(f"session:{self._record.token}".encode()).decode()
        allowed = {f"Bearer {self._record.token}", f"Basic {login}"}

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            shown = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
            if scope["type"] == "http" and shown not in allowed:
                await error_response(Unauthorized("this is another session's server"), scope["path"])(
                    scope, receive, send
                )
                return
            self._heard_at = time.monotonic()
            await app(scope, receive, send)
            self._heard_at = time.monotonic()

        return guard

    async def _watch_lease(self) -> None:
        lease = self._record.request.config.lease_seconds
        while time.monotonic() - self._heard_at < lease:
            await asyncio.sleep(lease / 20)
        self.save()
        self._stack.pause(self._record)

    # -- numbered calls ------------------------------------------------------------------------------------------

    async def train_step(self, request: TrainStepRequest) -> TrainStepResponse:
        async def work(number: int) -> TrainStepResponse:
            self._check(request)
            return self._update([*self._now.pending, batch_bytes(request)], request, number)

        return await self._numbered(request, work)

    async def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResponse:
        async def work(number: int) -> ForwardBackwardResponse:
            self._check(request)
            self._now.pending.append(batch_bytes(request))
            self._advance(number, request.cursor)
            return ForwardBackwardResponse(
                **self._place(number), loss=1.0, tokens=1, supervised_tokens=1, weight=1.0, seconds=0.0
            )

        return await self._numbered(request, work)

    async def optim_step(self, request: OptimStepRequest) -> TrainStepResponse:
        async def work(number: int) -> TrainStepResponse:
            if not self._now.pending:
                raise InvalidField("no gradients wait", param="step")
            return self._update(self._now.pending, request, number)

        return await self._numbered(request, work)

    async def load_checkpoint(self, request: LoadCheckpointRequest) -> CallResponse:
        async def work(number: int) -> CallResponse:
            if request.name not in self._record.named:
                raise CheckpointNotFound(f"there is no checkpoint {request.name!r}", param="name")
            self._now = self._record.named[request.name].copy()
            self._advance(number, request.cursor)
            return CallResponse(**self._place(number))

        return await self._numbered(request, work)

    def _update(self, batches: list[bytes], request: TrainStepRequest | OptimStepRequest, number: int) -> Any:
        self._now.weights = folded(self._now.weights, batches)
        self._now.pending = []
        self._now.global_steps += 1
        self._advance(number, request.cursor)
        return TrainStepResponse(
            **self._place(number),
            loss=int(self._now.weights[:8], 16) / 2**32,
            grad_norm=1.0,
            lr=request.lr or 1e-3,
            tokens=10,
            supervised_tokens=5,
            weight=5.0,
            seconds=0.01,
            tokens_per_second=1000.0,
            skipped=False,
        )

    def _advance(self, number: int, cursor: dict[str, Any] | None) -> None:
        self._now.number, self._now.cursor = number, cursor or self._now.cursor
        every = self._record.request.config.save_every_n_steps
        if every and number % every == 0:
            self.save()

    def _place(self, number: int) -> dict[str, Any]:
        return {
            "step": number,
            "global_steps": self._now.global_steps,
            "last_durable_step": self._record.durable.number,
            "metrics": {},
        }

    def _check(self, batch: Batch) -> None:
        for index, row in enumerate(batch.rows or ()):
            if "bad" in row:
                raise DataInvalid("this row cannot be used", row=index, pointer="/bad")

    async def _numbered(self, request: Any, work: Callable[[int], Awaitable[Any]]) -> Any:
        digest = hashlib.sha256(canonical([type(request).__name__, request.model_dump(mode="json")])).digest()
        if request.step is None:
            async with self._busy:
                return await work(self._now.number + 1)
        known = self._known(request.step, digest)
        if known is not None:
            return await asyncio.shield(known)
        return await self._in_turn(request.step, digest, work)

    def _known(self, number: int, digest: bytes) -> asyncio.Future[Any] | None:
        """The answer, given or to come, of a call that is here already."""
        config, done = self._record.request.config, self._now.number
        self._record.most_ahead = max(self._record.most_ahead, number - done - 1)
        if number > done + 1 + config.window:
            raise InvalidField(f"step {number} is too far ahead of {done + 1}", param="step")
        if number in self._waiting:
            first, future = self._waiting[number]
        elif number <= done:
            if number not in self._answers:
                raise InvalidField(f"the answer to step {number} is no longer kept", param="step")
            future = asyncio.get_running_loop().create_future()
            first, answer = self._answers[number]
            future.set_result(answer)
        else:
            return None
        if first != digest:
            raise Conflict(f"step {number} was sent with another body", param="step")
        return future

    async def _in_turn(self, number: int, digest: bytes, work: Callable[[int], Awaitable[Any]]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (digest, future)
        try:
            async with self._moved:
                await self._moved.wait_for(lambda: self._now.number >= number - 1 or self.dead)
            async with self._busy:
                answer = await self._do(number, digest, work)
        except BaseException as error:
            future.cancel()
            del self._waiting[number]
            raise error
        del self._waiting[number]
        future.set_result(answer)
        async with self._moved:
            self._moved.notify_all()
        return answer

    async def _do(self, number: int, digest: bytes, work: Callable[[int], Awaitable[Any]]) -> Any:
        await self._stack.at("before", number)
        await asyncio.sleep(self._stack.step_seconds)
        self._alive()
        answer = await work(number)
        self._answers[number] = (digest, answer)
        self._record.trained.append((number, self._now.weights.encode()))
        await self._stack.at("after", number)
        self._alive()
        return answer

    def _alive(self) -> None:
        if self.dead:
            raise Unavailable("the server was killed")

    # -- the rest ------------------------------------------------------------------------------------------------

    async def health(self) -> HealthResponse:
        return HealthResponse()

    async def status(self) -> TrainingStatusResponse:
        config = self._record.request.config
        return TrainingStatusResponse(
            job_id=self._record.job_id,
            model=config.model or MODEL,
            global_steps=self._now.global_steps,
            next_step=self._now.number + 1,
            last_durable_step=self._record.durable.number,
            window=config.window,
            lease_seconds=config.lease_seconds,
            cursor=self._now.cursor,
            pending_gradients=bool(self._now.pending),
        )

    async def heartbeat(self) -> TrainingStatusResponse:
        self._record.heartbeats += 1
        return await self.status()

    async def validate(self, request: ValidateRequest) -> ValidateResponse:
        """Rows say themselves what their `loss`, `weight`, `tokens` and `right` (predicted tokens) are."""
        self._check(request)
        rows = request.rows or []
        weight, tokens = sum(row["weight"] for row in rows), sum(row["tokens"] for row in rows)
        loss = math.fsum(row["loss"] * row["weight"] for row in rows) / weight
        return ValidateResponse(
            loss=loss,
            perplexity=math.exp(loss),
            token_accuracy=sum(row["right"] for row in rows) / tokens,
            supervised_tokens=tokens,
            weight=weight,
            global_steps=self._now.global_steps,
            metrics={},
        )

    async def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        async with self._moved:
            await self._moved.wait_for(lambda: self._now.number >= (request.after_step or 0) or self.dead)
        self._alive()
        name = request.name or f"step{self._now.number}"
        known = next((one for one in self._record.checkpoints if one.name == name), None)
        if known is not None and known.step != self._now.number:
            raise Conflict(f"there is a checkpoint {name!r} of another step", param="name")
        checkpoint = known or self._new_checkpoint(name)
        await self._stack.at("saved", self._now.number)
        self._alive()
        result = {"global_steps": self._now.global_steps, "checkpoint_dir": checkpoint.identifier}
        return SaveCheckpointResponse(checkpoint=checkpoint, result=result)

    def _new_checkpoint(self, name: str) -> SessionCheckpoint:
        self._record.named[name] = self._now.copy()
        self.save()
        checkpoint = SessionCheckpoint(
            name=name,
            identifier=f"{MODEL}-sft-{self._record.job_id}-{name}",
            step=self._now.number,
            global_steps=self._now.global_steps,
            state="verifying",
            created_at=datetime.now(UTC),
        )
        self._record.checkpoints.append(checkpoint)
        asyncio.get_running_loop().call_later(0.05, self._verified, checkpoint)
        return checkpoint

    def _verified(self, checkpoint: SessionCheckpoint) -> None:
        checkpoint.state = self._stack.verdict

    async def checkpoints(self) -> ListCheckpointsResponse:
        return ListCheckpointsResponse(checkpoints=self._record.checkpoints)

    async def complete(self) -> EndResponse:
        await self._stack.complete_job(self._record.job_id)
        return EndResponse(message="completed")

    async def pause(self) -> EndResponse:
        self.save()
        # Once this answer is on its way.
        asyncio.get_running_loop().call_later(0.05, self._stack.pause, self._record)
        return EndResponse(message="paused")


Fault = Callable[["Stack"], Coroutine[Any, Any, None]]


class Stack:
    """The scheduler; implements apis.sft_sessions.SFTSessions. Its methods for tests may be called from any thread.

    Attributes:
        step_seconds: that each step takes.
        start_seconds: between a submit, or a loss, and a server that runs.
        notice_seconds: for which a server that was killed is still said to run.
        faults: what to do once, by when ("before" or "after" a step, "saved") and by the call's number.
        verdict: of the verification of checkpoints.
        keep_answers: whether a server that starts anew has the answers to the steps that are durable.
    """

    def __init__(self, api_key: str | None = None) -> None:
        self.step_seconds = 0.0
        self.start_seconds = 0.02
        self.notice_seconds = 0.05
        self.faults: dict[tuple[str, int], Fault] = {}
        self.verdict: Any = "ready"
        self.keep_answers = True
        self.sessions: dict[str, Record] = {}
        self.submits = 0
        self._api_key = api_key
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._app = FastAPI()
        add_exception_handlers(self._app)
        self._app.include_router(create_scheduler_router(self))
        self.loop = asyncio.new_event_loop()
        self.served: Served | None = None

    @property
    def url(self) -> str:
        assert self.served is not None
        return f"http://127.0.0.1:{self.served.port}"

    async def open(self, port: int = 0) -> None:
        self.served = Served(self._guard, port)
        await self.served.started()

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if self._api_key is not None and shown != f"Bearer {self._api_key}":
            await error_response(Unauthorized("no such key"), scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def at(self, when: str, number: int) -> None:
        fault = self.faults.pop((when, number), None)
        if fault is not None:
            await fault(self)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` where the servers run."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def record(self, job_id: str) -> Record:
        if job_id not in self.sessions:
            raise JobNotFound(f"there is no session {job_id!r}", param="job_id")
        return self.sessions[job_id]

    # -- life of a session ---------------------------------------------------------------------------------------

    def _start(self, record: Record, after: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._bring_up(record, after))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, record: Record, after: float) -> None:
        await asyncio.sleep(after)
        record.state = SessionState.STARTING
        await asyncio.sleep(self.start_seconds)
        if record.state is SessionState.STARTING and not self._closed:
            record.lives += 1
            record.server = TrainingApp(self, record)
            await record.server.served.started()
            record.state = SessionState.RUNNING

    def _stop(self, record: Record) -> None:
        if record.server is not None:
            record.server.kill()

    def pause(self, record: Record) -> None:
        self._stop(record)
        record.state, record.paused, record.server = SessionState.QUEUED, True, None

    def kill(self) -> None:
        """Kill every training server; what is not durable is lost, and each starts anew."""
        for record in self.sessions.values():
            if record.server is not None and not record.server.dead:
                self._stop(record)
                self._start(record, self.notice_seconds)

    async def down(self, seconds: float) -> None:
        """Kill the scheduler too, and start it again on its port."""
        assert self.served is not None
        self.kill()
        port = self.served.port
        self.served.kill()
        await asyncio.sleep(seconds)
        if not self._closed:
            await self.open(port)

    def fail(self, record: Record, reason: str) -> None:
        self._stop(record)
        record.state, record.error = SessionState.FAILED, reason

    def close(self) -> None:
        self._closed = True
        for record in self.sessions.values():
            self._stop(record)
        assert self.served is not None
        self.served.kill()

    # -- the API -------------------------------------------------------------------------------------------------

    async def submit_job(self, request: SubmitJobRequest) -> SubmitJobResponse:
        self.submits += 1
        job_id, body = request.job_id or secrets.token_hex(4), canonical(request.model_dump(mode="json"))
        known = self.sessions.get(job_id)
        if known is not None and known.body != body:
            raise Conflict(f"job {job_id!r} was submitted with another body", param="job_id")
        if known is None:
            known = self.sessions[job_id] = Record(job_id, body, request)
            self._start(known)
        return SubmitJobResponse(job_id=job_id, status=known.state, message="accepted")

    async def job_status(self, job_id: str) -> SessionStatusResponse:
        record = self.record(job_id)
        running = record.state is SessionState.RUNNING and record.server is not None
        return SessionStatusResponse(
            job_id=job_id,
            status=record.state,
            server_url=record.server.url if running and record.server else None,
            created_at=record.created_at,
            started_at=record.created_at if record.lives else None,
            error_message=record.error,
            paused=record.paused,
            last_durable_step=record.durable.number or None,
        )

    async def list_sessions(self) -> ListSessionsResponse:
        jobs = [await self.job_status(job_id) for job_id in self.sessions]
        return ListSessionsResponse(jobs=[job.model_copy(update={"server_url": None}) for job in jobs])

    async def cancel_session(self, job_id: str) -> SessionActionResponse:
        record = self.record(job_id)
        self._stop(record)
        record.state = SessionState.CANCELLED
        return SessionActionResponse(job_id=job_id, status=record.state, message="cancelled")

    async def complete_job(self, job_id: str) -> SessionActionResponse:
        record = self.record(job_id)
        if record.state in _ENDED:
            raise Conflict(f"session {job_id!r} has ended", param="job_id")
        if record.server is not None:
            record.server.save()
        self._stop(record)
        record.state, record.paused = SessionState.COMPLETED, False
        return SessionActionResponse(job_id=job_id, status=record.state, message="completed")

    async def resume_job(self, job_id: str) -> SubmitJobResponse:
        record = self.record(job_id)
        if record.state in _ENDED:
            raise Conflict(f"session {job_id!r} has ended", param="job_id")
        if record.paused:
            record.paused = False
            self._start(record)
        return SubmitJobResponse(job_id=job_id, status=record.state, message="resumed")


async def kill(stack: Stack) -> None:
    """A fault: the training servers die where they stand."""
    stack.kill()


def down(seconds: float) -> Fault:
    """A fault: everything is away for so long."""

    async def fault(stack: Stack) -> None:
        task = asyncio.get_running_loop().create_task(stack.down(seconds))
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)

    return fault


@contextmanager
def running_stack(api_key: str | None = None) -> Iterator[Stack]:
    """A stack whose servers run in a thread of their own."""
    stack = Stack(api_key)
    thread = threading.Thread(target=stack.loop.run_forever, name="sft-contract-server", daemon=True)
    thread.start()
    try:
        stack.call(stack.open())
        yield stack
    finally:
        stack.call(_shut(stack))
        stack.loop.call_soon_threadsafe(stack.loop.stop)
        thread.join()
        stack.loop.close()


async def _shut(stack: Stack) -> None:
    stack.close()
    await asyncio.sleep(0.05)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""A stack in memory behind real HTTP: the routers of `apis`, each over a small implementation that keeps state.

A job takes one step of its life each time its status is asked for, so that tests see every state without clocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import apis.datasets.routes
import apis.inference.routes
import apis.inspect.routes
import apis.models.routes
import apis.post_training.routes
from apis.datasets import Dataset, IterrowsResponse, ListDatasetsResponse, RegisterDatasetRequest, Row
from apis.errors import (
    CheckpointNotFound,
    Conflict,
    DatasetNotFound,
    FileMissing,
    InvalidField,
    JobNotFound,
    ModelNotFound,
    NonFiniteLoss,
    NotFound,
    NotSupported,
    Unauthorized,
    Unavailable,
)
from apis.inference import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    Usage,
)
from apis.inspect import HealthInfo, ListProvidersResponse, ListRoutesResponse, ProviderInfo, RouteInfo, VersionInfo
from apis.models import ListModelsResponse, Model, RegisterModelRequest
from apis.post_training import (
    Checkpoint,
    CheckpointFile,
    CheckpointFilesResponse,
    JobError,
    JobEvent,
    JobEventKind,
    JobProgress,
    JobStatus,
    JobSummary,
    ListOrder,
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PostTrainingMetric,
    PreferenceOptimizeRequest,
    PreflightReport,
    PreflightRequest,
    StepMetric,
    StoredFile,
    SupervisedFineTuneRequest,
)
from distributions.errors import add_exception_handlers, error_response

BASE_MODEL = "lab/tiny-135M"
DIVERGING_MODEL = "lab/diverging"
STEPS = 4
ADAPTER_FILE, ADAPTER_BYTES = "adapter/adapter_config.json", b'{"r": 16}'
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class DatasetStore:
    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._rows: dict[str, list[Row]] = {}

    async def register_dataset(self, request: RegisterDatasetRequest) -> Dataset:
        identifier = request.dataset_id or f"dataset-{len(self._datasets)}"
        known = self._datasets.get(identifier)
        if known is not None:
            if known.source != request.source:
                raise Conflict(f"dataset {identifier!r} has another source", param="dataset_id")
            return known
        dataset = Dataset(
            identifier=identifier,
            provider_resource_id=identifier,
            provider_id="localfs",
            purpose=request.purpose,
            source=request.source,
            metadata=request.metadata or {},
        )
        self._datasets[identifier] = dataset
        self._rows[identifier] = list(request.source.rows) if request.source.type == "rows" else []
        return dataset

    async def list_datasets(self) -> ListDatasetsResponse:
        return ListDatasetsResponse(data=list(self._datasets.values()))

    async def get_dataset(self, dataset_id: str) -> Dataset:
        return self.find(dataset_id)

    async def unregister_dataset(self, dataset_id: str) -> None:
        self.find(dataset_id)
        del self._datasets[dataset_id]

    async def iterrows(
        self, dataset_id: str, start_index: int | None = None, limit: int | None = None
    ) -> IterrowsResponse:
        self.find(dataset_id)
        rows, start = self._rows[dataset_id], start_index or 0
        end = len(rows) if limit in (None, -1) else start + limit
        return IterrowsResponse(data=rows[start:end], has_more=end < len(rows))

    async def append_rows(self, dataset_id: str, rows: list[Row]) -> None:
        if self.find(dataset_id).source.type != "rows":
            raise InvalidField("only a data set registered by rows can be appended to", param="dataset_id")
        self._rows[dataset_id] += rows

    def find(self, dataset_id: str) -> Dataset:
        if dataset_id not in self._datasets:
            raise DatasetNotFound(f"dataset {dataset_id!r} is not registered", param="dataset_id")
        return self._datasets[dataset_id]


class ModelStore:
    def __init__(self) -> None:
        self._models = {identifier: _model(identifier, identifier) for identifier in (BASE_MODEL, DIVERGING_MODEL)}

    async def list_models(self) -> ListModelsResponse:
        return ListModelsResponse(data=list(self._models.values()))

    async def get_model(self, model_id: str) -> Model:
        return self.find(model_id)

    async def register_model(self, request: RegisterModelRequest) -> Model:
        target = self.find(request.provider_model_id or request.model_id)
        if request.model_id in self._models and request.model_id != target.identifier:
            raise Conflict(f"model id {request.model_id!r} is taken", param="model_id")
        model = _model(request.model_id, target.identifier, request.metadata)
        self._models[request.model_id] = model
        return model

    async def unregister_model(self, model_id: str) -> None:
        self.find(model_id)
        del self._models[model_id]

    def find(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise ModelNotFound(f"model {model_id!r} is not registered", param="model")
        return self._models[model_id]


def _model(identifier: str, resource: str, metadata: dict[str, Any] | None = None) -> Model:
    return Model(
        identifier=identifier,
        provider_resource_id=resource,
        provider_id="transformers",
        id=identifier,
        created=0,
        metadata=metadata or {},
    )


@dataclass
class Job:
    request: SupervisedFineTuneRequest
    ticks: int = 0
    cancelled: bool = False

    @property
    def step(self) -> int:
        return min(max(self.ticks - 3, 0), STEPS)

    @property
    def status(self) -> JobStatus:
        if self.cancelled:
            return JobStatus.cancelled
        if self.request.model == DIVERGING_MODEL and self.step >= 2:
            return JobStatus.failed
        if self.ticks < 2:
            return JobStatus.scheduled
        return JobStatus.completed if self.ticks > STEPS + 3 else JobStatus.in_progress

    def events(self) -> list[JobEvent]:
        """What has happened so far: numbered from 1, at a fixed time."""
        told: list[tuple[JobEventKind, str, int | None]] = [(JobEventKind.log, "job accepted", None)]
        told += [(JobEventKind.step, f"step {step}", step) for step in range(1, self.step + 1)]
        if self.status.terminal:
            told.append((JobEventKind.status, f"{self.status}: it ended", None))
        return [
            JobEvent(id=number, at=EPOCH, kind=kind, message=message, step=step)
            for number, (kind, message, step) in enumerate(told, 1)
        ]


@dataclass
class PostTrainingService:
    datasets: DatasetStore
    models: ModelStore
    folder: Path
    jobs: dict[str, Job] = field(default_factory=dict)

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        known = self.jobs.get(request.job_uuid)
        if known is not None and known.request != request:
            raise Conflict(f"job {request.job_uuid!r} exists with another body", param="job_uuid")
        if known is None:
            self._check(request)
            self.jobs[request.job_uuid] = Job(request)
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        """Every character is a token, every row a step; the last row is dropped."""
        self._check(request.as_job("preflight"))
        config = request.training_config
        assert config.data_config is not None
        rows = (await self.datasets.iterrows(config.data_config.dataset_id)).data
        texts = ["".join(message["content"] for message in row["messages"]) for row in rows[:-1]]
        last = {"count": 1, "first_rows": [len(rows) - 1]}
        none = {"count": 0, "first_rows": []}
        epochs, tokens = config.n_epochs or 3, sum(map(len, texts))
        steps = len(texts) * epochs
        question, answer = (message["content"] for message in rows[0]["messages"])
        return PreflightReport.model_validate(
            {
                "dataset": {
                    "rows": len(rows), "format": "messages", "tokens": tokens, "supervised_tokens": tokens // 2,
                    "longest_row_tokens": 99, "truncated": none, "control_tokens": none, "fingerprint": "0" * 64,
                    "dropped": {**last, "overlength": none, "unsupervised": last},
                    "sample": [
                        {"text": f"user: {question}\n", "supervised": False}, {"text": answer, "supervised": True},
                    ],
                },
                "seed": config.seed or 0, "max_seq_len": config.data_config.max_seq_len or 4096,
                "n_epochs": epochs, "batch_size": 1, "lr": config.optimizer_config.lr or 3e-4,
                "steps_per_epoch": len(texts), "total_steps": steps, "warmup_steps": steps // 10,
                "tokens_per_epoch": tokens, "largest_step_tokens": 8, "longest_kept_tokens": 8,
                "trainable_parameters": 4_884_480,
                "memory": {
                    "device_kind": "cpu", "base_bytes": 3 * 2**28, "adapter_bytes": 2**26, "activation_bytes": 2**28,
                    "logit_bytes": 2**24, "runtime_bytes": 2**28, "total_bytes": 3 * 2**29,
                },
                "time": {"seconds": None, "tokens_per_second": None, "jobs": 0, "note": "unknown: no job yet"},
            }
        )  # fmt: skip

    def _check(self, request: SupervisedFineTuneRequest) -> None:
        if request.model is None:
            raise InvalidField("model: this stack has no default model; name one", param="model")
        self.models.find(request.model)
        data = request.training_config.data_config
        if data is None:
            raise InvalidField("name the rows to train on", param="training_config.data_config")
        for identifier in filter(None, (data.dataset_id, data.validation_dataset_id)):
            self.datasets.find(identifier)

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        raise NotSupported(f"no provider does preference optimization (beta {request.algorithm_config.beta})")

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        jobs = [
            JobSummary(job_uuid=uuid, status=job.status, model=str(job.request.model), created_at=EPOCH)
            for uuid, job in self.jobs.items()
        ][:: 1 if order is ListOrder.asc else -1]
        first = 1 + [job.job_uuid for job in jobs].index(after) if after else 0
        rest = [job for job in jobs[first:] if status in (None, job.status)]
        if limit is None:
            return ListPostTrainingJobsResponse(data=rest)
        more = len(rest) > limit
        last = rest[limit - 1].job_uuid if more else None
        return ListPostTrainingJobsResponse(data=rest[:limit], has_more=more, next=last)

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        job = self._find(job_uuid)
        job.ticks += 1
        ended = job.status.terminal
        return PostTrainingJobStatusResponse(
            job_uuid=job_uuid,
            status=job.status,
            scheduled_at=EPOCH,
            started_at=EPOCH if job.ticks > 1 else None,
            completed_at=EPOCH + timedelta(seconds=75) if ended else None,
            checkpoints=self._checkpoints(job),
            model=job.request.model,
            attempt=1,
            queue_position=2 if job.status is JobStatus.scheduled else None,
            progress=self._progress(job),
            error=self._error(job),
        )

    def _progress(self, job: Job) -> JobProgress | None:
        if job.status is JobStatus.scheduled:
            return None
        if job.step == 0:
            return JobProgress(phase="load_model", total_steps=STEPS)
        left = float(STEPS - job.step)
        return JobProgress(
            step=job.step,
            total_steps=STEPS,
            loss=2.0 / job.step,
            tokens_per_second=1234.5,
            seconds_left=left,
            phase="train",
        )

    def _error(self, job: Job) -> JobError | None:
        if job.status is not JobStatus.failed:
            return None
        return JobError(code=NonFiniteLoss.code, message="the loss is not finite at step 2; lower the learning rate")

    def _checkpoints(self, job: Job) -> list[Checkpoint]:
        if job.status is not JobStatus.completed:
            return []
        uuid = job.request.job_uuid
        checkpoint = Checkpoint(
            identifier=f"{job.request.model}-sft-{uuid}-0",
            created_at=EPOCH,
            epoch=0,
            step=STEPS,
            post_training_job_id=uuid,
            path=f"jobs/{uuid}/checkpoints/{STEPS}",
            training_metrics=PostTrainingMetric(epoch=0, train_loss=0.5, validation_loss=0.75, perplexity=2.117),
        )
        return [checkpoint]

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return PostTrainingJobArtifactsResponse(job_uuid=job_uuid, checkpoints=self._checkpoints(self._find(job_uuid)))

    async def cancel_job(self, job_uuid: str) -> None:
        job = self._find(job_uuid)
        job.cancelled = job.cancelled or not job.status.terminal

    async def delete_job(self, job_uuid: str) -> None:
        if not self._find(job_uuid).status.terminal:
            raise Conflict(f"job {job_uuid!r} has not ended: cancel it first", param="job_uuid")
        del self.jobs[job_uuid]

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        lines = [event.message for event in self._find(job_uuid).events()]
        first = after if tail is None else max(0, len(lines) - tail)
        return PostTrainingJobLogStream(job_uuid=job_uuid, log_lines=lines[first:], next=len(lines))

    async def stream_job_events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        return self._events(self._find(job_uuid), after)

    async def _events(self, job: Job, after: int) -> AsyncIterator[JobEvent]:
        while True:
            events = job.events()
            for event in events[after:]:
                yield event
            after = len(events)
            if job.status.terminal:
                yield JobEvent(id=after, at=EPOCH, kind=JobEventKind.end, message=job.status)
                return
            job.ticks += 1
            await asyncio.sleep(0)

    async def get_job_metrics(
        self, job_uuid: str, after_step: int = 0, limit: int = 1000
    ) -> PostTrainingJobMetricsResponse:
        steps = range(after_step + 1, min(self._find(job_uuid).step, after_step + limit) + 1)
        data = [StepMetric(step=step, at=EPOCH, epoch=0, loss=2.0 / step, lr=3e-4, grad_norm=0.5) for step in steps]
        return PostTrainingJobMetricsResponse(job_uuid=job_uuid, data=data, next=steps[-1] if steps else after_step)

    async def list_checkpoint_files(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        if step not in [checkpoint.step for checkpoint in self._checkpoints(self._find(job_uuid))]:
            raise CheckpointNotFound(f"job {job_uuid!r} has no finished checkpoint of step {step}", param="step")
        digest = hashlib.sha256(ADAPTER_BYTES).hexdigest()
        file = CheckpointFile(name=ADAPTER_FILE, size=len(ADAPTER_BYTES), sha256=digest)
        return CheckpointFilesResponse(job_uuid=job_uuid, step=step, data=[file])

    async def find_checkpoint_file(self, job_uuid: str, step: int, name: str) -> StoredFile:
        files = (await self.list_checkpoint_files(job_uuid, step)).data
        file = next((file for file in files if file.name == name), None)
        if file is None:
            raise FileMissing(f"checkpoint {step} of job {job_uuid!r} has no file {name!r}", param="name")
        path = self.folder / "adapter_config.json"
        path.write_bytes(ADAPTER_BYTES)
        return StoredFile(path, file.size, file.sha256)

    def _find(self, job_uuid: str) -> Job:
        if job_uuid not in self.jobs:
            raise JobNotFound(f"job {job_uuid!r} does not exist", param="job_uuid")
        return self.jobs[job_uuid]


class Echo:
    """Answers with the last message's words; the word `break` ends a stream with an error."""

    def __init__(self, models: ModelStore) -> None:
        self._models = models

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        self._models.find(request.model)
        words = self._words(request)
        choice = ChatChoice(message=AnswerMessage(content=" ".join(words)), finish_reason="stop")
        return ChatCompletion(
            id="chat-1", created=0, model=request.model, choices=[choice], usage=_usage(len(words), len(words))
        )

    async def stream_chat_completion(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        self._models.find(request.model)
        for word in self._words(request):
            if word == "break":
                raise Unavailable("the model's worker is gone")
            choice = ChunkChoice(delta=Delta(content=word))
            yield ChatCompletionChunk(id="chat-1", created=0, model=request.model, choices=[choice])

    def _words(self, request: ChatCompletionRequest) -> list[str]:
        return (request.messages[-1].content or "").split()[: request.max_tokens]

    async def completion(self, request: CompletionRequest) -> Completion:
        self._models.find(request.model)
        choices = [
            CompletionChoice(index=index, text=prompt.upper(), finish_reason="stop")
            for index, prompt in enumerate(request.prompt)
        ]
        return Completion(id="text-1", created=0, model=request.model, choices=choices, usage=_usage(1, 1))

    async def stream_completion(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        for word in request.prompt[0].split():
            choices = [CompletionChoice(index=0, text=word.upper())]
            yield Completion(id="text-1", created=0, model=request.model, choices=choices)


def _usage(prompt: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class Inspection:
    _provider = ProviderInfo(
        api="post_training", provider_id="memory", provider_type="inline::memory", health=HealthInfo(status="OK")
    )

    async def version(self) -> VersionInfo:
        return VersionInfo(version="9.9.9")

    async def health(self) -> HealthInfo:
        return HealthInfo(status="OK")

    async def list_providers(self) -> ListProvidersResponse:
        return ListProvidersResponse(data=[self._provider])

    async def get_provider(self, provider_id: str) -> ProviderInfo:
        if provider_id != self._provider.provider_id:
            raise NotFound(f"there is no provider {provider_id!r}")
        return self._provider

    async def list_routes(self) -> ListRoutesResponse:
        return ListRoutesResponse(data=[RouteInfo(route="/v1/health", method="GET", provider_types=[])])


@dataclass
class Received:
    """A request as it arrived; `path` still percent-encoded."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class InMemoryStack:
    """The running stack, itself the ASGI app that is served.

    Attributes:
        requests: what arrived, oldest first.
        faults: answers given instead of the routes' own to the next requests.
        api_key: demanded from every caller where it is set.
    """

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self._folder = folder
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a new stack would be."""
        self.requests: list[Received] = []
        self.faults: deque[Response] = deque()
        self.api_key: str | None = None
        self.datasets, self.models = DatasetStore(), ModelStore()
        self.post_training = PostTrainingService(self.datasets, self.models, self._folder)
        self._routes = self._mounted()

    def _mounted(self) -> FastAPI:
        app = FastAPI()
        add_exception_handlers(app)
        app.include_router(apis.post_training.routes.create_router(self.post_training), prefix="/v1alpha")
        app.include_router(apis.datasets.routes.create_router(self.datasets), prefix="/v1beta")
        app.include_router(apis.models.routes.create_router(self.models), prefix="/v1")
        app.include_router(apis.inference.routes.create_router(Echo(self.models)), prefix="/v1")
        app.include_router(apis.inspect.routes.create_router(Inspection()), prefix="/v1")
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        self.requests.append(Received(request.method, scope["raw_path"].decode(), dict(request.headers), body))
        answer = self._answer(request)
        if answer is not None:
            return await answer(scope, receive, send)
        read = False

        async def replay() -> Any:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self._routes(scope, replay, send)

    def _answer(self, request: Request) -> Response | None:
        if self.faults:
            return self.faults.popleft()
        expected = self.api_key
        if expected is not None and request.headers.get("authorization") != f"Bearer {expected}":
            return error_response(Unauthorized("the API key is missing or wrong"), request.url.path)
        return None


def fault(status: int, body: Any = None, **headers: str) -> JSONResponse:
    """A planned answer; underscores in header names become hyphens."""
    return JSONResponse(body, status, headers={name.replace("_", "-"): value for name, value in headers.items()})


@contextmanager
def running() -> Iterator[InMemoryStack]:
    """Serve a stack on a free port of 127.0.0.1 until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        stack = InMemoryStack(Path(folder))
        with serving(stack) as stack.url:
            yield stack


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve any app on a free port of 127.0.0.1, in a thread; gives its URL."""
    # The protocol named, as asyncio sends small answers at once only then.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()

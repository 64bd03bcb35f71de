"""The verbs of `AsyncStackClient`: those of `resources.py`, awaited. What each does and raises is said there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from apis.datasets.models import Dataset, DatasetPurpose, DataSource, IterrowsResponse
from apis.errors import Unavailable
from apis.inference.models import ChatCompletion, ChatCompletionChunk, Completion
from apis.inspect.models import HealthInfo, ProviderInfo, VersionInfo
from apis.models.models import Model
from apis.post_training.models import (
    CheckpointFile,
    JobEvent,
    JobStatus,
    JobSummary,
    ListOrder,
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    PreflightRequest,
    SupervisedFineTuneRequest,
)
from apis.post_training.reports import PreflightReport
from post_training.client import calls
from post_training.client.downloads import Form, OnProgress, download_in_thread
from post_training.client.following import Following
from post_training.client.transport import AsyncTransport
from post_training.client.waiting import Wait, job_failure


class _Resource:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport


class PostTrainingResource(_Resource):
    """Whole jobs. Every method raises a `PostgradError`; an unknown job is JobNotFound."""

    async def supervised_fine_tune(
        self, request: SupervisedFineTuneRequest | None = None, /, **fields: Any
    ) -> PostTrainingJob:
        built = calls.build_request(SupervisedFineTuneRequest, request, fields)
        return await self._transport.send(calls.supervised_fine_tune(built))

    async def preflight(self, request: PreflightRequest | None = None, /, **fields: Any) -> PreflightReport:
        built = calls.build_request(PreflightRequest, request, fields)
        return await self._transport.send(calls.preflight(built))

    async def preference_optimize(
        self, request: PreferenceOptimizeRequest | None = None, /, **fields: Any
    ) -> PostTrainingJob:
        built = calls.build_request(PreferenceOptimizeRequest, request, fields)
        return await self._transport.send(calls.preference_optimize(built))

    async def jobs(self, *, status: JobStatus | str | None = None) -> list[JobSummary]:
        return await self._transport.send(calls.list_jobs(status))

    async def jobs_page(
        self,
        limit: int = 100,
        after: str | None = None,
        *,
        order: ListOrder | str = ListOrder.asc,
        status: JobStatus | str | None = None,
    ) -> ListPostTrainingJobsResponse:
        return await self._transport.send(calls.jobs_page(limit, after, order, status))

    async def iter_jobs(
        self, *, order: ListOrder | str = ListOrder.asc, status: JobStatus | str | None = None, page_size: int = 100
    ) -> AsyncIterator[JobSummary]:
        page = await self.jobs_page(page_size, order=order, status=status)
        while True:
            for job in page.data:
                yield job
            if page.next is None:
                return
            page = await self.jobs_page(page_size, page.next, order=order, status=status)

    async def status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return await self._transport.send(calls.job_status(job_uuid))

    async def artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return await self._transport.send(calls.job_artifacts(job_uuid))

    async def cancel(self, job_uuid: str) -> None:
        await self._transport.send(calls.cancel_job(job_uuid))

    async def delete(self, job_uuid: str) -> None:
        await self._transport.send(calls.delete_job(job_uuid))

    async def logs(
        self, job_uuid: str, after: int | None = None, *, tail: int | None = None
    ) -> PostTrainingJobLogStream:
        return await self._transport.send(calls.job_logs(job_uuid, after, tail))

    async def metrics(self, job_uuid: str, after_step: int = 0, *, limit: int = 1000) -> PostTrainingJobMetricsResponse:
        return await self._transport.send(calls.job_metrics(job_uuid, after_step, limit))

    async def events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        following = Following(job_uuid, after)
        while not following.ended:
            try:
                async with self._transport.opened(following.call()) as response:
                    following.connected()
                    async for chunk in response.aiter_raw():
                        for event in following.feed(chunk):
                            yield event
                        if following.ended:
                            return
                pause = following.pause()
            except Unavailable as error:
                pause = following.pause(error)
            await asyncio.sleep(pause)

    async def checkpoint_files(self, job_uuid: str, step: int) -> list[CheckpointFile]:
        return await self._transport.send(calls.checkpoint_files(job_uuid, step))

    async def download_checkpoint(
        self,
        job_uuid: str,
        step: int,
        to: str | os.PathLike[str],
        form: Form = "adapter",
        on_progress: OnProgress | None = None,
    ) -> Path:
        return await download_in_thread(self._transport.settings, job_uuid, step, to, form, on_progress)

    async def wait(
        self,
        job_uuid: str,
        *,
        poll_seconds: float = 2.0,
        timeout: float | None = None,
        on_status: Callable[[PostTrainingJobStatusResponse], None] | None = None,
        raise_on_failure: bool = False,
    ) -> PostTrainingJobStatusResponse:
        wait = Wait(job_uuid, poll_seconds, timeout)
        while True:
            try:
                status = await self.status(job_uuid)
            except Unavailable as error:
                await asyncio.sleep(wait.after_outage(error))
                continue
            if on_status is not None:
                on_status(status)
            pause = wait.after_status(status)
            if pause is None:
                break
            await asyncio.sleep(pause)
        if raise_on_failure and (failure := job_failure(status)) is not None:
            raise failure
        return status


class DatasetsResource(_Resource):
    """Data sets and their rows. An unknown one is DatasetNotFound."""

    async def register(
        self,
        source: DataSource | dict[str, Any],
        *,
        dataset_id: str | None = None,
        purpose: DatasetPurpose | str = DatasetPurpose.post_training_messages,
        metadata: dict[str, Any] | None = None,
    ) -> Dataset:
        return await self._transport.send(calls.register_dataset(source, dataset_id, purpose, metadata))

    async def list(self) -> list[Dataset]:
        return await self._transport.send(calls.list_datasets())

    async def get(self, dataset_id: str) -> Dataset:
        return await self._transport.send(calls.get_dataset(dataset_id))

    async def unregister(self, dataset_id: str) -> None:
        await self._transport.send(calls.unregister_dataset(dataset_id))

    async def rows(
        self, dataset_id: str, *, start_index: int | None = None, limit: int | None = None
    ) -> IterrowsResponse:
        return await self._transport.send(calls.rows(dataset_id, start_index, limit))

    # `list` the method hides the type of that name inside this class.
    async def append(self, dataset_id: str, rows: calls.Rows) -> None:
        await self._transport.send(calls.append_rows(dataset_id, rows))


class ModelsResource(_Resource):
    """Base models and checkpoints under their ids. An unknown one is ModelNotFound."""

    async def list(self) -> list[Model]:
        return await self._transport.send(calls.list_models())

    async def get(self, model_id: str) -> Model:
        return await self._transport.send(calls.get_model(model_id))

    async def register(
        self, model_id: str, *, provider_model_id: str | None = None, metadata: dict[str, Any] | None = None
    ) -> Model:
        return await self._transport.send(calls.register_model(model_id, provider_model_id, metadata))

    async def unregister(self, model_id: str) -> None:
        await self._transport.send(calls.unregister_model(model_id))


class InferenceResource(_Resource):
    """Text from models. `parameters` are OpenAI's (`max_tokens`, `temperature`, …) and go into the body as they are."""

    async def chat_completion(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> ChatCompletion:
        body = {**parameters, "model": model, "messages": messages}
        return await self._transport.send(calls.chat_completion(body))

    def stream_chat_completion(
        self, model: str, messages: list[dict[str, Any]], **parameters: Any
    ) -> AsyncIterator[ChatCompletionChunk]:
        body = {**parameters, "model": model, "messages": messages}
        return self._transport.stream(calls.stream_chat_completion(body))

    async def completion(self, model: str, prompt: str | list[str], **parameters: Any) -> Completion:
        return await self._transport.send(calls.completion({**parameters, "model": model, "prompt": prompt}))

    def stream_completion(self, model: str, prompt: str | list[str], **parameters: Any) -> AsyncIterator[Completion]:
        return self._transport.stream(calls.stream_completion({**parameters, "model": model, "prompt": prompt}))


class InspectResource(_Resource):
    """What the running stack says about itself."""

    async def version(self) -> VersionInfo:
        return await self._transport.send(calls.version())

    async def health(self) -> HealthInfo:
        return await self._transport.send(calls.health())

    async def providers(self) -> list[ProviderInfo]:
        return await self._transport.send(calls.list_providers())

    async def provider(self, provider_id: str) -> ProviderInfo:
        return await self._transport.send(calls.get_provider(provider_id))

"""What the provider asks of the other server, in words that know no dialect, and a Postgrad as such a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import anyio.to_thread

from apis.datasets.models import Row
from apis.errors import DatasetNotFound
from apis.post_training.models import (
    CheckpointFile,
    JobEvent,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    PreflightRequest,
    SupervisedFineTuneRequest,
)
from apis.post_training.reports import PreflightReport
from post_training.client.async_resources import DatasetsResource, PostTrainingResource
from post_training.client.core import Settings
from post_training.client.downloads import download_file
from post_training.client.transport import AsyncTransport, SyncTransport
from providers.remote_stack.config import RemoteStackConfig


class RemoteServer(Protocol):
    """The other server. Job ids are those it knows. Every method raises what it answers, as a `PostgradError`."""

    async def fine_tune(self, request: SupervisedFineTuneRequest) -> str:
        """The id of the job there."""
        ...

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> str: ...

    async def preflight(self, request: PreflightRequest) -> PreflightReport: ...

    async def has_rows(self, dataset_id: str) -> bool: ...

    async def register_rows(self, dataset_id: str, rows: list[Row]) -> None: ...

    async def status(self, job: str) -> PostTrainingJobStatusResponse:
        """Raises JobNotFound."""
        ...

    async def cancel(self, job: str) -> None: ...

    async def delete(self, job: str) -> None: ...

    async def logs(self, job: str, after: int, tail: int | None) -> PostTrainingJobLogStream: ...

    async def metrics(self, job: str, after_step: int, limit: int) -> PostTrainingJobMetricsResponse: ...

    def events(self, job: str, after: int) -> AsyncIterator[JobEvent]:
        """Until the job has ended; without an event that says so."""
        ...

    async def files(self, job: str, step: int) -> list[CheckpointFile]: ...

    async def download(self, job: str, step: int, file: CheckpointFile, to: Path) -> None:
        """Bring a file here; it appears when its hash is right."""
        ...

    async def close(self) -> None: ...


def settings_of(config: RemoteStackConfig) -> Settings:
    """How the server is reached. The environment's key is the command line's and not for other servers."""
    return Settings(config.url, config.api_key, config.timeout_seconds, max_retries=2)


class PostgradServer:
    """Another Postgrad, by its own routes."""

    def __init__(self, config: RemoteStackConfig) -> None:
        self._settings = settings_of(config)
        self._transport = AsyncTransport(self._settings)
        self._jobs, self._datasets = PostTrainingResource(self._transport), DatasetsResource(self._transport)

    async def fine_tune(self, request: SupervisedFineTuneRequest) -> str:
        return (await self._jobs.supervised_fine_tune(request)).job_uuid

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> str:
        return (await self._jobs.preference_optimize(request)).job_uuid

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        return await self._jobs.preflight(request)

    async def has_rows(self, dataset_id: str) -> bool:
        try:
            await self._datasets.get(dataset_id)
        except DatasetNotFound:
            return False
        return True

    async def register_rows(self, dataset_id: str, rows: list[Row]) -> None:
        await self._datasets.register({"type": "rows", "rows": rows}, dataset_id=dataset_id)

    async def status(self, job: str) -> PostTrainingJobStatusResponse:
        return await self._jobs.status(job)

    async def cancel(self, job: str) -> None:
        await self._jobs.cancel(job)

    async def delete(self, job: str) -> None:
        await self._jobs.delete(job)

    async def logs(self, job: str, after: int, tail: int | None) -> PostTrainingJobLogStream:
        return await self._jobs.logs(job, None if tail is not None else after, tail=tail)

    async def metrics(self, job: str, after_step: int, limit: int) -> PostTrainingJobMetricsResponse:
        return await self._jobs.metrics(job, after_step, limit=limit)

    def events(self, job: str, after: int) -> AsyncIterator[JobEvent]:
        return self._jobs.events(job, after)

    async def files(self, job: str, step: int) -> list[CheckpointFile]:
        return await self._jobs.checkpoint_files(job, step)

    async def download(self, job: str, step: int, file: CheckpointFile, to: Path) -> None:
        await anyio.to_thread.run_sync(self._download, job, step, file, to)

    def _download(self, job: str, step: int, file: CheckpointFile, to: Path) -> None:
        transport = SyncTransport(self._settings)
        try:
            download_file(transport, job, step, file, to)
        finally:
            transport.close()

    async def close(self) -> None:
        await self._transport.close()

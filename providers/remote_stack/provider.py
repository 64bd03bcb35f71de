"""remote::llama-stack: jobs are sent to another server, and what is asked of them is asked there."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, cast
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from apis.errors import Conflict, FileMissing, Forbidden, JobFailure, JobNotFound, Unauthorized, Unavailable
from apis.post_training.models import (
    CheckpointFile,
    CheckpointFilesResponse,
    JobError,
    JobEvent,
    JobEventKind,
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
    StoredFile,
    SupervisedFineTuneRequest,
)
from apis.post_training.reports import PreflightReport
from post_training.catalog.naming import folder_name
from post_training.job_specs import request_hash
from post_training.jobs.database import now
from providers.remote_stack.config import RemoteStackConfig
from providers.remote_stack.dialects import connect
from providers.remote_stack.jobs import RemoteJobRow, RemoteJobs, Sent, place_of
from providers.remote_stack.rows import with_remote_rows
from providers.remote_stack.server import RemoteServer
from providers.spec import ProviderDeps

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 8
"""Questions about jobs that may be on their way to the other server for one list."""


async def get_adapter_impl(config: RemoteStackConfig, deps: ProviderDeps) -> RemoteStack:
    return RemoteStack(config, deps)


class RemoteStack:
    """Fulfils `apis.post_training.PostTraining`. Jobs have the ids and states that they have on the other server.

    It is asked for the first time when it is needed, so a stack starts without it.
    """

    def __init__(self, config: RemoteStackConfig, deps: ProviderDeps) -> None:
        self._config, self._datasets = config, deps.datasets
        self._provider_id = deps.provider_id
        self._jobs = RemoteJobs(deps.database, deps.provider_id)
        self._files = deps.home / "remote" / folder_name(deps.provider_id)
        self._server: RemoteServer | None = None
        self._downloads: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._connecting, self._stopping = asyncio.Lock(), asyncio.Event()

    async def start(self) -> None:
        await anyio.to_thread.run_sync(self._jobs.make_table)

    async def shutdown(self) -> None:
        if self._server is not None:
            await self._server.close()

    def end_streams(self) -> None:
        """As `JobService.end_streams`."""
        self._stopping.set()

    # -- submitting ----------------------------------------------------------------------------------------------

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        async def send(server: RemoteServer) -> str:
            return await server.fine_tune(await with_remote_rows(request, self._datasets, server))

        return await self._submit(request, request.model or "", send)

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        async def send(server: RemoteServer) -> str:
            return await server.preference_optimize(await with_remote_rows(request, self._datasets, server))

        return await self._submit(request, request.finetuned_model, send)

    async def _submit(
        self,
        request: SupervisedFineTuneRequest | PreferenceOptimizeRequest,
        model: str,
        send: Callable[[RemoteServer], Awaitable[str]],
    ) -> PostTrainingJob:
        job_uuid, digest = request.job_uuid, request_hash(request)
        if not await anyio.to_thread.run_sync(self._jobs.find_sent, job_uuid, digest):
            async with self._other() as server:
                remote_uuid = await send(server)
            await anyio.to_thread.run_sync(self._jobs.add, Sent(job_uuid, remote_uuid, model, digest))
        return PostTrainingJob(job_uuid=job_uuid)

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        async with self._other() as server:
            return await server.preflight(await with_remote_rows(request, self._datasets, server))

    # -- asking --------------------------------------------------------------------------------------------------

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        rows = await anyio.to_thread.run_sync(self._jobs.listed, after, order)
        wanted = None if limit is None else limit + 1  # one more tells whether there are more
        found: list[tuple[RemoteJobRow, JobStatus]] = []
        for start in range(0, len(rows), ASKED_AT_ONCE):
            part = rows[start : start + ASKED_AT_ONCE]
            found += [pair for pair in await self._states(part) if status in (None, pair[1])]
            if wanted is not None and len(found) >= wanted:
                break
        shown = found[:limit]
        data = [
            JobSummary(job_uuid=row.job_uuid, status=state, model=row.model, created_at=row.created_at)
            for row, state in shown
        ]
        if limit is None:
            return ListPostTrainingJobsResponse(data=data)
        more = len(found) > limit
        return ListPostTrainingJobsResponse(data=data, has_more=more, next=place_of(shown[-1][0]) if more else None)

    async def _states(self, rows: Sequence[RemoteJobRow]) -> list[tuple[RemoteJobRow, JobStatus]]:
        async def state(row: RemoteJobRow) -> JobStatus:
            return (await self._status(row)).status

        return list(zip(rows, await asyncio.gather(*map(state, rows)), strict=True))

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return await self._status(await self._job(job_uuid))

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        checkpoints = (await self.get_job_status(job_uuid)).checkpoints
        return PostTrainingJobArtifactsResponse(job_uuid=job_uuid, checkpoints=checkpoints)

    async def cancel_job(self, job_uuid: str) -> None:
        row = await self._job(job_uuid)
        if row.ended is None:
            async with self._other() as server:
                await server.cancel(row.remote_uuid)

    async def delete_job(self, job_uuid: str) -> None:
        row = await self._job(job_uuid)
        if not (await self._status(row)).status.terminal:
            raise Conflict(f"job {job_uuid!r} has not ended; cancel it first", param="job_uuid")
        async with self._other() as server:
            try:
                await server.delete(row.remote_uuid)
            except JobNotFound:
                logger.info("job %s is gone from the other server already", job_uuid)
        await anyio.to_thread.run_sync(self._jobs.remove, job_uuid)
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._folder(job_uuid), ignore_errors=True))

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        row = await self._job(job_uuid)
        async with self._other() as server:
            return (await server.logs(row.remote_uuid, after, tail)).model_copy(update={"job_uuid": job_uuid})

    async def get_job_metrics(
        self, job_uuid: str, after_step: int = 0, limit: int = 1000
    ) -> PostTrainingJobMetricsResponse:
        row = await self._job(job_uuid)
        async with self._other() as server:
            told = await server.metrics(row.remote_uuid, after_step, limit)
            return told.model_copy(update={"job_uuid": job_uuid})

    async def stream_job_events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        row = await self._job(job_uuid)
        await self._status(row)  # a server that is away is said before the first event
        return self._events(row, after)

    async def _events(self, row: RemoteJobRow, after: int) -> AsyncGenerator[JobEvent]:
        async with self._other() as server:
            events = cast(AsyncGenerator[JobEvent], server.events(row.remote_uuid, after))
            async with aclosing(events):
                while (event := await self._next(events)) is not None:
                    after = event.id
                    yield event
        if self._stopping.is_set():
            return
        status = await self._status(row)
        if status.status.terminal:
            yield _end_of(status, after)

    async def _next(self, events: AsyncGenerator[JobEvent]) -> JobEvent | None:
        """The next event; None where there is no more, or this server stops."""
        coming = asyncio.ensure_future(anext(events, None))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            for task in (coming, stopping):
                task.cancel()
            await asyncio.gather(coming, stopping, return_exceptions=True)

    # -- files ---------------------------------------------------------------------------------------------------

    async def list_checkpoint_files(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        row = await self._job(job_uuid)
        async with self._other() as server:
            return CheckpointFilesResponse(job_uuid=job_uuid, step=step, data=await server.files(row.remote_uuid, step))

    async def find_checkpoint_file(self, job_uuid: str, step: int, name: str) -> StoredFile:
        """As the Protocol has it; the file is brought here when it is first asked for, and held to its hash."""
        row = await self._job(job_uuid)
        async with self._other() as server:
            files = {file.name: file for file in await server.files(row.remote_uuid, step)}
            if name not in files or not _is_below(name):
                raise FileMissing(f"checkpoint {step} of job {job_uuid!r} has no file {name[:200]!r}", param="name")
            path = self._folder(job_uuid) / str(step) / name
            async with self._downloads.setdefault(path, asyncio.Lock()):
                if not await anyio.to_thread.run_sync(_is_here, path, files[name]):
                    await server.download(row.remote_uuid, step, files[name], path)
        return StoredFile(path, files[name].size, files[name].sha256)

    def _folder(self, job_uuid: str) -> Path:
        return self._files / folder_name(job_uuid)

    # -- the other server ----------------------------------------------------------------------------------------

    async def _job(self, job_uuid: str) -> RemoteJobRow:
        return await anyio.to_thread.run_sync(self._jobs.get, job_uuid)

    async def _status(self, row: RemoteJobRow) -> PostTrainingJobStatusResponse:
        """What the other server says; once the job has ended, what it said then, since that never changes.

        A job that has gone from there before it ended has failed: nobody can finish it.
        """
        if row.ended is not None:
            return PostTrainingJobStatusResponse.model_validate(row.ended, extra="ignore")
        try:
            async with self._other() as server:
                told = await server.status(row.remote_uuid)
        except JobNotFound:
            told = _lost(row)
        told = told.model_copy(update={"job_uuid": row.job_uuid, "provider_id": self._provider_id})
        if told.status.terminal:
            await anyio.to_thread.run_sync(self._jobs.set_ended, row.job_uuid, told)
        return told

    @asynccontextmanager
    async def _other(self) -> AsyncIterator[RemoteServer]:
        """The other server; its faults in words that name no address and no key."""
        try:
            yield await self._connected()
        except (Unauthorized, Forbidden) as error:
            logger.error("provider %s: %s", self._provider_id, error.message)
            what = "the server behind it does not accept this stack's key; its `api_key` in the run.yaml is wrong"
            raise Unavailable(f"provider {self._provider_id!r}: {what}") from error
        except Unavailable as error:
            logger.warning("provider %s: %s", self._provider_id, error.message)
            what = "the server behind it does not answer; try again later"
            raise Unavailable(f"provider {self._provider_id!r}: {what}") from error

    async def _connected(self) -> RemoteServer:
        async with self._connecting:
            if self._server is None:
                self._server = await connect(self._config)
            return self._server


def _lost(row: RemoteJobRow) -> PostTrainingJobStatusResponse:
    message = "the other server, which ran the job, does not know it any more; submit it again under another job_uuid"
    return PostTrainingJobStatusResponse(
        job_uuid=row.job_uuid,
        status=JobStatus.failed,
        scheduled_at=row.created_at,
        completed_at=now(),
        model=row.model,
        error=JobError(code=JobFailure.code, message=message),
    )


def _end_of(status: PostTrainingJobStatusResponse, last_id: int) -> JobEvent:
    error = status.error.model_dump() if status.error else None
    data: dict[str, Any] = {"job_uuid": status.job_uuid, "status": status.status.value, "error": error}
    at = status.completed_at or now()
    return JobEvent(id=last_id, at=at, kind=JobEventKind.end, message=status.status.value, data=data)


def _is_below(name: str) -> bool:
    """Whether a file that the other server names would lie in the checkpoint's folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and "\\" not in name and not {"..", "."} & set(name.split("/"))


def _is_here(path: Path, file: CheckpointFile) -> bool:
    # It was put there once its hash was right.
    return path.is_file() and path.stat().st_size == file.size

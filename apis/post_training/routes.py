"""The post_training API over HTTP: ids in the path, bodies as the models say."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from apis.common import MAX_INTEGER
from apis.errors import InvalidField
from apis.post_training.event_stream import JobEventStream, event_id
from apis.post_training.file_answers import file_answer
from apis.post_training.models import (
    CheckpointFilesResponse,
    JobStatus,
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
from apis.post_training.protocol import PostTraining
from apis.post_training.reports import PreflightReport

MAX_PAGE = 10_000
MAX_JOBS_PAGE = 1000

After = Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="Only what is numbered above this")]
Tail = Annotated[int | None, Query(ge=1, le=MAX_PAGE, description="The newest so many lines; not with `after`")]
Limit = Annotated[int | None, Query(ge=1, le=MAX_JOBS_PAGE, description="At most so many jobs. Left out: all")]
AfterJob = Annotated[str | None, Query(description="The jobs behind this one, by its id or as `next` of a page says")]
Order = Annotated[ListOrder, Query(description="Oldest or newest first")]
OfStatus = Annotated[JobStatus | None, Query(description="Only the jobs that are so")]
Step = Annotated[int, Path(ge=0, le=MAX_INTEGER, description="The checkpoint's optimizer step")]
LastEventId = Annotated[str | None, Header(description="Id of the last event seen; goes before `after`")]


def create_router(impl: PostTraining) -> APIRouter:
    """Serve `impl` under `/post-training`; mount with the prefix of the API's version."""
    router = APIRouter(prefix="/post-training", tags=["post_training"])
    _add_submits(router, impl)
    _add_jobs(router, impl)
    _add_telemetry(router, impl)
    _add_files(router, impl)
    return router


def _add_submits(router: APIRouter, impl: PostTraining) -> None:
    @router.post("/supervised-fine-tune")
    async def supervised_fine_tune(request: SupervisedFineTuneRequest) -> PostTrainingJob:
        return await impl.supervised_fine_tune(request)

    @router.post("/preference-optimize")
    async def preference_optimize(request: PreferenceOptimizeRequest) -> PostTrainingJob:
        return await impl.preference_optimize(request)

    @router.post("/preflight")
    async def preflight(request: PreflightRequest) -> PreflightReport:
        return await impl.preflight(request)


def _add_jobs(router: APIRouter, impl: PostTraining) -> None:
    # What is left unset is left out: a call without `limit` is answered as it was before there were pages.
    @router.get("/jobs", response_model_exclude_unset=True)
    async def list_jobs(
        limit: Limit = None, after: AfterJob = None, order: Order = ListOrder.asc, status: OfStatus = None
    ) -> ListPostTrainingJobsResponse:
        return await impl.list_jobs(limit, after, order, status)

    # `:path` because an id may hold slashes; the verb is the last segment.
    @router.get("/jobs/{job_uuid:path}/status")
    async def get_job_status(job_uuid: str) -> PostTrainingJobStatusResponse:
        return await impl.get_job_status(job_uuid)

    @router.get("/jobs/{job_uuid:path}/artifacts")
    async def get_job_artifacts(job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return await impl.get_job_artifacts(job_uuid)

    @router.post("/jobs/{job_uuid:path}/cancel", status_code=204, response_class=Response)
    async def cancel_job(job_uuid: str) -> None:
        await impl.cancel_job(job_uuid)

    @router.delete("/jobs/{job_uuid:path}", status_code=204, response_class=Response)
    async def delete_job(job_uuid: str) -> None:
        await impl.delete_job(job_uuid)


def _add_telemetry(router: APIRouter, impl: PostTraining) -> None:
    @router.get("/jobs/{job_uuid:path}/logs")
    async def get_job_logs(job_uuid: str, after: After = None, tail: Tail = None) -> PostTrainingJobLogStream:
        if after is not None and tail is not None:
            raise InvalidField("tail and after exclude each other: send one of them", param="tail")
        return await impl.get_job_logs(job_uuid, after or 0, tail)

    @router.get("/jobs/{job_uuid:path}/metrics")
    async def get_job_metrics(
        job_uuid: str, after_step: After = None, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 1000
    ) -> PostTrainingJobMetricsResponse:
        return await impl.get_job_metrics(job_uuid, after_step or 0, limit)

    @router.get(
        "/jobs/{job_uuid:path}/events",
        response_class=StreamingResponse,
        responses={200: {"description": "Server-Sent Events", "content": {"text/event-stream": {}}}},
    )
    async def stream_job_events(
        job_uuid: str, after: After = None, last_event_id: LastEventId = None
    ) -> StreamingResponse:
        start = event_id(last_event_id) if last_event_id else after or 0
        return JobEventStream(await impl.stream_job_events(job_uuid, start))


def _add_files(router: APIRouter, impl: PostTraining) -> None:
    # After the verbs: `…/files/adapter/status` is the status of a job whose id looks like a file's address, for no file
    # of a checkpoint is called as a verb. The id takes as much as it can, so the last `/checkpoints/…/files/` counts.
    @router.get("/jobs/{job_uuid:path}/checkpoints/{step}/files")
    async def list_checkpoint_files(job_uuid: str, step: Step) -> CheckpointFilesResponse:
        return await impl.list_checkpoint_files(job_uuid, step)

    @router.head("/jobs/{job_uuid:path}/checkpoints/{step}/files/{name:path}", include_in_schema=False)
    @router.get(
        "/jobs/{job_uuid:path}/checkpoints/{step}/files/{name:path}",
        response_class=FileResponse,
        responses={
            200: {"description": "The file, of the type that its name says", "content": {"*/*": {}}},
            206: {"description": "The ranges asked for"},
            304: {"description": "The reader has this file"},
        },
    )
    async def get_checkpoint_file(request: Request, job_uuid: str, step: Step, name: str) -> Response:
        return file_answer(request, await impl.find_checkpoint_file(job_uuid, step, name))

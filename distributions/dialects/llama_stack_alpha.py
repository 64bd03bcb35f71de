"""Jobs at /alpha, for clients up to 0.0.63: requests in two shapes, states in words of their own, bare lists."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter, Query, Request, Response

from apis.common import Identifier, RequestModel, ResponseModel
from apis.post_training.models import (
    Checkpoint,
    JobError,
    JobProgress,
    JobStatus,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobStatusResponse,
)
from apis.post_training.protocol import PostTraining
from distributions.dialects.llama_stack_alpha_bodies import (
    AlphaFineTune,
    AlphaPreference,
    AlphaPreferenceOptimizeRequest,
    AlphaSupervisedFineTuneRequest,
    words_of_request,
)
from distributions.dialects.words import speak

AlphaStatus = Literal["scheduled", "running", "completed", "failed"]
CANCELLED = "cancelled"
_STATUS: dict[JobStatus, AlphaStatus] = {
    JobStatus.scheduled: "scheduled",
    JobStatus.in_progress: "running",
    JobStatus.completed: "completed",
    JobStatus.failed: "failed",
    # These clients know no other word that ends their waiting; the error says what it was.
    JobStatus.cancelled: "failed",
}


class AlphaJobRequest(RequestModel):
    job_uuid: Identifier


class AlphaJobStatusResponse(ResponseModel):
    """`running` is what 0.0.61 calls a job in progress. 0.0.63 has that word beside a newer one, and nothing that these
    clients send tells them apart."""

    job_uuid: str
    status: AlphaStatus
    scheduled_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    resources_allocated: dict[str, Any] | None = None
    checkpoints: list[Checkpoint] = []
    progress: JobProgress | None = None
    error: JobError | None = None


def create_alpha_jobs_router(impl: PostTraining) -> APIRouter:
    """Serve `impl` under `/post-training`; mount at `/alpha`."""
    router = APIRouter(prefix="/post-training", tags=["post_training"], deprecated=True)
    _add_submits(router, impl)
    _add_jobs(router, impl)
    return router


def _add_submits(router: APIRouter, impl: PostTraining) -> None:
    @router.post("/supervised-fine-tune")
    async def supervised_fine_tune_alpha(request: AlphaFineTune, http: Request) -> PostTrainingJob:
        speak(http.scope, words_of_request(request))
        spec = request.spec() if isinstance(request, AlphaSupervisedFineTuneRequest) else request
        return await impl.supervised_fine_tune(spec)

    @router.post("/preference-optimize")
    async def preference_optimize_alpha(request: AlphaPreference, http: Request) -> PostTrainingJob:
        speak(http.scope, words_of_request(request))
        spec = request.spec() if isinstance(request, AlphaPreferenceOptimizeRequest) else request
        return await impl.preference_optimize(spec)


def _add_jobs(router: APIRouter, impl: PostTraining) -> None:
    @router.get("/jobs")
    async def list_jobs_alpha() -> list[PostTrainingJob]:
        return [PostTrainingJob(job_uuid=job.job_uuid) for job in (await impl.list_jobs()).data]

    @router.get("/job/status")
    async def get_job_status_alpha(job_uuid: str = Query()) -> AlphaJobStatusResponse:
        return _status(await impl.get_job_status(job_uuid))

    @router.get("/job/artifacts")
    async def get_job_artifacts_alpha(job_uuid: str = Query()) -> PostTrainingJobArtifactsResponse:
        return await impl.get_job_artifacts(job_uuid)

    @router.get("/job/logs")
    async def get_job_logs_alpha(job_uuid: str = Query()) -> PostTrainingJobLogStream:
        return await impl.get_job_logs(job_uuid)

    @router.post("/job/cancel", status_code=204, response_class=Response)
    async def cancel_job_alpha(request: AlphaJobRequest) -> None:
        await impl.cancel_job(request.job_uuid)


def _status(job: PostTrainingJobStatusResponse) -> AlphaJobStatusResponse:
    error = job.error
    if job.status is JobStatus.cancelled and error is None:
        error = JobError(code=CANCELLED, message="the job was cancelled")
    return AlphaJobStatusResponse(
        **{name: getattr(job, name) for name in AlphaJobStatusResponse.model_fields if name not in ("status", "error")},
        status=_STATUS[job.status],
        error=error,
    )

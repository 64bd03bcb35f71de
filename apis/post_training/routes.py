"""The post_training API over HTTP: ids in the path, bodies as the models say."""

from __future__ import annotations

from fastapi import APIRouter, Query, Response

from apis.common import MAX_INTEGER
from apis.post_training.models import (
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)
from apis.post_training.protocol import PostTraining


def create_router(impl: PostTraining) -> APIRouter:
    """Serve `impl` under `/post-training`; mount with the prefix of the API's version."""
    router = APIRouter(prefix="/post-training", tags=["post_training"])

    @router.post("/supervised-fine-tune")
    async def supervised_fine_tune(request: SupervisedFineTuneRequest) -> PostTrainingJob:
        return await impl.supervised_fine_tune(request)

    @router.post("/preference-optimize")
    async def preference_optimize(request: PreferenceOptimizeRequest) -> PostTrainingJob:
        return await impl.preference_optimize(request)

    @router.get("/jobs")
    async def list_jobs() -> ListPostTrainingJobsResponse:
        return await impl.list_jobs()

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

    @router.get("/jobs/{job_uuid:path}/logs")
    async def get_job_logs(job_uuid: str, after: int = Query(0, ge=0, le=MAX_INTEGER)) -> PostTrainingJobLogStream:
        return await impl.get_job_logs(job_uuid, after)

    return router

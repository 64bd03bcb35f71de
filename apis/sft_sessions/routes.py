"""Sessions over HTTP: the scheduler's routes, and those of a training server, at OpenTinker's paths."""

from __future__ import annotations

from fastapi import APIRouter

from apis.sft_sessions.models import (
    ListSessionsResponse,
    SessionActionResponse,
    SessionStatusResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from apis.sft_sessions.protocol import SFTSessions, TrainingServer
from apis.sft_sessions.training_models import (
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
    TrainingStatusResponse,
    TrainStepRequest,
    TrainStepResponse,
    ValidateRequest,
    ValidateResponse,
)

TRAINING_PREFIX = "/api/v1"


def create_scheduler_router(impl: SFTSessions) -> APIRouter:
    """Serve the scheduler of sessions at the root, where OpenTinker's clients look for it."""
    router = APIRouter(tags=["sft_sessions"])

    @router.post("/submit_job")
    async def submit_job(request: SubmitJobRequest) -> SubmitJobResponse:
        return await impl.submit_job(request)

    @router.get("/job_status/{job_id:path}")
    async def job_status(job_id: str) -> SessionStatusResponse:
        return await impl.job_status(job_id)

    @router.get("/list_jobs")
    async def list_sessions() -> ListSessionsResponse:
        return await impl.list_sessions()

    @router.delete("/cancel_job/{job_id:path}")
    async def cancel_session(job_id: str) -> SessionActionResponse:
        return await impl.cancel_session(job_id)

    @router.post("/complete_job/{job_id:path}")
    async def complete_session(job_id: str) -> SessionActionResponse:
        return await impl.complete_job(job_id)

    @router.post("/resume_job/{job_id:path}")
    async def resume_session(job_id: str) -> SubmitJobResponse:
        return await impl.resume_job(job_id)

    return router


def create_training_router(impl: TrainingServer) -> APIRouter:
    """Serve one session's training server."""
    router = APIRouter(prefix=TRAINING_PREFIX, tags=["training"])
    _add_looking(router, impl)
    _add_training(router, impl)
    _add_checkpoints(router, impl)
    return router


def _add_looking(router: APIRouter, impl: TrainingServer) -> None:
    @router.get("/health")
    async def health() -> HealthResponse:
        return await impl.health()

    @router.get("/status")
    async def status() -> TrainingStatusResponse:
        return await impl.status()

    @router.post("/heartbeat")
    async def heartbeat() -> TrainingStatusResponse:
        return await impl.heartbeat()


def _add_training(router: APIRouter, impl: TrainingServer) -> None:
    @router.post("/train_step")
    async def train_step(request: TrainStepRequest) -> TrainStepResponse:
        return await impl.train_step(request)

    @router.post("/forward_backward")
    async def forward_backward(request: ForwardBackwardRequest) -> ForwardBackwardResponse:
        return await impl.forward_backward(request)

    @router.post("/optim_step")
    async def optim_step(request: OptimStepRequest) -> TrainStepResponse:
        return await impl.optim_step(request)

    @router.post("/validate")
    async def validate(request: ValidateRequest) -> ValidateResponse:
        return await impl.validate(request)


def _add_checkpoints(router: APIRouter, impl: TrainingServer) -> None:
    @router.post("/save_checkpoint")
    async def save_checkpoint(request: SaveCheckpointRequest) -> SaveCheckpointResponse:
        return await impl.save_checkpoint(request)

    @router.post("/load_checkpoint")
    async def load_checkpoint(request: LoadCheckpointRequest) -> CallResponse:
        return await impl.load_checkpoint(request)

    @router.get("/checkpoints")
    async def checkpoints() -> ListCheckpointsResponse:
        return await impl.checkpoints()

    @router.post("/complete")
    async def complete() -> EndResponse:
        return await impl.complete()

    @router.post("/pause")
    async def pause() -> EndResponse:
        return await impl.pause()

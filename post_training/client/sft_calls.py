"""Every verb of a scheduler of SFT sessions and of a training server as a `Call`."""

from __future__ import annotations

from typing import Any

from apis.sft_sessions.models import (
    ListSessionsResponse,
    SessionActionResponse,
    SessionStatusResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
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
    SessionCheckpoint,
    TrainingStatusResponse,
    TrainStepRequest,
    TrainStepResponse,
    ValidateRequest,
    ValidateResponse,
)
from post_training.client.calls import build_request
from post_training.client.core import Call, ModelT, parse_as, path_id

_PREFIX = "/api/v1"
# A step waits for those before it, a checkpoint for its files: what is asked again after so long finds the answer.
WORK_PATIENCE_SECONDS = 600.0


def submit_job(request: SubmitJobRequest) -> Call[SubmitJobResponse]:
    """Its id is chosen by the client, so that a retry after a lost answer opens nothing twice."""
    body = {**request.model_dump(mode="json", exclude_unset=True), "job_type": request.job_type.value}
    return Call("POST", "/submit_job", parse_as(SubmitJobResponse), body=body, idempotent=request.job_id is not None)


def job_status(job_id: str) -> Call[SessionStatusResponse]:
    return Call("GET", _job("job_status", job_id), parse_as(SessionStatusResponse))


def list_jobs() -> Call[list[SessionStatusResponse]]:
    parse = parse_as(ListSessionsResponse)
    return Call("GET", "/list_jobs", lambda body: parse(body).jobs)


def cancel_job(job_id: str) -> Call[SessionActionResponse]:
    return Call("DELETE", _job("cancel_job", job_id), parse_as(SessionActionResponse))


def complete_job(job_id: str) -> Call[SessionActionResponse]:
    return Call("POST", _job("complete_job", job_id), parse_as(SessionActionResponse))


def resume_job(job_id: str) -> Call[SubmitJobResponse]:
    return Call("POST", _job("resume_job", job_id), parse_as(SubmitJobResponse))


def _job(verb: str, job_id: str) -> str:
    return f"/{verb}/{path_id(job_id, param='job_id')}"


def health() -> Call[HealthResponse]:
    return Call("GET", f"{_PREFIX}/health", parse_as(HealthResponse))


def training_status() -> Call[TrainingStatusResponse]:
    return Call("GET", f"{_PREFIX}/status", parse_as(TrainingStatusResponse))


def heartbeat() -> Call[TrainingStatusResponse]:
    return Call("POST", f"{_PREFIX}/heartbeat", parse_as(TrainingStatusResponse))


def train_step(fields: dict[str, Any]) -> Call[TrainStepResponse]:
    return _work("train_step", TrainStepRequest, fields, TrainStepResponse, idempotent=_numbered(fields))


def forward_backward(fields: dict[str, Any]) -> Call[ForwardBackwardResponse]:
    return _work(
        "forward_backward", ForwardBackwardRequest, fields, ForwardBackwardResponse, idempotent=_numbered(fields)
    )


def optim_step(fields: dict[str, Any]) -> Call[TrainStepResponse]:
    return _work("optim_step", OptimStepRequest, fields, TrainStepResponse, idempotent=_numbered(fields))


def validate(fields: dict[str, Any]) -> Call[ValidateResponse]:
    return _work("validate", ValidateRequest, fields, ValidateResponse, idempotent=True)


def save_checkpoint(fields: dict[str, Any]) -> Call[SaveCheckpointResponse]:
    return _work("save_checkpoint", SaveCheckpointRequest, fields, SaveCheckpointResponse, idempotent=False)


def pause() -> Call[EndResponse]:
    """Not to be sent again: a session that is paused answers nothing more."""
    return Call(
        "POST", f"{_PREFIX}/pause", parse_as(EndResponse), body={}, idempotent=False, patience=WORK_PATIENCE_SECONDS
    )


def load_checkpoint(fields: dict[str, Any]) -> Call[CallResponse]:
    return _work("load_checkpoint", LoadCheckpointRequest, fields, CallResponse, idempotent=_numbered(fields))


def checkpoints() -> Call[list[SessionCheckpoint]]:
    parse = parse_as(ListCheckpointsResponse)
    return Call("GET", f"{_PREFIX}/checkpoints", lambda body: parse(body).checkpoints)


def _numbered(fields: dict[str, Any]) -> bool:
    """A call with a number may be sent again: the server answers a replay as the first time."""
    return fields.get("step") is not None


def _work(
    verb: str, request: type[Any], fields: dict[str, Any], response: type[ModelT], *, idempotent: bool
) -> Call[ModelT]:
    """Raises InvalidField with the first field that does not fit `request`; nothing is sent then."""
    given = {name: value for name, value in fields.items() if value is not None}
    checked = build_request(request, None, given)
    if given.get("sequences"):
        given["sequences"] = checked.model_dump(mode="json", include={"sequences"}, exclude_none=True)["sequences"]
    return Call(
        "POST",
        f"{_PREFIX}/{verb}",
        parse_as(response),
        body=given,
        idempotent=idempotent,
        patience=WORK_PATIENCE_SECONDS,
    )

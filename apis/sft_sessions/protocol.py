"""What a stack that opens SFT sessions must be able to do, and the training server of one session."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
    TrainingStatusResponse,
    TrainStepRequest,
    TrainStepResponse,
    ValidateRequest,
    ValidateResponse,
)


@runtime_checkable
class SFTSessions(Protocol):
    """Sessions beside whole jobs, on the same scheduler. Every method answers at once."""

    async def submit_job(self, request: SubmitJobRequest) -> SubmitJobResponse:
        """Accept a session durably; it waits for a device.

        Raises:
            BadRequest: a key or value of the config cannot be used; more devices are asked for than there are.
            NotFound: the model is not registered.
            QueueFull
        """
        ...

    async def job_status(self, job_id: str) -> SessionStatusResponse:
        """Raises JobNotFound, also for a whole job."""
        ...

    async def list_sessions(self) -> ListSessionsResponse:
        """All sessions of the caller's, oldest first; without their tokens."""
        ...

    async def cancel_session(self, job_id: str) -> SessionActionResponse:
        """End it without a result; checkpoints that were announced stay. Raises JobNotFound."""
        ...

    async def complete_job(self, job_id: str) -> SessionActionResponse:
        """Have it saved and ended with success, once what was sent is done. Raises JobNotFound, Conflict."""
        ...

    async def resume_job(self, job_id: str) -> SubmitJobResponse:
        """Let a paused session wait for a device again; one that runs or waits is left alone.

        Raises:
            JobNotFound
            Conflict: it has ended.
        """
        ...


@runtime_checkable
class OffersSessions(Protocol):
    """A post-training provider that opens sessions beside whole jobs."""

    @property
    def sessions(self) -> SFTSessions: ...


class TrainingServer(Protocol):
    """One session's calls. Raises BadRequest for what cannot be used, TooLarge, Unavailable while it ends."""

    async def health(self) -> HealthResponse: ...

    async def status(self) -> TrainingStatusResponse: ...

    async def train_step(self, request: TrainStepRequest) -> TrainStepResponse:
        """One optimizer update on one batch."""
        ...

    async def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResponse:
        """Add a batch's gradients to those that wait for `optim_step`."""
        ...

    async def optim_step(self, request: OptimStepRequest) -> TrainStepResponse:
        """One update by the mean, over all their tokens, of the gradients that wait."""
        ...

    async def validate(self, request: ValidateRequest) -> ValidateResponse: ...

    async def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResponse: ...

    async def load_checkpoint(self, request: LoadCheckpointRequest) -> CallResponse: ...

    async def checkpoints(self) -> ListCheckpointsResponse: ...

    async def heartbeat(self) -> TrainingStatusResponse: ...

    async def complete(self) -> EndResponse:
        """Save, wait until all checkpoints are verified, and end the session with success."""
        ...

    async def pause(self) -> EndResponse:
        """Save and give the device back, until the scheduler is asked to resume the session."""
        ...

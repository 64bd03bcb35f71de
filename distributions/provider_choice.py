"""Several providers of post_training in one stack: which one a request is for.

The one that it names, else the first configured one that supports its model and algorithm. Jobs are asked for by their
id, whoever trains them: providers over the stack's job store all know all of its jobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from apis.errors import InvalidField, JobNotFound, NotSupported, PostgradError, UnsupportedModel
from apis.post_training.models import (
    CheckpointFilesResponse,
    JobEvent,
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
    StoredFile,
    SupervisedFineTuneRequest,
)
from apis.post_training.protocol import PostTraining
from apis.post_training.reports import PreflightReport
from apis.sft_sessions.models import (
    ListSessionsResponse,
    SessionActionResponse,
    SessionStatusResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from apis.sft_sessions.protocol import OffersSessions, SFTSessions

_OPTIONS = ("algorithm_config", "config.algorithm_config", "config.lora", "training_config.efficiency_config")
"""What one provider may refuse and another take."""

_T = TypeVar("_T")


class _Choice:
    """Chooses among providers, in the order in which they are configured.

    Args:
        providers: by provider_id.
        what: what they provide, for messages.
    """

    def __init__(self, providers: Mapping[str, Any], what: str) -> None:
        self._providers = providers
        self._what = what

    async def for_request(self, provider_id: str | None, ask: Callable[[Any], Awaitable[_T]], param: str) -> _T:
        """The answer of the provider named, else of the first one that supports what is asked for.

        Raises:
            InvalidField: `param`: no provider is called so.
            PostgradError: what the provider says; where none supports the request, the one that came furthest.
        """
        if provider_id is not None:
            return await ask(self._named(provider_id, param))
        refusals: list[PostgradError] = []
        for provider in self._providers.values():
            try:
                return await ask(provider)
            except (UnsupportedModel, NotSupported) as error:
                refusals.append(error)
            except InvalidField as error:
                if not (error.param or "").startswith(_OPTIONS):
                    raise
                refusals.append(error)
        # A provider that takes the model and not an option says more than one that does not take the model.
        raise next((error for error in refusals if isinstance(error, InvalidField)), refusals[0])

    async def for_job(self, ask: Callable[[Any], Awaitable[_T]]) -> _T:
        """The answer of the provider that knows the job asked for. Raises JobNotFound where none does."""
        unknown: JobNotFound | None = None
        for provider in self._providers.values():
            try:
                return await ask(provider)
            except JobNotFound as error:
                unknown = unknown or error
        assert unknown is not None  # there is a provider
        raise unknown

    @property
    def first(self) -> Any:
        return next(iter(self._providers.values()))

    def _named(self, provider_id: str, param: str) -> Any:
        if provider_id not in self._providers:
            raise InvalidField(
                f"there is no {self._what} provider {provider_id!r} here; there are {', '.join(self._providers)}",
                param=param,
            )
        return self._providers[provider_id]


class PostTrainingChoice:
    """Implements apis.post_training.PostTraining over several providers of it."""

    def __init__(self, providers: Mapping[str, PostTraining]) -> None:
        self._providers = providers
        self._choice = _Choice(providers, "post_training")

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        return await self._ask(request.provider_id, lambda provider: provider.supervised_fine_tune(request))

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        return await self._ask(request.provider_id, lambda provider: provider.preference_optimize(request))

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        return await self._ask(request.provider_id, lambda provider: provider.preflight(request))

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        return await self._choice.first.list_jobs(limit=limit, after=after, order=order, status=status)

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return await self._choice.for_job(lambda provider: provider.get_job_status(job_uuid))

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        return await self._choice.for_job(lambda provider: provider.get_job_artifacts(job_uuid))

    async def cancel_job(self, job_uuid: str) -> None:
        await self._choice.for_job(lambda provider: provider.cancel_job(job_uuid))

    async def delete_job(self, job_uuid: str) -> None:
        await self._choice.for_job(lambda provider: provider.delete_job(job_uuid))

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        return await self._choice.for_job(lambda provider: provider.get_job_logs(job_uuid, after=after, tail=tail))

    async def stream_job_events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        return await self._choice.for_job(lambda provider: provider.stream_job_events(job_uuid, after=after))

    async def get_job_metrics(
        self, job_uuid: str, after_step: int = 0, limit: int = 1000
    ) -> PostTrainingJobMetricsResponse:
        return await self._choice.for_job(
            lambda provider: provider.get_job_metrics(job_uuid, after_step=after_step, limit=limit)
        )

    async def list_checkpoint_files(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        return await self._choice.for_job(lambda provider: provider.list_checkpoint_files(job_uuid, step))

    async def find_checkpoint_file(self, job_uuid: str, step: int, name: str) -> StoredFile:
        return await self._choice.for_job(lambda provider: provider.find_checkpoint_file(job_uuid, step, name))

    async def _ask(self, provider_id: str | None, ask: Callable[[Any], Awaitable[_T]]) -> _T:
        return await self._choice.for_request(provider_id, ask, "provider_id")


class PostTrainingAndSessionsChoice(PostTrainingChoice):
    """The same, of which at least one offers sessions. Implements apis.sft_sessions.OffersSessions."""

    @property
    def sessions(self) -> SFTSessions:
        return SessionChoice(
            {name: each.sessions for name, each in self._providers.items() if isinstance(each, OffersSessions)}
        )


class SessionChoice:
    """Implements apis.sft_sessions.SFTSessions over several providers of sessions."""

    def __init__(self, providers: Mapping[str, SFTSessions]) -> None:
        self._choice = _Choice(providers, "sessions")

    async def submit_job(self, request: SubmitJobRequest) -> SubmitJobResponse:
        return await self._choice.for_request(
            request.config.provider_id, lambda provider: provider.submit_job(request), "config.provider_id"
        )

    async def job_status(self, job_id: str) -> SessionStatusResponse:
        return await self._choice.for_job(lambda provider: provider.job_status(job_id))

    async def list_sessions(self) -> ListSessionsResponse:
        return await self._choice.first.list_sessions()

    async def cancel_session(self, job_id: str) -> SessionActionResponse:
        return await self._choice.for_job(lambda provider: provider.cancel_session(job_id))

    async def complete_job(self, job_id: str) -> SessionActionResponse:
        return await self._choice.for_job(lambda provider: provider.complete_job(job_id))

    async def resume_job(self, job_id: str) -> SubmitJobResponse:
        return await self._choice.for_job(lambda provider: provider.resume_job(job_id))


def choose_among(providers: Mapping[str, PostTraining]) -> PostTraining:
    """One implementation for all of a stack's post_training providers, given by provider_id."""
    if len(providers) == 1:
        return next(iter(providers.values()))
    offers = any(isinstance(each, OffersSessions) for each in providers.values())
    return (PostTrainingAndSessionsChoice if offers else PostTrainingChoice)(providers)

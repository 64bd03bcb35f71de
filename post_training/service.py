"""The post_training Protocol over the job store.

A provider hands it what is its own, a `ProviderProfile`. Everything else - ids, durability, queue, status - is the same
for all providers and lives here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio.to_thread

from apis.errors import Conflict, NotSupported
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
from apis.post_training.reports import PreflightReport
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.event_stream import EventStreams
from post_training.job_files import CheckpointFiles, delete_job
from post_training.job_specs import ProviderProfile, SpecBuilder, request_hash
from post_training.job_views import list_of, log_line, metric_of, status_of
from post_training.jobs.database import Database
from post_training.jobs.scheduler import Scheduler
from post_training.jobs.spec import JobSpec
from post_training.jobs.store import JobStore
from post_training.preflight_job import Preflights, placeholder_id
from post_training.sessions import SessionService


class JobService:
    """Implements apis.post_training.PostTraining. Blocking work runs in threads: the event loop only waits.

    Attributes:
        sessions: the same provider's jobs that a client drives.
    """

    def __init__(
        self,
        database: Database,
        home: Path,
        models: ModelCatalog,
        datasets: DatasetCatalog,
        profile: ProviderProfile,
        scheduler: Scheduler,
    ) -> None:
        self._home = home
        self._models = models
        self._profile = profile
        self._specs = SpecBuilder(home, models, datasets, profile, scheduler.settings.slots)
        self._store = JobStore(database)
        self._scheduler = scheduler
        self.sessions = SessionService(home, self._store, scheduler, self._specs)
        self._streams = EventStreams(self._store)
        self._files = CheckpointFiles(home, self._store)
        self._preflights = Preflights(database, home)

    async def start(self) -> None:
        self._scheduler.serve(self._profile.provider_id)

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        await anyio.to_thread.run_sync(self._submit, request)
        self._scheduler.wake()
        return PostTrainingJob(job_uuid=request.job_uuid)

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        spec = await anyio.to_thread.run_sync(self._preflight_spec, request)
        kind = spec.device_kind or self._scheduler.settings.slots[0].kind
        return await self._preflights.report(spec, kind)

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        raise NotSupported(
            f"provider {self._profile.provider_id!r} has no preference optimization; it offers supervised_fine_tune"
        )

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        return await anyio.to_thread.run_sync(
            lambda: list_of(
                self._store.page(limit=limit, after=after, order=order, status=status), paged=limit is not None
            )
        )

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return await anyio.to_thread.run_sync(self._status, job_uuid)

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        checkpoints = (await self.get_job_status(job_uuid)).checkpoints
        return PostTrainingJobArtifactsResponse(job_uuid=job_uuid, checkpoints=checkpoints)

    async def cancel_job(self, job_uuid: str) -> None:
        await anyio.to_thread.run_sync(self._cancel, job_uuid)
        self._scheduler.wake()

    async def delete_job(self, job_uuid: str) -> None:
        forget = partial(self._models.remove_job, job_uuid=job_uuid)
        await anyio.to_thread.run_sync(delete_job, self._home, self._store, job_uuid, forget)

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        if tail is None:
            events = await anyio.to_thread.run_sync(self._store.events, job_uuid, after)
        else:
            events = await anyio.to_thread.run_sync(self._store.last_events, job_uuid, tail)
        lines = [log_line(event.at, event.message) for event in events]
        return PostTrainingJobLogStream(job_uuid=job_uuid, log_lines=lines, next=events[-1].id if events else after)

    async def stream_job_events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        return await self._streams.follow(job_uuid, after)

    def end_streams(self) -> None:
        """End all streams of events, as the server is about to stop; their readers go on with the next server."""
        self._streams.end()

    async def get_job_metrics(
        self, job_uuid: str, after_step: int = 0, limit: int = 1000
    ) -> PostTrainingJobMetricsResponse:
        rows = await anyio.to_thread.run_sync(self._store.metrics, job_uuid, after_step, limit)
        data = [metric_of(row) for row in rows]
        return PostTrainingJobMetricsResponse(job_uuid=job_uuid, data=data, next=data[-1].step if data else after_step)

    async def list_checkpoint_files(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        return await anyio.to_thread.run_sync(self._files.list, job_uuid, step)

    async def find_checkpoint_file(self, job_uuid: str, step: int, name: str) -> StoredFile:
        return await anyio.to_thread.run_sync(self._files.find, job_uuid, step, name)

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _cancel(self, job_uuid: str) -> None:
        if self._store.request_cancel(job_uuid):
            self._scheduler.clean(job_uuid)

    def _submit(self, request: SupervisedFineTuneRequest) -> None:
        body_hash = request_hash(request)
        # A replay must answer as the first time even if the model or data set has gone since.
        if self._store.find_submitted(request.job_uuid, body_hash):
            self._refuse_other_algorithm(request)
        else:
            spec = self._specs.job(request)
            self._store.submit(spec, body_hash, max_queued=self._scheduler.settings.max_queued)

    def _preflight_spec(self, preflight: PreflightRequest) -> JobSpec:
        """The job that a submit of this would make; that of an earlier submit where it was made already."""
        request = preflight.as_job(preflight.job_uuid or placeholder_id())
        if self._store.find_submitted(request.job_uuid, request_hash(request)):
            self._refuse_other_algorithm(request)
            return JobSpec.model_validate(self._store.get(request.job_uuid).spec)
        spec = self._specs.job(request)
        self._store.check_new(spec)
        return spec

    def _refuse_other_algorithm(self, request: SupervisedFineTuneRequest) -> None:
        """Raises Conflict where a replay names another adapter than the job trains.

        Bodies are compared with their defaults filled in, but what a job that goes on from an adapter leaves out is not
        the default: it is that adapter's.
        """
        asked = request.algorithm_config
        stored = JobSpec.model_validate(self._store.get(request.job_uuid).spec).algorithm_config
        for field in asked.model_fields_set if asked else ():
            if getattr(asked, field) != getattr(stored, field, None):
                raise Conflict(
                    f"job {request.job_uuid!r} already exists with another {field}; choose another job_uuid",
                    param=f"algorithm_config.{field}",
                )

    def _status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        job = self._store.get(job_uuid)
        rows, waiting = self._store.checkpoints(job_uuid), self._scheduler.waiting(job)
        return status_of(job, rows, waiting, self._scheduler.settings.max_attempts)

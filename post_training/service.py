"""The post_training Protocol over the job store.

A provider hands it what is its own: a check of each request, worker settings, a default model. Everything else - ids,
durability, queue, status - is the same for all providers and lives here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from apis.common import check_identifier
from apis.datasets.models import DATA_SOURCE
from apis.errors import Conflict, DataInvalid, DatasetNotFound, InvalidField, ModelNotFound, NotSupported
from apis.post_training.models import (
    CheckpointFilesResponse,
    JobEvent,
    JobStatus,
    ListOrder,
    ListPostTrainingJobsResponse,
    LoraFinetuningConfig,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    PreflightRequest,
    StoredFile,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from apis.post_training.reports import PreflightReport
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.folders import imported_models
from post_training.catalog.models import ModelCatalog, ResolvedModel, checkpoint_identifier
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.defaults import MAX_DEFAULT_EPOCHS
from post_training.event_stream import EventStreams
from post_training.job_files import CheckpointFiles, delete_job
from post_training.job_views import list_of, log_line, metric_of, status_of
from post_training.jobs.database import Database, now
from post_training.jobs.scheduler import Scheduler
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings
from post_training.jobs.store import JobStore
from post_training.preflight_job import Preflights, placeholder_id

CheckRequest = Callable[[SupervisedFineTuneRequest, ResolvedModel], LoraFinetuningConfig]
"""Refuses what a provider cannot do, by field name; returns the algorithm it will run."""


@dataclass(frozen=True)
class ProviderProfile:
    """What a provider brings.

    Attributes:
        check: called before a job is accepted.
        default_lr: the learning rate of a job on this model whose request names none.
        worker: settings stored with each job.
        default_model: used where a request names none.
        default_seed: used where a request gives none.
        model_roots: folders that `checkpoint_dir` may point into.
    """

    provider_id: str
    check: CheckRequest
    default_lr: Callable[[ResolvedModel], float]
    worker: WorkerSettings
    default_model: str | None = None
    default_seed: int = 0
    model_roots: tuple[Path, ...] = ()


class JobService:
    """Implements apis.post_training.PostTraining. Blocking work runs in threads: the event loop only waits."""

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
        self._datasets = datasets
        self._profile = profile
        self._store = JobStore(database)
        self._scheduler = scheduler
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
        body_hash = _hash(request)
        # A replay must answer as the first time even if the model or data set has gone since.
        if self._store.find_submitted(request.job_uuid, body_hash):
            self._refuse_other_algorithm(request)
        else:
            spec = self._checked_spec(request)
            self._store.submit(spec, body_hash, max_queued=self._scheduler.settings.max_queued)

    def _checked_spec(self, request: SupervisedFineTuneRequest) -> JobSpec:
        _check_validation(request.training_config)
        spec = self._spec(request)
        self._check_device(spec)
        return spec

    def _preflight_spec(self, preflight: PreflightRequest) -> JobSpec:
        """The job that a submit of this would make; that of an earlier submit where it was made already."""
        request = preflight.as_job(preflight.job_uuid or placeholder_id())
        if self._store.find_submitted(request.job_uuid, _hash(request)):
            self._refuse_other_algorithm(request)
            return JobSpec.model_validate(self._store.get(request.job_uuid).spec)
        spec = self._checked_spec(request)
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

    def _check_device(self, spec: JobSpec) -> None:
        """Refuse now what would wait for ever."""
        slots = self._scheduler.settings.slots
        if not any(spec.device_kind in (None, slot.kind) for slot in slots):
            have = ", ".join(slot.name for slot in slots)
            raise InvalidField(
                f"no {spec.device_kind} device is configured here (`jobs.devices` of the run.yaml gives {have})",
                param="training_config.device",
            )

    def _spec(self, request: SupervisedFineTuneRequest) -> JobSpec:
        data = request.training_config.data_config
        if data is None:
            raise InvalidField(
                "a job needs training_config.data_config with the dataset_id of a registered data set",
                param="training_config.data_config.dataset_id",
            )
        model = self._resolve_model(request)
        algorithm = self._profile.check(request, model)
        self._check_checkpoint_ids(model.identifier, request)
        seed = request.training_config.seed
        return JobSpec(
            job_uuid=request.job_uuid,
            created_at=now(),
            provider_id=self._profile.provider_id,
            model=ModelRef(
                identifier=model.identifier,
                base_identifier=model.base_identifier,
                base_dir=str(model.base_dir),
                adapter_dir=str(model.adapter_dir) if model.adapter_dir else None,
            ),
            training_config=self._with_lr(request.training_config, model),
            algorithm_config=algorithm,
            dataset=self._check_dataset(data.dataset_id, request, "dataset_id"),
            validation=(
                self._check_dataset(data.validation_dataset_id, request, "validation_dataset_id")
                if data.validation_dataset_id
                else None
            ),
            seed=self._profile.default_seed if seed is None else seed,
            worker=self._profile.worker,
        )

    def _with_lr(self, training: TrainingConfig, model: ResolvedModel) -> TrainingConfig:
        """Fixed now, so that every attempt has the same; what depends on the rows is settled where they are read."""
        optimizer = training.optimizer_config
        if optimizer.lr is not None:
            return training
        filled = optimizer.model_copy(update={"lr": self._profile.default_lr(model)})
        return training.model_copy(update={"optimizer_config": filled})

    def _resolve_model(self, request: SupervisedFineTuneRequest) -> ResolvedModel:
        if request.checkpoint_dir:
            return self._at_directory(request.checkpoint_dir, request.model)
        identifier = request.model or self._profile.default_model
        if identifier is None:
            raise InvalidField(
                "no model named and the provider has no default_model; pass model, see `postgrad models list`",
                param="model",
            )
        return self._models.resolve(identifier)

    def _at_directory(self, checkpoint_dir: str, model: str | None) -> ResolvedModel:
        """The base model in a directory. Its id is `model`, else the one it was imported under, else its name."""
        directory = self._base_dir(checkpoint_dir)
        imported = {path.resolve(): identifier for identifier, path in imported_models(self._home).items()}
        identifier = imported.get(directory, directory.name)
        if model is not None and model != identifier:
            # Upstream's clients name the descriptor of what lies in the directory; another model's would mislabel it.
            known = self._known(model)
            if known is not None and (known.adapter_dir is not None or known.base_dir.resolve() != directory):
                raise InvalidField(
                    f"checkpoint_dir is {identifier!r}, but model {model!r} lies elsewhere; send one of the two",
                    param="checkpoint_dir",
                )
            identifier = model
        return ResolvedModel(check_identifier(identifier, param="checkpoint_dir"), identifier, directory, None, None)

    def _known(self, model: str) -> ResolvedModel | None:
        """The model of this id, None where there is none. Raises Conflict where it is another owner's."""
        try:
            return self._models.resolve(model)
        except ModelNotFound:
            self._models.refuse_hidden(model)
            return None

    def _base_dir(self, checkpoint_dir: str) -> Path:
        for root in self._profile.model_roots:
            # A NUL or an overlong name is no directory either.
            with contextlib.suppress(OSError, ValueError):
                directory = (root / checkpoint_dir).resolve()
                if directory.is_relative_to(root.resolve()) and directory.is_dir():
                    return directory
        raise InvalidField(
            f"{checkpoint_dir[:100]!r} is not a base-model directory under an allowed root "
            "(the provider's `model_roots`)",
            param="checkpoint_dir",
        )

    def _check_checkpoint_ids(self, model: str, request: SupervisedFineTuneRequest) -> None:
        """Refuse now what could only fail once an epoch is trained. Raises InvalidField, Conflict."""
        epochs = request.training_config.n_epochs or MAX_DEFAULT_EPOCHS
        checkpoint_identifier(model, request.job_uuid, epochs)
        self._models.refuse_taken(checkpoint_identifier(model, request.job_uuid, epoch) for epoch in range(epochs))

    def _check_dataset(self, dataset_id: str, request: SupervisedFineTuneRequest, field: str) -> DatasetRef:
        """Resolve a data set and check what can be checked at once: all rows of a small one, else the first.

        Raises:
            DatasetNotFound, DataInvalid: with `training_config.data_config.<field>` as their param.
        """
        assert request.training_config.data_config is not None  # _spec refused that
        try:
            reference = self._datasets.reference(dataset_id)
            reader = open_rows(
                DATA_SOURCE.validate_python(reference.source), SourcePolicy.model_validate(reference.policy)
            )
            data = request.training_config.data_config
            check_rows(reader, data.data_format, data.columns)
        except (DatasetNotFound, DataInvalid) as error:
            error.param = f"training_config.data_config.{field}"
            raise
        return reference

    def _status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        job = self._store.get(job_uuid)
        rows, waiting = self._store.checkpoints(job_uuid), self._scheduler.waiting(job)
        return status_of(job, rows, waiting, self._scheduler.settings.max_attempts)


def _check_validation(training: TrainingConfig) -> None:
    """Refuse settings of a validation that contradict each other. Raises InvalidField."""
    data = training.data_config
    if data is None:
        return
    if data.validation_dataset_id and data.validation_split:
        raise InvalidField(
            "give a validation_dataset_id or a validation_split, not both",
            param="training_config.data_config.validation_split",
        )
    if training.early_stopping_patience and not (data.validation_dataset_id or data.validation_split):
        raise InvalidField(
            "stopping early needs a validation loss: give a validation_dataset_id or a validation_split",
            param="training_config.early_stopping_patience",
        )


def _hash(request: SupervisedFineTuneRequest) -> str:
    # Without what equals a default, so that a field which a later version adds does not make a replay another request.
    body: dict[str, Any] = request.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

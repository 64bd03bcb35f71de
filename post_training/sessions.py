"""The scheduler of SFT sessions: one facade over the one queue, in OpenTinker's words.

A session is a job whose rows a client brings, step by step. Everything that a job has it has as well: a durable row, a
place in the queue, a lease on its device, events, checkpoints; `worker/session_loop.py` runs it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio.to_thread

from apis.errors import InvalidField, JobNotFound, PostgradError
from apis.post_training.models import (
    DataConfig,
    EfficiencyConfig,
    JobStatus,
    OptimizerConfig,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from apis.sft_sessions.models import (
    ListSessionsResponse,
    SessionActionResponse,
    SessionConfig,
    SessionState,
    SessionStatusResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from post_training.job_specs import SpecBuilder, request_hash
from post_training.jobs.scheduler import Scheduler
from post_training.jobs.spec import JobSpec, SessionSettings
from post_training.jobs.store import JobStore
from post_training.jobs.tables import JobRow
from post_training.owners import current_caller
from post_training.session_tokens import USER, session_token, token_digest

SERVER = "training_server"
"""The key under which a job's resources hold the address of its training server and the attempt that it belongs to."""

_STATES = {
    JobStatus.completed: SessionState.COMPLETED,
    JobStatus.failed: SessionState.FAILED,
    JobStatus.cancelled: SessionState.CANCELLED,
    JobStatus.scheduled: SessionState.QUEUED,
}
_LORA_FIELDS = {"rank": "lora_rank", "alpha": "lora_alpha"}
_T = TypeVar("_T")


class SessionService:
    """Implements apis.sft_sessions.SFTSessions over the job store of one provider."""

    def __init__(self, home: Path, store: JobStore, scheduler: Scheduler, specs: SpecBuilder) -> None:
        self._home = home
        self._store = store
        self._scheduler = scheduler
        self._specs = specs

    async def submit_job(self, request: SubmitJobRequest) -> SubmitJobResponse:
        job_id = request.job_id or f"sft-{secrets.token_hex(4)}"
        await _in_thread(lambda: self._submit(request, job_id))
        self._scheduler.wake()
        return await self._answer(job_id)

    async def job_status(self, job_id: str) -> SessionStatusResponse:
        return await _in_thread(lambda: self._status_of(self._session(job_id)))

    async def list_sessions(self) -> ListSessionsResponse:
        return await _in_thread(self._list)

    async def cancel_session(self, job_id: str) -> SessionActionResponse:
        await _in_thread(lambda: self._cancel(job_id))
        self._scheduler.wake()
        status = await self.job_status(job_id)
        ended = status.completed_at is not None
        message = f"the session is {status.status}" if ended else "the session is being cancelled"
        return SessionActionResponse(job_id=job_id, status=status.status, message=message)

    async def complete_job(self, job_id: str) -> SessionActionResponse:
        await _in_thread(lambda: self._store.request_completion(self._session(job_id).job_uuid))
        self._scheduler.wake()
        return await self._action(job_id)

    async def resume_job(self, job_id: str) -> SubmitJobResponse:
        await _in_thread(lambda: self._store.resume(self._session(job_id).job_uuid))
        self._scheduler.wake()
        return await self._answer(job_id)

    async def _answer(self, job_id: str) -> SubmitJobResponse:
        status = await self.job_status(job_id)
        message = status.message or f"the session is {status.status}"
        return SubmitJobResponse(job_id=job_id, status=status.status, message=message, server_url=status.server_url)

    async def _action(self, job_id: str) -> SessionActionResponse:
        status = await self.job_status(job_id)
        return SessionActionResponse(
            job_id=job_id, status=status.status, message=status.message or f"the session is {status.status}"
        )

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _submit(self, request: SubmitJobRequest, job_id: str) -> None:
        body = request_hash(request)
        with _in_words_of_the_config(request.config):
            if not self._store.find_submitted(job_id, body):
                self._store.submit(self._spec(request, job_id), body, max_queued=self._scheduler.settings.max_queued)

    def _spec(self, request: SubmitJobRequest, job_id: str) -> JobSpec:
        config = request.config
        settings = SessionSettings(
            token_sha256="",
            host=self._scheduler.settings.session_host,
            lease_seconds=config.lease_seconds,
            window=config.window,
            total_steps=config.total_steps,
            labels={
                name: value
                for name in ("project_name", "experiment_name")
                if (value := getattr(config, name)) is not None
            },
        )
        spec = self._specs.session(self._as_job(request, job_id), settings)
        token = session_token(self._home, job_id, spec.created_at.isoformat())
        worker = spec.worker if config.kernels == "auto" else spec.worker.model_copy(update={"kernels": config.kernels})
        session = settings.model_copy(update={"token_sha256": token_digest(token)})
        return spec.model_copy(update={"session": session, "worker": worker})

    def _as_job(self, request: SubmitJobRequest, job_id: str) -> SupervisedFineTuneRequest:
        """The job that would train the same way on a data set of its own."""
        config, lora = request.config, request.config.lora
        algorithm = lora.as_algorithm() if lora is not None else config.algorithm_config
        given: dict[str, Any] = {} if algorithm is None else {"algorithm_config": algorithm}
        if config.provider_id is not None:
            given["provider_id"] = config.provider_id
        model = lora.lora_adapter_path if lora is not None and lora.lora_adapter_path is not None else config.model
        return SupervisedFineTuneRequest(
            job_uuid=job_id, model=model, training_config=_training(config, self._device(request), job_id), **given
        )

    def _device(self, request: SubmitJobRequest) -> Any:
        """The kind of device. Raises InvalidField where more are asked for than there are, or than a session uses."""
        gpus, device = request.num_gpus, request.config.device
        have = sum(slot.kind == "cuda" for slot in self._scheduler.settings.slots)
        if gpus is None:
            return device
        if gpus > have:
            raise InvalidField(f"this stack has {have} GPUs (`jobs.devices` of its run.yaml)", param="num_gpus")
        if gpus > 1:
            raise InvalidField("a session trains on one device: ask for 1 GPU, or leave num_gpus out", param="num_gpus")
        kind = "cuda" if gpus else "cpu"
        if device not in (None, kind):
            raise InvalidField(
                f"num_gpus {gpus} contradicts config.device {device!r}: send one of them", param="num_gpus"
            )
        return kind

    def _session(self, job_id: str) -> JobRow:
        try:
            job = self._store.get(job_id)
        except JobNotFound as error:
            error.param = "job_id"
            raise
        if not job.is_session:
            raise JobNotFound(
                f"job {job_id!r} is a whole job and no session: see it with post_training", param="job_id"
            )
        return job

    def _cancel(self, job_id: str) -> None:
        if self._store.request_cancel(self._session(job_id).job_uuid):
            self._scheduler.clean(job_id)

    def _list(self) -> ListSessionsResponse:
        durable = self._store.durable_steps()
        jobs = [self._status(job, server_url(job), durable.get(job.job_uuid)) for job in self._store.sessions()]
        return ListSessionsResponse(jobs=jobs)

    def _status_of(self, job: JobRow) -> SessionStatusResponse:
        """With the token, for whom the session belongs to."""
        url = server_url(job)
        if url is not None and current_caller().owner == job.owned_by:
            url = self._with_token(url, job)
        steps = [row.step for row in self._store.all_checkpoints(job.job_uuid)]
        return self._status(job, url, max(steps, default=None))

    def _status(self, job: JobRow, url: str | None, durable: int | None) -> SessionStatusResponse:
        waiting = self._scheduler.waiting(job)
        device = (job.resources or {}).get("device", "")
        return SessionStatusResponse(
            job_id=job.job_uuid,
            status=state_of(job),
            gpu_ids=[int(device.partition(":")[2])] if device.startswith("cuda:") and url is not None else [],
            port=urlsplit(url).port if url is not None else None,
            server_url=url,
            created_at=job.scheduled_at,
            started_at=job.started_at,
            completed_at=job.completed_at,
            error_message=job.error["message"] if job.error else None,
            message=waiting.reason,
            paused=job.paused,
            queue_position=waiting.position,
            last_durable_step=durable,
        )

    def _with_token(self, url: str, job: JobRow) -> str:
        created = JobSpec.model_validate(job.spec).created_at.isoformat()
        parts, token = urlsplit(url), session_token(self._home, job.job_uuid, created)
        return parts._replace(netloc=f"{USER}:{token}@{parts.netloc}").geturl()


def server_url(job: JobRow) -> str | None:
    """Where the training server of a session answers, None where there is none now."""
    server = (job.resources or {}).get(SERVER) or {}
    running = job.status == JobStatus.in_progress and server.get("attempt") == job.attempt
    return server.get("url") if running else None


def state_of(job: JobRow) -> SessionState:
    """A job's status in OpenTinker's words."""
    if job.status == JobStatus.in_progress:
        return SessionState.STARTING if server_url(job) is None else SessionState.RUNNING
    return _STATES[JobStatus(job.status)]


def _training(config: SessionConfig, device: Any, job_id: str) -> TrainingConfig:
    return TrainingConfig(
        # Its rows come from the client; the id of a data set, which a DataConfig must have, names nothing.
        data_config=DataConfig(
            dataset_id=job_id,
            data_format=config.data_format,
            columns=config.columns,
            train_on_input=config.train_on_input,
            max_seq_len=config.max_seq_len,
            on_overlength=config.on_overlength,
        ),
        optimizer_config=_optimizer(config),
        efficiency_config=EfficiencyConfig(enable_activation_checkpointing=config.enable_activation_checkpointing),
        dtype=config.dtype,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        save_every_n_steps=config.save_every_n_steps,
        device=device,
    )


def _optimizer(config: SessionConfig) -> OptimizerConfig:
    """The request's; the rate is constant where it does not say how many steps there will be."""
    given: dict[str, Any] = config.optimizer_config.model_dump(exclude_unset=True)
    if config.lora is not None and config.lora.lr is not None:
        given["lr"] = config.lora.lr
    if config.total_steps is None:
        given = {"num_warmup_steps": 0, **given, "lr_schedule": "constant"}
    return OptimizerConfig.model_validate(given)


@contextmanager
def _in_words_of_the_config(config: SessionConfig) -> Iterator[None]:
    """Name the fields of a refused job as the session's config does."""
    try:
        yield
    except PostgradError as error:
        error.param = None if error.param is None else _in_config(error.param, config)
        raise


def _in_config(field: str, config: SessionConfig) -> str:
    if field in ("job_id", "job_uuid"):
        return "job_id"
    if field == "num_gpus":
        return field
    if config.lora is not None and field.startswith("algorithm_config."):
        return f"config.lora.{_LORA_FIELDS.get(field.removeprefix('algorithm_config.'), 'target_modules')}"
    for place in ("training_config.data_config.", "training_config.efficiency_config.", "training_config."):
        if field.startswith(place):
            return f"config.{field.removeprefix(place)}"
    return f"config.{field}"


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await anyio.to_thread.run_sync(work)

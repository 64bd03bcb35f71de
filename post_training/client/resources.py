"""The verbs of `StackClient`, grouped as the APIs are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from apis.datasets.models import Dataset, DatasetPurpose, DataSource, IterrowsResponse
from apis.errors import Unavailable
from apis.inference.models import ChatCompletion, ChatCompletionChunk, Completion
from apis.inspect.models import HealthInfo, ProviderInfo, VersionInfo
from apis.models.models import Model
from apis.post_training.models import (
    CheckpointFile,
    JobEvent,
    JobStatus,
    JobSummary,
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
from apis.post_training.reports import PreflightReport
from post_training.client import calls
from post_training.client.downloads import CheckpointDownload, Form, OnProgress
from post_training.client.following import Following
from post_training.client.transport import SyncTransport
from post_training.client.waiting import Wait, job_failure


class _Resource:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport


class PostTrainingResource(_Resource):
    """Whole jobs. Every method raises a `PostgradError`; an unknown job is JobNotFound."""

    def supervised_fine_tune(
        self, request: SupervisedFineTuneRequest | None = None, /, **fields: Any
    ) -> PostTrainingJob:
        """Submit a fine-tuning job; answers at once. Sending the same request again changes nothing.

        Give a whole request, or its fields: `supervised_fine_tune(job_uuid="j1", model="m", training_config={…})`.

        Raises:
            BadRequest: a field, the model or the data cannot be used, or the id belongs to another request.
            NotFound: the model or data set is not registered.
            QueueFull: too many jobs wait.
        """
        built = calls.build_request(SupervisedFineTuneRequest, request, fields)
        return self._transport.send(calls.supervised_fine_tune(built))

    def preflight(self, request: PreflightRequest | None = None, /, **fields: Any) -> PreflightReport:
        """What a job of this request would train on and take, from all of its rows; nothing is run.

        Takes what `supervised_fine_tune` takes, `job_uuid` is optional, and waits until all rows are read.

        Raises:
            BadRequest, NotFound: as `supervised_fine_tune`; DataInvalid also for what only tokens show.
            TooLarge: the rows take too long to read for an answer; the job itself has the time.
        """
        built = calls.build_request(PreflightRequest, request, fields)
        return self._transport.send(calls.preflight(built))

    def preference_optimize(
        self, request: PreferenceOptimizeRequest | None = None, /, **fields: Any
    ) -> PostTrainingJob:
        """As `supervised_fine_tune`, on preference rows. Raises NotSupported where no provider has it."""
        built = calls.build_request(PreferenceOptimizeRequest, request, fields)
        return self._transport.send(calls.preference_optimize(built))

    def jobs(self, *, status: JobStatus | str | None = None) -> list[JobSummary]:
        """Every job, or every one of this status, oldest first, in one answer; `iter_jobs` is for very many."""
        return self._transport.send(calls.list_jobs(status))

    def jobs_page(
        self,
        limit: int = 100,
        after: str | None = None,
        *,
        order: ListOrder | str = ListOrder.asc,
        status: JobStatus | str | None = None,
    ) -> ListPostTrainingJobsResponse:
        """Up to `limit` (at most 1,000) jobs; the answer's `next`, passed as `after`, gets the page behind them.

        Args:
            after: a job's id works as well.
            order: `asc` or `desc`, the newest first.
        """
        return self._transport.send(calls.jobs_page(limit, after, order, status))

    def iter_jobs(
        self, *, order: ListOrder | str = ListOrder.asc, status: JobStatus | str | None = None, page_size: int = 100
    ) -> Iterator[JobSummary]:
        """Every job, or every one of this status, read page by page as they are taken; deleting them is no harm."""
        page = self.jobs_page(page_size, order=order, status=status)
        while True:
            yield from page.data
            if page.next is None:
                return
            page = self.jobs_page(page_size, page.next, order=order, status=status)

    def status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        return self._transport.send(calls.job_status(job_uuid))

    def artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """The finished checkpoints."""
        return self._transport.send(calls.job_artifacts(job_uuid))

    def cancel(self, job_uuid: str) -> None:
        """Stop a job; on one that has ended nothing happens."""
        self._transport.send(calls.cancel_job(job_uuid))

    def delete(self, job_uuid: str) -> None:
        """Forget a job that has ended, with its checkpoints, their model ids and files.

        Raises:
            Conflict: it has not ended, or an unfinished job goes on from one of its checkpoints.
        """
        self._transport.send(calls.delete_job(job_uuid))

    def logs(self, job_uuid: str, after: int | None = None, *, tail: int | None = None) -> PostTrainingJobLogStream:
        """Log lines numbered above `after` (from the first on), or the newest `tail` of them.

        Pass the answer's `next` to read on.
        """
        return self._transport.send(calls.job_logs(job_uuid, after, tail))

    def metrics(self, job_uuid: str, after_step: int = 0, *, limit: int = 1000) -> PostTrainingJobMetricsResponse:
        """Numbers of the optimizer steps above `after_step`; pass the answer's `next` to read on."""
        return self._transport.send(calls.job_metrics(job_uuid, after_step, limit))

    def events(self, job_uuid: str, after: int = 0) -> Iterator[JobEvent]:
        """Every event with an id above `after`, each once and in order, as they come, until the job has ended.

        A cut connection is made again, and outages of the server of up to a minute are waited out.

        Raises:
            Unavailable: the server was not there, or stayed away.
        """
        following = Following(job_uuid, after)
        while not following.ended:
            try:
                with self._transport.opened(following.call()) as response:
                    following.connected()
                    for chunk in response.iter_raw():
                        yield from following.feed(chunk)
                        if following.ended:
                            return
                pause = following.pause()
            except Unavailable as error:
                pause = following.pause(error)
            time.sleep(pause)

    def checkpoint_files(self, job_uuid: str, step: int) -> list[CheckpointFile]:
        """The files of the checkpoint of `step`, with sizes and hashes. Raises CheckpointNotFound."""
        return self._transport.send(calls.checkpoint_files(job_uuid, step))

    def download_checkpoint(
        self,
        job_uuid: str,
        step: int,
        to: str | os.PathLike[str],
        form: Form = "adapter",
        on_progress: OnProgress | None = None,
    ) -> Path:
        """Bring a checkpoint here and return its folder; a download that was cut goes on where it was.

        Args:
            to: a folder that is not there yet, or is empty. It appears when everything in it is right.
            form: `adapter` (PEFT), `merged` (a whole model), or `all` (both and the training state, in folders).
            on_progress: called with the bytes that are here and the bytes there will be.

        Raises:
            InvalidField: `to` cannot be used.
            CheckpointNotFound: there is no finished checkpoint of that step.
            FileMissing: the checkpoint does not hold that form.
            ModelInvalid: a file differs from its hash.
        """
        return CheckpointDownload(self._transport, job_uuid, step, to, form, on_progress).run()

    def wait(
        self,
        job_uuid: str,
        *,
        poll_seconds: float = 2.0,
        timeout: float | None = None,
        on_status: Callable[[PostTrainingJobStatusResponse], None] | None = None,
        raise_on_failure: bool = False,
    ) -> PostTrainingJobStatusResponse:
        """Wait until the job has completed, failed or been cancelled, and return its last status.

        Outages of the server of up to a minute are waited out.

        Args:
            on_status: called with each status seen, the last one included.
            raise_on_failure: raise the job's own error where it failed, JobFailure where it was cancelled.

        Raises:
            Unavailable: the job did not end within `timeout` seconds, or the server stayed away.
        """
        wait = Wait(job_uuid, poll_seconds, timeout)
        while True:
            try:
                status = self.status(job_uuid)
            except Unavailable as error:
                time.sleep(wait.after_outage(error))
                continue
            if on_status is not None:
                on_status(status)
            pause = wait.after_status(status)
            if pause is None:
                break
            time.sleep(pause)
        if raise_on_failure and (failure := job_failure(status)) is not None:
            raise failure
        return status


class DatasetsResource(_Resource):
    """Data sets and their rows. An unknown one is DatasetNotFound."""

    def register(
        self,
        source: DataSource | dict[str, Any],
        *,
        dataset_id: str | None = None,
        purpose: DatasetPurpose | str = DatasetPurpose.post_training_messages,
        metadata: dict[str, Any] | None = None,
    ) -> Dataset:
        """Register a source: `{"type": "uri", "uri": …}` or `{"type": "rows", "rows": […]}`.

        Raises:
            DataInvalid: the source cannot be read or has no rows.
            Conflict: the id is taken by another source.
        """
        return self._transport.send(calls.register_dataset(source, dataset_id, purpose, metadata))

    def list(self) -> list[Dataset]:
        return self._transport.send(calls.list_datasets())

    def get(self, dataset_id: str) -> Dataset:
        return self._transport.send(calls.get_dataset(dataset_id))

    def unregister(self, dataset_id: str) -> None:
        self._transport.send(calls.unregister_dataset(dataset_id))

    def rows(self, dataset_id: str, *, start_index: int | None = None, limit: int | None = None) -> IterrowsResponse:
        """Rows from `start_index` on, at most `limit` of them (None: all)."""
        return self._transport.send(calls.rows(dataset_id, start_index, limit))

    # `list` the method hides the type of that name inside this class.
    def append(self, dataset_id: str, rows: calls.Rows) -> None:
        """Add rows at the end. Not retried once sent: a lost answer could add them twice."""
        self._transport.send(calls.append_rows(dataset_id, rows))


class ModelsResource(_Resource):
    """Base models and checkpoints under their ids. An unknown one is ModelNotFound."""

    def list(self) -> list[Model]:
        return self._transport.send(calls.list_models())

    def get(self, model_id: str) -> Model:
        return self._transport.send(calls.get_model(model_id))

    def register(
        self, model_id: str, *, provider_model_id: str | None = None, metadata: dict[str, Any] | None = None
    ) -> Model:
        """Give the known model `provider_model_id` the further id `model_id`. Raises Conflict where that is taken."""
        return self._transport.send(calls.register_model(model_id, provider_model_id, metadata))

    def unregister(self, model_id: str) -> None:
        """Forget the id; files stay."""
        self._transport.send(calls.unregister_model(model_id))


class InferenceResource(_Resource):
    """Text from models. `parameters` are OpenAI's (`max_tokens`, `temperature`, …) and go into the body as they are."""

    def chat_completion(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> ChatCompletion:
        body = {**parameters, "model": model, "messages": messages}
        return self._transport.send(calls.chat_completion(body))

    def stream_chat_completion(
        self, model: str, messages: list[dict[str, Any]], **parameters: Any
    ) -> Iterator[ChatCompletionChunk]:
        """Each piece as it comes; the request is sent when the first is asked for."""
        body = {**parameters, "model": model, "messages": messages}
        return self._transport.stream(calls.stream_chat_completion(body))

    def completion(self, model: str, prompt: str | list[str], **parameters: Any) -> Completion:
        return self._transport.send(calls.completion({**parameters, "model": model, "prompt": prompt}))

    def stream_completion(self, model: str, prompt: str | list[str], **parameters: Any) -> Iterator[Completion]:
        """Each piece as it comes; the request is sent when the first is asked for."""
        return self._transport.stream(calls.stream_completion({**parameters, "model": model, "prompt": prompt}))


class InspectResource(_Resource):
    """What the running stack says about itself."""

    def version(self) -> VersionInfo:
        return self._transport.send(calls.version())

    def health(self) -> HealthInfo:
        return self._transport.send(calls.health())

    def providers(self) -> list[ProviderInfo]:
        return self._transport.send(calls.list_providers())

    def provider(self, provider_id: str) -> ProviderInfo:
        """Raises NotFound."""
        return self._transport.send(calls.get_provider(provider_id))

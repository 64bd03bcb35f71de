"""What a post-training provider must be able to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class PostTraining(Protocol):
    """Whole jobs. Every method but `preflight` answers at once; the training itself runs elsewhere."""

    async def supervised_fine_tune(self, request: SupervisedFineTuneRequest) -> PostTrainingJob:
        """Accept a job durably and return its id.

        The same id with the same body answers as the first time.

        Raises:
            BadRequest: a field, model or data set cannot be used, or the id belongs to another body.
            NotFound: the model or data set is not registered.
            QueueFull: too many jobs wait.
        """
        ...

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> PostTrainingJob:
        """As `supervised_fine_tune`, on preference rows. Raises NotSupported where a provider has none."""
        ...

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        """Check a request as `supervised_fine_tune` does, read and tokenise all of its rows, and report; run nothing.

        Raises:
            BadRequest, NotFound: as `supervised_fine_tune`; DataInvalid also for what only tokens show.
            TooLarge: the rows take too long to read for an answer.
        """
        ...

    async def list_jobs(
        self,
        limit: int | None = None,
        after: str | None = None,
        order: ListOrder = ListOrder.asc,
        status: JobStatus | None = None,
    ) -> ListPostTrainingJobsResponse:
        """The jobs of this status (all: None), whole or a page.

        Args:
            limit: at most so many; `has_more` and `next` are set then, and only then.
            after: go on behind this job's id, or at the `next` of the page before.

        Raises:
            InvalidField: `after` is neither.
        """
        ...

    async def get_job_status(self, job_uuid: str) -> PostTrainingJobStatusResponse:
        """Raises JobNotFound."""
        ...

    async def get_job_artifacts(self, job_uuid: str) -> PostTrainingJobArtifactsResponse:
        """The finished checkpoints. Raises JobNotFound."""
        ...

    async def cancel_job(self, job_uuid: str) -> None:
        """Stop a job; on a finished one nothing happens. Raises JobNotFound."""
        ...

    async def delete_job(self, job_uuid: str) -> None:
        """Forget a job that has ended: its row, events, checkpoints, their model ids and all files.

        Raises:
            JobNotFound: there is no such job.
            Conflict: it has not ended, or an unfinished job goes on from one of its checkpoints.
        """
        ...

    async def get_job_logs(self, job_uuid: str, after: int = 0, tail: int | None = None) -> PostTrainingJobLogStream:
        """Log lines numbered above `after`; with `tail`, the newest that many instead. Raises JobNotFound."""
        ...

    async def stream_job_events(self, job_uuid: str, after: int = 0) -> AsyncIterator[JobEvent]:
        """Every event with an id above `after`, in order, each once, then each new one as it comes.

        Once the job has ended and all is told, one event of kind `end` follows and the iterator is over. It is over
        without one where the job is deleted or the server stops. An async generator is closed when its reader goes.

        Raises:
            JobNotFound: before the first event.
        """
        ...

    async def get_job_metrics(
        self, job_uuid: str, after_step: int = 0, limit: int = 1000
    ) -> PostTrainingJobMetricsResponse:
        """Numbers of the steps above `after_step`, at most `limit`; the newest of each step. Raises JobNotFound."""
        ...

    async def list_checkpoint_files(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        """The files of the finished checkpoint of `step`. Raises JobNotFound, CheckpointNotFound."""
        ...

    async def find_checkpoint_file(self, job_uuid: str, step: int, name: str) -> StoredFile:
        """One of those files, by its exact name.

        Raises:
            JobNotFound, CheckpointNotFound.
            FileMissing: the checkpoint has no such file.
            ModelInvalid: it is damaged.
        """
        ...

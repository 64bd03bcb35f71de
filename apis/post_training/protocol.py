"""What a post-training provider must be able to do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from apis.post_training.models import (
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)


@runtime_checkable
class PostTraining(Protocol):
    """Whole jobs. Every method answers at once; the training itself runs elsewhere."""

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

    async def list_jobs(self) -> ListPostTrainingJobsResponse:
        """Every job, oldest first."""
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

    async def get_job_logs(self, job_uuid: str, after: int = 0) -> PostTrainingJobLogStream:
        """Log lines with a number greater than `after`. Raises JobNotFound."""
        ...

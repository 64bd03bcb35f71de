"""What llama-stack-client's SDKs of several generations have in common.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from flow import equal
from llama_stack_client import APIStatusError, LlamaStackClient
from plain import LORA, PlainDriver, training


class Jobs(PlainDriver):
    """Verbs of jobs, which the clients from 0.1.0 to 0.7.0 spell alike."""

    submit_route = "/v1/post-training/supervised-fine-tune"
    status_type = "JobStatusResponse"
    artifacts_type = "JobArtifactsResponse"

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.client: Any = LlamaStackClient(base_url=self.url)

    @property
    def post_training(self) -> Any:
        return self.client.post_training

    def submit(self, job_uuid: str, dataset_id: str, validation_id: str, epochs: int) -> str:
        job = self.post_training.supervised_fine_tune(
            job_uuid=job_uuid,
            model=self.base,
            training_config=training(self, dataset_id, validation_id, epochs),
            algorithm_config=LORA,
            hyperparam_search_config={},
            logger_config={},
        )
        equal(type(job).__name__, "PostTrainingJob", "the type of the answer to a submit")
        return job.job_uuid

    def jobs(self) -> list[str]:
        return [job.job_uuid for job in self.post_training.job.list()]

    def status(self, job_uuid: str) -> Any:
        return self.post_training.job.status(job_uuid=job_uuid)

    def artifacts(self, job_uuid: str) -> Any:
        return self.post_training.job.artifacts(job_uuid=job_uuid)

    def cancel(self, job_uuid: str) -> None:
        equal(self.post_training.job.cancel(job_uuid=job_uuid), None, "the answer to a cancel")

    def refusal(self, error: Exception) -> int:
        """The status code of an error that the SDK raised for an answer. Raises the error if it is another."""
        if not isinstance(error, APIStatusError):
            raise error
        return error.status_code

    def server_version(self) -> str:
        return self.client.inspect.version().version

    def health(self) -> str:
        return self.client.inspect.health().status

    def providers(self) -> list[tuple[str, str, str]]:
        return [(one.api, one.provider_id, one.provider_type) for one in self.client.providers.list()]

    def routes(self) -> list[tuple[str, str]]:
        return [(one.method, one.route) for one in self.client.routes.list()]

    def models(self) -> list[str]:
        return [one.identifier for one in self.client.models.list()]

    def model(self, model_id: str) -> str:
        found = self.client.models.retrieve(model_id=model_id)
        equal((found.type, found.api_model_type), ("model", "llm"), "the model's type")
        return found.identifier

    def register_model(self, model_id: str, stands_for: str) -> None:
        made = self.client.models.register(model_id=model_id, provider_model_id=stands_for)
        equal(made.identifier, model_id, "the model's identifier")

    def unregister_model(self, model_id: str) -> None:
        equal(self.client.models.unregister(model_id=model_id), None, "the answer")


class NewData(Jobs):
    """Data sets from 0.1.8 on: a purpose and a source, rows by index."""

    data_format: str | None = "dialog"

    @property
    def resource(self) -> Any:
        return self.client.datasets

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        made = self.resource.register(
            purpose="post-training/messages", source={"type": "rows", "rows": rows}, dataset_id=dataset_id
        )
        equal((made.identifier, made.type, made.provider_id), (dataset_id, "dataset", "localfs"), "the data set")

    def datasets(self) -> list[str]:
        return [one.identifier for one in self.resource.list()]

    def dataset(self, dataset_id: str) -> str:
        found = self.resource.retrieve(dataset_id)
        equal((found.source.type, found.purpose), ("rows", "post-training/messages"), "source and purpose")
        return found.identifier

    def rows(self, dataset_id: str, start: int, limit: int) -> list[dict[str, Any]]:
        return self.resource.iterrows(dataset_id, start_index=start, limit=limit).data

    def unregister(self, dataset_id: str) -> None:
        equal(self.resource.unregister(dataset_id), None, "the answer")


class AppendRows(NewData):
    """Since 0.2.13."""

    def append(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        equal(self.resource.appendrows(dataset_id, rows=rows), None, "the answer")

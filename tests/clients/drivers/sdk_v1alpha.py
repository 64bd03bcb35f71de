"""llama-stack-client 0.3.5 to 0.7.0: `client.alpha.post_training` at `/v1alpha`, models asked by OpenAI's verbs.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from flow import equal, main
from plain import Way
from sdk import AppendRows
from sdk_openai import openai_way


class V035(AppendRows):
    """0.3.5: data sets at `client.datasets`."""

    submit_route = "/v1alpha/post-training/supervised-fine-tune"
    data = "/v1beta"
    data_format = None  # told by the rows, which these clients bring as messages
    checkpoint_type = "Checkpoint"

    @property
    def post_training(self) -> Any:
        return self.client.alpha.post_training

    def models(self) -> list[str]:
        listed = [one.id for one in self.client.models.openai.list()]
        equal(sorted(listed), sorted(super().models()), "the models as both lists name them")
        return listed

    def ways(self) -> list[Way]:
        return [openai_way(self.client, "chat")]


class V040(V035):
    """0.4.0: data sets at `client.beta.datasets`, models typed as OpenAI's, an admin API."""

    @property
    def resource(self) -> Any:
        return self.client.beta.datasets

    def models(self) -> list[str]:
        listed = self.client.models.list()
        equal({one.object for one in listed}, {"model"}, "the objects listed")
        equal({one.custom_metadata["model_type"] for one in listed}, {"llm"}, "the types of the models")
        return [one.id for one in listed]

    def server_version(self) -> str:
        equal(self.client.alpha.admin.version().version, super().server_version(), "the version that admin gives")
        return super().server_version()

    def health(self) -> str:
        equal(self.client.alpha.admin.health().status, "OK", "the health that admin gives")
        return super().health()

    def providers(self) -> list[tuple[str, str, str]]:
        listed = super().providers()
        administered = self.client.alpha.admin.list_providers()
        equal([(one.api, one.provider_id, one.provider_type) for one in administered], listed, "admin's providers")
        one = self.client.alpha.admin.inspect_provider(listed[0][1])
        equal(one.provider_id, listed[0][1], "the provider that admin inspects")
        return listed

    def routes(self) -> list[tuple[str, str]]:
        listed = super().routes()
        administered = self.client.alpha.admin.list_routes()
        equal([(one.method, one.route) for one in administered], listed, "admin's routes")
        return listed


class V070(V040):
    """0.7.0: jobs named in the path, and an id in the body of rows beside that in the path."""

    def status(self, job_uuid: str) -> Any:
        return self.post_training.job.status(job_uuid)

    def artifacts(self, job_uuid: str) -> Any:
        return self.post_training.job.artifacts(job_uuid)

    def cancel(self, job_uuid: str) -> None:
        equal(self.post_training.job.cancel(job_uuid), None, "the answer to a cancel")

    def append(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        answer = self.resource.appendrows(path_dataset_id=dataset_id, body_dataset_id=dataset_id, rows=rows)
        equal(answer, None, "the answer")


DRIVERS = {"0.3.5": V035, "0.4.0": V040, "0.7.0": V070}

if __name__ == "__main__":
    main(lambda task: DRIVERS[task["version"]](task))

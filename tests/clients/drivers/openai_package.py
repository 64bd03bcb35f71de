"""The `openai` package: models, chat and completions by it, training by plain HTTP at the newest paths.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from flow import equal, main
from openai import APIStatusError, NotFoundError, OpenAI
from plain import PlainDriver, Way
from sdk_openai import openai_way


class Newest(PlainDriver):
    """Whatever is the newest release."""

    data = "/v1beta"

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none")

    def models(self) -> list[str]:
        return [one.id for one in self.client.models.list()]

    def model(self, model_id: str) -> str:
        self._refuse_unknown()
        found = self.client.models.retrieve(model_id)
        equal(found.object, "model", "the model's object")
        return found.id

    def _refuse_unknown(self) -> None:
        try:
            self.client.chat.completions.create(model="no/model", messages=[{"role": "user", "content": "a"}])
        except NotFoundError as error:
            equal((error.code, error.param), ("model_not_found", "model"), "code and param of the refusal")
        else:
            raise AssertionError("a model that does not exist answered")

    def refusal(self, error: Exception) -> int:
        return error.status_code if isinstance(error, APIStatusError) else super().refusal(error)

    def ways(self) -> list[Way]:
        return [
            openai_way(self.client, "chat"),
            openai_way(self.client.with_options(base_url=self.url + "/v1/openai/v1"), "openai chat"),
        ]


if __name__ == "__main__":
    main(Newest)

"""llama-stack-client 0.1.0 to 0.2.23: `client.post_training` at `/v1`, models asked by `client.inference`.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from files import csv_address
from flow import equal, main
from plain import Way
from sdk import AppendRows, Jobs, NewData
from sdk_inference import Inference
from sdk_openai import openai_way


class OldData(Jobs):
    """Data sets of 0.1.0 to 0.1.7: a schema and an address of a file, rows by pages."""

    data_format = "instruct"

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        schema = {"chat_completion_input": {"type": "json"}, "expected_answer": {"type": "string"}}
        self.client.datasets.register(
            dataset_id=dataset_id,
            dataset_schema=schema,
            url={"uri": csv_address(rows, self.folder)},
            provider_id="localfs",
        )

    def datasets(self) -> list[str]:
        return [one.identifier for one in self.client.datasets.list()]

    def dataset(self, dataset_id: str) -> str:
        found = self.client.datasets.retrieve(dataset_id=dataset_id)
        equal(found.type, "dataset", "the data set's type")
        equal(found.url.uri.startswith("data:text/csv;base64,"), True, "whether the data set has its address")
        return found.identifier

    def rows(self, dataset_id: str, start: int, limit: int) -> list[dict[str, Any]]:
        page = self.client.datasetio.get_rows_paginated(
            dataset_id=dataset_id, rows_in_page=limit, page_token=str(start)
        )
        equal(page.total_count, len(page.rows), "total_count")
        return page.rows

    def append(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        self.client.datasetio.append_rows(dataset_id=dataset_id, rows=rows)

    def unregister(self, dataset_id: str) -> None:
        self.client.datasets.unregister(dataset_id=dataset_id)


class OpenAI(Inference):
    """Clients that bring OpenAI's chat along, at `/v1/openai/v1`, since 0.2.3."""

    def ways(self) -> list[Way]:
        return [*super().ways(), openai_way(self.client)]


class V010(OldData, Inference):
    """0.1.0."""


class V019(NewData, Inference):
    """0.1.9."""


class V027(NewData, OpenAI):
    """0.2.3 to 0.2.12."""


class V0223(AppendRows, OpenAI):
    """0.2.13 to 0.2.23."""

    checkpoint_type = "Checkpoint"

    def models(self) -> list[str]:
        listed = [one.id for one in self.client.models.openai.list()]
        equal(sorted(listed), sorted(super().models()), "the models as OpenAI's list names them")
        return listed


DRIVERS = {"0.1.0": V010, "0.1.9": V019, "0.2.7": V027, "0.2.12": V027, "0.2.23": V0223}

if __name__ == "__main__":
    main(lambda task: DRIVERS[task["version"]](task))

"""llama-stack-client 0.0.61 and 0.0.63: everything at `/alpha`, lists without an envelope.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from files import csv_address
from flow import equal, is_a, main
from plain import LORA, TEXT_TOKENS, PlainDriver
from sdk_inference import Inference

SCHEMA = {"chat_completion_input": {"type": "json"}, "expected_answer": {"type": "string"}}


class V0063(Inference):
    """0.0.63: today's shape of a submit, old paths."""

    # Words of 0.0.61. The server cannot tell the two apart, since both say of themselves that they are 0.0.1-alpha.0,
    # and neither has a word for cancelled.
    running = "running"
    cancelled = "failed"

    submit_route = "/alpha/post-training/supervised-fine-tune"

    server_version = PlainDriver.server_version
    row_format = "instruct"
    sampling = {"strategy": "greedy", "max_tokens": TEXT_TOKENS}

    def piece(self, delta: Any) -> str:
        is_a(delta, str, "a delta, which was not yet an object")
        return delta

    def address(self, rows: list[dict[str, str]]) -> Any:
        return {"uri": csv_address(rows, self.folder)}

    def health(self) -> str:
        return self.client.inspect.health().status

    def providers(self) -> list[tuple[str, str, str]]:
        by_api = self.client.providers.list()
        return [(api, one.provider_id, one.provider_type) for api, those in by_api.items() for one in those]

    def routes(self) -> list[tuple[str, str]]:
        return [(one.method, one.route) for those in self.client.routes.list().values() for one in those]

    def model(self, model_id: str) -> str:
        return self.client.models.retrieve(identifier=model_id).identifier

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        self.client.datasets.register(dataset_id=dataset_id, dataset_schema=SCHEMA, url=self.address(rows))

    def datasets(self) -> list[str]:
        return [one.identifier for one in self.client.datasets.list()]

    def dataset(self, dataset_id: str) -> str:
        found = self.client.datasets.retrieve(dataset_id=dataset_id)
        equal(found.type, "dataset", "the data set's type")
        return found.identifier

    def rows(self, dataset_id: str, start: int, limit: int) -> list[dict[str, Any]]:
        page = self.client.datasetio.get_rows_paginated(
            dataset_id=dataset_id, rows_in_page=limit, page_token=str(start)
        )
        return page.rows

    def append(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        self.client.datasetio.append_rows(dataset_id=dataset_id, rows=rows)

    def unregister(self, dataset_id: str) -> None:
        self.client.datasets.unregister(dataset_id=dataset_id)


class V0061(V0063):
    """0.0.61: a submit with the data set beside the training_config, and logs of a job."""

    def address(self, rows: list[dict[str, str]]) -> Any:
        return csv_address(rows, self.folder)

    def submit(self, job_uuid: str, dataset_id: str, validation_id: str, epochs: int) -> str:
        job = self.post_training.supervised_fine_tune(
            job_uuid=job_uuid,
            model=self.base,
            dataset_id=dataset_id,
            validation_dataset_id=validation_id,
            algorithm="lora",
            algorithm_config={name: value for name, value in LORA.items() if name != "type"},
            optimizer_config={"optimizer_type": "adamw", "lr": 1e-2, "lr_min": 1e-3, "weight_decay": 0.01},
            training_config={
                "n_epochs": epochs,
                "batch_size": 4,
                "shuffle": True,
                "n_iters": 1000,
                "enable_activation_checkpointing": False,
                "memory_efficient_fsdp_wrap": False,
                "fsdp_cpu_offload": False,
            },
            hyperparam_search_config={},
            logger_config={},
        )
        return job.job_uuid

    def logs(self, job_uuid: str) -> list[str]:
        answer = self.post_training.job.logs(job_uuid=job_uuid)
        is_a(answer.log_lines, list, "log_lines")
        return answer.log_lines


DRIVERS = {"0.0.61": V0061, "0.0.63": V0063}

if __name__ == "__main__":
    main(lambda task: DRIVERS[task["version"]](task))

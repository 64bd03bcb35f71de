"""Every verb by plain HTTP, standard library only: what a driver does where its client lacks a verb.

Runs in a client's own virtual environment.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

TEXT_TOKENS = 12


@dataclass(frozen=True)
class Way:
    """One way to ask a model. `kind` says by what: sdk, cli or http. Streams give the pieces of text in their order.

    `greedy`: whether the same question has the same answer; a command without an option for it may draw at random.
    """

    name: str
    kind: str
    chat: Callable[[str, str], str]
    chat_stream: Callable[[str, str], list[str]]
    completion: Callable[[str, str], str] | None = None
    completion_stream: Callable[[str, str], list[str]] | None = None
    greedy: bool = True


class HttpError(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status_code: int, body: str) -> None:
        super().__init__(f"{status_code}: {body[:500]}")
        self.status_code = status_code


class PlainDriver:
    """Verbs at the paths of one time. A driver overrides those that its client has."""

    kind = "sdk"
    submit_route = "/v1alpha/post-training/supervised-fine-tune"
    status_type: str | None = None
    artifacts_type: str | None = None
    checkpoint_type: str | None = None
    """Names of the SDK's types of what is answered; None: it has none."""
    inspect = "/v1"
    data = "/v1"
    openai = "/v1"
    purpose: str = "post-training/messages"
    data_format: str | None = None
    """What a job says of its data; None: nothing."""
    row_format: str | None = None
    """What the rows are where that is another; None and no data format: messages."""
    running = "in_progress"
    cancelled = "cancelled"
    """What this client's time calls a job that trains, and one that was cancelled."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.url: str = task["url"]
        self.version: str = task["version"]
        self.base: str = task["model"]
        self.folder = Path(task["folder"])

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The JSON of the answer, None where there is none. Raises HttpError."""
        with self._open(method, path, body, query) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The JSON of each server-sent event up to `[DONE]`."""
        with self._open("POST", path, body, {}) as answer:
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def _open(self, method: str, path: str, body: Any, query: dict[str, Any]) -> Any:
        address = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {"content-type": "application/json"}, method=method)
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            with error:
                raise HttpError(error.code, error.read().decode()) from None

    # -- what the stack says about itself --

    def server_version(self) -> str:
        return self.call("GET", f"{self.inspect}/version")["version"]

    def health(self) -> str:
        return self.call("GET", f"{self.inspect}/health")["status"]

    def providers(self) -> list[tuple[str, str, str]]:
        """(API, provider id, provider type) of each."""
        listed = self.call("GET", f"{self.inspect}/providers")["data"]
        return [(one["api"], one["provider_id"], one["provider_type"]) for one in listed]

    def routes(self) -> list[tuple[str, str]]:
        listed = self.call("GET", f"{self.inspect}/inspect/routes")["data"]
        return [(one["method"], one["route"]) for one in listed]

    # -- data sets --

    def row(self, question: str, answer: str) -> dict[str, Any]:
        """One exchange as a row of this client's format."""
        asked = {"role": "user", "content": question}
        answered = {"role": "assistant", "content": answer}
        row_format = self.row_format or self.data_format
        if row_format == "instruct":
            return {"chat_completion_input": json.dumps([asked]), "expected_answer": answer}
        if row_format == "dialog":
            return {"dialog": json.dumps([asked, answered])}
        return {"messages": [asked, answered]}

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        source = {"type": "rows", "rows": rows}
        body = {"dataset_id": dataset_id, "purpose": self.purpose, "source": source}
        self.call("POST", f"{self.data}/datasets", body)

    def datasets(self) -> list[str]:
        return [one["identifier"] for one in self.call("GET", f"{self.data}/datasets")["data"]]

    def dataset(self, dataset_id: str) -> str:
        return self.call("GET", f"{self.data}/datasets/{dataset_id}")["identifier"]

    def rows(self, dataset_id: str, start: int, limit: int) -> list[dict[str, Any]]:
        path = f"{self.data}/datasetio/iterrows/{dataset_id}"
        return self.call("GET", path, start_index=start, limit=limit)["data"]

    def append(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        self.call("POST", f"{self.data}/datasetio/append-rows/{dataset_id}", {"rows": rows})

    def unregister(self, dataset_id: str) -> None:
        self.call("DELETE", f"{self.data}/datasets/{dataset_id}")

    # -- jobs --

    def submit(self, job_uuid: str, dataset_id: str, validation_id: str, epochs: int) -> str:
        body = {
            "job_uuid": job_uuid,
            "model": self.base,
            "training_config": training(self, dataset_id, validation_id, epochs),
            "algorithm_config": LORA,
        }
        return self.call("POST", self.submit_route, body)["job_uuid"]

    def jobs(self) -> list[str]:
        return [one["job_uuid"] for one in self.call("GET", "/v1alpha/post-training/jobs")["data"]]

    def status(self, job_uuid: str) -> Any:
        found = self.call("GET", f"/v1alpha/post-training/jobs/{job_uuid}/status")
        times = {name: found[name] for name in ("scheduled_at", "started_at", "completed_at") if found[name]}
        return {**found, **{name: datetime.fromisoformat(time) for name, time in times.items()}}

    def artifacts(self, job_uuid: str) -> Any:
        return self.call("GET", f"/v1alpha/post-training/jobs/{job_uuid}/artifacts")

    def cancel(self, job_uuid: str) -> None:
        self.call("POST", f"/v1alpha/post-training/jobs/{job_uuid}/cancel")

    def refusal(self, error: Exception) -> int:
        """The status code of an answer that `error` stands for. Raises the error if it stands for none."""
        if not isinstance(error, HttpError):
            raise error
        return error.status_code

    # -- models --

    def models(self) -> list[str]:
        return [one["identifier"] for one in self.call("GET", f"{self.inspect}/models")["data"]]

    def model(self, model_id: str) -> str:
        return self.call("GET", f"{self.inspect}/models/{model_id}")["identifier"]

    def register_model(self, model_id: str, stands_for: str) -> None:
        self.call("POST", f"{self.inspect}/models", {"model_id": model_id, "provider_model_id": stands_for})

    def unregister_model(self, model_id: str) -> None:
        self.call("DELETE", f"{self.inspect}/models/{model_id}")

    # -- chat --

    def ways(self) -> list[Way]:
        return [
            Way(
                "chat",
                "http",
                self._chat,
                self._chat_stream,
                self._completion,
                self._completion_stream,
            )
        ]

    def _ask(self, model: str, **question: Any) -> dict[str, Any]:
        return {"model": model, "temperature": 0, "max_tokens": TEXT_TOKENS, **question}

    def _chat(self, model: str, text: str) -> str:
        body = self._ask(model, messages=[{"role": "user", "content": text}])
        return self.call("POST", f"{self.openai}/chat/completions", body)["choices"][0]["message"]["content"]

    def _chat_stream(self, model: str, text: str) -> list[str]:
        body = self._ask(model, messages=[{"role": "user", "content": text}], stream=True)
        chunks = self.events(f"{self.openai}/chat/completions", body)
        return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]

    def _completion(self, model: str, text: str) -> str:
        return self.call("POST", f"{self.openai}/completions", self._ask(model, prompt=text))["choices"][0]["text"]

    def _completion_stream(self, model: str, text: str) -> list[str]:
        chunks = self.events(f"{self.openai}/completions", self._ask(model, prompt=text, stream=True))
        return [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]


def training(driver: PlainDriver, dataset_id: str, validation_id: str, epochs: int) -> dict[str, Any]:
    """A training_config with every field that the oldest of the `/v1` clients requires."""
    data: dict[str, Any] = {
        "dataset_id": dataset_id,
        "validation_dataset_id": validation_id,
        "batch_size": 4,
        "shuffle": True,
    }
    if driver.data_format is not None:
        data["data_format"] = driver.data_format
    return {
        "n_epochs": epochs,
        "max_steps_per_epoch": 1000,
        "gradient_accumulation_steps": 1,
        "max_validation_steps": 10,
        "data_config": data,
        "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-2, "weight_decay": 0.01, "num_warmup_steps": 0},
        "dtype": "fp32",
    }


LORA: dict[str, Any] = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 8,
    "alpha": 16,
}

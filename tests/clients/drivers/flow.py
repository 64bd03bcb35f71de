"""The flow that every client goes through, and what must come of each step.

Runs in a client's own virtual environment, so it imports the standard library only. The task comes as JSON on standard
input; standard output ends with one line of JSON, the steps.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from plain import PlainDriver, Way

POLL_SECONDS = 0.1
QUESTION = "Say red 0"


class Steps:
    """What each step did: its verb, by what, and how it failed if it did."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []

    @contextmanager
    def step(self, verb: str, kind: str) -> Iterator[dict[str, Any]]:
        """A step that may fail without ending the flow. What is put into the dict yielded is reported."""
        seen: dict[str, Any] = {}
        begun = time.monotonic()
        entry = {"verb": verb, "by": kind, "seen": seen}
        try:
            yield seen
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            entry["error"] = f"{type(error).__name__}: {error} (in {last.name}: {last.line})"
        entry["seconds"] = round(time.monotonic() - begun, 2)
        self.done.append(entry)


def equal(actual: Any, expected: Any, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what} is {actual!r}, not {expected!r}")


def among(member: Any, members: Any, what: str) -> None:
    if member not in members:
        raise AssertionError(f"{member!r} is not among the {what}: {members!r}")


def is_a(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kind):
        raise AssertionError(f"{what} is {value!r}, a {type(value).__name__}")


def part(of: Any, name: str) -> Any:
    """A field of an SDK's model or, where that SDK does not type it, of a dict."""
    return of[name] if isinstance(of, dict) else getattr(of, name)


class Flow:
    """Register, train, look, ask, cancel, clean up, with one driver."""

    def __init__(self, driver: Any, task: dict[str, Any]) -> None:
        self.driver = driver
        self.task = task
        self.job: str = task["job"]
        self.dataset: str = task["dataset"]
        self.held_out: str = task["dataset"] + "-held-out"
        self.tuned = f"{task['model']}-sft-{self.job}-0"
        self.steps = Steps()

    def run(self) -> list[dict[str, Any]]:
        self.look()
        self.register()
        self.train()
        self.read_artifacts()
        self.refuse()
        self.ask()
        self.name_model()
        self.cancel()
        self.clean_up()
        return self.steps.done

    @contextmanager
    def step(self, verb: str, method: str | None = None) -> Iterator[dict[str, Any]]:
        """A step by the client, or by plain HTTP where the driver has no method of its own for it."""
        name = method or verb
        plain = getattr(PlainDriver, name, None)
        by = "http" if plain is not None and getattr(type(self.driver), name) is plain else self.driver.kind
        with self.steps.step(verb, by) as seen:
            yield seen

    def look(self) -> None:
        with self.step("version", "server_version"):
            equal(self.driver.server_version(), self.task["server_version"], "the server's version")
        with self.step("health"):
            equal(self.driver.health(), "OK", "the server's health")
        with self.step("providers"):
            among(("post_training", "torchtune", "inline::torchtune"), self.driver.providers(), "providers")
        with self.step("routes"):
            among(("POST", self.driver.submit_route), self.driver.routes(), "routes")
        with self.step("models"):
            among(self.task["model"], self.driver.models(), "models")
        with self.step("model"):
            equal(self.driver.model(self.task["model"]), self.task["model"], "the model's identifier")

    def register(self) -> None:
        rows = [self.driver.row(question, answer) for question, answer in self.task["exchanges"]]
        with self.step("register"):
            self.driver.register(self.dataset, rows[:-2])
            self.driver.register(self.held_out, rows[:4])
        with self.step("datasets"):
            among(self.dataset, self.driver.datasets(), "data sets")
        with self.step("dataset"):
            equal(self.driver.dataset(self.dataset), self.dataset, "the data set's identifier")
        with self.step("append"):
            self.driver.append(self.dataset, rows[-2:])
        with self.step("rows"):
            equal(self.driver.rows(self.dataset, 1, 2), rows[1:3], "the second and third row")
            equal(self.driver.rows(self.dataset, len(rows) - 2, 5), rows[-2:], "the rows appended")

    def train(self) -> None:
        with self.step("submit"):
            equal(self.driver.submit(self.job, self.dataset, self.held_out, 1), self.job, "the job's id")
        with self.step("list", "jobs"):
            among(self.job, self.driver.jobs(), "jobs")
        with self.step("poll", "status") as seen:
            status = self._poll(self.job, seen)
            equal(status[-1], "completed", "the last status")
            self._check_completed(self.driver.status(self.job))

    def _poll(self, job_uuid: str, seen: dict[str, Any], until: str = "") -> list[str]:
        """The statuses in their order, up to a terminal one or `until`."""
        statuses: list[str] = []
        ends = {"completed", "failed", "cancelled", until}
        deadline = time.monotonic() + 120
        while not statuses or statuses[-1] not in ends:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job_uuid} is still {statuses[-1]}")
            now = part(self.driver.status(job_uuid), "status")
            if not statuses or now != statuses[-1]:
                statuses.append(now)
                among(now, ["scheduled", self.driver.running, *ends], "statuses")
            time.sleep(POLL_SECONDS)
        seen["statuses"] = statuses
        return statuses

    def _check_completed(self, status: Any) -> None:
        self._check_type(status, self.driver.status_type)
        equal(part(status, "job_uuid"), self.job, "job_uuid")
        times = [part(status, name) for name in ("scheduled_at", "started_at", "completed_at")]
        for time_ in times:
            is_a(time_, datetime, "a time of the job")
        equal(times, sorted(times), "the order of the job's times")
        is_a(part(status, "resources_allocated"), dict, "resources_allocated")
        self._check_checkpoints(part(status, "checkpoints"))

    def _check_type(self, answer: Any, name: str | None) -> None:
        if name is not None:
            equal(type(answer).__name__, name, "the type of the answer")

    def _check_checkpoints(self, checkpoints: Any) -> None:
        equal([part(one, "identifier") for one in checkpoints], [self.tuned], "the checkpoints")
        checkpoint = checkpoints[0]
        self._check_type(checkpoint, self.driver.checkpoint_type)
        equal(part(checkpoint, "epoch"), 0, "the checkpoint's epoch")
        equal(part(checkpoint, "post_training_job_id"), self.job, "the checkpoint's job")
        is_a(part(checkpoint, "path"), str, "the checkpoint's path")
        created = part(checkpoint, "created_at")
        is_a(created, str if isinstance(checkpoint, dict) else datetime, "created_at")
        metrics = part(checkpoint, "training_metrics")
        for name in ("train_loss", "validation_loss", "perplexity"):
            is_a(part(metrics, name), float, name)
        equal(part(metrics, "epoch"), 0, "the epoch of the metrics")
        if not math.isclose(part(metrics, "perplexity"), math.exp(part(metrics, "validation_loss")), rel_tol=1e-6):
            raise AssertionError(f"the perplexity does not belong to the loss: {metrics!r}")

    def read_artifacts(self) -> None:
        with self.step("artifacts"):
            artifacts = self.driver.artifacts(self.job)
            self._check_type(artifacts, self.driver.artifacts_type)
            equal(part(artifacts, "job_uuid"), self.job, "job_uuid")
            self._check_checkpoints(part(artifacts, "checkpoints"))
        if hasattr(self.driver, "logs"):
            with self.step("logs"):
                lines = self.driver.logs(self.job)
                if not any("completed" in line for line in lines):
                    raise AssertionError(f"no line tells of the end: {lines!r}")

    def refuse(self) -> None:
        with self.step("submit again", "submit"):
            equal(self.driver.submit(self.job, self.dataset, self.held_out, 1), self.job, "the id of the same job")
        with self.step("submit another body", "submit"):
            self._refused(400, self.job, lambda: self.driver.submit(self.job, self.dataset, self.held_out, 2))
        with self.step("unknown job", "status"):
            for verb in (self.driver.status, self.driver.artifacts, self.driver.cancel):
                self._refused(404, "no-such-job", lambda verb=verb: verb("no-such-job"))

    def _refused(self, status_code: int, naming: str, verb: Any) -> None:
        try:
            answer = verb()
        except Exception as error:
            equal(self.driver.refusal(error), status_code, f"the status code ({error})")
            equal(naming in str(error), True, f"whether {naming} is named in: {error}")
        else:
            raise AssertionError(f"it was answered with {answer!r} instead of a {status_code}")

    def ask(self) -> None:
        for way in self.driver.ways():
            self._ask(way, way.name, way.chat, way.chat_stream)
            if way.completion is not None and way.completion_stream is not None:
                self._ask(way, way.name.replace("chat", "completion"), way.completion, way.completion_stream)

    def _ask(self, way: Way, name: str, whole: Any, stream: Any) -> None:
        text = ""
        with self.steps.step(name, way.kind) as seen:
            text = whole(self.tuned, QUESTION)
            is_a(text, str, "the answer")
            seen["text" if way.greedy else "drawn"] = text
        with self.steps.step(f"{name} stream", way.kind) as seen:
            pieces = stream(self.tuned, QUESTION)
            seen["pieces"] = len(pieces)
            if way.greedy:
                equal("".join(pieces), text, "the streamed answer")
            else:
                is_a("".join(pieces), str, "the streamed answer")

    def name_model(self) -> None:
        alias = self.task["alias"]
        with self.step("name model", "register_model"):
            self.driver.register_model(alias, self.tuned)
            among(alias, self.driver.models(), "models")
        with self.step("forget model", "unregister_model"):
            self.driver.unregister_model(alias)
            equal(alias in self.driver.models(), False, "whether the model is still listed")

    def cancel(self) -> None:
        other = self.job + "-cancelled"
        with self.step("cancel") as seen:
            self.driver.submit(other, self.dataset, self.held_out, 3000)
            self._poll(other, seen, until=self.driver.running)
            self.driver.cancel(other)
            equal(self._poll(other, seen)[-1], self.driver.cancelled, "the last status")
            self.driver.cancel(other)
            is_a(part(self.driver.status(other), "completed_at"), datetime, "completed_at")

    def clean_up(self) -> None:
        with self.step("unregister"):
            self.driver.unregister(self.dataset)
            self.driver.unregister(self.held_out)
            equal(self.dataset in self.driver.datasets(), False, "whether the data set is still listed")


def main(make: Any) -> None:
    """Run the flow with the driver that `make` makes from the task on standard input."""
    task = json.load(sys.stdin)
    steps = Flow(make(task), task).run()
    print("\n" + json.dumps(steps))

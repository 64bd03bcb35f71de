"""The `llama-stack-client` command of 0.1.0 to 0.3.5, by what it prints: it exits with 0 whatever happens.

The first command runs as a process of its own, the others through the same entry point in this process, which saves
seconds of imports each; with `processes` in the task all run as processes. Runs in that client's virtual environment.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from files import write_csv, write_lines
from flow import equal, main
from plain import LORA, PlainDriver, Way, training

WIDTH = "4000"  # so that nothing printed is wrapped


class CliError(Exception):
    """The panel that the command prints where a request failed."""


class Record:
    """A printed object, `Name(field=value, …)`, read back."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class _Names(dict[str, Any]):
    """Names that printed objects use: any class becomes a Record of its name."""

    def __missing__(self, name: str) -> Any:
        return type(name, (Record,), {})


def read(printed: str) -> Any:
    """A printed value as an object."""
    names = _Names(datetime=datetime, TzInfo=lambda *_: datetime.UTC)
    return eval(printed.strip(), {"__builtins__": {}}, names)


def table(printed: str) -> list[list[str]]:
    """Cells of the rows of a printed table, without its head."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


class Command(PlainDriver):
    """Verbs that every version of the command has had."""

    kind = "cli"
    submit_route = "/v1/post-training/supervised-fine-tune"
    status_type = "JobStatusResponse"
    artifacts_type = "JobArtifactsResponse"
    data_format = "instruct"

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.processes: bool = task.get("processes", False)
        os.environ["COLUMNS"] = WIDTH

    def run(self, *arguments: str, process: bool = False) -> str:
        """What the command printed. Raises CliError."""
        words = ["--endpoint", self.url, *arguments]
        printed = self._process(words) if process or self.processes else self._in_this_process(words)
        if "Failed to " in printed and "Error Type:" in printed:
            raise CliError(" ".join(re.sub("[│╭╮╰╯─]", " ", printed).split()))
        return printed

    def _process(self, words: list[str]) -> str:
        program = str(Path(sys.executable).parent / "llama-stack-client")
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=120)
        equal((done.returncode, "Traceback" in done.stderr), (0, False), f"exit code and traceback ({done.stderr})")
        return done.stdout

    def _in_this_process(self, words: list[str]) -> str:
        from llama_stack_client.lib.cli.llama_stack_client import main

        printed = io.StringIO()
        sys.argv = ["llama-stack-client", *words]
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main()
        return printed.getvalue()

    def refusal(self, error: Exception) -> int:
        found = re.search(r"Error code: (\d+)", str(error)) if isinstance(error, CliError) else None
        return int(found.group(1)) if found else super().refusal(error)

    # -- what the stack says about itself --

    def server_version(self) -> str:
        return read(self.run("inspect", "version", process=True)).version

    def providers(self) -> list[tuple[str, str, str]]:
        return [(row[0], row[1], row[2]) for row in table(self.run("providers", "list"))]

    # -- jobs --

    def submit(self, job_uuid: str, dataset_id: str, validation_id: str, epochs: int) -> str:
        configs = {"algorithm": LORA, "training": training(self, dataset_id, validation_id, epochs)}
        options = [word for name, value in configs.items() for word in (f"--{name}-config", json.dumps(value))]
        named = ["--job-uuid", job_uuid, "--model", self.base]
        return self.run("post_training", "supervised_fine_tune", *named, *options).strip()

    def jobs(self) -> list[str]:
        return read(self.run("post_training", "list"))

    def status(self, job_uuid: str) -> Any:
        return read(self.run("post_training", "status", "--job-uuid", job_uuid))

    def artifacts(self, job_uuid: str) -> Any:
        return read(self.run("post_training", "artifacts", "--job-uuid", job_uuid))

    def cancel(self, job_uuid: str) -> None:
        equal(self.run("post_training", "cancel", "--job-uuid", job_uuid).strip(), "", "what a cancel prints")

    # -- data sets --

    def datasets(self) -> list[str]:
        return [row[0] for row in table(self.run("datasets", "list"))]

    # -- models --

    def model(self, model_id: str) -> str:
        cells = table(self.run("models", "get", model_id))[0]
        equal(model_id in cells, True, f"whether the model's id is among {cells}")
        return model_id

    def register_model(self, model_id: str, stands_for: str) -> None:
        printed = self.run("models", "register", model_id, "--provider-model-id", stands_for)
        equal(f"Successfully registered model {model_id}" in printed, True, f"whether success is told by {printed!r}")

    def unregister_model(self, model_id: str) -> None:
        self.run("models", "unregister", model_id)

    # -- chat --

    greedy = True
    """Llama Stack's own verb is greedy where nothing is said, OpenAI's draws at random."""

    def ways(self) -> list[Way]:
        return [Way("chat", "cli", self.chat, self.chat_stream, greedy=self.greedy)]

    def _chat(self, model: str, text: str, *options: str) -> str:
        return self.run("inference", "chat-completion", "--model-id", model, "--message", text, *options)

    def chat(self, model: str, text: str) -> str:
        answer = read(self._chat(model, text))
        message = answer.choices[0].message if hasattr(answer, "choices") else answer.completion_message
        return message.content

    def chat_stream(self, model: str, text: str) -> list[str]:
        role, printed = self._chat(model, text, "--stream").split("> ", 1)
        equal(role.lower(), "assistant", "who speaks")
        return [printed.removesuffix("\n")]


class OldTables(Command):
    """0.1.0: models as plain tables, data sets with a schema."""

    # In this client both end in a TypeError of its own, whatever the server answers.
    providers = PlainDriver.providers
    model = PlainDriver.model

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        schema = {name: {"type": "json" if name == "chat_completion_input" else "string"} for name in rows[0]}
        path = write_csv(rows, self.folder / "rows.csv")
        named = ["--dataset-id", dataset_id, "--dataset-path", str(path), "--provider-id", "localfs"]
        self.run("datasets", "register", *named, "--schema", json.dumps(schema))

    def models(self) -> list[str]:
        return [row[0] for row in table(self.run("models", "list"))]


class NewTables(Command):
    """Models with their type in the first column."""

    def models(self) -> list[str]:
        return [row[1] for row in table(self.run("models", "list"))]


class NewData(NewTables):
    """0.2.3 on: data sets by purpose."""

    suffix = "csv"

    def register(self, dataset_id: str, rows: list[dict[str, str]]) -> None:
        path = self.folder / f"rows.{self.suffix}"
        (write_csv if self.suffix == "csv" else write_lines)(rows, path)
        named = ["--dataset-id", dataset_id, "--dataset-path", str(path), "--purpose", self.purpose]
        self.run("datasets", "register", *named, "--metadata", '{"by": "command line"}')

    def unregister(self, dataset_id: str) -> None:
        self.run("datasets", "unregister", dataset_id)


class DialogLines(NewData):
    """The same with JSON lines, which the command sends as a `data:` URI of the type None."""

    suffix = "jsonl"
    data_format = "dialog"


class OpenAIChat(DialogLines):
    """0.2.13 on: models are asked by OpenAI's verb."""

    greedy = False


class DataSetsOnly(OpenAIChat):
    """0.3.5: of training it can register the data; its commands for jobs look where the SDK no longer has them."""

    data = "/v1beta"
    submit_route = PlainDriver.submit_route
    status_type = artifacts_type = None
    submit = PlainDriver.submit
    jobs = PlainDriver.jobs
    status = PlainDriver.status
    artifacts = PlainDriver.artifacts
    cancel = PlainDriver.cancel


DRIVERS = {
    "0.1.0": OldTables,
    "0.1.9": NewTables,
    "0.2.7": NewData,
    "0.2.12": DialogLines,
    "0.2.23": OpenAIChat,
    "0.3.5": DataSetsOnly,
}

if __name__ == "__main__":
    main(lambda task: DRIVERS[task["version"]](task))

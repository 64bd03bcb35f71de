"""What /openapi.json and /docs say beyond what the routes say themselves: APIs, summaries, errors, keys."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from apis.common import MAX_INTEGER
from distributions.errors import answers_as_openai

Json = dict[str, Any]

DESCRIPTION = """\
Fine-tuning jobs, the data sets they read, and the models they make.

Older forms of a route are marked as deprecated: they are served for clients that know no other, and mean the same.
An error says what is wrong, where, and what to do; `x-should-retry: false` goes with every error that stays one."""

TAGS = {
    "post_training": "Fine-tuning: check a job, submit it, follow it, stop it, and fetch what it made.",
    "sft_sessions": "Fine-tuning step by step: open a session, find its training server, end it.",
    "datasets": "Rows to train on: from files, URIs or the request itself.",
    "models": "Base models and checkpoints of jobs, under one kind of id.",
    "inference": "Text from any model, a checkpoint of a running job included.",
    "inspect": "What this server is and has.",
    "other": "Lists of what Llama Stack had besides; nothing is in them.",
}

# By the name of the route's function. What a dialect adds to a name (`_flat`, `_alpha`) changes nothing of its meaning.
SUMMARIES = {
    "supervised_fine_tune": "Submit a fine-tuning job",
    "preference_optimize": "Submit a job that learns from preferences",
    "preflight": "Check a job and count its tokens, steps, memory and time, without running it",
    "list_jobs": "List jobs, all or by pages",
    "get_job_status": "State, progress and checkpoints of a job",
    "get_job_artifacts": "Finished checkpoints of a job",
    "cancel_job": "Stop a job; one that has ended stays as it is",
    "delete_job": "Delete a job that has ended, with its checkpoints and their files",
    "get_job_logs": "Log lines of a job",
    "get_job_metrics": "Loss, learning rate and gradient norm of each step",
    "stream_job_events": "Follow a job: everything that has happened, then each new thing as it happens",
    "list_checkpoint_files": "List the files of a checkpoint",
    "get_checkpoint_file": "Download a file of a checkpoint",
    "submit_job": "Open a session of fine-tuning step by step",
    "job_status": "State of a session, and where its training server answers",
    "list_sessions": "List sessions",
    "cancel_session": "End a session without a result",
    "complete_session": "Save a session and end it with success",
    "resume_session": "Let a paused session go on",
    "register_dataset": "Register a data set",
    "list_datasets": "List data sets",
    "get_dataset": "Find a data set",
    "unregister_dataset": "Forget a data set",
    "iterrows": "Read rows of a data set by pages",
    "get_rows": "Read rows of a data set by pages",
    "append_rows": "Append rows to a data set",
    "list_models": "List models",
    "register_model": "Give a model another id",
    "get_model": "Find a model",
    "unregister_model": "Forget a model's id; its files stay",
    "chat_completion": "Answer a conversation",
    "completion": "Continue a text",
    "version": "Version of this server",
    "health": "Whether this server can work",
    "list_providers": "List providers",
    "get_provider": "Find a provider",
    "list_routes": "List routes",
    "list": "List what this server does not have",
}

_REFERENCE = "#/components/{}/{}"
# What each status means, and the name of its description. A response that a route declares itself stays as it is.
_ERRORS = {
    400: ("BadRequest", "A field, a row, a model or an id cannot be used; the message names it"),
    401: ("Unauthorized", "The server needs its API key"),
    403: ("Forbidden", "The key may see this, and not change it"),
    404: ("NotFound", "There is no such thing"),
    413: ("TooLarge", "The body, or what it asks for, is over a limit"),
    416: ("NoSuchRange", "The file has no such bytes"),
    429: ("Busy", "Too much is waiting; try again later"),
    500: ("Failed", "The server failed, and its log says why"),
    501: ("NotSupported", "No provider here does that"),
    503: ("Unavailable", "Something that the request needs cannot run now; try again later"),
}
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WORKED_FOR = ("post_training", "sft_sessions", "inference")
_OPEN = "/v1/health"


class Documented(FastAPI):
    """A FastAPI application whose schema says all that a client may meet."""

    def __init__(self, **settings: Any) -> None:
        tags = [{"name": name, "description": text} for name, text in TAGS.items()]
        super().__init__(
            title="Postgrad",
            version=version("postgrad"),
            description=DESCRIPTION,
            openapi_tags=tags,
            **settings,
        )

    def openapi(self) -> Json:
        if self.openapi_schema is None:
            self.openapi_schema = _described(super().openapi())
        return self.openapi_schema


def _described(document: Json) -> Json:
    _make_limits_whole(document)
    for path, method, operation in operations(document):
        operation["summary"] = _summary(operation["summary"])
        operation["responses"] = _responses(path, method, operation)
    tags = {tag for _, _, operation in operations(document) for tag in operation.get("tags", [])}
    document["tags"] = [tag for tag in document["tags"] if tag["name"] in tags]
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own answer, which this server never gives
        schemas.pop(name, None)
    schemas.update(_SCHEMAS)
    components["responses"] = dict(_named_responses())
    components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"ApiKey": []}]
    return document


def _make_limits_whole(node: Any) -> None:
    """Write the limits of integers as integers, in place: FastAPI keeps every limit as a float.

    The largest number of 64 bits has no float of its own and comes as the next one, which is no such number.
    """
    if isinstance(node, list):
        for item in node:
            _make_limits_whole(item)
    if not isinstance(node, dict):
        return
    for value in node.values():
        _make_limits_whole(value)
    if node.get("type") == "integer":
        for name in _LIMITS:
            limit = node.get(name)
            if isinstance(limit, float) and limit.is_integer():
                node[name] = min(int(limit), MAX_INTEGER) if name == "maximum" else int(limit)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Path, method and description of each operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _summary(title: str) -> str:
    """The summary of the longest name that `title`, as FastAPI makes it of a function's name, begins with."""
    words = title.lower().replace(" ", "_")
    names = [name for name in SUMMARIES if words == name or words.startswith(f"{name}_")]
    return SUMMARIES[max(names, key=len)] if names else title


def _responses(path: str, method: str, operation: Json) -> Json:
    declared = {status: answer for status, answer in operation["responses"].items() if status != "422"}
    suffix = "AsOpenAI" if answers_as_openai(path) else ""
    errors = {
        str(status): {"$ref": _REFERENCE.format("responses", _ERRORS[status][0] + suffix)}
        for status in _statuses(path, method, operation)
    }
    return dict(sorted({**errors, **declared}.items()))


def _statuses(path: str, method: str, operation: Json) -> Iterator[int]:
    asks = bool(operation.get("parameters") or "requestBody" in operation)
    works = method == "post" and not set(_WORKED_FOR).isdisjoint(operation.get("tags", []))
    yield from (400, 500, 503)
    if path != _OPEN:
        yield 401
    if asks:
        yield 404
    if method != "get":
        yield 403
    if "requestBody" in operation:
        yield 413
    if "206" in operation["responses"]:
        yield 416
    if works:
        yield from (429, 501)


def _named_responses() -> Iterator[tuple[str, Json]]:
    for suffix, schema in (("", "Error"), ("AsOpenAI", "OpenAIError")):
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format("schemas", schema)}}}
        for name, text in _ERRORS.values():
            yield name + suffix, {"description": text, "content": content}


_TEXT: Json = {"type": "string"}
_NAMED: Json = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_FAULT: Json = {
    "type": "object",
    "required": ["loc", "msg", "type"],
    "properties": {
        "loc": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
        "msg": _TEXT,
        "type": _TEXT,
    },
}
_CAUSE: Json = {
    "code": {**_TEXT, "description": "Stable, for programs"},
    "message": {**_TEXT, "description": "What is wrong, where, and what to do"},
    "param": {**_NAMED, "description": "The field that is wrong, dotted"},
}
_SCHEMAS: Json = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "param"],
                "properties": {
                    **_CAUSE,
                    "type": {**_TEXT, "description": "OpenAI's kind of error, on routes that its clients share"},
                    "row": {"type": "integer", "description": "0-based number of the row that is wrong"},
                    "pointer": {**_TEXT, "description": "JSON pointer to the value in that row"},
                    "detail": {
                        "type": "object",
                        "required": ["errors"],
                        "properties": {"errors": {"type": "array", "items": _FAULT}},
                        "description": "Every field that is wrong",
                    },
                },
            },
            "detail": {**_TEXT, "description": "The message again, where Llama Stack's clients look for it"},
        },
    },
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "param", "type"],
                "properties": {**_CAUSE, "type": {**_TEXT, "description": "OpenAI's kind of error"}},
            }
        },
    },
}

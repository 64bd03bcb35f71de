"""Every error that leaves Postgrad, as one tree.

    PostgradError
    ├── BadRequest (400)
    │   ├── InvalidField          a field's value cannot be used
    │   ├── DataInvalid           a data set or one of its rows cannot be used
    │   ├── Conflict              the id is taken by something else (never 409: real clients retry that)
    │   ├── StepMissing           a session's step waited for one before it that did not come
    │   ├── UnsupportedModel      no configured provider computes this model rightly
    │   └── ModelInvalid          a model directory is incomplete or damaged
    ├── Unauthorized (401)
    ├── Forbidden (403)           the key may see this and not change it
    ├── MethodNotAllowed (405)
    ├── NotFound (404)
    │   ├── JobNotFound, DatasetNotFound, ModelNotFound, CheckpointNotFound, FileMissing
    ├── TooLarge (413)
    ├── QueueFull (429)
    ├── NotSupported (501)        the provider does not offer this verb or option
    ├── Unavailable (503)         a worker the request needs cannot run
    │   ├── StoreUnavailable      the store is locked, full, read-only or away
    ├── JobFailure                why a job failed; stored with it
    │   ├── DiskFull (503)        also answers a request that found no room
    │   ├── OutOfMemory, WorkerDied, NonFiniteLoss, NothingTrained, CheckpointUnverified
    └── StackError                a stack cannot be built or started; for the command line
        ├── RunConfigInvalid, EnvironmentUnset, ProviderInvalid, PortBusy, UnknownTemplate

Each leaf has a stable `code` (for programs) and a `message` that says what, where and what to do (for people).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar


class PostgradError(Exception):
    """Root of the tree.

    Attributes:
        code: stable, machine-readable.
        http_status: what the server answers.
        param: the offending field (dotted) or None.
        retryable: whether the same request may succeed later; false sets `x-should-retry: false`.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[PostgradError], message: str, state: dict[str, object]) -> PostgradError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class BadRequest(PostgradError):
    code = "bad_request"
    http_status = 400


class InvalidField(BadRequest):
    code = "invalid_field"


class DataInvalid(BadRequest):
    """A row, or a whole data set, that cannot be trained on.

    Attributes:
        row: 0-based row number, None for the data set as a whole.
        pointer: JSON pointer (RFC 6901) to the offending value inside the row.
    """

    code = "data_invalid"

    def __init__(
        self, message: str, *, row: int | None = None, pointer: str | None = None, param: str | None = None
    ) -> None:
        where = "" if row is None else f"row {row}" + (f", {pointer}" if pointer else "") + ": "
        super().__init__(where + message, param=param)
        self.row = row
        self.pointer = pointer


class Conflict(BadRequest):
    code = "conflict"


class StepMissing(BadRequest):
    code = "step_missing"


class UnsupportedModel(BadRequest):
    code = "unsupported_model"


class ModelInvalid(BadRequest):
    code = "model_invalid"


class Unauthorized(PostgradError):
    code = "unauthorized"
    http_status = 401


class Forbidden(PostgradError):
    code = "forbidden"
    http_status = 403


class NotFound(PostgradError):
    code = "not_found"
    http_status = 404


class JobNotFound(NotFound):
    code = "job_not_found"


class DatasetNotFound(NotFound):
    code = "dataset_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class CheckpointNotFound(NotFound):
    code = "checkpoint_not_found"


class FileMissing(NotFound):
    code = "file_not_found"


class MethodNotAllowed(PostgradError):
    code = "method_not_allowed"
    http_status = 405


class TooLarge(PostgradError):
    code = "too_large"
    http_status = 413


class QueueFull(PostgradError):
    code = "queue_full"
    http_status = 429
    retryable = True


class NotSupported(PostgradError):
    code = "not_supported"
    http_status = 501


class Unavailable(PostgradError):
    code = "unavailable"
    http_status = 503
    retryable = True


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class JobFailure(PostgradError):
    code = "job_failed"


class OutOfMemory(JobFailure):
    code = "out_of_memory"


class DiskFull(JobFailure):
    code = "disk_full"
    http_status = 503
    retryable = True


class WorkerDied(JobFailure):
    code = "worker_died"


class NonFiniteLoss(JobFailure):
    code = "non_finite_loss"


class NothingTrained(JobFailure):
    code = "nothing_trained"


class CheckpointUnverified(JobFailure):
    code = "checkpoint_unverified"


class StackError(PostgradError):
    code = "stack_error"


class RunConfigInvalid(StackError):
    code = "run_config_invalid"


class EnvironmentUnset(StackError):
    code = "environment_unset"


class ProviderInvalid(StackError):
    code = "provider_invalid"


class PortBusy(StackError):
    code = "port_busy"


class UnknownTemplate(StackError):
    code = "unknown_template"


# Every `error.code` that a failed job may have. docs/errors.md says what to do about each.
JOB_FAILURE_CODES = frozenset(
    kind.code
    for kind in (
        JobFailure,
        OutOfMemory,
        DiskFull,
        WorkerDied,
        NonFiniteLoss,
        NothingTrained,
        CheckpointUnverified,
        DataInvalid,
        InvalidField,
        ModelNotFound,
        ModelInvalid,
        UnsupportedModel,
        Conflict,
        PostgradError,
    )
)


def error_classes(root: type[PostgradError] = PostgradError) -> Iterator[type[PostgradError]]:
    """Every class of the tree, `root` first."""
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def error_class(code: object) -> type[PostgradError] | None:
    """The class that has this `code`; None where none has."""
    return next((kind for kind in error_classes() if kind.code == code), None)


def field_path(location: Sequence[int | str], value: Any) -> list[int | str]:
    """Where in `value` a fault of pydantic lies, as whoever wrote `value` knows it.

    Args:
        location: pydantic's; for a tagged union it holds the tag as well, which is left out here, and so is what a text
            or number was made into.
        value: the JSON value that did not fit.
    """
    path: list[int | str] = []
    node, tag_left_out = value, False
    for index, part in enumerate(location):
        if path and isinstance(node, str | int | float):
            break
        is_last = index == len(location) - 1
        if isinstance(node, Mapping) and node.get("type") == part and not tag_left_out and not is_last:
            tag_left_out = True
            continue
        path.append(part)
        node, tag_left_out = _child(node, part), False
    return path


def _child(node: Any, part: int | str) -> Any:
    try:
        return node[part]
    except (KeyError, IndexError, TypeError):
        return None

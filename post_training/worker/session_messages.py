"""What a session's training server and its worker tell each other, and how: as JSON, rows in base64. No torch here.

Not as pickles: the server reads what comes from the network, and whoever took it over would have the worker as well.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from apis.errors import PostgradError, error_class
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec

ClientCursor = dict[str, Any]
LINK_VARIABLE = "POSTGRAD_SESSION_LINK_FD"
"""The environment variable that tells the server which of its open files is the link to its worker."""
STOP_SECONDS = 2.0
"""So long the server may take to send what is answered already, once the session ends."""


@dataclass(frozen=True)
class Opening:
    """What the server is told before it serves.

    Attributes:
        owned: the session belongs to an API key, which may be revoked.
        done: the number of the newest call that was done before.
    """

    spec: JobSpec
    owned: bool
    done: int


@dataclass(frozen=True)
class StepWork:
    """What `train_step`, `forward_backward` and `validate` are done with."""

    rows: list[TokenizedRow]
    lr: float | None = None
    cursor: ClientCursor | None = None


@dataclass(frozen=True)
class UpdateWork:
    """What `optim_step` is done with."""

    lr: float | None = None
    cursor: ClientCursor | None = None


@dataclass(frozen=True)
class SaveWork:
    """What `save_checkpoint` is done with. `wait`: it is answered once it is verified."""

    name: str | None
    cursor: ClientCursor | None = None
    validation_loss: float | None = None
    wait: bool = True


@dataclass(frozen=True)
class LoadWork:
    """What `load_checkpoint` is done with."""

    name: str
    optimizer: bool
    cursor: ClientCursor | None = None


_PLAIN_WORK = {kind.__name__: kind for kind in (UpdateWork, SaveWork, LoadWork)}


def encode(value: Any) -> bytes:
    """A list of what `pack` takes, or one such thing."""
    return json.dumps([pack(each) for each in value] if isinstance(value, list) else pack(value)).encode()


def decode(content: bytes) -> Any:
    """What `encode` was given. Raises ValueError where it was not."""
    found = json.loads(content)
    if not isinstance(found, list):
        raise ValueError("no message")
    return [unpack(each) for each in found] if found and isinstance(found[0], list) else unpack(found)


def pack(value: Any) -> list[Any]:
    """What it is and its content: work, an opening, an error of ours, or (called "") anything that JSON holds.

    Only the outermost layer is told apart, so that nothing in a client's own data is taken for one of these.
    """
    if isinstance(value, StepWork):
        rows = [[row.row, _text(row.tokens, np.int32), _text(row.weights, np.float32)] for row in value.rows]
        return ["StepWork", {"rows": rows, "lr": value.lr, "cursor": value.cursor}]
    if type(value).__name__ in _PLAIN_WORK:
        return [type(value).__name__, asdict(value)]
    if isinstance(value, Opening):
        return ["Opening", {"spec": value.spec.model_dump(mode="json"), "owned": value.owned, "done": value.done}]
    if isinstance(value, PostgradError):
        return ["error", {"code": value.code, "state": value.__dict__}]
    return ["", value]


def unpack(packed: list[Any]) -> Any:
    """The inverse of `pack`."""
    kind, content = packed
    if kind == "StepWork":
        rows = [TokenizedRow(n, _array(tokens, np.int32), _array(w, np.float32)) for n, tokens, w in content["rows"]]
        return StepWork(rows, content["lr"], content["cursor"])
    if kind in _PLAIN_WORK:
        return _PLAIN_WORK[kind](**content)
    if kind == "Opening":
        return Opening(JobSpec.model_validate(content["spec"]), content["owned"], content["done"])
    if kind == "error":
        return _error(content["code"], content["state"])
    return content


def _text(values: Any, dtype: Any) -> str:
    return b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _array(text: str, dtype: Any) -> Any:
    return np.frombuffer(b64decode(text), dtype=dtype).copy()


def _error(code: str, state: dict[str, Any]) -> PostgradError:
    kind = error_class(code) or PostgradError
    error = kind.__new__(kind)  # its message says already what the constructor would add
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error

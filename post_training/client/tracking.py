"""Where the metrics of a fit go: the console, JSON lines, TensorBoard, Weights & Biases; each imported when named.

with open_tracking(["console", "tensorboard"], project="support", run="tickets-1") as tracker:
    client.fit(rows, batch_size=8, tracker=tracker)
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO, get_args

from apis.errors import DataInvalid, InvalidField, NotSupported

Backend = Literal["console", "jsonl", "tensorboard", "wandb"]
DEFAULT_PROJECT = "postgrad"


class Tracking(Protocol):
    """What `fit` needs to report metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of optimizer step `step`; names have a group, such as `train/loss`."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class ConsoleTracking:
    """One line for each step. `out` defaults to stdout."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        shown = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        print(f"step {step}  {shown}", file=self._out or sys.stdout, flush=True)

    def close(self) -> None:
        """Nothing is left to write."""


class JsonLinesTracking:
    """One JSON object a line: `step`, `time` (seconds since 1970) and the metrics. A file that exists grows.

    Raises:
        DataInvalid: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataInvalid(f"cannot write metrics to {str(path)!r}: {error.strerror}") from None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        line = {"step": step, "time": round(time.time(), 3), **metrics}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracking:
    """Scalars in TensorBoard's event files, under `folder`. Raises NotSupported where tensorboardX is missing."""

    def __init__(self, folder: Path) -> None:
        self._writer = _library("tensorboardX", "tensorboard", "client").SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracking:
    """A run of Weights & Biases. WANDB_MODE=offline keeps it on this machine, as for every program that uses it.

    Args:
        run: its id, so that a session that is resumed goes on with the same run.
        name: what it is shown as; None: its id.
        folder: where its files lie.
        api_key: None: as `wandb login` or WANDB_API_KEY say.

    Raises:
        NotSupported: wandb is missing.
        InvalidField: W&B takes no run, for want of a key above all.
    """

    def __init__(
        self,
        project: str,
        run: str,
        folder: Path,
        *,
        name: str | None = None,
        api_key: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        wandb = _library("wandb", "wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name or run,
                id=run,
                resume="allow",
                dir=str(folder),
                config=dict(config or {}),
                # Its own output would mix with ours, and it would record ours.
                settings=wandb.Settings(api_key=api_key, console="off", silent=True),
            )
        except wandb.Error as error:
            raise InvalidField(
                f"Weights & Biases takes no run: {error} (`wandb login`, WANDB_API_KEY or `wandb_key` give the key, "
                "WANDB_MODE=offline needs none)",
                param="logger_backends",
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several at once; a context manager."""

    def __init__(self, trackers: Sequence[Tracking]) -> None:
        self._trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        """Close them all, also where one of them fails."""
        with ExitStack() as closing:
            for tracker in reversed(self._trackers):
                closing.callback(tracker.close)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Run:
    project: str
    run: str
    name: str | None
    folder: Path
    wandb_key: str | None
    config: Mapping[str, Any]
    console: TextIO | None


_BACKENDS: Mapping[str, Callable[[_Run], Tracking]] = {
    "console": lambda run: ConsoleTracking(run.console),
    "jsonl": lambda run: JsonLinesTracking(run.folder / "metrics.jsonl"),
    "tensorboard": lambda run: TensorBoardTracking(run.folder / "tensorboard"),
    "wandb": lambda run: WandbTracking(
        run.project, run.run, run.folder, name=run.name, api_key=run.wandb_key, config=run.config
    ),
}


def open_tracking(
    backends: Sequence[Backend | str],
    *,
    project: str | None = None,
    run: str,
    name: str | None = None,
    folder: Path | str = "runs",
    wandb_key: str | None = None,
    config: Mapping[str, Any] | None = None,
    console: TextIO | None = None,
) -> Trackers:
    """Open trackers by name. Files go to `<folder>/<project>/<run>/`.

    Args:
        backends: of `console`, `jsonl`, `tensorboard`, `wandb`.
        run: an id, such as the session's: what has the same one is written to the same place.
        name: what the run is shown as, where a tracker shows it.
        config: what the run was made with, for trackers that keep it; no secrets.
        console: where `console` prints; None: stdout.

    Raises:
        InvalidField: a name that there is none of, or a tracker that does not take the run.
        NotSupported: the library of one is not installed; it says how to get it.
    """
    for backend in backends:
        if backend not in _BACKENDS:
            raise InvalidField(
                f"there is no tracker {backend!r}: there are {', '.join(get_args(Backend))}", param="logger_backends"
            )
    project, run = _name(project or DEFAULT_PROJECT), _name(run)
    place = _Run(project, run, name, Path(folder) / project / run, wandb_key, config or {}, console)
    opened: list[Tracking] = []
    try:
        for backend in dict.fromkeys(backends):
            opened.append(_BACKENDS[backend](place))
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened)


def _name(text: str) -> str:
    """A name as part of a path, and as W&B takes it: other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip(".-") or "run"


def _library(module: str, backend: Backend, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise NotSupported(
            f"the tracker {backend!r} needs {error.name}: pip install 'postgrad[{extra}]'", param="logger_backends"
        ) from None

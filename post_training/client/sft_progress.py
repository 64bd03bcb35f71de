"""How a fit shows that it goes on: one line on stderr that is redrawn, nothing where stderr is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from apis.sft_sessions.models import SessionState, SessionStatusResponse
from apis.sft_sessions.training_models import TrainStepResponse

_BAR_WIDTH = 20
_CLEAR = "\r\x1b[K"
_REDRAW_SECONDS = 0.1


class Progress:
    """The line of one fit. `out` defaults to stderr."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._shown = self._out.isatty()
        self._drawn_at = 0.0
        self._began: tuple[float, int] | None = None

    def say(self, text: str) -> None:
        """A line that stays, on whatever stderr is."""
        self.clear()
        print(text, file=self._out, flush=True)

    def clear(self) -> None:
        """Make room for what something else prints."""
        if self._shown:
            self._out.write(_CLEAR)
            self._out.flush()
            self._drawn_at = 0.0

    def waiting(self, status: SessionStatusResponse) -> None:
        """What the scheduler says of a session whose server does not answer yet."""
        place = f", {status.queue_position} ahead" if status.queue_position else ""
        reason = f" ({status.message})" if status.message else ""
        name = "running" if status.status is SessionState.RUNNING else status.status.lower()
        self._draw(f"{name}{place}{reason}")

    def step(self, step: int, total: int | None, answer: TrainStepResponse | None) -> None:
        """After optimizer step `step`, from 1, of `total`; None where there is no telling."""
        now = time.monotonic()
        if self._began is None:
            self._began = (now, step)
        if now - self._drawn_at < _REDRAW_SECONDS and step != total:
            return
        parts = [f"{_bar(step, total)}step {step}" + (f"/{total}" if total else "")]
        if answer is not None:
            parts.append("loss " + ("not finite" if answer.loss is None else f"{answer.loss:.4f}"))
            parts.append(f"{answer.tokens_per_second:,.0f} tokens/s")
        if total and step > self._began[1]:
            pace = (now - self._began[0]) / (step - self._began[1])
            parts.append(f"{_clock(pace * (total - step))} left")
        self._draw("  ".join(parts))
        self._drawn_at = now

    def doing(self, what: str) -> None:
        """Something other than a step."""
        self._draw(what)

    def _draw(self, text: str) -> None:
        if self._shown:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(_CLEAR + text[:width])
            self._out.flush()


def _bar(step: int, total: int | None) -> str:
    if not total:
        return ""
    filled = _BAR_WIDTH * step // total
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] "


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

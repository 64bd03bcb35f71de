"""Reading a job's events over connections that may be cut: what is asked for, understood and left out. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from apis.errors import PostgradError, Unavailable
from apis.post_training.models import JobEvent, JobEventKind
from post_training.client import calls
from post_training.client.core import Call
from post_training.client.waiting import Outage

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_KINDS = frozenset(JobEventKind)


@dataclass
class ServerEvent:
    """One event of a stream, as the HTML standard's "server-sent events" has them."""

    name: str = "message"
    id: str | None = None
    data: list[str] = field(default_factory=list)


class EventParser:
    """Bytes in any pieces to whole events; one that a cut has left unfinished is never given out."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ServerEvent()

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if (event := self._line(line.rstrip(b"\r").decode("utf-8", "replace"))) is not None:
                yield event

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            event, self._event = self._event, ServerEvent()
            return event if event.data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._event.data.append(value)
        elif name == "event":
            self._event.name = value
        elif name == "id":
            self._event.id = value
        return None


class Following:
    """One reader of one job's events, over as many connections as it takes.

    Attributes:
        after: id of the last event given out.
        ended: whether the job has ended and everything was given out.
    """

    def __init__(self, job_uuid: str, after: int) -> None:
        self.job_uuid, self.after = job_uuid, after
        self.ended = False
        self._parser = EventParser()
        self._outage = Outage()
        self._pause = _FIRST_PAUSE

    def call(self) -> Call[None]:
        """The request for what comes after the last event."""
        return calls.job_events(self.job_uuid, self.after)

    def connected(self) -> None:
        self._outage.over()
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """The new events in a piece of the answer. Raises PostgradError where it is no stream of events."""
        for event in self._parser.feed(chunk):
            if event.name == JobEventKind.end:
                self.ended = True
                return
            told = self._understood(event)
            if told is not None and told.id > self.after:
                self.after, self._pause = told.id, _FIRST_PAUSE
                yield told

    def pause(self, error: Unavailable | None = None) -> float:
        """Seconds until the next connection; the pauses grow while nothing new comes.

        Args:
            error: why there is no connection; None where the server closed it.

        Raises:
            Unavailable: the server was never there, or has been away for a minute.
        """
        if error is not None:
            self._outage.went_on(error)
        seconds, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return seconds

    def _understood(self, event: ServerEvent) -> JobEvent | None:
        """None for a kind that only a newer server knows."""
        if event.name not in _KINDS:
            self.after = max(self.after, int(event.id or 0))
            return None
        data = "\n".join(event.data)
        try:
            return JobEvent.model_validate(json.loads(data), extra="ignore")
        except (ValueError, ValidationError):
            raise PostgradError(f"the stream holds an event that was not expected: {data[:100]}") from None

"""What checkpoints cost a job, in steps: told from the times of its events alone."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from apis.post_training.models import JobEvent, JobEventKind

WRITTEN = "written, verifying"
SAVED = "saved step "


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint.

    Attributes:
        stalled: seconds in which no step was made.
        lost: seconds by which later steps came later than they would have without, the slower steps beside the
            verification included.
        verified: seconds from the last step before the checkpoint to its announcement; 0 where none is made.
    """

    stalled: float
    lost: float
    verified: float


def undisturbed(events: Sequence[JobEvent]) -> float:
    """The median time from one step to the next, in seconds, where nothing else was told in between."""
    gaps = [
        (later.at - earlier.at).total_seconds()
        for earlier, later in itertools.pairwise(events)
        if earlier.kind is JobEventKind.step and later.kind is JobEventKind.step
    ]
    return statistics.median(gaps)


def epoch_costs(events: Sequence[JobEvent]) -> list[Cost]:
    """Of each checkpoint after an epoch that training went on after."""
    usual = undisturbed(events)
    return [_cost(events, index, usual) for index, each in enumerate(events) if _goes_on(events, index, each)]


def _goes_on(events: Sequence[JobEvent], index: int, event: JobEvent) -> bool:
    return WRITTEN in event.message and any(later.kind is JobEventKind.step for later in events[index:])


def _cost(events: Sequence[JobEvent], index: int, usual: float) -> Cost:
    before = next(e for e in reversed(events[:index]) if e.kind is JobEventKind.step)
    later = [e for e in events[index:] if e.kind is JobEventKind.step]
    announced = next(e for e in events[index:] if e.kind is JobEventKind.checkpoint)
    # Until the first step that began after the announcement, so that one it came in the middle of counts whole.
    until = [*[e for e in later if e.at <= announced.at], *[e for e in later if e.at > announced.at][:1]]
    took = (until[-1].at - before.at).total_seconds()
    return Cost(
        stalled=(later[0].at - before.at).total_seconds() - usual,
        lost=took - usual * len(until),
        verified=(announced.at - before.at).total_seconds(),
    )


def inside_costs(events: Sequence[JobEvent]) -> list[Cost]:
    """Of each checkpoint inside an epoch: the steps around it are further apart by it."""
    usual = undisturbed(events)
    found = []
    for index, event in enumerate(events):
        if not event.message.startswith(SAVED):
            continue
        before = next(e for e in reversed(events[:index]) if e.kind is JobEventKind.step)
        after = next((e for e in events[index:] if e.kind is JobEventKind.step), None)
        if after is not None:
            lost = (after.at - before.at).total_seconds() - usual
            found.append(Cost(lost, lost, 0.0))
    return found

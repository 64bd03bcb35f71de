"""Which way a job may move.

    scheduled ─> in_progress ─> completed | failed | cancelled
        │             └──────> scheduled      (an attempt ended without a result)
        └────────────────────> cancelled | failed

Terminal states never change.
"""

from __future__ import annotations

from apis.errors import PostgradError
from apis.post_training.models import JobStatus

EDGES: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.scheduled: frozenset({JobStatus.in_progress, JobStatus.cancelled, JobStatus.failed}),
    JobStatus.in_progress: frozenset({JobStatus.completed, JobStatus.failed, JobStatus.cancelled, JobStatus.scheduled}),
    JobStatus.completed: frozenset(),
    JobStatus.failed: frozenset(),
    JobStatus.cancelled: frozenset(),
}


class IllegalTransition(PostgradError):
    """A move that the graph above does not have: a fault of ours, never of a client."""

    code = "illegal_transition"


class LeaseLost(PostgradError):
    """This worker no longer owns its job: it must write nothing more and stop."""

    code = "lease_lost"


def check_transition(old: JobStatus, new: JobStatus) -> None:
    """Raises IllegalTransition unless a job may move from `old` to `new`."""
    if new not in EDGES[old]:
        raise IllegalTransition(f"a job cannot move from {old} to {new}")

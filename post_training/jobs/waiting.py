"""Why a job does not run yet, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from apis.post_training.models import JobStatus
from post_training.jobs.devices import Slot
from post_training.jobs.store import JobStore
from post_training.jobs.tables import JobRow


@dataclass(frozen=True)
class Waiting:
    """A place in the queue: 0 is next. Both None for a job that does not wait."""

    position: int | None = None
    reason: str | None = None


def describe_wait(store: JobStore, job: JobRow, slots: Sequence[Slot], provider_ids: Collection[str]) -> Waiting:
    """Where a job stands among those that could run on the same devices, and what it waits for."""
    if job.status != JobStatus.scheduled:
        return Waiting()
    if job.paused:
        return Waiting(None, f"{_history(store, job)}paused: it goes on when its client resumes it")
    ahead = store.jobs_ahead(job, provider_ids, {slot.kind for slot in slots})
    reason = _obstacle(job, slots, provider_ids) or _turn(ahead, [s.name for s in slots if _fits(job, s)])
    return Waiting(ahead, f"{_history(store, job)}{reason}")


def _fits(job: JobRow, slot: Slot) -> bool:
    return job.device_kind in (None, slot.kind)


def _obstacle(job: JobRow, slots: Sequence[Slot], provider_ids: Collection[str]) -> str | None:
    if job.provider_id not in provider_ids:
        return f"this stack has no provider {job.provider_id!r}: add it to the run.yaml, or cancel the job"
    if not any(_fits(job, slot) for slot in slots):
        have = ", ".join(slot.name for slot in slots)
        return f"it needs a {job.device_kind} device and this stack has {have}"
    return None


def _turn(ahead: int, names: Sequence[str]) -> str:
    if ahead:
        return "1 job is ahead in the queue" if ahead == 1 else f"{ahead} jobs are ahead in the queue"
    return f"next in the queue: starts as soon as {' or '.join(names)} is free"


def _history(store: JobStore, job: JobRow) -> str:
    """Of a job that ran already: why it is back."""
    if not job.attempt:
        return ""
    return f"attempt {job.attempt} ended without a result ({store.transitions(job.job_uuid)[-1].reason}); "

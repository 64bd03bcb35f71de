"""Lists of jobs, whole or page by page.

A page starts where the one before ended, at a job's number: it costs the same wherever it is, and jobs that come or go
meanwhile neither repeat nor hide others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from apis.common import MAX_INTEGER
from apis.errors import InvalidField
from apis.post_training.models import JobStatus, ListOrder
from post_training.jobs.tables import JobRow
from post_training.owners import own

# No id has this character, so no id is taken for a place.
_PLACE = "~"


@dataclass(frozen=True)
class JobHead:
    """What a list of jobs shows of one; its spec stays in the store, since a list may be long."""

    job_uuid: str
    status: JobStatus
    model: str
    scheduled_at: datetime


@dataclass(frozen=True)
class JobPage:
    """Jobs in the order asked for; `next` continues behind them, None where they are the last."""

    jobs: Sequence[JobHead]
    next: str | None


def read_page(
    session: Session,
    *,
    limit: int | None = None,
    after: str | None = None,
    order: ListOrder = ListOrder.asc,
    status: JobStatus | None = None,
) -> JobPage:
    """The caller's jobs that are so (all: None), at most `limit`, in the order in which they came or the newest first.

    Args:
        after: the job to go on behind, by its id, or the `next` of the page before, which holds when the job is gone.

    Raises:
        InvalidField: `after` is neither.
    """
    descending = order is ListOrder.desc
    query = select(JobRow.sequence, JobRow.job_uuid, JobRow.status, JobRow.model, JobRow.scheduled_at)
    query = query.where(own(JobRow.owned_by)).order_by(JobRow.sequence.desc() if descending else JobRow.sequence)
    if status is not None:
        query = query.where(JobRow.status == status)
    if after is not None:
        place = _place_of(session, after)
        query = query.where(JobRow.sequence < place if descending else JobRow.sequence > place)
    # One more than asked for tells whether there are more.
    rows = session.execute(query if limit is None else query.limit(limit + 1)).all()
    more = limit is not None and len(rows) > limit
    shown = rows[:limit]
    jobs = [JobHead(job_uuid, JobStatus(status), model, at) for _, job_uuid, status, model, at in shown]
    return JobPage(jobs, f"{_PLACE}{shown[-1][0]}" if more else None)


def _place_of(session: Session, after: str) -> int:
    number = after.removeprefix(_PLACE)
    is_number = len(number) <= len(str(MAX_INTEGER)) and number.isascii() and number.isdigit()
    if after.startswith(_PLACE) and is_number and int(number) <= MAX_INTEGER:
        return int(number)
    sequence = session.scalar(select(JobRow.sequence).where(JobRow.job_uuid == after, own(JobRow.owned_by)))
    if sequence is None:
        raise InvalidField(
            f"there is no job {after[:100]!r} to list the jobs behind: it may have been deleted; "
            "give the `next` of the page before, or begin anew without `after`",
            param="after",
        )
    return sequence

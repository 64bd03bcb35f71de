"""A preflight on the server's side: who reads the rows, how many at a time, and what is told of a job beside them."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from apis.errors import TooLarge, Unavailable
from apis.post_training.reports import PreflightReport
from post_training.checkpoints.child import run_child
from post_training.estimates import estimates
from post_training.jobs.database import Database
from post_training.jobs.spec import JobSpec

PREFLIGHT_MODULE = "post_training.data.preflight_process"
PREFLIGHT_SECONDS = 600.0
AT_ONCE = 2
"""Preflights that read rows at one time; each takes a core."""


def placeholder_id() -> str:
    """The id of a job that is only looked at: no other job has it."""
    return f"p-{uuid.uuid4().hex[:12]}"


class Preflights:
    """Reports on jobs that are not run. Rows are read by short-lived processes without torch; others wait."""

    def __init__(self, database: Database, home: Path) -> None:
        self._database = database
        self._home = home
        # Of its own, so that waiting for long data never takes the threads of other requests.
        self._limiter = anyio.CapacityLimiter(AT_ONCE)

    async def report(self, spec: JobSpec, device_kind: str) -> PreflightReport:
        """Read all rows of `spec` and report.

        Raises:
            DataInvalid: a row cannot be trained on.
            TooLarge: that took more than `PREFLIGHT_SECONDS`.
            Unavailable: the process that reads broke off.
        """
        read = partial(_read, spec, self._home)
        rows = await anyio.to_thread.run_sync(read, limiter=self._limiter)
        estimate = partial(estimates, self._database, spec, rows, device_kind)
        return PreflightReport.model_validate({**rows, **await anyio.to_thread.run_sync(estimate)})


def _read(spec: JobSpec, home: Path) -> dict[str, Any]:
    try:
        return run_child(
            PREFLIGHT_MODULE,
            {"spec": spec.model_dump(mode="json"), "home": str(home)},
            what="reading the rows for the preflight",
            failure=Unavailable,
            too_slow=TooLarge,
            timeout=PREFLIGHT_SECONDS,
            threads=1,
        )
    except TooLarge as error:
        error.message += "; submit the job, which has the time, or try a part of the data"
        raise

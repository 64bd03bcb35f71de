"""Reads and tokenises all rows of a job that is not run, in a process of its own. No torch here.

`post_training.checkpoints.child.run_child` starts it with `{"spec": …, "home": …}`; the answer is the report of
`read_job_rows`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from post_training.checkpoints.child import serve_child
from post_training.data.job_rows import read_job_rows
from post_training.jobs.spec import JobSpec


def _report(request: dict[str, Any]) -> dict[str, Any]:
    return read_job_rows(JobSpec.model_validate(request["spec"]), Path(request["home"])).report


if __name__ == "__main__":
    serve_child(_report)

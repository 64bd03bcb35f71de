"""How the command line words a job's progress."""

from __future__ import annotations

from typing import Any

import pytest

from apis.post_training import JobProgress, JobStatus, PostTrainingJobStatusResponse
from distributions.cli import progress
from distributions.cli.output import clock


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3600, "1:00:00"), (-3, "0:00")]
)
def test_durations_are_shown_as_a_clock(seconds: float, shown: str):
    assert clock(seconds) == shown


def test_a_running_job_is_summed_up_with_what_is_known():
    def told(**progress_fields: Any) -> str:
        status = PostTrainingJobStatusResponse(
            job_uuid="j", status=JobStatus.in_progress, progress=JobProgress(**progress_fields)
        )
        return progress.summary(status)

    assert told() == "starting"
    assert told(phase="validation", step=7, epoch=1) == "validation  step 7  epoch 1"
    assert told(phase="train", step=1, skipped_steps=2, seconds_left=3725) == (
        "train  step 1  epoch 0  2 steps skipped  1:02:05 left"
    )


def test_a_waiting_job_says_why_it_waits():
    status = PostTrainingJobStatusResponse(job_uuid="j", status=JobStatus.scheduled, waiting_reason="no free device")
    assert progress.summary(status) == "scheduled (no free device)"

"""What the status of a job says of its progress, its attempts and its place in the queue; what a replay is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.post_training.models import JobProgress, SupervisedFineTuneRequest
from post_training.job_specs import request_hash as _hash
from post_training.jobs.tables import CheckpointRow
from tests.job_server import JOBS, JobServer, job_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    with job_server(tmp_path / "home") as made:
        yield made


def status(server: JobServer, job_uuid: str) -> dict[str, Any]:
    return httpx.get(f"{server.url}{JOBS}/{job_uuid}/status").json()


@pytest.mark.parametrize(
    ("step", "total", "percent"),
    [(0, 8, 0.0), (1, 3, 33.3), (8, 8, 100.0), (9, 8, 100.0), (5, None, None), (0, 0, None)],
)
def test_percent_is_of_all_steps_once_their_number_is_known(step: int, total: int | None, percent: float | None):
    progress = JobProgress(step=step, total_steps=total)
    assert progress.percent == percent
    # As it is stored and read again, and as it is answered.
    assert JobProgress.model_validate(progress.model_dump(mode="json")) == progress
    assert progress.model_dump()["percent"] == percent


def test_progress_and_attempts_are_told(server: JobServer):
    owner = server.claim("j")
    server.leases.update("j", owner, progress=JobProgress(step=3, total_steps=12, tokens_seen=99, seconds_left=4.5))
    told = status(server, "j")
    progress = {key: told["progress"][key] for key in ("step", "total_steps", "percent", "tokens_seen", "seconds_left")}
    assert progress == {"step": 3, "total_steps": 12, "percent": 25.0, "tokens_seen": 99, "seconds_left": 4.5}
    assert (told["attempt"], told["max_attempts"], told["lost_attempts"]) == (1, 3, 0)
    server.leases.lost("j", owner, "its worker ended by SIGKILL", 3)
    told = status(server, "j")
    assert (told["status"], told["attempt"], told["lost_attempts"]) == ("scheduled", 1, 1)
    assert told["queue_position"] == 0
    assert "SIGKILL" in told["waiting_reason"]


def test_a_jobs_own_limit_of_attempts_goes_before_the_stacks(server: JobServer):
    server.submit("j", max_attempts=25)
    assert status(server, "j")["max_attempts"] == 25


def test_a_waiting_job_says_its_place(server: JobServer):
    server.submit("first")
    server.submit("second")
    assert (status(server, "second")["queue_position"], status(server, "second")["waiting_reason"]) == (
        1,
        "1 job is ahead in the queue",
    )
    server.scheduler.provider_ids.clear()
    assert "no provider" in status(server, "first")["waiting_reason"]


class LaterRequest(SupervisedFineTuneRequest):
    """As a later version may have it."""

    reward_model: str | None = None


def test_a_replay_is_the_same_for_a_version_that_knows_more_fields():
    body = {"job_uuid": "j", "model": "m", "training_config": {"data_config": {"dataset_id": "d"}}}
    request = SupervisedFineTuneRequest.model_validate(body)
    assert _hash(LaterRequest.model_validate(body)) == _hash(request)
    assert _hash(SupervisedFineTuneRequest.model_validate({**body, "checkpoint_dir": None})) == _hash(request)
    assert _hash(LaterRequest.model_validate({**body, "reward_model": "r"})) != _hash(request)
    training = {
        "n_epochs": None,
        "optimizer_config": {"lr": None},
        "data_config": {"dataset_id": "d", "batch_size": None},
    }
    assert _hash(SupervisedFineTuneRequest.model_validate({**body, "training_config": training})) == _hash(request)
    for other in ({"max_grad_norm": None}, {"dtype": None}, {"n_epochs": 3}, {"data_config": {"dataset_id": "e"}}):
        changed = {**body, "training_config": {**body["training_config"], **other}}
        assert _hash(SupervisedFineTuneRequest.model_validate(changed)) != _hash(request)


def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss(server: JobServer):
    owner = server.claim("j")
    losses: list[tuple[float, float | None]] = [(3.0, None), (2.0, 1.5), (1.0, 1.2), (0.5, 1.4)]
    for epoch, (train_loss, validation_loss) in enumerate(losses):
        metrics = {"epoch": epoch, "train_loss": train_loss, "validation_loss": validation_loss}
        row = CheckpointRow(
            job_uuid="j", epoch=epoch, step=epoch + 1, path="p", created_at=datetime.now(UTC), metrics=metrics
        )
        server.leases.record_checkpoint(owner, row)
        assert status(server, "j")["best_checkpoint"] == (None if epoch == 0 else f"base-sft-j-{min(epoch - 1, 2)}")
        server.leases.announce("j", owner, epoch + 1, f"base-sft-j-{epoch}", {}, lambda session, row: None)
    assert status(server, "j")["best_checkpoint"] == "base-sft-j-2"


@pytest.mark.parametrize(
    ("training", "param"),
    [
        (
            {"data_config": {"dataset_id": "d", "validation_dataset_id": "v", "validation_split": 0.1}},
            "training_config.data_config.validation_split",
        ),
        (
            {"data_config": {"dataset_id": "d"}, "early_stopping_patience": 2},
            "training_config.early_stopping_patience",
        ),
        (
            {"data_config": {"dataset_id": "d", "validation_split": 1.0}},
            "training_config.data_config.validation_split",
        ),
    ],
)
def test_a_validation_that_cannot_be_is_refused_by_its_field(server: JobServer, training: dict[str, Any], param: str):
    body = {"job_uuid": "j", "model": "base", "training_config": training}
    answer = httpx.post(f"{server.url}/v1alpha/post-training/supervised-fine-tune", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

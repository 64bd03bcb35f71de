"""remote::llama-stack: between two live servers, in every dialect, and what it says when the other one has trouble."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from llama_stack_client.types.post_training_preference_optimize_params import PostTrainingPreferenceOptimizeParams
from llama_stack_client.types.post_training_supervised_fine_tune_params import PostTrainingSupervisedFineTuneParams
from pydantic import TypeAdapter, ValidationError

from apis.errors import Conflict, InvalidField, JobNotFound, NotSupported, Unavailable
from apis.post_training.models import JobEventKind, JobStatus, PreferenceOptimizeRequest, SupervisedFineTuneRequest
from post_training.catalog.importing import import_model
from post_training.catalog.keys import ApiKeys
from post_training.client import StackClient
from post_training.jobs.database import Database
from providers.remote_stack.config import RemoteStackConfig
from providers.remote_stack.dialects import dialect_of
from providers.remote_stack.llama_stack import history, read_status
from providers.remote_stack.llama_stack_bodies import WHOLE_EPOCH, fine_tune_body, preference_body
from tests.served_stack import run_yaml_with, served
from tests.tiny_llama import save_tiny_llama

LLAMA_STACKS = ["llama-stack-0.1", "llama-stack-0.3", "llama-stack-0.6"]
MODEL = "tiny"
DATA: dict[str, Any] = {"dataset_id": "rows", "batch_size": 4, "data_format": "instruct", "shuffle": True}
OPTIMIZER: dict[str, Any] = {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.0, "num_warmup_steps": 0}
TRAINING: dict[str, Any] = {"n_epochs": 1, "data_config": DATA, "optimizer_config": OPTIMIZER, "dtype": "fp32"}
LORA: dict[str, Any] = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": False,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}


def body(job_uuid: str, **training: Any) -> dict[str, Any]:
    config = {**TRAINING, **training}
    return {"job_uuid": job_uuid, "model": MODEL, "training_config": config, "algorithm_config": LORA}


def instruct_rows(count: int) -> list[dict[str, str]]:
    asked = [json.dumps([{"role": "user", "content": f"Say red {n}"}]) for n in range(count)]
    return [{"chat_completion_input": text, "expected_answer": "The old hen."} for text in asked]


# -- words -----------------------------------------------------------------------------------------------------------


def without_null(value: Any) -> Any:
    return {k: without_null(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def test_a_body_is_what_a_real_client_sends():
    request = SupervisedFineTuneRequest.model_validate(body("j", seed=None))
    sent = fine_tune_body(request)
    TypeAdapter(PostTrainingSupervisedFineTuneParams).validate_python(without_null(sent))
    assert (sent["training_config"]["max_steps_per_epoch"], sent["training_config"]["n_epochs"]) == (WHOLE_EPOCH, 1)
    preferences = {"job_uuid": "j", "finetuned_model": MODEL, "training_config": TRAINING}
    sent = preference_body(PreferenceOptimizeRequest.model_validate(preferences))
    assert sent["algorithm_config"] == {"beta": 0.1, "loss_type": "sigmoid"}
    needed = PostTrainingPreferenceOptimizeParams.__annotations__.keys()
    assert sent.keys() == needed


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"seed": 7}, "training_config.seed"),
        ({"max_grad_norm": 0.5}, "training_config.max_grad_norm"),
        ({"n_epochs": None}, "training_config.n_epochs"),
        ({"data_config": {**DATA, "validation_split": 0.1}}, "training_config.data_config.validation_split"),
        ({"data_config": {**DATA, "data_format": "alpaca"}}, "training_config.data_config.data_format"),
        ({"data_config": {**DATA, "batch_size": None}}, "training_config.data_config.batch_size"),
        ({"optimizer_config": {**OPTIMIZER, "lr": None}}, "training_config.optimizer_config.lr"),
        ({"optimizer_config": {**OPTIMIZER, "lr_schedule": "linear"}}, "training_config.optimizer_config.lr_schedule"),
    ],
)
def test_what_a_llama_stack_has_no_word_for_is_refused_by_name(change: dict[str, Any], param: str):
    with pytest.raises(InvalidField) as caught:
        fine_tune_body(SupervisedFineTuneRequest.model_validate(body("j", **change)))
    assert caught.value.param == param


# As the notebook of 0.2.17 shows it.
TOLD: dict[str, Any] = {
    "job_uuid": "1234",
    "status": "completed",
    "scheduled_at": "2025-08-20T10:00:00Z",
    "started_at": "2025-08-20T10:00:05Z",
    "completed_at": "2025-08-20T10:09:00Z",
    "resources_allocated": {},
    "checkpoints": [
        {
            "identifier": "meta-llama/Llama-3.2-3B-Instruct-sft-0",
            "created_at": "2025-08-20T10:08:55Z",
            "epoch": 0,
            "post_training_job_id": "1234",
            "path": "~/.llama/checkpoints/meta-llama/Llama-3.2-3B-Instruct-sft-0",
            "training_metrics": {"epoch": 0, "train_loss": 0.7165, "validation_loss": 0.3558, "perplexity": 1.4273},
        }
    ],
}


def test_a_status_of_a_llama_stack_becomes_ours_and_a_history_with_lasting_numbers():
    status = read_status("mine", TOLD)
    (checkpoint,) = status.checkpoints
    assert (checkpoint.post_training_job_id, checkpoint.step) == ("mine", 1)
    assert checkpoint.training_metrics is not None
    assert checkpoint.training_metrics.train_loss == 0.7165
    whole = history(status)
    assert [(event.id, event.kind, event.message) for event in whole] == [
        (1, JobEventKind.status, "scheduled"),
        (2, JobEventKind.status, "in_progress"),
        (3, JobEventKind.checkpoint, "checkpoint meta-llama/Llama-3.2-3B-Instruct-sft-0"),
        (4, JobEventKind.status, "completed"),
    ]
    earlier = read_status("mine", {**TOLD, "status": "in_progress", "completed_at": None})
    assert history(earlier) == whole[:3]
    assert read_status("mine", {**TOLD, "status": "pending"}).status is JobStatus.scheduled
    with pytest.raises(JobNotFound):
        read_status("mine", None)


@pytest.mark.parametrize(
    ("routes", "dialect"),
    [
        (["/v1/post-training/jobs", "/v1/post-training/job/status"], "llama-stack-0.1"),
        (["/v1alpha/post-training/job/status", "/v1/datasetio/iterrows/{dataset_id:path}"], "llama-stack-0.1"),
        (["/v1alpha/post-training/job/status", "/v1beta/datasetio/iterrows/{dataset_id:path}"], "llama-stack-0.3"),
        (["/v1alpha/post-training/jobs/{job_uuid}/status"], "llama-stack-0.6"),
        (["/v1alpha/post-training/jobs/{job_uuid}/events", "/v1/post-training/job/status"], "postgrad"),
    ],
)
def test_a_dialect_is_told_by_the_routes(routes: list[str], dialect: str):
    assert dialect_of(["/v1/health", *routes]) == dialect


def test_a_server_without_post_training_is_said_to_be_one():
    with pytest.raises(NotSupported, match=r"0\.1\.8 to 0\.6\.1"):
        dialect_of(["/v1/health", "/v1/chat/completions"])


@pytest.mark.parametrize(
    "url", ["gpu.example:8321", "ftp://gpu.example", "http://user:secret@gpu.example", "http://x?y"]
)
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ValidationError, match="URL"):
        RemoteStackConfig(url=url)


# -- two live servers ------------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """The server that trains."""

    home: Path
    url: str


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("trainer")
    home = folder / "home"
    import_model(str(save_tiny_llama(folder / "tiny", context=256)), MODEL, home)
    with served(home, stack=run_yaml_with(folder, jobs={"devices": ["cpu"]})) as (url, _):
        yield Trainer(home, url)


@contextmanager
def front(folder: Path, url: str, **config: Any) -> Iterator[str]:
    """A stack that sends its jobs to `url`; gives its own."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    remote = {"provider_id": "gpu", "provider_type": "remote::llama-stack", "config": {"url": url, **config}}
    datasetio = {"provider_id": "localfs", "provider_type": "inline::localfs"}
    providers = {"post_training": [remote], "datasetio": [datasetio]}
    stack = run_yaml_with(folder, apis=["post_training", "datasetio"], providers=providers)
    with served(folder / "home", stack=stack) as (own, _):
        yield own


@pytest.mark.parametrize("dialect", LLAMA_STACKS)
def test_a_job_is_trained_by_a_server_that_speaks_as_a_llama_stack(trainer: Trainer, tmp_path: Path, dialect: str):
    job = f"job-{dialect}"
    with front(tmp_path, trainer.url, dialect=dialect, poll_seconds=0.1) as url, StackClient(url) as client:
        client.datasets.register({"type": "rows", "rows": instruct_rows(12)}, dataset_id="rows")
        jobs = client.post_training
        assert jobs.supervised_fine_tune(**body(job)).job_uuid == job
        assert jobs.supervised_fine_tune(**body(job)).job_uuid == job
        with pytest.raises(Conflict):
            jobs.supervised_fine_tune(**body(job, n_epochs=2))
        told = list(jobs.events(job))
        ended = jobs.status(job)
        assert (ended.status, ended.provider_id) == (JobStatus.completed, "gpu"), ended.error
        assert [event.message for event in told if event.kind is JobEventKind.status] == [
            "scheduled",
            "in_progress",
            "completed",
        ]
        assert [event.id for event in told] == [1, 2, 3, 4]
        assert list(jobs.events(job, after=2)) == told[2:]
        assert [one.identifier for one in jobs.artifacts(job).checkpoints] == [f"{MODEL}-sft-{job}-0"]
        assert len(jobs.logs(job).log_lines) == 4
        assert [(one.job_uuid, one.status) for one in jobs.jobs()] == [(job, JobStatus.completed)]
        for lacking in (lambda: jobs.metrics(job), lambda: jobs.checkpoint_files(job, 1), lambda: jobs.delete(job)):
            with pytest.raises(NotSupported, match="is a Llama Stack, which has no"):
                lacking()
        with pytest.raises(JobNotFound):
            jobs.status("nobody")
        jobs.supervised_fine_tune(**body(f"long-{dialect}", n_epochs=5000))
        jobs.cancel(f"long-{dialect}")
        assert jobs.wait(f"long-{dialect}", poll_seconds=0.1, timeout=20).status is JobStatus.cancelled
    with StackClient(trainer.url) as client:
        assert client.post_training.status(job).status is JobStatus.completed


def test_checkpoint_files_are_brought_here_once_and_held_to_their_hashes(trainer: Trainer, tmp_path: Path):
    with front(tmp_path, trainer.url) as url, StackClient(url) as client:
        client.datasets.register({"type": "rows", "rows": instruct_rows(12)}, dataset_id="rows")
        client.post_training.supervised_fine_tune(**body("files"))
        (checkpoint,) = client.post_training.wait("files", poll_seconds=0.1, timeout=120).checkpoints
        route = f"{url}/v1alpha/post-training/jobs/files/checkpoints/{checkpoint.step}/files"
        files = {file["name"]: file for file in httpx.get(route).json()["data"]}
        name = "adapter/adapter_model.safetensors"
        local = tmp_path / "home" / "remote" / "gpu" / "files" / str(checkpoint.step)
        assert not local.exists()
        content = httpx.get(f"{route}/{name}").content
        assert hashlib.sha256(content).hexdigest() == files[name]["sha256"]
        assert [str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()] == [name]
        there = trainer.home / "jobs" / "files" / "checkpoints" / str(checkpoint.step) / "adapter"
        assert content == (there / "adapter_model.safetensors").read_bytes()
        assert httpx.get(f"{route}/adapter/nothing").status_code == 404
        # What is not what its manifest says is not handed on.
        config = there / "adapter_config.json"
        damaged = config.read_bytes().replace(b"LORA", b"LOSS")
        assert damaged != config.read_bytes()
        config.write_bytes(damaged)
        answer = httpx.get(f"{route}/adapter/adapter_config.json")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_invalid")
        assert not (local / "adapter" / "adapter_config.json").exists()


def test_a_job_that_is_gone_from_the_other_server_has_failed_unless_it_had_ended(trainer: Trainer, tmp_path: Path):
    with front(tmp_path, trainer.url) as url, StackClient(url) as client, StackClient(trainer.url) as other:
        client.datasets.register({"type": "rows", "rows": instruct_rows(12)}, dataset_id="rows")
        for job in ("seen", "unseen"):
            client.post_training.supervised_fine_tune(**body(job))
            other.post_training.wait(job, poll_seconds=0.1, timeout=120)
            if job == "seen":
                client.post_training.status(job)
            other.post_training.delete(job)
        assert client.post_training.status("seen").status is JobStatus.completed
        gone = client.post_training.status("unseen")
        assert gone.status is JobStatus.failed
        assert gone.error is not None
        assert "does not know it any more" in gone.error.message
        page = client.post_training.jobs_page(1)
        assert [job.job_uuid for job in page.data] == ["seen"]
        rest = client.post_training.jobs_page(1, page.next)
        assert ([job.job_uuid for job in rest.data], rest.next) == (["unseen"], None)
        assert [job.job_uuid for job in client.post_training.jobs(status="failed")] == ["unseen"]
        client.post_training.delete("unseen")
        assert [job.job_uuid for job in client.post_training.jobs()] == ["seen"]


def test_a_stack_starts_without_the_other_server_and_says_that_it_is_away_without_its_address(tmp_path: Path):
    with front(tmp_path, "http://127.0.0.1:9", timeout_seconds=1) as url:
        httpx.post(
            f"{url}/v1beta/datasets",
            json={"dataset_id": "rows", "source": {"type": "rows", "rows": instruct_rows(3)}},
        ).raise_for_status()
        answer = httpx.post(f"{url}/v1alpha/post-training/supervised-fine-tune", json=body("j"), timeout=30)
        assert answer.status_code == 503
        assert "'gpu': the server behind it does not answer" in answer.text
        assert "127.0.0.1" not in answer.text
        assert httpx.get(f"{url}/v1alpha/post-training/jobs").json()["data"] == []


def test_each_key_of_this_stack_sees_its_own_jobs_and_a_refused_key_is_the_stacks_fault(tmp_path: Path):
    with ExitStack() as stack:
        other, home = tmp_path / "other", tmp_path / "front" / "home"
        (other / "home").mkdir(parents=True)
        import_model(str(save_tiny_llama(other / "tiny", context=256)), MODEL, other / "home")
        environ = {**os.environ, "POSTGRAD_API_KEY": "trainers-own-administrator"}
        url, _ = stack.enter_context(
            served(other / "home", stack=run_yaml_with(other), POSTGRAD_API_KEY=environ["POSTGRAD_API_KEY"])
        )
        with front(tmp_path / "wrong", url, api_key="wrong") as wrong:
            answer = httpx.get(f"{wrong}/v1/providers/gpu")
            assert answer.json()["config"]["api_key"] == "********"
            httpx.post(
                f"{wrong}/v1beta/datasets",
                json={"dataset_id": "rows", "source": {"type": "rows", "rows": instruct_rows(3)}},
            ).raise_for_status()
            with StackClient(wrong, max_retries=0) as client, pytest.raises(Unavailable, match="does not accept"):
                client.post_training.supervised_fine_tune(**body("j"))
        home.mkdir(parents=True)
        database = Database(f"sqlite:///{home / 'postgrad.db'}")
        database.migrate()
        keys = [ApiKeys(database).create(name)[1] for name in ("alice", "bob")]
        database.close()
        own = stack.enter_context(front(tmp_path / "front", url, api_key=environ["POSTGRAD_API_KEY"]))
        alice, bob = (stack.enter_context(StackClient(own, api_key=key)) for key in keys)
        alice.datasets.register({"type": "rows", "rows": instruct_rows(8)}, dataset_id="rows")
        alice.post_training.supervised_fine_tune(**body("hers"))
        assert [job.job_uuid for job in alice.post_training.jobs()] == ["hers"]
        assert bob.post_training.jobs() == []
        for verb in (bob.post_training.status, bob.post_training.cancel, bob.post_training.delete):
            with pytest.raises(JobNotFound):
                verb("hers")
        alice.post_training.cancel("hers")

"""Jobs of the huggingface provider that are killed end in the bytes of undisturbed ones, whatever they train."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from apis.post_training.models import FullFinetuningConfig, LoraFinetuningConfig, RunnableAlgorithm
from post_training.worker import announcing
from tests.job_bench import Bench, VerifierHere, rows
from tests.test_resume import at_call
from tests.tiny_llama import save_tiny_llama

ALGORITHMS: dict[str, RunnableAlgorithm] = {
    "lora": LoraFinetuningConfig(rank=4, alpha=8, lora_dropout=0.3),
    "all": FullFinetuningConfig(),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_other_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    base = save_tiny_llama(folder / "tiny", context=128)
    return Bench(folder / "home", base, model_module="providers.huggingface.model")


def weights(bench: Bench, job_uuid: str) -> list[tuple[str, str]]:
    """Name and hash of every weight file of the job's announced checkpoints, oldest first."""
    files = [file for step in sorted(bench.steps(job_uuid)) for file in _files(bench.root(job_uuid) / str(step))]
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_killed_job_ends_with_the_bytes_of_an_undisturbed_one(bench: Bench, kind: str):
    calm = bench.submit(f"calm-{kind}", rows(7), algorithm=ALGORITHMS[kind], save_every_n_steps=1)
    assert bench.attempt() == "completed", bench.log(calm.job_uuid)
    expected = weights(bench, calm.job_uuid)
    assert len(expected) == 4
    assert len(set(expected)) == 4
    for what, step in (("update", 3), ("record_checkpoint", 4), ("announce", 4), ("update", 6)):
        killed = bench.submit(f"{kind}-{what}-{step}", rows(7), algorithm=ALGORITHMS[kind], save_every_n_steps=1)
        assert bench.attempt(at_call(what, step)) == "scheduled"
        assert bench.attempt() == "completed", bench.log(killed.job_uuid)
        assert weights(bench, killed.job_uuid) == expected, what


def test_a_job_of_all_weights_that_fails_leaves_its_whole_epochs_and_nothing_unproven(bench: Bench):
    job = bench.submit("fails", rows(7), algorithm=FullFinetuningConfig(), save_every_n_steps=1)

    def at(name: str, step: int | None) -> None:
        if name == "update" and step == 6:
            raise RuntimeError("the end")

    assert bench.attempt(at) == "failed"
    assert bench.steps(job.job_uuid) == [4]
    assert (bench.root(job.job_uuid) / "4" / "merged" / "config.json").is_file()

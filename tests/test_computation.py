"""How a job is computed: chosen by how much there is to do, stored by the first attempt, kept by those after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from post_training.training.model import KernelForm
from post_training.worker import announcing, setup
from tests.job_bench import Bench, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread_and_no_other_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "base").mkdir()
    save_tiny_llama(tmp_path / "base")
    return Bench(tmp_path / "home", tmp_path / "base", model_module="providers.torchtune.model")


def weights_of(base: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())


def test_a_job_is_compiled_for_where_there_is_enough_to_do(bench: Bench) -> None:
    spec = bench.submit("job", rows(4))
    tokens = setup.WORTH_COMPILING / (4 * weights_of(bench.base))
    assert setup.choose_kernels(spec, int(tokens * 0.99)) == "fused"
    assert setup.choose_kernels(spec, int(tokens * 1.01)) == "compiled"


@pytest.mark.parametrize("form", ["plain", "fused", "compiled"])
def test_a_configured_form_holds_whatever_there_is_to_do(bench: Bench, form: KernelForm) -> None:
    spec = bench.submit("job", rows(4))
    worker = spec.worker.model_copy(update={"kernels": form})
    assert setup.choose_kernels(spec.model_copy(update={"worker": worker}), 1) == form


def test_the_form_is_reported_and_a_later_attempt_keeps_the_first_one_s(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load = setup.load_model

    def loading(spec: Any, device: str, kernels: KernelForm) -> Any:
        asked.append(kernels)
        return load(spec, device, kernels)

    monkeypatch.setattr(setup, "load_model", loading)

    def stop(name: str, step: int | None) -> None:
        if (name, step) == ("update", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    spec = bench.submit("job", rows(6))
    assert bench.attempt(stop) == "scheduled"
    job = bench.store.get("job")
    assert (job.resources or {})["kernels"] == "fused"
    assert (job.report or {})["computation"] == {"kernels": "fused", "remarks": []}
    monkeypatch.setattr(setup, "choose_kernels", lambda *_: "plain")  # as if the rule had changed since
    assert bench.run(spec).status == "completed"
    assert asked == ["fused", "fused"]

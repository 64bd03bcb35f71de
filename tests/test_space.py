"""Room for checkpoints: what they take, and what is refused before it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from apis.errors import DiskFull
from apis.post_training.models import JobProgress, LoraFinetuningConfig
from post_training.checkpoints import space
from post_training.checkpoints.space import CheckpointSize, check_save, check_start, estimate, format_bytes, free_bytes
from post_training.checkpoints.state import rng_tensors
from post_training.data.batching import flatten
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from post_training.worker import announcing
from post_training.worker.resume import Cursor
from post_training.worker.saving import Snapshot, write_checkpoint
from providers.torchtune.model import load_model
from tests.job_bench import Bench, VerifierHere, rows
from tests.test_trainer import make_rows
from tests.tiny_llama import save_tiny_llama

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def disk_usage(directory: Path) -> int:
    """Bytes of all files, each rounded up to blocks of 4 KiB, and as many for each folder."""
    blocks = [-(-path.stat().st_size // 4096) if path.is_file() else 1 for path in directory.rglob("*")]
    return 4096 * (1 + sum(blocks))


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("merged", [None, "fp32", "bf16"])
@pytest.mark.parametrize("rank", [2, 64])
def test_the_estimate_is_what_a_checkpoint_takes_and_a_little_more(
    tmp_path: Path, base: Path, optimizer: Any, merged: Any, rank: int
) -> None:
    model = load_model(ModelConfig(base, LoraSettings(rank, 8), dtype="fp32"))
    trainer = Trainer(model, OptimSettings(2, optimizer))
    trainer.train_step([flatten(make_rows(2))])
    bench = Bench(tmp_path, base, export=("adapter",) if merged is None else ("adapter", "merged"))
    spec = bench.submit("sized", rows(2), optimizer_config={"optimizer_type": optimizer})
    spec.algorithm_config = LoraFinetuningConfig(rank=rank, alpha=8)
    spec.worker.merged_dtype = merged or "fp32"
    snapshot = Snapshot.of_job(trainer, 0, Cursor(), JobProgress(), rng_tensors())
    directory = write_checkpoint(spec, tmp_path, snapshot, merged is not None)

    tensors = trainer.masters.tensors.values()
    size = estimate(sum(t.numel() for t in tensors), len(tensors), optimizer, base, merged)
    taken = disk_usage(directory)
    assert taken <= size.after <= 1.1 * taken + 150_000
    assert (size.after == size.inside) == (merged is None)


def test_the_estimate_grows_by_sixteen_bytes_a_parameter_with_adam_and_eight_with_sgd(base: Path) -> None:
    def per_parameter(optimizer: str) -> float:
        return (estimate(2_000_000, 10, optimizer, base).inside - estimate(1_000_000, 10, optimizer, base).inside) / 1e6

    # fp32: the adapter, the master and, with Adam, two moments.
    assert (per_parameter("adamw"), per_parameter("adam"), per_parameter("sgd")) == (16, 16, 8)


def test_a_start_is_refused_unless_all_checkpoints_have_room() -> None:
    size = CheckpointSize(inside=10 << 20, after=1 << 30)
    needed = 3 * (1 << 30) + 2 * (10 << 20)
    check_start(Path("/"), size, after=3, inside=2, free=lambda _: needed)
    with pytest.raises(DiskFull) as refused:
        check_start(Path("/"), size, after=3, inside=2, free=lambda _: needed - 1)
    assert refused.value.message.startswith(
        "the job's checkpoints need 3.1 GiB of disk, 3.0 GiB are free: 3 after epochs"
    )
    with pytest.raises(DiskFull, match=r"step 7 needs 10\.0 MiB of disk, 0\.4 MiB are free"):
        check_save(Path("/"), 10 << 20, 7, free=lambda _: 500_000)


def test_bytes_are_rounded_so_that_what_is_asked_for_is_enough() -> None:
    assert format_bytes(1) == "0.1 MiB"
    assert format_bytes((1 << 30) + 1) == "1.1 GiB"
    assert format_bytes((1 << 31) - 1, floor=True) == "1.9 GiB"
    assert format_bytes(5 << 20) == "5.0 MiB"


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    real = space.shutil.disk_usage
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: asked.append(path) or real(path))
    assert free_bytes(tmp_path / "not" / "yet") > 0
    assert asked == [tmp_path]


# -- a job ------------------------------------------------------------------------------------------------------------


def shrinking(*sizes: int) -> Callable[[Path], int]:
    """So many bytes are free at each look, and as at the last one ever after."""
    left = list(sizes)

    def free(_path: Path) -> int:
        return left.pop(0) if len(left) > 1 else left[0]

    return free


def test_a_job_without_room_for_all_its_checkpoints_fails_before_its_first_step(tmp_path: Path, base: Path) -> None:
    bench = Bench(tmp_path, base)
    bench.submit("poor", rows(4), n_epochs=100)
    assert bench.attempt(free=lambda _: 5_000_000) == "failed"
    error = bench.store.get("poor").error
    assert error is not None
    assert error["code"] == "disk_full"
    assert "100 after epochs" in error["message"]
    assert not bench.outcome("poor").series
    assert bench.folders("poor") == []


def test_a_merged_model_without_room_is_refused_before_the_model_is_loaded(tmp_path: Path, base: Path) -> None:
    bench = Bench(tmp_path, base, export=("adapter", "merged"))
    bench.submit("poor", rows(4), n_epochs=10)
    merged = (base / "model.safetensors").stat().st_size
    assert bench.attempt(free=lambda _: 10 * merged) == "failed"
    assert "loaded tiny" not in bench.log("poor")
    assert (bench.store.get("poor").error or {})["code"] == "disk_full"


def test_a_disk_that_fills_up_while_a_job_trains_ends_it_with_its_newest_checkpoint_announced(
    tmp_path: Path, base: Path
) -> None:
    bench = Bench(tmp_path, base)
    bench.submit("filling", rows(8), save_every_n_steps=2)
    plenty = 1 << 40
    # Two looks before the first step, one before each of the saves at steps 2 and 4, one at 6.
    assert bench.attempt(free=shrinking(plenty, plenty, plenty, plenty, 1000)) == "failed"
    failed = bench.outcome("filling")
    assert (failed.error, failed.identifiers) == ("disk_full", ["tiny-sft-JOB-0"])
    assert "the checkpoint of step 6 needs" in (bench.store.get("filling").error or {})["message"]
    bench.submit("filling-inside", rows(8), save_every_n_steps=1)
    assert bench.attempt(free=shrinking(plenty, plenty, plenty, plenty, 1000)) == "failed"
    failed = bench.outcome("filling-inside")
    assert (failed.error, failed.identifiers) == ("disk_full", ["tiny-sft-JOB-step2"])
    assert bench.folders("filling-inside") == ["2"]

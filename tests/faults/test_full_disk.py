"""A disk that is full at any write of a save, or while a job trains: what was saved before stays, nothing partial is
left, and the job says why it failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from apis.post_training.models import JobStatus
from post_training.jobs.launchers.local import LocalLauncher
from post_training.worker import announcing
from tests.faults.one_save import OneSave
from tests.job_bench import Bench, Outcome, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small file system can be mounted on Linux as root only")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take all the room but so many bytes; returns the file that takes it."""
    filler = disk / "filler"
    state = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - leave)
    return filler


@pytest.fixture(scope="module")
def failing_writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("a library that lets writes fail is made on Linux, by cc")
    library = tmp_path_factory.mktemp("shim") / "failing_writes.so"
    source = HERE / "failing_writes.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("form", ["inside", "merged"])
def test_any_write_of_a_save_may_fail_for_want_of_room(
    tmp_path: Path, base: Path, failing_writes: Path, form: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.one_save", str(tmp_path / "home"), str(base), form]
    environment = {**os.environ, "LD_PRELOAD": str(failing_writes), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    tries = [json.loads(line) for line in run.stdout.splitlines()]
    *failed, last = tries
    # Folders, files and their contents, then all of them made durable, then the rename.
    assert len(failed) > 20
    assert {each["outcome"] for each in failed} == {"DiskFull"}
    assert all(each["left"] == ["1"] for each in failed)
    assert all(each["calls"] >= each["n"] for each in failed)
    assert last["outcome"] == "saved"
    assert last["calls"] == len(failed)


@pytest.mark.parametrize("merged", [False, True])
def test_a_save_on_a_small_disk_fails_cleanly_until_it_fits(small_disk: Path, base: Path, merged: bool) -> None:
    # The store lies elsewhere, so that only the checkpoint meets the full disk.
    home = small_disk.parent / "home"
    home.mkdir()
    (home / "jobs").symlink_to(small_disk / "jobs")
    (small_disk / "jobs").mkdir()
    save = OneSave(home, base, merged=merged)
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] != "saved":
        filler = fill(small_disk, leave=len(outcomes) * (48 if merged else 16) * 1024)
        outcomes.append(save())
        filler.unlink()
        if outcomes[-1] != "saved":
            assert save.check_earlier() == ["1"]
        assert len(outcomes) < 100
    assert len(outcomes) > 10
    assert set(outcomes[:-1]) == {"DiskFull"}
    save.bench.store.database.close()


def check_failed(bench: Bench, base: Path, job_uuid: str) -> Outcome:
    """The job says why it failed, and its first epoch's checkpoint loads in PEFT and changes the model."""
    failed = bench.outcome(job_uuid)
    assert (failed.status, failed.error) == ("failed", "disk_full")
    assert failed.identifiers[0] == "tiny-sft-JOB-0"
    assert sorted(bench.folders(job_uuid), key=int) == [str(step) for step in failed.steps]
    ids = torch.arange(40)[None]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.inference_mode():
        before = model(ids).logits
        adapter = bench.home / bench.store.checkpoints(job_uuid)[0].path / "adapter"
        after = PeftModel.from_pretrained(model, str(adapter))(ids).logits
    assert float((after - before).norm() / before.norm()) > 1e-4
    return failed


def test_a_job_that_finds_no_room_for_its_next_checkpoint_fails_and_keeps_the_earlier_ones(
    small_disk: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    bench = Bench(small_disk / "home", base)
    bench.submit("filled", rows(12), save_every_n_steps=4, optimizer_config={"lr": 1e-2})

    def at(name: str, step: int | None) -> None:
        if name == "update" and step == 10:
            fill(small_disk, leave=300_000)

    assert bench.attempt(at) == "failed"
    # The newest one inside the second epoch was announced, so that its work is not lost.
    assert check_failed(bench, base, "filled").identifiers == ["tiny-sft-JOB-0", "tiny-sft-JOB-step8"]
    bench.store.database.close()


def test_a_worker_whose_disk_with_the_store_on_it_is_full_to_the_last_byte_still_says_so(
    small_disk: Path, base: Path
) -> None:
    bench = Bench(small_disk / "home", base, model_module="providers.torchtune.model")
    spec = bench.submit("brimful", rows(12), n_epochs=20, save_every_n_steps=4, optimizer_config={"lr": 1e-2})
    worker = LocalLauncher(bench.store.database.url, bench.home).launch(bench.claim(), small_disk.parent / "log", 1)
    try:
        wait_for(lambda: len(bench.store.checkpoints("brimful")) > 0)
        worker.process.send_signal(signal.SIGSTOP)  # or it would take some of the room that is counted here
        fill(small_disk, leave=0)
        worker.process.send_signal(signal.SIGCONT)
        wait_for(lambda: JobStatus(bench.store.get("brimful").status).terminal)
        assert worker.process.wait(20) == 0
    finally:
        worker.kill()
    check_failed(bench, base, spec.job_uuid)
    bench.store.database.close()


def wait_for(reached: object, seconds: float = 90) -> None:
    assert callable(reached)
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)

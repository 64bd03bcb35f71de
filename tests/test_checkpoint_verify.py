"""A checkpoint is announced only if it computes what the trainer computed, whoever loads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from apis.errors import CheckpointUnverified, InvalidField, OutOfMemory
from post_training.checkpoints import child, export, verification, verify
from post_training.checkpoints.layout import CheckpointWriter, Manifest
from post_training.checkpoints.state import save_training_state
from post_training.processes import available_memory
from post_training.training.model import LoraSettings, ModelConfig
from providers.torchtune.model import load_model
from tests.torchtune_models import make_model

MODULE = "providers.torchtune.model"
LORA = LoraSettings(rank=4, alpha=8)
REPOSITORY = Path(__file__).parents[1]
# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def trained(base: Path, scale: float = 0.1) -> tuple[dict[str, Tensor], dict[str, Tensor], dict]:
    """Masters of an adapter that training moved, and the same as PEFT knows them."""
    model = load_model(ModelConfig(base, LORA, dtype="fp32", seed=3))
    generator = torch.Generator().manual_seed(1)
    masters = {
        name: parameter.detach().clone()
        if "lora_a" in name
        else scale * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.adapter_parameters().items()
    }
    return masters, *model.peft_adapter(masters)


def checkpoint(
    home: Path,
    base: Path,
    *,
    merged: str | None = None,
    scale: float = 0.1,
    spoil: Callable[[dict[str, Tensor], dict[str, Tensor], dict], None] = lambda *_: None,
) -> Path:
    masters, tensors, config = trained(base, scale)
    spoil(masters, tensors, config)
    with CheckpointWriter(home, "job", 5) as writer:
        export.write_adapter(writer.adapter, tensors, config, "base", base)
        if merged:
            export.merge(base, writer.adapter, writer.merged, merged)  # type: ignore[arg-type]
        save_training_state(writer.training_state, {f"master.{name}": masters[name] for name in masters}, {"step": 5})
        manifest = Manifest(
            identifier="base-sft-job-0",
            job_uuid="job",
            model="base",
            base_model="base",
            epoch=0,
            step=5,
            created_at=datetime.now(UTC),
        )
        return writer.commit(manifest)


def run(directory: Path, base: Path) -> verification.VerifyReport:
    """Verification in this process, which is quicker; two tests run it in its own."""
    return verify.verify(
        {"checkpoint_dir": str(directory), "base_dir": str(base), "model_module": MODULE, "lora": asdict(LORA)}
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    make_model(directory, "llama")
    return directory


@pytest.mark.parametrize("case", ["llama_tied", "qwen2", "gemma", "phi3"])
def test_a_good_checkpoint_of_each_family_is_verified_with_its_numbers(tmp_path: Path, case: str):
    make_model(tmp_path / "base", case)
    report = run(checkpoint(tmp_path, tmp_path / "base"), tmp_path / "base")
    assert report.adapter_error is not None
    assert report.adapter_error <= 1e-5
    assert report.merged_error <= 1e-5
    assert report.merged_dtype is None
    assert report.change > 1e-2
    assert report.tokens == 192


def test_a_saved_fp32_merge_is_the_one_that_is_checked(tmp_path: Path, base: Path):
    report = run(checkpoint(tmp_path, base, merged="fp32"), base)
    assert report.merged_dtype == "fp32"
    assert report.merged_error <= 1e-5


def test_a_bf16_merge_has_its_own_bound(tmp_path: Path, base: Path):
    report = run(checkpoint(tmp_path, base, merged="bf16"), base)
    assert report.merged_dtype == "bf16"
    assert 1e-4 < report.merged_error <= 3e-2


def _rescale(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    config["lora_alpha"] *= 2


def _swap(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    first, second = (f"base_model.model.model.layers.{n}.mlp.up_proj.lora_B.weight" for n in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _other_prefix(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    for key in list(tensors):
        tensors["wrong." + key] = tensors.pop(key)


def _nothing_trained(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    for name, tensor in (masters | tensors).items():
        if "lora_b" in name.lower():
            tensor.zero_()


def _infinite_master(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    next(iter(masters.values()))[0] = float("inf")


def _lost_master(masters: dict[str, Tensor], tensors: dict[str, Tensor], config: dict) -> None:
    masters.pop(next(iter(masters)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_rescale, "the adapter, loaded by PEFT, does not compute what was trained"),
        (_swap, "the adapter, loaded by PEFT, does not compute what was trained"),
        (_other_prefix, "is left over"),
        (_nothing_trained, "training changed nothing"),
        (_infinite_master, "NaN or infinite"),
        (_lost_master, "is in only one of the model and its training state"),
    ],
)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_a_checkpoint_that_computes_something_else_is_refused(tmp_path: Path, base: Path, spoil, message: str):
    directory = checkpoint(tmp_path, base, spoil=spoil)
    with pytest.raises(CheckpointUnverified, match=message):
        run(directory, base)


def test_a_merge_onto_the_wrong_base_is_refused(tmp_path: Path, base: Path):
    make_model(tmp_path / "other", "llama", seed=1)
    _, tensors, config = trained(base)
    export.write_adapter(tmp_path, tensors, config, "base", base)
    export.merge(tmp_path / "other", tmp_path, tmp_path / "merged")
    with pytest.raises(CheckpointUnverified, match="the merged model does not compute"):
        verify.verify_merged(base, tmp_path, tmp_path / "merged", "fp32")


def test_a_file_changed_after_commit_is_refused(tmp_path: Path, base: Path):
    directory = checkpoint(tmp_path, base)
    path = directory / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] += 1e-7
    save_file(tensors, path)
    with pytest.raises(CheckpointUnverified, match=r"adapter_model\.safetensors has changed"):
        run(directory, base)


def test_near_ties_may_swap_and_clear_winners_may_not():
    expected = torch.tensor([[1.0, 1.000001, -3.0], [2.0, 1.0, 0.0]])
    assert verify.same_argmax(torch.tensor([[1.000002, 1.0, -3.0], [2.0, 1.0, 0.0]]), expected)
    assert not verify.same_argmax(torch.tensor([[1.0, 1.000001, -3.0], [1.0, 2.0, 0.0]]), expected)


def test_the_relative_error_is_that_of_the_definition_and_not_a_number_is_no_match():
    assert verify.relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert verify.relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")


def test_the_probe_stays_within_a_short_context_or_window(tmp_path: Path):
    make_model(tmp_path / "a", "llama", max_position_embeddings=40)
    make_model(tmp_path / "b", "mistral", sliding_window=50)
    assert [len(segment) for segment in verify.probe_segments(tmp_path / "a")] == [40, 40, 32]
    assert [len(segment) for segment in verify.probe_segments(tmp_path / "b")] == [50, 50, 32]


# -- in a process of its own -----------------------------------------------------------------------------------------


def test_the_verifying_process_answers_the_same_numbers_and_leaves_the_checkpoint_as_it_is(tmp_path: Path, base: Path):
    directory = checkpoint(tmp_path, base, merged="fp32")
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    report = verification.verify_checkpoint(directory, base, MODULE, asdict(LORA), threads=1, timeout=120)
    assert report.adapter_error is not None
    assert report.adapter_error <= 1e-5
    assert report.merged_error <= 1e-5
    assert report.change == pytest.approx(run(directory, base).change, rel=1e-3)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_one_process_verifies_one_checkpoint_after_another_and_a_refusal_crosses_with_its_numbers(
    tmp_path: Path, base: Path
):
    good, other = checkpoint(tmp_path / "a", base), checkpoint(tmp_path / "b", base, scale=0.2)
    spoilt = checkpoint(tmp_path / "c", base, spoil=_rescale)
    verifier = verification.Verifier(base, MODULE, asdict(LORA))
    verifier.prepare()
    child = verifier._child
    reports = [verifier.begin(directory, 1, 120).result() for directory in (good, other)]
    with pytest.raises(CheckpointUnverified, match=r"differ by \S+ \(relative Frobenius\), allowed is 1e-05"):
        verifier.begin(spoilt, 1, 120).result()
    again = verifier.begin(good, 1, 120).result()
    assert verifier._child is child
    # The base's logits are computed once, and serve all of them.
    expected = [run(directory, base).change for directory in (good, other)]
    assert [report.change for report in reports] == pytest.approx(expected, rel=1e-3)
    assert again == reports[0]
    verifier.rest()
    assert not verifier.started


def test_the_logits_of_a_base_whose_files_have_changed_are_computed_again(tmp_path: Path):
    base = tmp_path / "changing"
    make_model(base, "llama")
    directory = checkpoint(tmp_path, base)
    before = run(directory, base).change
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    after = run(directory, base)
    assert after.adapter_error is not None
    assert after.adapter_error <= 1e-5
    assert abs(after.change - before) > 1e-3


def test_a_verification_waits_for_its_turn_where_memory_is_short(tmp_path: Path, base: Path, monkeypatch):
    verifier = verification.Verifier(base, MODULE, asdict(LORA))
    weights = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values()) * 4
    for free, fits in ((weights + 2**20, False), (weights * 2 + 2**30, True), (None, True)):
        monkeypatch.setattr(verification, "available_memory", lambda free=free: free)
        assert verifier.fits_beside_training() is fits


def test_available_memory_is_what_the_machine_has_left_and_no_more_than_the_limit_of_a_container(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       8000000 kB\nMemFree:  1000 kB\nMemAvailable:    4000000 kB\n")
    assert available_memory(tmp_path / "none", tmp_path) is None
    assert available_memory(meminfo, tmp_path) == 4_000_000 * 1024
    for name, text in (("current", "900\n"), ("stat", "anon 600\ninactive_file 250\n"), ("max", "max\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_memory(meminfo, tmp_path) == 4_000_000 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(meminfo, tmp_path) == 1000 - 900 + 250


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes an importable module whose handler has the given body."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))

    def make(body: str) -> str:
        (tmp_path / "child_under_test.py").write_text(
            "import os, signal, sys, time\n"
            "from apis.errors import InvalidField\n"
            "from post_training.checkpoints.child import serve_child\n"
            f"def handle(request):\n    {body}\n"
            "serve_child(handle)\n"
        )
        return "child_under_test"

    return make


def ask(module: str, timeout: float = 30) -> dict:
    return child.run_child(module, {"n": 2}, what="the work", failure=CheckpointUnverified, timeout=timeout, threads=1)


def test_what_a_child_prints_does_not_mix_with_its_answer(child_module):
    body = "print('a'); os.system('echo b'); return {'n': request['n'] + 1, 'threads': os.environ['OMP_NUM_THREADS']}"
    assert ask(child_module(body)) == {"n": 3, "threads": "1"}


def test_a_childs_error_keeps_its_class_and_message(child_module):
    with pytest.raises(InvalidField, match=r"^wrong$"):
        ask(child_module("raise InvalidField('wrong')"))


def test_a_child_that_crashes_is_the_callers_failure_without_its_traceback(child_module):
    with pytest.raises(CheckpointUnverified, match="the work ended with code 1 and no answer") as raised:
        ask(child_module("raise RuntimeError('secret')"))
    assert "secret" not in raised.value.message


def test_a_child_killed_by_the_system_is_out_of_memory(child_module):
    with pytest.raises(OutOfMemory, match="the work was killed"):
        ask(child_module("os.kill(os.getpid(), signal.SIGKILL)"))


def test_a_child_that_takes_too_long_is_stopped_with_all_it_started(child_module, tmp_path: Path):
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); os.system('sleep 60'); return {{}}"
    module = child_module(body)
    with pytest.raises(CheckpointUnverified, match="took longer than 3 s"):
        ask(module, timeout=3)
    group = int((tmp_path / "pid").read_text())
    _wait_until(lambda: not _group_lives(group))


def test_a_kept_child_answers_one_request_after_another_and_an_error_does_not_end_it(child_module):
    module = child_module(
        "if request['n'] < 0: raise InvalidField('negative')\n    return {'n': request['n'], 'pid': os.getpid()}"
    )
    with child.Child(module, what="the work", failure=CheckpointUnverified, threads=1, nice=7) as kept:
        first = kept.ask({"n": 1}, 30)
        assert os.getpriority(os.PRIO_PROCESS, first["pid"]) == os.getpriority(os.PRIO_PROCESS, 0) + 7
        with pytest.raises(InvalidField, match="negative"):
            kept.ask({"n": -1}, 30)
        assert kept.ask({"n": 2}, 30) == {"n": 2, "pid": first["pid"]}
    _wait_until(lambda: not _group_lives(first["pid"]))


def test_a_kept_child_that_is_ended_while_it_works_says_so_to_whoever_waits(child_module, caplog):
    kept = child.Child(child_module("time.sleep(60)"), what="the work", failure=CheckpointUnverified, threads=1)
    threading.Timer(1, kept.kill).start()
    with pytest.raises(CheckpointUnverified, match="the work was broken off"):
        kept.ask({}, 30)
    assert not caplog.records


def test_a_child_ends_when_its_caller_is_killed(child_module, tmp_path: Path):
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60); return {{}}"
    module = child_module(body)
    code = (
        "from post_training.checkpoints.child import run_child; from apis.errors import Unavailable\n"
        f"run_child({module!r}, {{}}, what='work', failure=Unavailable, timeout=60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    _wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    _wait_until(lambda: not _group_lives(int((tmp_path / "pid").read_text())))


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)

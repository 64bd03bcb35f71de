"""Checkpoint directories: whole or absent, hashed, restored bit for bit; exports that load in PEFT and transformers."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sqlalchemy.exc import OperationalError
from torch import Tensor

from apis.errors import DiskFull, ModelInvalid
from post_training.checkpoints import export, layout, state
from post_training.checkpoints.layout import (
    CheckpointWriter,
    Manifest,
    check_files,
    checkpoints_root,
    clean_partial,
    read_manifest,
)
from tests.torchtune_models import make_model, random_tokens, relative_error

JOB = "job-1"
# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def manifest(step: int = 4) -> Manifest:
    return Manifest(
        identifier=f"base-sft-{JOB}-0",
        job_uuid=JOB,
        model="base",
        base_model="base",
        epoch=0,
        step=step,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        metrics={"train_loss": 0.5},
        versions={"torch": "2.0"},
    )


def write(home: Path, step: int = 4, content: str = "hello") -> Path:
    with CheckpointWriter(home, JOB, step) as writer:
        (writer.adapter / "a.json").write_text(content)
        (writer.training_state / "state.json").write_text("{}")
        return writer.commit(manifest(step))


def lora(
    directory: Path, base: Path, modules: dict[str, tuple[int, int]], alpha: int = 8, rank: int = 4, **config: object
) -> dict[str, Tensor]:
    """A random adapter in PEFT's layout on `modules`, which are given with their (out, in) sizes."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    ranks = config.get("rank_pattern", {})
    for module, (outputs, inputs) in modules.items():
        r = ranks.get(module, rank) if isinstance(ranks, dict) else rank
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(r, inputs, generator=generator) / 4
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, r, generator=generator) / 4
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        **config,
    }
    directory.mkdir(exist_ok=True)
    export.write_adapter(directory, tensors, content, "base", base)
    return tensors


LLAMA_MODULES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.1.self_attn.v_proj": (16, 32),
    "model.layers.1.mlp.down_proj": (32, 48),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    make_model(directory, "llama")
    (directory / "tokenizer.json").write_text('{"model": "tiny"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=random_tokens(40)[None]).logits[0]


def plain(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


# -- the directory ---------------------------------------------------------------------------------------------------


def test_a_committed_checkpoint_lies_under_its_job_and_step_with_the_hash_of_every_file(tmp_path: Path):
    directory = write(tmp_path)
    assert directory == tmp_path / "jobs" / JOB / "checkpoints" / "4"
    found = check_files(directory)
    assert sorted(found.files) == ["adapter/a.json", "training_state/state.json"]
    # printf hello | sha256sum
    assert found.files["adapter/a.json"].sha256 == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert found.files["adapter/a.json"].size == 5
    assert found.metrics == {"train_loss": 0.5}
    assert [path.name for path in directory.parent.iterdir()] == ["4"]


def test_an_exception_inside_the_block_leaves_nothing(tmp_path: Path):
    def fail() -> None:
        with CheckpointWriter(tmp_path, JOB, 1) as writer:
            (writer.adapter / "a").write_text("x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert list(checkpoints_root(tmp_path, JOB).iterdir()) == []


def test_leaving_the_block_without_commit_leaves_nothing(tmp_path: Path):
    with CheckpointWriter(tmp_path, JOB, 1) as writer:
        (writer.adapter / "a").write_text("x")
    assert list(checkpoints_root(tmp_path, JOB).iterdir()) == []


def steps(root: Path) -> list[str]:
    """The folders that readers look for, whatever is in them."""
    return sorted(path.name for path in root.iterdir() if path.name.isdecimal())


def test_a_writer_killed_before_the_rename_leaves_no_checkpoint_and_is_cleaned_up(tmp_path: Path):
    earlier = write(tmp_path, 3)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from post_training.checkpoints import layout\n"
        "writer = layout.CheckpointWriter(Path(sys.argv[1]), 'job-1', 4).__enter__()\n"
        "(writer.adapter / 'a').write_text('x')\n"
        "layout.fsync_tree = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"  # the manifest is there, unmoved
        "from tests.test_checkpoints import manifest\n"
        "writer.commit(manifest())\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=Path(__file__).parents[1])
    assert killed.returncode == -signal.SIGKILL
    root = checkpoints_root(tmp_path, JOB)
    assert len(list(root.iterdir())) == 2
    assert steps(root) == ["3"]
    clean_partial(root)
    assert list(root.iterdir()) == [earlier]


def test_a_checkpoint_without_a_readable_manifest_is_refused(tmp_path: Path):
    directory = write(tmp_path, 9)
    (directory / "manifest.json").write_text("{")
    with pytest.raises(ModelInvalid, match="checkpoint 9 is damaged"):
        read_manifest(directory)
    (directory / "manifest.json").unlink()
    with pytest.raises(ModelInvalid, match="was never finished"):
        read_manifest(directory)


def test_a_directory_in_the_way_goes_only_after_the_writer_proved_its_right_again(tmp_path: Path):
    write(tmp_path, content="first")
    asked: list[str] = []
    with CheckpointWriter(tmp_path, JOB, 4) as writer:
        (writer.adapter / "a.json").write_text("second")
        there = writer.final / "adapter" / "a.json"
        directory = writer.commit(manifest(), lambda: asked.append(there.read_text()))
    assert asked == ["first", "first"]
    assert (directory / "adapter" / "a.json").read_text() == "second"
    assert [path.name for path in directory.parent.iterdir()] == ["4"]


@pytest.mark.parametrize("refused_at", [1, 2])
def test_a_writer_without_the_right_moves_nothing(tmp_path: Path, refused_at: int):
    before = write(tmp_path, content="first")
    calls = 0

    def confirm() -> None:
        nonlocal calls
        calls += 1
        if calls == refused_at:
            raise PermissionError("another's by now")

    with CheckpointWriter(tmp_path, JOB, 4) as writer:
        (writer.adapter / "a.json").write_text("second")
        with pytest.raises(PermissionError):
            writer.commit(manifest(), confirm)
    assert (before / "adapter" / "a.json").read_text() == "first"
    check_files(before)
    assert [path.name for path in before.parent.iterdir()] == ["4"]


def test_cleaning_up_keeps_what_the_store_knows_and_nothing_else(tmp_path: Path):
    root = write(tmp_path, 3).parent
    write(tmp_path, 4)
    (root / ".5.tmp-12-00ff" / "adapter").mkdir(parents=True)
    (root / "6" / "adapter").mkdir(parents=True)  # no manifest
    (root / "notes").mkdir()  # none of ours
    clean_partial(root, {4, 6})
    assert sorted(path.name for path in root.iterdir()) == ["4", "notes"]
    clean_partial(tmp_path / "nowhere", {4})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "adapter/a.json").write_text("jello"), "adapter/a.json has changed"),
        (lambda d: (d / "adapter/a.json").unlink(), "adapter/a.json is missing"),
        (lambda d: (d / "adapter/b.json").write_text(""), "adapter/b.json is not in its manifest"),
        (lambda d: (d / "adapter/b.pt").write_text(""), "adapter/b.pt is a link or a pickle"),
        (lambda d: (d / "manifest.json").write_text("{}"), "manifest.json of checkpoint 4 is damaged"),
        (lambda d: (d / "manifest.json").unlink(), "never finished"),
    ],
)
def test_damage_is_found_and_the_file_named(tmp_path: Path, damage, message: str):
    directory = write(tmp_path)
    damage(directory)
    with pytest.raises(ModelInvalid, match=message):
        check_files(directory)


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin", "x.pth"])
def test_a_pickle_is_never_committed(tmp_path: Path, name: str):
    with CheckpointWriter(tmp_path, JOB, 1) as writer:
        (writer.adapter / name).write_bytes(b"")
        with pytest.raises(ModelInvalid, match="pickle"):
            writer.commit(manifest(1))
    assert steps(checkpoints_root(tmp_path, JOB)) == []


def test_a_full_disk_at_every_write_is_said_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    earlier = write(tmp_path, 3)
    real = {"write_text": Path.write_text, "mkdir": Path.mkdir, "fsync": os.fsync}
    calls = {"count": 0, "fail_at": -1}

    def failing(name: str):
        def call(*args: object, **kwargs: object) -> object:
            calls["count"] += 1
            if calls["count"] == calls["fail_at"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real[name](*args, **kwargs)  # type: ignore[operator]

        return call

    monkeypatch.setattr(Path, "write_text", failing("write_text"))
    monkeypatch.setattr(Path, "mkdir", failing("mkdir"))
    monkeypatch.setattr(os, "fsync", failing("fsync"))
    write(tmp_path, 4)
    total = calls["count"]
    assert total > 10
    moved = 0
    for fail_at in range(1, total + 1):
        calls.update(count=0, fail_at=fail_at)
        with pytest.raises(DiskFull, match="no space left on the disk"):
            write(tmp_path, 5)
        calls["fail_at"] = -1
        names = steps(earlier.parent)
        moved += "5" in names  # an fsync of a folder may fail after the rename; then the checkpoint is whole
        assert names[:2] == ["3", "4"]
        for name in names:
            check_files(earlier.parent / name)
    assert moved < total / 2


# -- training state --------------------------------------------------------------------------------------------------


def test_training_state_comes_back_bit_for_bit(tmp_path: Path):
    shared = torch.randn(3, 4)
    tensors = {
        "master.a": shared,
        "master.b": shared,  # one storage twice
        "adam.m": torch.tensor([1e-42, -0.0, 3.0]),
        "half": torch.randn(5).to(torch.bfloat16),
        "strided": torch.randn(4, 3).T,
        "step": torch.tensor(7),
        "rng": torch.arange(5, dtype=torch.uint8),
    }
    meta = {"step": 7, "lr": 0.1 + 0.2, "history": [1e-300, 3.0], "cursor": {"epoch": 1, "row": 2**60}}
    state.save_training_state(tmp_path, tensors, meta)
    loaded, loaded_meta = state.load_training_state(tmp_path)
    assert loaded_meta == meta
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
    assert state.masters_of(loaded).keys() == {"a", "b"}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_damaged_training_state_is_refused(tmp_path: Path):
    directory = tmp_path / "4" / "training_state"
    directory.mkdir(parents=True)
    state.save_training_state(directory, {"a": torch.ones(3)}, {})
    (directory / "state.safetensors").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(ModelInvalid, match="checkpoint 4 cannot be read"):
        state.load_training_state(directory)


def test_the_random_generator_goes_on_where_it_was(tmp_path: Path):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.rand(3)
        state.save_training_state(tmp_path, state.rng_tensors(), {})
        expected = torch.rand(10)
        torch.manual_seed(99)
        state.restore_rng(state.load_training_state(tmp_path)[0])
        assert torch.rand(10).equal(expected)


def test_a_full_disk_is_known_by_its_number_by_words_and_through_what_wraps_it():
    for full in (
        OSError(errno.ENOSPC, "x"),
        OSError(errno.EDQUOT, "x"),
        OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")),
        OperationalError("INSERT", {}, Exception("could not extend file: No space left on device")),
    ):
        wrapped = RuntimeError("while saving")
        wrapped.__cause__ = full
        assert layout.disk_full(full, "x") is not None
        assert layout.disk_full(wrapped, "x") is not None
    locked = sqlite3.OperationalError("database is locked")
    for other in (
        None,
        OSError(errno.EACCES, "No space left on device"),
        # What was to be written is no reason.
        OperationalError("INSERT", {"message": "database or disk is full"}, locked),
    ):
        assert layout.disk_full(other, "x") is None


def test_a_full_disk_under_the_tensor_library_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The library's own words for it, recorded on a full file system.
    said = "Error while serializing: I/O error: No space left on device (os error 28)"

    def full(*_: object) -> None:
        raise state.SafetensorError(said)

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(OSError, match="No space left") as raised:
        state.save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    assert layout.disk_full(raised.value, "x") is not None


# -- exports ---------------------------------------------------------------------------------------------------------


def test_an_adapter_folder_loads_in_plain_peft_and_carries_tokenizer_and_template(tmp_path: Path, base: Path):
    tensors = lora(tmp_path / "adapter", base, LLAMA_MODULES)
    loaded = peft.PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter"))
    held = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert held.keys() == tensors.keys()
    assert all(held[name].equal(tensors[name]) for name in tensors)
    assert relative_error(logits_of(loaded), logits_of(plain(base))) > 1e-2
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base"
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
    ]


def test_an_adapter_with_a_nan_is_not_written(tmp_path: Path, base: Path):
    with pytest.raises(ModelInvalid, match="NaN"):
        export.write_adapter(tmp_path, {"x": torch.tensor([float("nan")])}, {}, "base", base)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {
            "rank_pattern": {"model.layers.1.self_attn.v_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 6, "down_proj": 3},
        },
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_a_merged_model_gives_the_logits_of_base_and_adapter_in_peft(tmp_path: Path, base: Path, config: dict):
    lora(tmp_path / "adapter", base, LLAMA_MODULES, **config)
    report = export.merge(base, tmp_path / "adapter", tmp_path / "merged")
    expected = logits_of(peft.PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter")))
    assert relative_error(logits_of(plain(tmp_path / "merged")), expected) < 1e-5
    assert relative_error(logits_of(plain(base)), expected) > 1e-2
    assert report.modules == 3
    assert report.relative_loss == 0
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_merge_in_many_shards_is_the_same_model(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    lora(tmp_path / "adapter", base, LLAMA_MODULES)
    export.merge(base, tmp_path / "adapter", tmp_path / "one")
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 20_000)
    export.merge(base, tmp_path / "adapter", tmp_path / "many")
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert logits_of(plain(tmp_path / "many")).equal(logits_of(plain(tmp_path / "one")))
    # and a merge reads a sharded base
    lora(tmp_path / "again", tmp_path / "many", LLAMA_MODULES)
    assert export.merge(tmp_path / "many", tmp_path / "again", tmp_path / "twice").modules == 3


def test_a_bf16_merge_reports_what_rounding_took(tmp_path: Path, base: Path):
    tensors = lora(tmp_path / "adapter", base, {"model.layers.0.self_attn.q_proj": (32, 32)}, alpha=8, rank=4)
    report = export.merge(base, tmp_path / "adapter", tmp_path / "merged", "bf16")
    name = "model.layers.0.self_attn.q_proj"
    weight = load_file(base / "model.safetensors")[f"{name}.weight"]
    prefix = f"base_model.model.{name}"
    delta = 2 * tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
    saved = (weight + delta).bfloat16()
    assert load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"].equal(saved)
    assert report.delta_norm == pytest.approx(float(delta.norm()), rel=1e-5)
    assert report.relative_loss == pytest.approx(
        float((saved.float() - weight - delta).norm() / delta.norm()), rel=1e-3
    )
    assert report.relative_loss > 1e-4
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tied_embeddings_stay_tied_and_refuse_an_adapter(tmp_path: Path):
    base = tmp_path / "base"
    make_model(base, "llama_tied")
    lora(tmp_path / "adapter", base, LLAMA_MODULES)
    export.merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    merged = plain(tmp_path / "merged")
    assert merged.get_parameter("lm_head.weight") is merged.get_parameter("model.embed_tokens.weight")
    lora(tmp_path / "head", base, {"lm_head": (96, 32)})
    with pytest.raises(ModelInvalid, match="lm_head, whose weight serves as embedding and output both"):
        export.merge(base, tmp_path / "head", tmp_path / "refused")


def test_a_merge_into_phi3s_fused_modules_equals_peft(tmp_path: Path):
    base = tmp_path / "base"
    make_model(base, "phi3")
    lora(tmp_path / "adapter", base, {"model.layers.0.self_attn.qkv_proj": (64, 32)})
    export.merge(base, tmp_path / "adapter", tmp_path / "merged")
    expected = logits_of(peft.PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter")))
    assert relative_error(logits_of(plain(tmp_path / "merged")), expected) < 1e-5


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ({"model.layers.9.self_attn.q_proj": (32, 32)}, {}, "no weight model.layers.9.self_attn.q_proj.weight"),
        ({"model.layers.0.self_attn.q_proj": (32, 16)}, {}, "belongs to another model"),
        (LLAMA_MODULES, {"r": 5}, "has rank 4, adapter_config.json says 5"),
        (LLAMA_MODULES, {"use_dora": True}, "has only its A and B factor"),
        (LLAMA_MODULES, {"bias": "all"}, "uses bias"),
        (LLAMA_MODULES, {"peft_type": "IA3"}, "says IA3"),
    ],
)
def test_an_adapter_that_cannot_be_merged_exactly_is_refused(
    tmp_path: Path, base: Path, modules: dict, config: dict, message: str
):
    lora(tmp_path / "adapter", base, modules, **config)
    with pytest.raises(ModelInvalid, match=message):
        export.merge(base, tmp_path / "adapter", tmp_path / "merged")


def test_half_an_adapter_pair_is_refused(tmp_path: Path, base: Path):
    tensors = lora(tmp_path / "adapter", base, LLAMA_MODULES)
    tensors.pop("base_model.model.model.layers.1.mlp.down_proj.lora_A.weight")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelInvalid, match="down_proj has only its B factor"):
        export.merge(base, tmp_path / "adapter", tmp_path / "merged")


def test_the_manifest_is_readable_without_torch(tmp_path: Path):
    directory = write(tmp_path)
    code = (
        "import sys; from pathlib import Path; from post_training.checkpoints.layout import check_files\n"
        "print(check_files(Path(sys.argv[1])).step, 'torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["4", "False"]
    assert read_manifest(directory).step == 4

"""torchtune and huggingface on the same model, data and seed: the same losses, and adapters for each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import providers.huggingface.model as huggingface
import providers.torchtune.model as torchtune
from post_training.data.batching import flatten
from post_training.data.types import TokenizedRow
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import StepResult, Trainer
from tests.test_torchtune_model import flat
from tests.torchtune_models import VOCAB, make_model, relative_error

STEPS = 6
KINDS = [{}, {"dora": True}, {"rslora": True}, {"attn_modules": ("q_proj", "output_proj"), "mlp": False}]


def rows(count: int) -> list[TokenizedRow]:
    generator = np.random.default_rng(5)
    made = []
    for number, length in enumerate(generator.integers(5, 30, count)):
        tokens = generator.integers(0, VOCAB, length).astype(np.int32)
        weights = (np.arange(length) >= length // 3).astype(np.float32)
        made.append(TokenizedRow(number, tokens, weights))
    return made


def train(module: Any, config: ModelConfig) -> tuple[Trainer, list[StepResult]]:
    trainer = Trainer(module.load_model(config), OptimSettings(STEPS, lr=5e-3, warmup_steps=1, weight_decay=0.1))
    data = rows(4 * STEPS)
    batches = [data[n : n + 4] for n in range(0, len(data), 4)]
    return trainer, [trainer.train_step([flatten(batch[:2]), flatten(batch[2:])]) for batch in batches]


def save(trainer: Trainer, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    tensors, config = trainer.model.peft_adapter(trainer.masters.snapshot())
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return config


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {case: tmp_path_factory.mktemp(case) for case in ("llama", "qwen2_tied", "gemma")}
    for case, path in made.items():
        make_model(path, case)
    return made


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "gemma"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_providers_give_the_same_losses_and_adapters(bases, tmp_path, case, kind, kernels):
    lora = LoraSettings(rank=4, alpha=8, **kind)
    config = ModelConfig(base_dir=bases[case], lora=lora, dtype="fp32", seed=11, kernels=kernels)
    (ours, our_steps), (theirs, their_steps) = train(torchtune, config), train(huggingface, config)
    for one, other in zip(our_steps, their_steps, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    assert our_steps[0].loss != pytest.approx(our_steps[-1].loss, abs=1e-2)
    assert save(ours, tmp_path / "torchtune") == save(theirs, tmp_path / "huggingface")

    def logits(module: Any, adapter: Path) -> torch.Tensor:
        model = module.load_model(replace(config, adapter_dir=adapter))
        model.module.eval()
        with torch.no_grad():
            return model.output(model.hidden_states(flat((9, 14))))

    for adapter in (tmp_path / "torchtune", tmp_path / "huggingface"):
        assert relative_error(logits(huggingface, adapter), logits(torchtune, adapter)) < 1e-5


def test_both_providers_give_the_same_losses_on_the_real_model(smollm2: Path):
    lora = LoraSettings(rank=8, alpha=16)
    config = ModelConfig(base_dir=smollm2, lora=lora, dtype="fp32", seed=3)
    (_, ours), (_, theirs) = train(torchtune, config), train(huggingface, config)
    assert [step.loss for step in ours] == pytest.approx([step.loss for step in theirs], abs=1e-4)

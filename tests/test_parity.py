"""The same training elsewhere gives the same numbers: in torchtune's own recipe, and in transformers with PEFT.

fp32 on the CPU, the real model, batches of 4 rows in file order, rank 16, alpha 32, every linear layer, AdamW without
decay, 5 warm-up steps and a cosine. Rows are short, so that the three runs take about a minute each on two cores;
POSTGRAD_LONG_PARITY=1 takes rows of up to 512 tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from apis.post_training.models import DatasetFormat
from post_training.data.batching import flatten
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import tokenize_dataset
from post_training.data.types import TokenizedRow
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings, learning_rate
from post_training.training.trainer import Trainer
from providers.torchtune.model import load_model
from tests.shared_data import shared_rows
from tests.test_trainer import products, relative
from tests.torchtune_recipe import recipe_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.timeout(1800),
]

STEPS, BATCH, RANK, ALPHA, LR, WARMUP = 20, 4, 16, 32, 3e-4, 5
LONG = bool(os.environ.get("POSTGRAD_LONG_PARITY"))
LONGEST = 512 if LONG else 80
SETTINGS = OptimSettings(STEPS, lr=LR, warmup_steps=WARMUP)


@dataclass(frozen=True)
class Run:
    """Losses by step, and the adapter at the end under PEFT's names."""

    losses: list[float]
    adapter: dict[str, Tensor]


@dataclass(frozen=True)
class Data:
    """The first rows that are short enough: as they are, and as we tokenize them."""

    rows: list[dict[str, Any]]
    tokenized: Sequence[TokenizedRow]

    def batches(self) -> list[list[TokenizedRow]]:
        return [list(self.tokenized[n : n + BATCH]) for n in range(0, STEPS * BATCH, BATCH)]


def alpaca_rows() -> list[dict[str, Any]]:
    """Real instructions with answers, else made-up ones."""
    try:
        return shared_rows("alpaca_en_demo.jsonl")
    except pytest.skip.Exception:
        return [
            {
                "instruction": f"Add {n} and {n * n}.",
                "input": "",
                "output": f"{n} + {n * n} = {n + n * n}. " * (1 + n % 3),
            }
            for n in range(STEPS * BATCH)
        ]


@pytest.fixture(scope="module")
def data(smollm2: Path) -> Data:
    rows = alpaca_rows()
    tokenizer = ChatTokenizer.from_dir(smollm2)
    found = tokenize_dataset(rows, tokenizer, DatasetFormat.alpaca, False, LONGEST, on_overlength="drop").rows
    kept = found[: STEPS * BATCH]
    assert len(kept) == STEPS * BATCH
    return Data([rows[row.row] for row in kept], kept)


@pytest.fixture(scope="module")
def recipe(smollm2: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what torchtune's recipe did."""
    out = tmp_path_factory.mktemp("recipe")
    rendered = [{"input": prompt, "output": row["output"]} for prompt, row in _prompts(smollm2, data.rows)]
    (out / "rows.json").write_text(json.dumps(rendered))
    config = recipe_config(smollm2, out / "rows.json", out, steps=STEPS, rank=RANK, alpha=ALPHA, lr=LR)
    (out / "config.yaml").write_text(config)
    command = [sys.executable, "-m", "tests.torchtune_recipe", str(out / "config.yaml"), str(out)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(out / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def _prompts(model_dir: Path, rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each question as transformers renders it, up to where the answer begins."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    prompts = []
    for row in rows:
        question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        messages = [{"role": "user", "content": question}]
        prompts.append((tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), row))
    return prompts


@pytest.fixture(scope="module")
def start(recipe: Path) -> dict[str, Tensor]:
    return load_file(recipe / "start.safetensors")


@pytest.fixture(scope="module")
def trainer(smollm2: Path, start: dict[str, Tensor]) -> Trainer:
    trainer = Trainer(load_model(ModelConfig(smollm2, LoraSettings(RANK, ALPHA), dtype="fp32")), SETTINGS)
    trainer.masters.load(start)
    return trainer


@pytest.fixture(scope="module")
def ours(trainer: Trainer, data: Data) -> Run:
    losses = [trainer.train_step([flatten(rows)]).loss for rows in data.batches()]
    return Run(losses, trainer.model.peft_adapter(trainer.masters.snapshot())[0])


@pytest.fixture(scope="module")
def in_peft(smollm2: Path, trainer: Trainer, start: dict[str, Tensor], data: Data) -> Run:
    tensors, config = trainer.model.peft_adapter(start)
    base = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    settings = {**config, "inference_mode": False, "base_model_name_or_path": None}
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**settings))
    peft.set_peft_model_state_dict(model, tensors)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    losses = [
        _hand_step(model, optimizer, trained, rows, learning_rate(SETTINGS, step))
        for step, rows in enumerate(data.batches())
    ]
    return Run(losses, peft.get_peft_model_state_dict(model, save_embedding_layers=False))


def _hand_step(model: Any, optimizer: Any, trained: list[Any], rows: list[TokenizedRow], lr: float) -> float:
    """A padded batch, the mean over supervised tokens, clipped at 1."""
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for index, row in enumerate(rows):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        ids[index, : len(tokens)], mask[index, : len(tokens)] = tokens, 1
        labels[index, : len(tokens)] = torch.where(torch.from_numpy(row.weights) > 0, tokens, -100)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    # In fp32, PyTorch's cross-entropy over 49,152 words is off by 4e-6, and the gradients by 7e-5, of which Adam makes
    # 2e-3 in twenty steps.
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return loss.item()


def test_tokens_and_masks_are_those_of_torchtune_s_data_loader(recipe: Path, data: Data) -> None:
    batches = load_file(recipe / "batches.safetensors")
    for step, rows in enumerate(data.batches()):
        for index, row in enumerate(rows):
            # The template ends a turn with a line break, which neither of us trains on and torchtune does not have.
            tokens, weights = row.tokens[:-1], row.weights[:-1]
            assert row.weights[-1] == 0
            theirs, labels = batches[f"{step}.tokens"][index], batches[f"{step}.labels"][index]
            assert theirs[: len(tokens)].tolist() == tokens.tolist()
            assert labels[: len(tokens)].tolist() == np.where(weights > 0, tokens, -100).tolist()
            assert set(labels[len(tokens) :].tolist()) <= {-100}


def test_losses_are_those_of_torchtune_s_unmodified_recipe(recipe: Path, ours: Run) -> None:
    theirs = json.loads((recipe / "losses.json").read_text())
    assert len(theirs) == STEPS
    assert ours.losses == pytest.approx(theirs, rel=1e-3)


def test_losses_and_adapters_are_those_of_transformers_and_peft(ours: Run, in_peft: Run) -> None:
    assert ours.losses == pytest.approx(in_peft.losses, rel=1e-4)
    expected = products(in_peft.adapter)
    found = products(ours.adapter)
    assert found.keys() == expected.keys()
    assert len(found) == 30 * 7
    worst = max(relative(found[name], expected[name]) for name in found)
    assert worst < 1e-3


def test_adapters_are_those_of_torchtune_s_recipe(recipe: Path, trainer: Trainer, ours: Run) -> None:
    expected = products(trainer.model.peft_adapter(load_file(recipe / "end.safetensors"))[0])
    worst = max(relative(product, expected[name]) for name, product in products(ours.adapter).items())
    # Its loss is PyTorch's fp32 cross-entropy, off as `_hand_step` says.
    assert worst < 4e-3

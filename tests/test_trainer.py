"""The trainer: the same numbers as a hand-written loop over transformers and PEFT, and every rule of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from post_training.data.batching import flatten, micro_batches
from post_training.data.types import TokenizedRow
from post_training.training.interruption import Interrupted
from post_training.training.model import Dtype, KernelForm, LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings, learning_rate
from post_training.training.trainer import Trainer
from providers.torchtune.model import load_model
from tests.torchtune_models import VOCAB, make_model

RANK, ALPHA, LR = 4, 8, 1e-2


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model(path, "llama_tied")
    return path


def make_rows(count: int, seed: int = 0) -> list[TokenizedRow]:
    """Rows of unequal length, each with an unsupervised beginning."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(random.integers(4, 40))
        weights = np.ones(length, np.float32)
        weights[: length // 2] = 0
        rows.append(TokenizedRow(number, random.integers(0, VOCAB, length).astype(np.int32), weights))
    return rows


def make_trainer(
    base_dir: Path, *, total: int = 20, dtype: Dtype = "fp32", kernels: KernelForm = "fused", **options: object
) -> Trainer:
    model = load_model(ModelConfig(base_dir, LoraSettings(RANK, ALPHA), dtype=dtype, seed=1, kernels=kernels))
    return Trainer(model, replace(OptimSettings(total, lr=LR, warmup_steps=2, weight_decay=0.1), **options))  # pyright: ignore[reportArgumentType]


def products(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """B @ A of every adapted layer, by PEFT's module name."""
    return {
        key.replace(".lora_A", ""): tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        for key in tensors
        if "lora_A" in key
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_losses_and_adapters_equal_a_hand_loop_over_transformers_and_peft(base_dir: Path) -> None:
    rows, trainer = make_rows(30), make_trainer(base_dir)
    start, config = trainer.model.peft_adapter(trainer.masters.snapshot())
    reference = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    reference = peft.get_peft_model(
        reference, peft.LoraConfig(**{**config, "inference_mode": False, "base_model_name_or_path": None})
    )
    peft.set_peft_model_state_dict(reference, start)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.1)

    for step in range(10):
        batch = rows[step * 3 : step * 3 + 3]
        ours = trainer.train_step([flatten(batch[:1]), flatten(batch[1:])])
        theirs = _hand_step(reference, optimizer, trainable, batch, learning_rate(trainer.settings, step))
        assert ours.loss == pytest.approx(theirs, rel=1e-4)

    final, _ = trainer.model.peft_adapter(trainer.masters.snapshot())
    expected = products(peft.get_peft_model_state_dict(reference))
    for key, product in products(final).items():
        assert relative(product, expected[key]) < 1e-3, key


def _hand_step(model, optimizer, trainable, rows: list[TokenizedRow], lr: float) -> float:
    """A padded batch, mean over supervised tokens, clipped at 1."""
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        ids[index, :length], mask[index, :length] = tokens, 1
        labels[index, :length] = torch.where(torch.from_numpy(row.weights) > 0, tokens, -100)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return loss.item()


@given(budget=st.integers(8, 200), seed=st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_how_rows_are_split_into_micro_batches_does_not_change_the_step(base_dir: Path, budget: int, seed: int) -> None:
    rows = make_rows(6, seed)
    whole, split = make_trainer(base_dir), make_trainer(base_dir)
    one = whole.train_step([flatten(rows)])
    many = split.train_step(list(micro_batches(rows, budget)))
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert (many.tokens, many.supervised_tokens) == (one.tokens, one.supervised_tokens)


def test_gradients_of_a_split_step_equal_those_of_the_whole(base_dir: Path) -> None:
    rows = make_rows(6)
    whole, split = make_trainer(base_dir, optimizer="sgd"), make_trainer(base_dir, optimizer="sgd")
    whole.train_step([flatten(rows)])
    split.train_step([flatten([row]) for row in rows])
    for name, expected in whole.masters.snapshot().items():
        assert relative(split.masters.snapshot()[name], expected) < 1e-5, name


def test_a_row_weight_scales_its_share_of_the_loss(base_dir: Path) -> None:
    heavy, light = make_rows(2)
    losses = [make_trainer(base_dir).train_step([flatten([row])]).loss for row in (heavy, light)]
    doubled = replace(heavy, weights=heavy.weights * 2)
    total = make_trainer(base_dir).train_step([flatten([doubled, light])])
    weights = [2 * heavy.supervised, light.supervised]
    assert total.loss == pytest.approx(np.average(losses, weights=weights), rel=1e-5)


def test_a_fully_masked_batch_changes_nothing_and_says_so(base_dir: Path) -> None:
    trainer = make_trainer(base_dir)
    before = trainer.masters.snapshot()
    masked = [replace(row, weights=np.zeros_like(row.weights)) for row in make_rows(2)]
    result = trainer.train_step([flatten(masked)])
    assert result.skipped
    assert result.supervised_tokens == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.masters.snapshot().items())


def test_a_masked_micro_batch_beside_a_supervised_one_does_not_dilute_it(base_dir: Path) -> None:
    row = make_rows(1)[0]
    masked = replace(row, weights=np.zeros_like(row.weights))
    alone = make_trainer(base_dir).train_step([flatten([row])])
    beside = make_trainer(base_dir).train_step([flatten([row]), flatten([masked])])
    assert beside.loss == pytest.approx(alone.loss, rel=1e-6)
    assert beside.grad_norm == pytest.approx(alone.grad_norm, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_applied(base_dir: Path, poison: float) -> None:
    trainer = make_trainer(base_dir)
    name = next(iter(trainer.masters.tensors))
    clean = trainer.masters.snapshot()
    with torch.no_grad():
        trainer.masters.tensors[name][0, 0] = poison
    result = trainer.train_step([flatten(make_rows(2))])
    assert result.skipped
    assert not math.isfinite(result.loss)
    for other, tensor in trainer.masters.snapshot().items():
        if other != name:
            assert torch.equal(tensor, clean[other]), other


def test_a_gradient_that_is_not_finite_is_never_applied(base_dir: Path) -> None:
    trainer = make_trainer(base_dir)
    before = trainer.masters.snapshot()
    parameter = next(iter(trainer.model.adapter_parameters().values()))
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    result = trainer.train_step([flatten(make_rows(2))])
    handle.remove()
    assert result.skipped
    assert math.isfinite(result.loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.masters.snapshot().items())
    assert not trainer.train_step([flatten(make_rows(2))]).skipped


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_has_the_schedule_losses_and_bytes_of_an_uninterrupted_one(base_dir: Path, dtype: Dtype) -> None:
    rows = make_rows(24)
    batches = [[flatten(rows[i : i + 4])] for i in range(0, 24, 4)]
    straight = make_trainer(base_dir, total=6, dtype=dtype)
    expected = [straight.train_step(batch) for batch in batches]

    first = make_trainer(base_dir, total=6, dtype=dtype)
    for batch in batches[:3]:
        first.train_step(batch)
    resumed = make_trainer(base_dir, total=6, dtype=dtype)
    resumed.load_state(*first.state())
    actual = [resumed.train_step(batch) for batch in batches[3:]]

    assert [r.lr for r in actual] == [r.lr for r in expected[3:]]
    assert [r.loss for r in actual] == [r.loss for r in expected[3:]]
    assert [r.step for r in actual] == [4, 5, 6]
    for name, tensor in straight.state()[0].items():
        assert torch.equal(tensor, resumed.state()[0][name]), name


def test_the_same_seed_gives_the_same_bytes(base_dir: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = make_trainer(base_dir)
        trainer.train_step([flatten(make_rows(3))])
        runs.append(trainer.masters.snapshot())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_the_schedule_warms_up_linearly_and_falls_along_a_cosine_to_zero() -> None:
    optim = OptimSettings(total_steps=12, lr=1.0, warmup_steps=4)
    rates = [learning_rate(optim, step) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)])


@pytest.mark.parametrize(
    ("name", "reference"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_each_optimizer_moves_weights_as_pytorch_s_own(base_dir: Path, name: str, reference: type) -> None:
    trainer = make_trainer(base_dir, optimizer=name, warmup_steps=0, max_grad_norm=None, weight_decay=0.3)
    gradients: dict[str, Tensor] = {}
    for key, parameter in trainer.model.adapter_parameters().items():
        parameter.register_hook(lambda g, key=key: gradients.__setitem__(key, g.clone()))
    before = trainer.masters.snapshot()
    trainer.train_step([flatten(make_rows(3))])
    expected = [tensor.clone().requires_grad_() for tensor in before.values()]
    for tensor, key in zip(expected, before, strict=True):
        tensor.grad = gradients[key]
    reference(expected, lr=LR, weight_decay=0.3).step()
    for tensor, (key, actual) in zip(expected, trainer.masters.snapshot().items(), strict=True):
        assert torch.allclose(tensor, actual, rtol=1e-6, atol=1e-8), key


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported(base_dir: Path) -> None:
    free = make_trainer(base_dir, optimizer="sgd", weight_decay=0.0, warmup_steps=0, max_grad_norm=None)
    clipped = make_trainer(base_dir, optimizer="sgd", weight_decay=0.0, warmup_steps=0, max_grad_norm=0.01)
    start = free.masters.snapshot()
    norms = [t.train_step([flatten(make_rows(3))]).grad_norm for t in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 0.01
    moved = math.sqrt(sum(float((clipped.masters.snapshot()[n] - start[n]).square().sum()) for n in start))
    assert moved == pytest.approx(LR * 0.01, rel=1e-3)


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_bf16_masters_keep_updates_that_bf16_weights_would_lose(base_dir: Path, kernels: KernelForm) -> None:
    trainer = make_trainer(base_dir, dtype="bf16", kernels=kernels, lr=1e-6, warmup_steps=0)
    before = trainer.masters.snapshot()
    trainer.train_step([flatten(make_rows(3))])
    after = trainer.masters.snapshot()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert moved
    assert any(torch.equal(after[name].bfloat16(), before[name].bfloat16()) for name in moved)
    parameters = trainer.model.adapter_parameters()
    assert all(torch.equal(parameters[name].bfloat16(), after[name].bfloat16()) for name in after)


def test_validation_is_weighted_over_all_tokens_whatever_the_batch_size(base_dir: Path) -> None:
    trainer, rows = make_trainer(base_dir), make_rows(7)
    trainer.train_step([flatten(rows)])
    results = [trainer.validate([flatten(rows[i : i + n]) for i in range(0, 7, n)]) for n in (1, 2, 7)]
    assert [r.loss for r in results] == pytest.approx([results[0].loss] * 3, rel=1e-5)
    assert results[0].perplexity == pytest.approx(math.exp(results[0].loss))
    assert {r.supervised_tokens for r in results} == {sum(row.supervised for row in rows)}
    assert len({r.token_accuracy for r in results}) == 1


def test_validation_leaves_no_gradient_and_no_change(base_dir: Path) -> None:
    trainer = make_trainer(base_dir)
    before = trainer.masters.snapshot()
    trainer.validate([flatten(make_rows(3))])
    assert not trainer.model.module.training
    assert all(p.grad is None for p in trainer.model.module.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.masters.snapshot().items())


def test_exporting_between_epochs_leaves_the_frozen_base_as_it_was(base_dir: Path) -> None:
    trainer = make_trainer(base_dir)
    frozen = {n: p.clone() for n, p in trainer.model.module.named_parameters() if not p.requires_grad}
    for _ in range(2):
        trainer.train_step([flatten(make_rows(3))])
        trainer.model.peft_adapter(trainer.masters.snapshot())
    now = dict(trainer.model.module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())


def test_an_interrupted_step_leaves_no_trace(base_dir: Path) -> None:
    asked = iter([False, True])
    trainer = make_trainer(base_dir)
    trainer._should_stop = lambda: next(asked)
    before = trainer.masters.snapshot()
    with pytest.raises(Interrupted):
        trainer.train_step([flatten([row]) for row in make_rows(3)])
    assert trainer.step == 0
    assert all(tensor.grad is None for tensor in trainer.masters.tensors.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.masters.snapshot().items())

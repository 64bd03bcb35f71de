"""What autograd holds does not grow with the number of micro-batches, and validation holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from post_training.data.batching import flatten
from post_training.data.types import FlatBatch, TokenizedRow
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from providers.torchtune.model import load_model
from tests.torchtune_models import VOCAB, make_model

LENGTH = 24


class Held:
    """Bytes of the tensors that are saved for a backward pass now, and the most there ever were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def count(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class _Saved:
    """A saved tensor; counted from when autograd takes it until autograd lets go of it."""

    def __init__(self, tensor: Tensor, held: Held) -> None:
        self.tensor, self._held = tensor, held
        self._size = tensor.numel() * tensor.element_size()
        held.count(self._size)

    def __del__(self) -> None:
        self._held.count(-self._size)


@contextmanager
def counting() -> Iterator[Held]:
    held = Held()
    unpack: Callable[[Any], Tensor] = lambda saved: saved.tensor  # noqa: E731
    with saved_tensors_hooks(lambda tensor: _Saved(tensor, held), unpack):
        yield held


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model(path, "llama_tied")
    return path


@pytest.fixture
def trainer(base_dir: Path) -> Trainer:
    return Trainer(load_model(ModelConfig(base_dir, LoraSettings(4, 8), seed=1)), OptimSettings(20))


def batches(count: int) -> list[FlatBatch]:
    random = np.random.default_rng(0)
    weights = np.ones(LENGTH, np.float32)
    weights[0] = 0
    drawn = [random.integers(0, VOCAB, LENGTH).astype(np.int32) for _ in range(count)]
    return [flatten([TokenizedRow(number, tokens, weights)]) for number, tokens in enumerate(drawn)]


def test_a_step_of_many_micro_batches_holds_no_more_than_a_step_of_one(trainer: Trainer) -> None:
    most = []
    for count in (1, 2, 8):
        with counting() as held:
            trainer.train_step(batches(count))
        most.append(held.most)
        assert held.now == 0
    assert most[0] > 0
    assert most == [most[0]] * 3


def test_a_micro_batch_twice_as_long_holds_twice_as_much(trainer: Trainer) -> None:
    """So the count above sees what it should."""
    with counting() as one:
        trainer.train_step(batches(1))
    with counting() as two:
        pair = batches(2)
        row = TokenizedRow(0, np.tile(pair[0].tokens.astype(np.int32), 2), np.ones(2 * LENGTH, np.float32))
        trainer.train_step([flatten([row])])
    assert two.most > 1.5 * one.most


def test_validation_holds_nothing_for_a_backward_pass(trainer: Trainer) -> None:
    with counting() as held:
        result = trainer.validate(batches(8))
    assert held.most == 0
    assert result.supervised_tokens == 8 * (LENGTH - 1)

"""Rows held back to validate, the best checkpoint, and stopping early; interrupted or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import DataInvalid
from post_training.data.planning import split_rows
from post_training.data.types import TokenizedRow
from post_training.worker import announcing
from post_training.worker.epochs import stops_early
from tests.job_bench import Bench, Killed, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
FAST = {"optimizer_type": "sgd", "lr": 0.1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_other_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny")


def tokenized(count: int) -> list[TokenizedRow]:
    return [TokenizedRow(n, np.array([n, n], np.int32), np.ones(2, np.float32)) for n in range(count)]


@given(count=st.integers(2, 200), part=st.floats(0.001, 0.999), seed=st.integers(0, 2**63 - 1))
def test_each_row_is_trained_on_or_validated_on_and_the_seed_says_which(count: int, part: float, seed: int):
    kept, held_out = split_rows(tokenized(count), part, seed)
    assert sorted(row.row for row in [*kept, *held_out]) == list(range(count))
    assert [row.row for row in kept] == sorted(row.row for row in kept)
    assert len(held_out) == min(count - 1, max(1, round(part * count)))
    again = split_rows(tokenized(count), part, seed)
    assert [row.row for row in again[1]] == [row.row for row in held_out]


def test_one_row_cannot_be_split():
    with pytest.raises(DataInvalid, match="at least 2 rows") as refused:
        split_rows(tokenized(1), 0.5, 0)
    assert refused.value.param == "training_config.data_config.validation_split"


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ([3, 2, 1], 1, False),
        ([3, 2, 2], 1, True),
        ([3, 2, 2.5], 2, False),
        ([3, 2, 2.5, 2.1], 2, True),
        ([3, 2, 2.5, 1.9], 2, False),
        ([3, math.nan], 1, True),
        ([math.nan, 3], 1, False),
        ([None, None], 1, True),
        ([1], 1, False),
        ([1, 1, 1, 1], None, False),
    ],
)
def test_a_job_stops_once_so_many_epochs_have_not_improved_on_the_best(
    losses: list[float | None], patience: int | None, stops: bool
):
    assert stops_early(losses, patience) is stops


def test_a_split_trains_on_the_rest_only_and_reports_both(base: Path, tmp_path: Path):
    bench = Bench(tmp_path / "home", base)
    outcome = bench.run(bench.submit("split", rows(10), data_config={"validation_split": 0.3}, optimizer_config=FAST))
    assert outcome.status == "completed", bench.log("split")
    report = bench.store.get("split").report
    assert report is not None
    assert report["validation_split"] == {"training_rows": 7, "validation_rows": 3}
    assert outcome.steps == [4, 8]
    supervised = sum(point["supervised_tokens"] for point in outcome.series[:4])
    assert 0 < supervised < report["dataset"]["supervised_tokens"]
    for metrics in outcome.metrics:
        assert metrics is not None
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["validation_loss"]))
        assert 0 <= metrics["token_accuracy"] <= 1


def test_a_validation_takes_the_first_rows_of_so_many_batches(base: Path, tmp_path: Path):
    bench = Bench(tmp_path / "home", base)

    def losses(name: str, held_out: int, **options: Any) -> list[float | None]:
        spec = bench.submit(name, rows(4), rows(held_out), data_config={"batch_size": 2}, **options)
        return [metrics["validation_loss"] for metrics in bench.run(spec).metrics if metrics is not None]

    four = losses("four", 4)
    assert len(four) == 2
    assert losses("two-batches", 7, max_validation_steps=2) == four
    assert losses("all", 7) != four
    assert losses("more-than-there-are", 4, max_validation_steps=3) == four


@pytest.mark.parametrize("packed", [False, True])
def test_a_validation_set_of_one_short_row_is_measured_whatever_the_batches(base: Path, tmp_path: Path, packed: bool):
    bench = Bench(tmp_path / "home", base)
    options: dict[str, Any] = {"data_config": {"batch_size": 64, "packed": packed}, "n_epochs": 1}
    outcome = bench.run(bench.submit("tiny-set", rows(4), rows(1), **options))
    assert outcome.status == "completed", bench.log("tiny-set")
    (metrics,) = outcome.metrics
    assert metrics is not None
    assert math.isfinite(metrics["validation_loss"])
    report = bench.store.get("tiny-set").report
    assert report is not None
    assert report["validation_dataset"]["rows"] == 1


def test_a_validation_set_without_anything_to_measure_is_refused_by_its_field_before_training(
    base: Path, tmp_path: Path
):
    bench = Bench(tmp_path / "home", base)
    for name, held_out, message in (
        ("none", [], "no rows"),
        ("long", [{**rows(1)[0], "prompt": "a " * 400}], "supervised"),
    ):
        outcome = bench.run(bench.submit(name, rows(4), held_out, n_epochs=1))
        error = bench.store.get(name).error
        assert (outcome.status, outcome.error, outcome.series) == ("failed", "data_invalid", [])
        assert error is not None
        assert error["param"] == "training_config.data_config.validation_dataset_id"
        assert message in error["message"]


def test_a_job_that_stops_early_is_completed_and_an_interrupted_one_stops_at_the_same_epoch(base: Path, tmp_path: Path):
    """A rate far too high, so that the validation loss gets worse."""
    options = {
        "data_config": {"validation_split": 0.25},
        "n_epochs": 12,
        "early_stopping_patience": 2,
        "optimizer_config": {"optimizer_type": "adamw", "lr": 0.03, "num_warmup_steps": 0},
    }
    bench = Bench(tmp_path / "home", base)
    calm = bench.run(bench.submit("calm", rows(8), **options))
    assert calm.status == "completed", bench.log("calm")
    losses = [metrics["validation_loss"] for metrics in calm.metrics if metrics]
    assert 3 <= len(losses) < 12
    assert min(losses[-2:]) >= min(losses[:-2])
    report = bench.store.get("calm").report
    assert report is not None
    assert report["stopped_early_after_epoch"] == len(losses) - 1
    assert "stopped early" in bench.log("calm")

    spec = bench.submit("disturbed", rows(8), **options)

    def kill(what: str, step: int | None) -> None:
        if what == "announce" and step == calm.steps[-2]:
            raise Killed

    bench.attempt(kill)
    assert bench.run(spec).metrics == calm.metrics
    assert bench.outcome("disturbed").adapters == calm.adapters

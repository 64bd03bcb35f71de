"""What a request leaves out: the rules of docs/training.md, and a job that is given a data set and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apis.post_training.models import PreflightRequest, TrainingConfig
from post_training.catalog import exporting
from post_training.catalog.models import ModelCatalog
from post_training.data.batching import epoch_order, steps
from post_training.data.job_rows import JobRows, read_job_rows
from post_training.data.planning import settle
from post_training.defaults import MAX_DEFAULT_EPOCHS, default_batch_size, default_epochs, default_lr
from post_training.jobs.spec import JobSpec
from post_training.worker import announcing
from tests.job_bench import Bench, Killed, VerifierHere, rows
from tests.test_config_fields import Service
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


# -- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "width", "lr"),
    [
        ("a tiny one", 64, 1e-3),
        ("SmolLM2-135M", 576, 5.7e-4),
        ("Qwen2.5-0.5B", 896, 4.5e-4),
        ("Llama-3.2-1B", 2048, 3e-4),
        ("Llama-3.1-8B", 4096, 2.1e-4),
        ("Llama-3.1-70B", 8192, 1.5e-4),
        ("none yet", 10**6, 5e-5),
    ],
)
def test_the_rate_falls_with_the_square_root_of_the_width(model: str, width: int, lr: float) -> None:
    assert default_lr(width) == lr, model


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_wider_model_never_has_a_higher_rate_and_every_rate_is_within_bounds(one: int, other: int) -> None:
    narrow, wide = sorted((one, other))
    assert 1e-3 >= default_lr(narrow) >= default_lr(wide) >= 5e-5


@pytest.mark.parametrize("width", [576, 2048, 4096, 8192])
def test_the_rate_lies_between_a_quarter_and_one_of_the_published_fits(width: int) -> None:
    """The fits of Thinking Machines' cookbook: 5e-4 (2000 / width)^p, with p 0.781 for Llama and 0.0775 for Qwen."""
    fits = [5e-4 * (2000 / width) ** p for p in (0.781, 0.0775)]
    assert 0.25 * max(fits) <= default_lr(width) <= max(fits)


@pytest.mark.parametrize(
    ("row_count", "batch_size", "epochs", "total_steps"),
    [
        (1, 1, 10, 10),
        (5, 1, 10, 50),
        (12, 1, 5, 60),
        (20, 1, 3, 60),
        (100, 5, 3, 60),
        (160, 8, 3, 60),
        (1000, 8, 3, 375),
        (8000, 8, 3, 3000),
        (10_000, 10, 2, 2000),
        (20_000, 20, 1, 1000),
        (52_002, 32, 1, 1626),
        (1_000_000, 32, 1, 31_250),
    ],
)
def test_batch_size_and_epochs_follow_the_table_of_the_docs(
    row_count: int, batch_size: int, epochs: int, total_steps: int
) -> None:
    size = default_batch_size(row_count)
    steps_per_epoch = -(-row_count // size)
    assert (size, default_epochs(row_count, steps_per_epoch)) == (batch_size, epochs)
    assert epochs * steps_per_epoch == total_steps


@given(st.integers(1, 10**7))
def test_any_data_set_gets_tens_of_steps_and_no_more_than_its_rows_ask(row_count: int) -> None:
    size = default_batch_size(row_count)
    steps_per_epoch = -(-row_count // size)
    epochs = default_epochs(row_count, steps_per_epoch)
    assert 1 <= size <= 32
    assert 1 <= epochs <= MAX_DEFAULT_EPOCHS
    assert steps_per_epoch >= min(20, row_count)
    assert epochs * steps_per_epoch >= min(60, 10 * row_count)
    assert epochs * row_count <= max(25_000, row_count)
    assert epochs * steps_per_epoch <= max(3200, -(-row_count // 32))


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_epochs_stay_within_bounds_whatever_the_batch_size(row_count: int, size: int) -> None:
    epochs = default_epochs(row_count, -(-row_count // size))
    assert 1 <= epochs <= MAX_DEFAULT_EPOCHS
    assert epochs == 1 or epochs * row_count <= 25_000


# -- in a job ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture
def bench(tmp_path: Path, base: Path) -> Bench:
    return Bench(tmp_path / "home", base)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield Service(tmp_path_factory.mktemp("home"))
    torch.set_num_threads(threads)


def planned(bench: Bench, data: list[dict[str, Any]], **training: Any) -> tuple[JobSpec, JobRows]:
    """What a request without epochs and batch size comes to."""
    name = f"job-{len(bench.store.summaries())}"
    data_config = {"batch_size": None, **training.pop("data_config", {})}
    spec = bench.submit(name, data, data_config=data_config, **{"n_epochs": None, **training})
    return spec, read_job_rows(spec, bench.home)


def test_a_job_that_names_a_data_set_and_nothing_else_trains_by_the_rules(service: Service) -> None:
    body: dict[str, Any] = {"model": "tiny", "training_config": {"data_config": {"dataset_id": "data"}}}
    before = asyncio.run(service.service.preflight(PreflightRequest.model_validate(body)))
    record = service.record({**body, "algorithm_config": None})
    report = record.report
    width = json.loads((service.base / "config.json").read_text())["hidden_size"]
    assert (report["lr"], report["batch_size"], report["n_epochs"]) == (default_lr(width), 1, 6)
    assert (report["total_steps"], report["warmup_steps"], report["steps_per_epoch"]) == (60, 6, 10)
    assert (before.lr, before.batch_size, before.n_epochs) == (report["lr"], 1, 6)
    assert before.total_steps == len(record.plan) == 60
    assert max(record.rates) == report["lr"]
    assert {epoch for epoch, *_ in record.plan} == set(range(6))


def test_the_rate_is_stored_when_the_job_is_accepted_and_the_card_names_all_three(service: Service) -> None:
    uuid = service.accept({"training_config": {"data_config": {"dataset_id": "data"}, "max_steps_per_epoch": 1}})
    stored = JobSpec.model_validate(service.store.get(uuid).spec)
    assert stored.lr == 1e-3
    assert stored.training_config.n_epochs is None
    assert service.attempt() == "completed"
    card = (service.home / service.store.checkpoints(uuid)[-1].path / "adapter" / "README.md").read_text()
    assert "| epochs | `6 of 6` |" in card
    for line in ("optimizer_config.lr | `0.001`", "n_epochs | `6`", "data_config.batch_size | `1`"):
        assert f"| {line} |" in card
    models = ModelCatalog(service.store.database, service.home)
    made_by = exporting._made_by(models, models.resolve(str(service.store.checkpoints(uuid)[-1].identifier)))
    assert made_by is not None
    assert (made_by.spec.n_epochs, made_by.spec.batch_size, made_by.spec.lr) == (6, 1, 1e-3)


def test_what_a_request_names_stays_as_it_is(bench: Bench) -> None:
    spec = bench.submit("named", rows(5), n_epochs=2, data_config={"batch_size": 3}, optimizer_config={"lr": 0.5})
    found = read_job_rows(spec, bench.home)
    assert found.spec == spec
    assert [found.report[name] for name in ("n_epochs", "batch_size", "lr", "total_steps")] == [2, 3, 0.5, 4]


def test_each_is_left_out_alone(bench: Bench) -> None:
    _, sized = planned(bench, rows(40), data_config={"batch_size": 10})
    assert (sized.spec.batch_size, sized.spec.n_epochs) == (10, MAX_DEFAULT_EPOCHS)  # four steps an epoch
    _, timed = planned(bench, rows(40), n_epochs=1)
    assert (timed.spec.batch_size, timed.spec.n_epochs) == (2, 1)
    _, accumulated = planned(bench, rows(40), gradient_accumulation_steps=2)
    assert (accumulated.spec.batch_size, accumulated.spec.n_epochs) == (2, 6)
    _, short = planned(bench, rows(40), max_steps_per_epoch=1)
    assert (short.spec.n_epochs, short.report["total_steps"]) == (3, 3)  # what is cut short is not made up for


def test_packs_count_where_rows_are_packed(bench: Bench) -> None:
    spec, found = planned(bench, rows(60), data_config={"packed": True})
    order = epoch_order(60, True, spec.seed, 0)
    packs = steps(
        [len(row.tokens) for row in found.training.rows], order=order, batch_size=1, packed=True, max_seq_len=96
    )
    assert 20 <= len(packs) < 40
    assert (found.spec.batch_size, found.spec.n_epochs) == (1, 3)


def test_rows_that_are_held_out_do_not_count(bench: Bench) -> None:
    _, whole = planned(bench, rows(40))
    _, split = planned(bench, rows(40), data_config={"validation_split": 0.5})
    assert [found.spec.batch_size for found in (whole, split)] == [2, 1]


def test_a_later_attempt_trains_as_the_first_one_did_even_where_the_rule_has_changed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    calm = bench.submit("calm", rows(4), n_epochs=None, data_config={"batch_size": None}, max_steps_per_epoch=1)
    expected = bench.run(calm)
    bench.submit("cut", rows(4), n_epochs=None, data_config={"batch_size": None}, max_steps_per_epoch=1)

    def kill(what: str, step: int | None) -> None:
        if what == "update" and step == 2:
            raise Killed

    assert bench.attempt(kill) == "scheduled"
    monkeypatch.setattr("post_training.data.planning.default_epochs", lambda rows, steps: 1)
    monkeypatch.setattr("post_training.data.planning.default_batch_size", lambda units: 3)
    assert bench.attempt() == "completed"
    found = bench.outcome("cut")
    assert len(found.series) == len(expected.series) == 10
    assert (found.series, found.adapters) == (expected.series, expected.adapters)


@given(st.integers(1, 30), st.booleans(), st.integers(1, 3))
def test_settling_twice_changes_nothing(row_count: int, packed: bool, accumulation: int) -> None:
    data = {"dataset_id": "d", "packed": packed, "max_seq_len": 64}
    config = {"data_config": data, "gradient_accumulation_steps": accumulation, "optimizer_config": {"lr": 0.1}}
    spec = JobSpec.model_construct(training_config=TrainingConfig.model_validate(config), seed=1)
    tokenized = _tokenized(row_count)
    once = settle(spec, tokenized)
    assert settle(once, tokenized[:1]) == once
    assert settle(spec, tokenized[:1], {"n_epochs": once.n_epochs, "batch_size": once.batch_size}) == once


def _tokenized(count: int) -> list[Any]:
    import numpy as np

    from post_training.data.types import TokenizedRow

    ones = np.ones(20, dtype=np.float32)
    return [TokenizedRow(index, ones.astype(np.int32), ones) for index in range(count)]

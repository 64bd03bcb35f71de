"""Optimizers and schedules: PyTorch's own steps, transformers' own rates, and what a request may combine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import Tensor

from apis.errors import ModelInvalid
from apis.post_training.models import JobProgress, OptimizerConfig
from post_training.checkpoints.space import estimate
from post_training.checkpoints.state import rng_tensors
from post_training.data.batching import flatten
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings, learning_rate
from post_training.training.trainer import Trainer
from post_training.worker import announcing, progress
from post_training.worker.resume import Cursor
from post_training.worker.saving import Snapshot, write_checkpoint
from post_training.worker.setup import optim_settings
from providers.torchtune.model import load_model
from tests.job_bench import Bench, Killed, VerifierHere, rows
from tests.random_llama import OVERFLOWS
from tests.test_trainer import make_rows
from tests.tiny_llama import save_tiny_llama
from tests.torchtune_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOTAL, WARMUP, LR = 23, 6, 2e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model(path, "llama_tied")
    return path


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


def make_trainer(base: Path, **options: Any) -> Trainer:
    model = load_model(ModelConfig(base, LoraSettings(4, 8), dtype="fp32", seed=1))
    return Trainer(model, OptimSettings(**{"total_steps": 6, "lr": LR, "max_grad_norm": None, **options}))


# -- schedules --------------------------------------------------------------------------------------------------------


def transformers_rates(name: str, **special: float) -> list[float]:
    """The rate of each step, 0 to TOTAL."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL, scheduler_specific_kwargs=special or None
    )
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "min_lr_ratio", "name", "special"),
    [
        ("cosine", 0.0, "cosine", {}),
        ("linear", 0.0, "linear", {}),
        ("constant", 0.0, "constant_with_warmup", {}),
        ("cosine", 0.2, "cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("linear", 0.2, "polynomial", {"lr_end": 0.2 * LR, "power": 1.0}),
    ],
)
def test_each_schedule_has_the_rates_of_transformers(
    schedule: Any, min_lr_ratio: float, name: str, special: dict[str, float]
) -> None:
    settings = OptimSettings(TOTAL, lr=LR, warmup_steps=WARMUP, schedule=schedule, min_lr_ratio=min_lr_ratio)
    expected = transformers_rates(name, **special)
    found = [learning_rate(settings, step) for step in range(TOTAL + 1)]
    assert found[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-6, abs=1e-12)
    # A warm-up of theirs begins with a step of rate 0; ours is one step ahead and so wastes none.
    assert found[:WARMUP] == pytest.approx([LR * (step + 1) / WARMUP for step in range(WARMUP)])
    if not min_lr_ratio:
        assert found[: WARMUP - 1] == pytest.approx(expected[1:WARMUP])


def test_the_cosine_of_earlier_versions_is_unchanged_to_the_last_bit() -> None:
    settings = OptimSettings(TOTAL, lr=LR, warmup_steps=WARMUP)
    for step in range(WARMUP, TOTAL + 1):
        progress = (step - WARMUP) / (TOTAL - WARMUP)
        assert learning_rate(settings, step) == LR * 0.5 * (1.0 + math.cos(math.pi * progress))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_step_is_made_at_the_rate_of_its_number(base: Path, schedule: Any) -> None:
    trainer = make_trainer(base, schedule=schedule, warmup_steps=2, optimizer="sgd")
    moved: list[float] = []
    for _ in range(4):
        before = trainer.masters.snapshot()
        result = trainer.train_step([flatten(make_rows(2))])
        after = trainer.masters.snapshot()
        length = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in after))
        moved.append(length / result.grad_norm)
        assert result.lr == learning_rate(trainer.settings, result.step - 1)
    assert moved == pytest.approx([learning_rate(trainer.settings, step) for step in range(4)], rel=1e-3)


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("adamw", {}, torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8}),
    ("adamw", {"betas": (0.8, 0.95)}, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-8}),
    ("adamw", {"eps": 1e-3}, torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-3}),
    ("adam", {"betas": (0.5, 0.9), "eps": 1e-4}, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-4}),
    ("sgd", {}, torch.optim.SGD, {"momentum": 0.0}),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("name", "options", "kind", "explicit"), OPTIONS)
def test_three_steps_are_those_of_pytorch_s_optimizer(
    base: Path, name: str, options: dict[str, Any], kind: type[torch.optim.Optimizer], explicit: dict[str, Any]
) -> None:
    trainer = make_trainer(base, optimizer=name, weight_decay=0.3, schedule="linear", **options)
    gradients: dict[str, Tensor] = {}
    for key, parameter in trainer.model.adapter_parameters().items():
        parameter.register_hook(lambda g, key=key: gradients.__setitem__(key, g.clone()))
    theirs = {key: tensor.clone().requires_grad_() for key, tensor in trainer.masters.snapshot().items()}
    optimizer: Any = kind(theirs.values(), lr=LR, weight_decay=0.3, **explicit)  # pyright: ignore[reportCallIssue]
    for step in range(3):
        trainer.train_step([flatten(make_rows(3, seed=step))])
        for key, tensor in theirs.items():
            tensor.grad = gradients[key]
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / 6)
        optimizer.step()
    for key, actual in trainer.masters.snapshot().items():
        assert torch.allclose(theirs[key], actual, rtol=1e-5, atol=1e-8), key


def test_every_option_changes_what_is_learnt(base: Path) -> None:
    ends = []
    for name, options, _, _ in OPTIONS:
        trainer = make_trainer(base, optimizer=name, **options)
        for step in range(3):
            trainer.train_step([flatten(make_rows(3, seed=step))])
        ends.append(torch.cat([tensor.flatten() for tensor in trainer.masters.snapshot().values()]))
    for index, end in enumerate(ends):
        assert not any(torch.equal(end, other) for other in ends[:index])


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, options, _, _ in OPTIONS])
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(base: Path, name: str, options: dict[str, Any]) -> None:
    def run(trainer: Trainer, steps: range) -> None:
        for step in steps:
            trainer.train_step([flatten(make_rows(3, seed=step))])

    straight, first, resumed = (make_trainer(base, optimizer=name, **options) for _ in range(3))
    run(straight, range(6))
    run(first, range(3))
    resumed.load_state(*first.state())
    run(resumed, range(3, 6))
    expected, found = straight.state()[0], resumed.state()[0]
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_the_room_for_momentum_is_counted(tmp_path: Path, chat_base: Path) -> None:
    model = load_model(ModelConfig(chat_base, LoraSettings(64, 8), dtype="fp32"))
    trainer = Trainer(model, OptimSettings(2, "sgd", momentum=0.9))
    trainer.train_step([flatten(make_rows(2))])
    spec = Bench(tmp_path, chat_base).submit("sized", rows(2))
    directory = write_checkpoint(
        spec, tmp_path, Snapshot.of_job(trainer, 0, Cursor(), JobProgress(), rng_tensors()), False
    )
    taken = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    tensors = trainer.masters.tensors.values()
    numbers = sum(t.numel() for t in tensors), len(tensors)
    with_momentum = estimate(*numbers, "sgd", chat_base, momentum=True).inside
    assert estimate(*numbers, "sgd", chat_base).inside < taken <= with_momentum <= 1.1 * taken + 150_000


# -- the request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"optimizer_type": "sgd"}, "lr", "sgd has no default rate"),
        ({"optimizer_type": "sgd", "lr": 0.1, "betas": [0.9, 0.99]}, "betas", "betas has no effect on sgd"),
        ({"optimizer_type": "sgd", "lr": 0.1, "eps": 1e-8}, "eps", "eps has no effect on sgd"),
        ({"momentum": 0.9}, "momentum", "momentum has no effect on adamw"),
        ({"optimizer_type": "adam", "momentum": 0.0}, "momentum", "momentum has no effect on adam"),
        ({"lr_schedule": "constant", "min_lr_ratio": 0.1}, "min_lr_ratio", "no effect on a constant lr_schedule"),
        ({"betas": [0.9, 1.0]}, "betas", "less than 1"),
        ({"betas": [0.9]}, "betas", "required"),
        ({"eps": 0}, "eps", "greater than 0"),
        ({"optimizer_type": "sgd", "lr": 0.1, "momentum": 1}, "momentum", "less than 1"),
        ({"lr_schedule": "step"}, "lr_schedule", "cosine"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio", "less than or equal to 1"),
    ],
)
def test_a_field_without_effect_or_sense_is_refused_by_name(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        OptimizerConfig.model_validate(given)
    error = refused.value.errors()[0]
    assert error["loc"][0] == field
    assert message in error["msg"]


def test_what_is_left_out_is_what_earlier_versions_did() -> None:
    assert optim_settings(OptimizerConfig(lr=3e-4), 200, 1.0) == OptimSettings(200, "adamw", 3e-4, 0.0, 20, 1.0)
    assert optim_settings(OptimizerConfig(lr=3e-4), 5000, None) == OptimSettings(5000, "adamw", 3e-4, 0.0, 100, None)
    # A replay of a request is told by its body without nulls.
    new = {"lr_schedule", "min_lr_ratio", "betas", "eps", "momentum"}
    assert not new & OptimizerConfig().model_dump(exclude_none=True).keys()


def test_every_field_reaches_the_optimizer() -> None:
    adam = {
        "optimizer_type": "adam",
        "lr": 0.1,
        "weight_decay": 0.2,
        "num_warmup_steps": 3,
        "lr_schedule": "linear",
        "min_lr_ratio": 0.4,
        "betas": [0.5, 0.6],
        "eps": 0.7,
    }
    expected = OptimSettings(9, "adam", 0.1, 0.2, 3, 2.0, "linear", 0.4, (0.5, 0.6), 0.7)
    assert optim_settings(OptimizerConfig.model_validate(adam), 9, 2.0) == expected
    sgd = OptimizerConfig.model_validate({"optimizer_type": "sgd", "lr": 0.1, "momentum": 0.8})
    assert optim_settings(sgd, 9, None).momentum == 0.8


# -- numbers that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_as_they_were(
    base: Path, poison: float, where: str, optimizer: str
) -> None:
    options = {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else None, "weight_decay": 0.1}
    poisoned, spared = make_trainer(base, **options), make_trainer(base, **options)
    for trainer in (poisoned, spared):
        trainer.train_step([flatten(make_rows(2))])
    before = poisoned.state()[0]
    parameter = next(iter(poisoned.model.adapter_parameters().values()))
    whole = poisoned.model.hidden_states
    if where == "gradient":
        handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, poison))
    else:
        poisoned.model.hidden_states = lambda segments: whole(segments) * poison  # pyright: ignore[reportAttributeAccessIssue]
        handle = None
    result = poisoned.train_step([flatten(make_rows(2, seed=1))])
    assert result.skipped
    assert result.supervised_tokens > 0
    after = poisoned.state()[0]
    assert all(torch.equal(before[key], after[key]) for key in before)
    # What comes after is as if the step had not been, but for its number in the schedule.
    if handle is not None:
        handle.remove()
    poisoned.model.hidden_states = whole  # pyright: ignore[reportAttributeAccessIssue]
    spared.step += 1
    for trainer in (poisoned, spared):
        trainer.train_step([flatten(make_rows(2, seed=2))])
    expected, found = spared.state()[0], poisoned.state()[0]
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_nothing_that_is_not_finite_is_saved(tmp_path: Path, chat_base: Path) -> None:
    trainer = make_trainer(chat_base)
    trainer.train_step([flatten(make_rows(2))])
    with torch.no_grad():
        trainer.masters.tensors["layers.1.mlp.w2.lora_b.weight"][3, 1] = math.nan
    spec = Bench(tmp_path, chat_base).submit("poisoned", rows(2))
    snapshot = Snapshot.of_job(trainer, 0, Cursor(), JobProgress(), rng_tensors())
    with pytest.raises(ModelInvalid, match=r"layers\.1\.mlp\.down_proj\.lora_B\.weight holds NaN or infinite"):
        write_checkpoint(spec, tmp_path, snapshot, False)
    assert not list(tmp_path.rglob("*.safetensors"))


def _bench(home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    return Bench(home, base)


def _some_overflow(count: int, which: range) -> list[dict[str, Any]]:
    return [{**row, "completion": row["completion"] + OVERFLOWS * (n in which)} for n, row in enumerate(rows(count))]


def test_steps_that_are_not_finite_are_counted_and_ten_in_a_row_fail_the_job(
    tmp_path: Path, chat_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, chat_base, monkeypatch)
    options: dict[str, Any] = {"n_epochs": 1, "data_config": {"batch_size": 1, "shuffle": False}}
    nine = bench.run(bench.submit("nine", _some_overflow(12, range(1, 10)), **options))
    assert (nine.status, nine.progress["skipped_steps"]) == ("completed", 9)
    assert [step["skipped"] for step in nine.series] == [False, *[True] * 9, False, False]
    assert [step["loss"] for step in nine.series[1:10]] == [None] * 9
    ten = bench.run(bench.submit("ten", _some_overflow(12, range(1, 11)), **options))
    assert (ten.status, ten.error, ten.progress["skipped_steps"]) == ("failed", "non_finite_loss", 10)


def test_an_epoch_without_a_finite_step_says_that_and_the_remedy(
    tmp_path: Path, chat_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, chat_base, monkeypatch)
    options: dict[str, Any] = {"n_epochs": 5, "data_config": {"batch_size": 1, "shuffle": False}}
    outcome = bench.run(bench.submit("all", _some_overflow(3, range(3)), **options))
    assert (outcome.status, outcome.error, outcome.progress["skipped_steps"]) == ("failed", "non_finite_loss", 3)


def test_the_count_in_a_row_goes_on_over_an_epochs_end(
    tmp_path: Path, chat_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, chat_base, monkeypatch)
    monkeypatch.setattr(progress, "MAX_SKIPPED_IN_A_ROW", 4)
    # The end of the first epoch and the beginning of the second are three in a row, then four.
    options: dict[str, Any] = {"n_epochs": 2, "data_config": {"batch_size": 1, "shuffle": False}}
    three = bench.run(bench.submit("three", [*_some_overflow(4, range(2)), *_some_overflow(1, range(1))], **options))
    assert (three.status, three.progress["skipped_steps"]) == ("completed", 6)
    rows_of_four = [*_some_overflow(4, range(2)), *_some_overflow(2, range(2))]
    four = bench.run(bench.submit("four", rows_of_four, **options))
    assert (four.status, four.error, four.progress["skipped_steps"]) == ("failed", "non_finite_loss", 6)


def test_the_count_in_a_row_survives_a_lost_worker(
    tmp_path: Path, chat_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, chat_base, monkeypatch)
    data_config = {"batch_size": 1, "shuffle": False}
    spec = bench.submit(
        "killed", _some_overflow(12, range(1, 11)), n_epochs=1, data_config=data_config, save_every_n_steps=1
    )

    def at(what: str, step: int | None) -> None:
        if what == "update" and step == 7:
            raise Killed

    bench.attempt(at)
    outcome = bench.run(spec, attempts=2)
    assert (outcome.status, outcome.error) == ("failed", "non_finite_loss")
    assert outcome.progress["skipped_steps"] == 10

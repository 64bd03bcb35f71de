"""Interrupted and resumed is the same as undisturbed, byte for byte, wherever an attempt ends. Models here draw random
numbers while they train (dropout), so that their state is part of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.layout import check_files
from post_training.jobs.launchers.orders import Order
from post_training.jobs.states import LeaseLost
from post_training.processes import python_module, torch_environment
from post_training.worker import announcing
from post_training.worker.epochs import SAVE_SECONDS, SaveTimer
from tests.job_bench import At, Bench, Killed, Outcome, VerifierHere, rows
from tests.random_llama import OVERFLOWS
from tests.tiny_llama import save_tiny_llama

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def overflowing(data: list[dict[str, Any]], *indices: int) -> list[dict[str, Any]]:
    """The rows, some of them without a finite loss."""
    return [{**row, "completion": row["completion"] + OVERFLOWS * (n in indices)} for n, row in enumerate(data)]


KINDS: dict[str, dict[str, Any]] = {
    # 4 steps an epoch, each of two rows in one micro-batch, each saved
    "plain": {"data": rows(7), "save_every_n_steps": 1},
    # 3 steps an epoch, each of several micro-batches; a step that is skipped in each epoch; a validation
    "rich": {
        "data": overflowing(rows(24), 4),
        "validation": rows(3),
        "data_config": {"packed": True},
        "gradient_accumulation_steps": 2,
        "save_every_n_steps": 2,
        "optimizer_config": {"optimizer_type": "adam", "lr": 1e-3, "weight_decay": 0.1, "num_warmup_steps": 4},
    },
    # by time, which is none here: an attempt goes on from the end of an epoch, or from where it was stopped
    "timed": {"data": rows(6), "optimizer_config": {"optimizer_type": "sgd", "lr": 0.1}},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_other_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


@pytest.fixture
def bench(tmp_path: Path, base: Path) -> Bench:
    return Bench(tmp_path, base)


@pytest.fixture(scope="module")
def calm_bench(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("calm"), base)


@pytest.fixture(scope="module")
def calm(calm_bench: Bench) -> dict[str, Outcome]:
    """What undisturbed jobs come to."""
    return {kind: calm_bench.run(calm_bench.submit(f"calm-{kind}", **given)) for kind, given in KINDS.items()}


def at_call(what: str, step: int | None = None, number: int = 1, *, stop: bool = False) -> At:
    """End the attempt at the n-th call of `what` (about `step`): by a kill, or by SIGTERM."""
    calls = 0

    def at(name: str, about: int | None) -> None:
        nonlocal calls
        if name != what or (step is not None and about != step):
            return
        calls += 1
        if calls == number and stop:
            os.kill(os.getpid(), signal.SIGTERM)
        elif calls == number:
            raise Killed

    return at


def trained_steps(bench: Bench, job_uuid: str) -> Counter[int | None]:
    """How often each step was made, over all attempts."""
    return Counter(event.step for event in bench.store.events(job_uuid, 0, 10_000) if event.step is not None)


def test_undisturbed_jobs_are_what_these_tests_take_them_for(calm_bench: Bench, calm: dict[str, Outcome]) -> None:
    assert {kind: (o.status, o.steps) for kind, o in calm.items()} == {
        "plain": ("completed", [4, 8]),
        "rich": ("completed", [3, 6]),
        "timed": ("completed", [3, 6]),
    }
    assert [s["skipped"] for s in calm["rich"].series].count(True) == 2
    assert calm["rich"].progress["skipped_steps"] == 2
    assert calm["plain"].series[0]["epoch"] == 0
    assert calm["plain"].series[-1]["epoch"] == 1
    assert calm["plain"].adapters[0] != calm["plain"].adapters[1]
    again = calm_bench.run(calm_bench.submit("calm-again", **KINDS["plain"]))
    assert again == calm["plain"]
    # Nothing stays that is not announced.
    assert calm_bench.folders("calm-plain") == ["4", "8"]


@pytest.mark.parametrize(
    ("kind", "what", "step"),
    [
        ("plain", "update", 1),  # trained, not told
        ("plain", "update", 2),
        ("plain", "record_checkpoint", 3),  # a whole directory that the store does not know
        ("plain", "update", 4),  # the last step of an epoch
        ("plain", "record_checkpoint", 4),
        ("plain", "update", 5),
        ("rich", "update", 3),
        ("rich", "record_checkpoint", 3),
        ("rich", "update", 6),
        ("timed", "update", 2),
        ("timed", "update", 5),
        ("plain", "finish", None),
    ],
)
def test_a_killed_job_ends_with_the_bytes_and_numbers_of_an_undisturbed_one(
    bench: Bench, calm: dict[str, Outcome], kind: str, what: str, step: int | None
) -> None:
    spec = bench.submit(f"killed-{kind}-{what}-{step}", **KINDS[kind])
    assert bench.attempt(at_call(what, step)) == "scheduled"
    assert bench.run(spec) == calm[kind]
    assert bench.store.get(spec.job_uuid).attempt == 2
    assert bench.folders(spec.job_uuid) == [str(step) for step in calm[kind].steps]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_checkpoint_that_was_recorded_and_not_announced_is_announced_without_training_again(
    bench: Bench, calm: dict[str, Outcome], epoch: int
) -> None:
    spec = bench.submit(f"unannounced-{epoch}", **KINDS["rich"])
    assert bench.attempt(at_call("announce", calm["rich"].steps[epoch])) == "scheduled"
    written = bench.root(spec.job_uuid) / str(calm["rich"].steps[epoch])
    before = written.stat().st_ino
    assert bench.run(spec) == calm["rich"]
    # Training had gone on by one step where one was left.
    again = {step for step, times in trained_steps(bench, spec.job_uuid).items() if times > 1}
    assert again == ({4} if epoch == 0 else set())
    assert written.stat().st_ino == before


@pytest.mark.parametrize(("kind", "number"), [("plain", 6), ("rich", 7), ("rich", 8), ("timed", 5), ("timed", 10)])
def test_a_stop_saves_the_last_finished_step_and_no_step_is_made_twice(
    bench: Bench, calm: dict[str, Outcome], kind: str, number: int
) -> None:
    spec = bench.submit(f"stopped-{kind}-{number}", **KINDS[kind])
    assert bench.attempt(at_call("should_stop", number=number, stop=True)) == "scheduled"
    trained = max(trained_steps(bench, spec.job_uuid))  # pyright: ignore[reportArgumentType]
    assert trained is not None
    assert bench.steps(spec.job_uuid)[-1] == trained
    assert bench.run(spec) == calm[kind]
    assert set(trained_steps(bench, spec.job_uuid).values()) == {1}


def test_a_stop_in_the_validation_saves_the_epoch_up_to_it(bench: Bench, calm: dict[str, Outcome]) -> None:
    def at(name: str, _step: int | None) -> None:
        progress = bench.store.get("validating").progress or {}
        if name == "should_stop" and progress.get("phase") == "validation":
            os.kill(os.getpid(), signal.SIGTERM)

    spec = bench.submit("validating", **KINDS["rich"])
    assert bench.attempt(at) == "scheduled"
    assert bench.steps("validating") == [3]
    # The checkpoint after the epoch takes the place of that one.
    assert bench.run(spec) == calm["rich"]
    assert set(trained_steps(bench, "validating").values()) == {1}


@pytest.fixture
def slow_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is verified when a job waits for it, and not before."""
    monkeypatch.setattr(VerifierHere, "looks", 12)


@pytest.mark.usefixtures("slow_verification")
def test_a_stop_in_the_verification_leaves_a_checkpoint_that_the_next_attempt_announces(
    bench: Bench, calm: dict[str, Outcome]
) -> None:
    def at(name: str, _step: int | None) -> None:
        progress = bench.store.get("verifying").progress or {}
        if name == "should_stop" and progress.get("phase") == "verify":
            os.kill(os.getpid(), signal.SIGTERM)

    spec = bench.submit("verifying", **KINDS["plain"])
    assert bench.attempt(at) == "scheduled"
    assert bench.outcome("verifying").steps == []
    # The next epoch was trained meanwhile, and its end waited.
    assert bench.steps("verifying") == [4, 8]
    assert bench.run(spec, attempts=1) == calm["plain"]
    assert set(trained_steps(bench, "verifying").values()) == {1}


@pytest.mark.parametrize("looks", [1, 2, 12])
def test_training_goes_on_while_a_checkpoint_is_verified_with_the_same_bytes(
    bench: Bench, calm: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    monkeypatch.setattr(VerifierHere, "looks", looks)
    order: list[str] = []

    def at(name: str, step: int | None) -> None:
        if name == "announce" or (name == "update" and step is not None):
            order.append(f"{name} {step}")

    spec = bench.submit(f"beside-{looks}", **KINDS["plain"])
    assert bench.attempt(at) == "completed"
    assert bench.outcome(spec.job_uuid) == calm["plain"]
    # Looked at after each step; the next epoch's checkpoint waits for the one before.
    after = min(4 + looks + 1, 8)
    told = [f"update {step}" for step in range(1, 9)]
    assert order == [*told[:after], "announce 4", *told[after:], "announce 8"]


@pytest.mark.usefixtures("slow_verification")
def test_training_waits_for_a_verification_that_has_no_memory_beside_it(
    bench: Bench, calm: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifierHere, "fits_beside_training", lambda _: False)
    announced: list[int] = []

    def at(name: str, step: int | None) -> None:
        if name == "announce":
            announced.append(len(trained_steps(bench, "waited")))

    bench.submit("waited", **KINDS["plain"])
    assert bench.attempt(at) == "completed"
    assert announced == [4, 8]
    assert bench.outcome("waited") == calm["plain"]


@pytest.mark.usefixtures("slow_verification")
def test_a_checkpoint_that_is_verified_stays_whatever_the_limit(bench: Bench, calm: dict[str, Outcome]) -> None:
    seen: list[list[int]] = []

    def at(name: str, _step: int | None) -> None:
        if name == "record_checkpoint":
            seen.append(bench.steps("unproven"))

    spec = bench.submit("unproven", **KINDS["plain"])
    bench.attempt(at)
    assert seen == [[], [1], [2], [3], [3, 4], [4, 5], [4, 6], [4, 7]]
    assert bench.outcome(spec.job_uuid) == calm["plain"]


@pytest.mark.usefixtures("slow_verification")
@pytest.mark.parametrize("step", [5, 7])
def test_a_job_killed_while_a_checkpoint_is_verified_announces_it_once_and_goes_on_from_the_newest(
    bench: Bench, calm: dict[str, Outcome], step: int
) -> None:
    spec = bench.submit(f"beside-killed-{step}", **KINDS["plain"])
    assert bench.attempt(at_call("update", step + 1)) == "scheduled"
    assert bench.steps(spec.job_uuid) == [4, step]
    assert bench.run(spec) == calm["plain"]
    assert bench.log(spec.job_uuid).count("checkpoint tiny-sft-") == 2 * 2 + 1  # written; written again; announced
    assert trained_steps(bench, spec.job_uuid)[step] == 1


@pytest.mark.usefixtures("slow_verification")
def test_a_damaged_checkpoint_that_was_still_to_be_announced_is_made_again(
    bench: Bench, calm: dict[str, Outcome]
) -> None:
    spec = bench.submit("unproven-damaged", **KINDS["plain"], save_total_limit=2)
    bench.attempt(at_call("update", 7))
    assert bench.steps(spec.job_uuid) == [4, 5, 6]
    flip(bench.root(spec.job_uuid) / "4" / "adapter" / "adapter_model.safetensors")
    assert bench.run(spec) == calm["plain"]
    assert "passed over a damaged checkpoint: " in bench.log(spec.job_uuid)


@pytest.mark.parametrize("looks", [0, 2, 12])
def test_a_checkpoint_that_fails_its_verification_fails_the_job_however_far_it_has_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    monkeypatch.setattr(VerifierHere, "looks", looks)

    def at(name: str, step: int | None) -> None:
        if name == "record_checkpoint" and step == 4:
            flip(bench.root(spec.job_uuid) / "4" / "adapter" / "adapter_model.safetensors")

    spec = bench.submit(f"unverified-{looks}", **KINDS["plain"])
    assert bench.attempt(at) == "failed"
    failed = bench.outcome(spec.job_uuid)
    assert (failed.error, failed.steps, bench.folders(spec.job_uuid)) == ("checkpoint_unverified", [], [])
    assert max(s for s in trained_steps(bench, spec.job_uuid) if s) == min(4 + looks + 1, 8)


@pytest.mark.usefixtures("slow_verification")
def test_a_job_that_fails_while_a_checkpoint_is_verified_announces_that_and_the_newest(bench: Bench) -> None:
    data = overflowing(rows(20), *range(5, 20))
    options: dict[str, Any] = {"data_config": {"batch_size": 1, "shuffle": False}, "max_steps_per_epoch": 4}
    spec = bench.submit("failed-meanwhile", data, **options, n_epochs=3, save_every_n_steps=3)

    def at(name: str, step: int | None) -> None:
        if name == "update" and step == 7:
            raise RuntimeError("unforeseen")

    assert bench.attempt(at) == "failed"
    failed = bench.outcome(spec.job_uuid)
    assert (failed.identifiers, failed.steps) == (["tiny-sft-JOB-0", "tiny-sft-JOB-step6"], [4, 6])
    assert bench.folders(spec.job_uuid) == ["4", "6"]


# A failing example is told as it was found: to shrink it would take minutes.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 6),
)
def test_any_number_of_ends_anywhere_come_to_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    base: Path,
    calm: dict[str, Outcome],
    ends: list[tuple[int, bool]],
    kind: str,
    looks: int,
) -> None:
    bench = Bench(tmp_path_factory.mktemp("random"), base)
    spec = bench.submit("random", **KINDS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifierHere, "looks", looks)
        for at, stop in ends:
            if bench.attempt(_at_any(at, stop)) == "completed":
                break
        assert bench.run(spec) == calm[kind]


def _at_any(number: int, stop: bool) -> At:
    calls = 0

    def at(_name: str, _step: int | None) -> None:
        nonlocal calls
        calls += 1
        if calls == number and stop:
            os.kill(os.getpid(), signal.SIGTERM)
        elif calls == number:
            raise Killed

    return at


# -- what a resumed job trusts -----------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["training_state/state.safetensors", "adapter/adapter_config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    bench: Bench, calm: dict[str, Outcome], name: str
) -> None:
    spec = bench.submit(f"damaged-{Path(name).stem}", **KINDS["plain"], save_total_limit=2)
    bench.attempt(at_call("update", 4))
    assert bench.steps(spec.job_uuid) == [2, 3]
    flip(bench.root(spec.job_uuid) / "3" / name)
    assert bench.run(spec) == calm["plain"]
    assert "passed over a damaged checkpoint: " in bench.log(spec.job_uuid)
    assert trained_steps(bench, spec.job_uuid)[3] == 2
    assert trained_steps(bench, spec.job_uuid)[2] == 1


def test_an_announced_checkpoint_that_was_damaged_gets_its_bytes_back(bench: Bench, calm: dict[str, Outcome]) -> None:
    spec = bench.submit("healed", **KINDS["plain"])
    bench.attempt(at_call("update", 5))
    directory = bench.root("healed") / "4"
    flip(directory / "adapter" / "adapter_model.safetensors")
    assert bench.run(spec) == calm["plain"]
    check_files(directory)


def test_without_any_usable_checkpoint_the_job_starts_again(bench: Bench, calm: dict[str, Outcome]) -> None:
    spec = bench.submit("from-the-start", **KINDS["timed"])
    bench.attempt(at_call("should_stop", number=5, stop=True))
    (step,) = bench.steps("from-the-start")
    flip(bench.root("from-the-start") / str(step) / "training_state" / "state.json")
    assert bench.run(spec) == calm["timed"]
    assert trained_steps(bench, "from-the-start")[1] == 2


# -- what stays --------------------------------------------------------------------------------------------------------


def test_so_many_checkpoints_inside_epochs_are_kept_as_asked(bench: Bench, calm: dict[str, Outcome]) -> None:
    seen: list[list[int]] = []

    def at(name: str, _step: int | None) -> None:
        if name == "record_checkpoint":
            seen.append(bench.steps("kept"))

    spec = bench.submit("kept", **KINDS["plain"], save_total_limit=2)
    bench.attempt(at)
    assert seen == [[], [1], [1, 2], [2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [4, 6, 7]]
    assert bench.run(spec) == calm["plain"]


def test_a_cancelled_job_keeps_what_was_announced_and_nothing_else(bench: Bench) -> None:
    def at(name: str, step: int | None) -> None:
        if name == "update" and step == 7:
            bench.store.request_cancel("cancelled")
        if name == "update" and step == 8:
            raise AssertionError("it went on")

    bench.submit("cancelled", **KINDS["plain"])
    # The store says so to a worker's beats; `confirm` is one.
    assert bench.attempt(at) == "cancelled"
    assert bench.folders("cancelled") == ["4"]
    assert bench.steps("cancelled") == [4]


def test_a_failed_job_announces_its_newest_checkpoint_and_removes_the_others(bench: Bench) -> None:
    data = overflowing(rows(20), *range(5, 20))
    options: dict[str, Any] = {"data_config": {"batch_size": 1, "shuffle": False}, "save_every_n_steps": 2}
    spec = bench.submit("diverged", data, **options, save_total_limit=3)
    failed = bench.run(spec)
    assert (failed.status, failed.error) == ("failed", "non_finite_loss")
    assert (failed.identifiers, failed.metrics) == (["tiny-sft-JOB-step14"], [None])
    assert bench.folders("diverged") == ["14"]
    model = ModelCatalog(bench.store.database, bench.home).resolve("tiny-sft-diverged-step14")
    assert model.adapter_dir == bench.root("diverged") / "14" / "adapter"


def test_a_failed_job_whose_checkpoint_could_not_have_its_name_leaves_nothing(bench: Bench) -> None:
    data = overflowing(rows(20), *range(5, 20))
    options: dict[str, Any] = {"data_config": {"batch_size": 1, "shuffle": False}, "save_every_n_steps": 2}
    spec = bench.submit("d" * 240, data, **options)
    failed = bench.run(spec)
    assert (failed.status, failed.error, failed.steps) == ("failed", "non_finite_loss", [])
    assert bench.folders(spec.job_uuid) == []


# -- a lease that is lost ----------------------------------------------------------------------------------------------


def tree(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize(("what", "step"), [("update", 3), ("record_checkpoint", 3), ("should_stop", None)])
def test_a_worker_that_lost_its_lease_writes_nothing_more(
    bench: Bench, calm: dict[str, Outcome], what: str, step: int | None
) -> None:
    job = f"lost-{what}"
    before: dict[str, int] = {}
    rows_before: list[int] = []

    def at(name: str, about: int | None) -> None:
        trained = trained_steps(bench, job)
        if before or name != what or about != step or len(trained) < 2:
            return
        owner = next(lease.owner for lease in bench.leases.held() if lease.job_uuid == job)
        assert bench.leases.lost(job, owner, "taken away", max_attempts=1000)
        before.update(tree(bench.root(job)))
        rows_before.extend(bench.steps(job))

    spec = bench.submit(job, **{**KINDS["plain"], "save_total_limit": 5})
    with pytest.raises(LeaseLost):
        bench.attempt(at)
    assert before
    assert tree(bench.root(job)) == before
    assert bench.steps(job) == rows_before
    assert bench.run(spec) == calm["plain"]


def test_a_lease_that_is_lost_right_before_the_rename_leaves_no_checkpoint(bench: Bench) -> None:
    confirms: list[list[str]] = []

    def at(name: str, _step: int | None) -> None:
        if name != "confirm" or not trained_steps(bench, "fenced"):
            return
        confirms.append(bench.folders("fenced"))
        if len(confirms) == 2:  # the first comes before anything is written
            owner = next(lease.owner for lease in bench.leases.held() if lease.job_uuid == "fenced")
            assert bench.leases.lost("fenced", owner, "taken away", max_attempts=1000)

    spec = bench.submit("fenced", **KINDS["plain"])
    with pytest.raises(LeaseLost):
        bench.attempt(at)
    assert confirms[0] == []
    assert confirms[1][0].startswith(".1.tmp-")
    assert bench.folders("fenced") == []
    assert bench.run(spec).status == "completed"


def test_a_worker_without_a_lease_exits_with_3_and_writes_nothing(bench: Bench) -> None:
    bench.submit("gone", **KINDS["plain"])
    owner = bench.claim().owner
    assert bench.leases.lost("gone", owner, "taken away", max_attempts=1000)
    command = [*python_module("post_training.worker.main"), "--home", str(bench.home)]
    order = Order(
        database_url=bench.store.database.url,
        job_uuid="gone",
        owner=owner,
        model_module="tests.random_llama",
        log=str(bench.home / "log"),
        warm_seconds=60,
    )
    run = subprocess.run(command, env=torch_environment(1), input=order.line(), capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (3, b"taken\n")
    assert "job gone is not this worker's any more" in (bench.home / "log").read_text()
    assert not (bench.home / "jobs").exists()


# -- when to save ------------------------------------------------------------------------------------------------------


def test_a_save_is_due_after_so_many_steps_or_minutes_and_a_slow_one_is_rare() -> None:
    assert [step for step in range(1, 10) if SaveTimer(3).due(step)] == [3, 6, 9]
    clock = [0.0]
    timer = SaveTimer(None, lambda: clock[0])
    clock[0] = SAVE_SECONDS - 1
    assert not timer.due(1)
    clock[0] = SAVE_SECONDS
    assert timer.due(1)
    timer.saved(60.0)
    clock[0] += 60 / 0.03 - 1
    assert not timer.due(1)
    clock[0] += 2
    assert timer.due(1)

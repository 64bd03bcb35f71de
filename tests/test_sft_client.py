"""`SFTClient` over real HTTP: the order of what is trained, what is measured and saved, and what a session is.

The servers are of `sft_contract_server`, whose weights tell every batch and its place.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from apis.errors import (
    BadRequest,
    CheckpointNotFound,
    CheckpointUnverified,
    Conflict,
    DataInvalid,
    FileMissing,
    InvalidField,
    JobFailure,
    JobNotFound,
    Unauthorized,
    Unavailable,
)
from apis.sft_sessions.models import SessionConfig, SessionState
from apis.sft_sessions.training_models import ValidateResponse
from post_training.client import SFTClient
from post_training.client.sft_progress import Progress
from post_training.client.sft_result import merge_validations
from tests.sft_contract_parts import INITIAL, canonical, folded, rows_after
from tests.sft_contract_server import Record, Stack, running_stack

Row = dict[str, Any]
ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(10)]


def chunks(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[SFTClient]:
    with SFTClient(stack.url, max_retries=0, poll_seconds=0.01, outage_seconds=10) as client:
        yield client


@pytest.fixture
def record(stack: Stack, client: SFTClient) -> Record:
    """A session that runs."""
    return stack.sessions[client.submit(model="lab/exact")]


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Any, step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def close(self) -> None:
        pass


# -- what is trained -------------------------------------------------------------------------------------------------


def test_one_epoch_trains_all_rows_in_order_and_the_last_step_takes_what_is_left(client: SFTClient, record: Record):
    result = client.fit(ROWS, batch_size=4)
    assert record.weights == rows_after(chunks(ROWS, 4))
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.total_steps == 3


def test_losses_are_those_that_the_server_measured(client: SFTClient, record: Record):
    result = client.fit(ROWS, batch_size=4)
    weights = [rows_after(chunks(ROWS, 4)[: n + 1]) for n in range(3)]
    assert list(result.losses) == [int(one[:8], 16) / 2**32 for one in weights]


def test_epochs_repeat_the_rows(client: SFTClient, record: Record):
    result = client.fit(ROWS, batch_size=4, epochs=2)
    assert record.weights == rows_after(chunks(ROWS, 4) * 2)
    assert [step.epoch for step in result.steps] == [0, 0, 0, 1, 1, 1]


def test_steps_may_end_within_an_epoch_and_what_they_trained_is_saved(client: SFTClient, record: Record):
    result = client.fit(ROWS, batch_size=4, steps=5)
    assert record.weights == rows_after((chunks(ROWS, 4) * 2)[:5])
    assert [checkpoint.step for checkpoint in result.checkpoints] == [5]


def test_a_shuffled_epoch_has_the_order_that_a_whole_job_draws(client: SFTClient, record: Record):
    client.fit(ROWS, batch_size=4, epochs=2, shuffle=True, seed=7)
    orders = [np.random.Generator(np.random.PCG64([7, epoch])).permutation(10) for epoch in range(2)]
    assert record.weights == rows_after([rows for order in orders for rows in chunks([ROWS[n] for n in order], 4)])


def numbered(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: ROWS,
    "tuple": lambda _: tuple(ROWS),
    "iterator": lambda _: iter(ROWS),
    "function": lambda _: lambda: iter(ROWS),
    "datasets.Dataset": lambda _: datasets.Dataset.from_list(ROWS),
    "datasets.IterableDataset": lambda _: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "jsonl": lambda folder: numbered(folder / "r.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
    "json": lambda folder: str(numbered(folder / "r.json", json.dumps(ROWS))),
    "csv": lambda folder: numbered(
        folder / "r.csv", "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
    ),
}


@pytest.mark.parametrize("form", SOURCES)
def test_every_form_of_the_same_rows_trains_the_same(client: SFTClient, record: Record, tmp_path: Path, form: str):
    client.fit(SOURCES[form](tmp_path), batch_size=3)
    assert record.weights == rows_after(chunks(ROWS, 3))


def test_rows_of_token_ids_travel_as_compact_sequences(client: SFTClient, record: Record):
    client.fit([{"tokens": [1, 2, 3], "labels": [-100, 2, 3]}, {"tokens": [4, 5]}], batch_size=2)

    def ids(dtype: str, kind: str, values: list[int]) -> dict[str, Any]:
        content = np.array(values, kind).tobytes()
        return {"dtype": dtype, "shape": [len(values)], "data": base64.b64encode(content).decode()}

    sent = {
        "sequences": [
            {"tokens": ids("uint16", "<u2", [1, 2, 3]), "labels": ids("int32", "<i4", [-100, 2, 3])},
            {"tokens": ids("uint16", "<u2", [4, 5])},
        ]
    }
    assert record.weights == folded(INITIAL, [canonical(sent)])


# -- pipelining ------------------------------------------------------------------------------------------------------


def test_batches_are_sent_ahead_as_far_as_the_window_allows(stack: Stack, client: SFTClient):
    stack.step_seconds = 0.02
    record = stack.sessions[client.submit(window=3)]
    client.fit(ROWS, batch_size=1)
    assert 1 <= record.most_ahead <= 3
    assert record.weights == rows_after(chunks(ROWS, 1))


def test_without_a_window_a_step_is_sent_once_the_last_is_answered(stack: Stack, client: SFTClient):
    record = stack.sessions[client.submit(window=0)]
    client.fit(ROWS, batch_size=1)
    assert record.most_ahead == 0


def test_reading_slow_rows_overlaps_with_the_steps(stack: Stack, client: SFTClient):
    def slow() -> Iterator[Row]:
        for row in ROWS:
            time.sleep(0.05)
            yield row

    stack.step_seconds = 0.05
    client.submit()
    began = time.monotonic()
    client.fit(slow(), batch_size=1, complete=False)
    # One after the other they would take 1 s; what is saved at the end takes its time too.
    assert time.monotonic() - began < 0.95


# -- validation ------------------------------------------------------------------------------------------------------

MEASURED = [
    {"loss": 1.0, "weight": 1.0, "tokens": 1, "right": 1},
    {"loss": 2.0, "weight": 3.0, "tokens": 2, "right": 0},
    {"loss": 4.0, "weight": 0.5, "tokens": 5, "right": 2},
]


def test_validation_is_weighted_by_tokens_over_all_rows_whatever_the_calls(client: SFTClient, record: Record):
    loss = (1.0 + 2.0 * 3.0 + 4.0 * 0.5) / 4.5
    for size in (1, 2, 3):
        result = client.evaluate(MEASURED, batch_size=size)
        assert result.loss == pytest.approx(loss, rel=1e-15)
        assert result.perplexity == pytest.approx(math.exp(loss))
        assert result.token_accuracy == pytest.approx(3 / 8)
        assert (result.supervised_tokens, result.weight) == (8, 4.5)


def test_validations_are_made_in_between_and_at_the_end(client: SFTClient, record: Record):
    result = client.fit(ROWS, iter(MEASURED), batch_size=2, validate_every=2, validation_batch_size=2)
    assert [(one.step, one.global_steps) for one in result.validations] == [(2, 2), (4, 4), (5, 5)]


def test_a_validation_at_the_last_step_is_not_made_twice(client: SFTClient, record: Record):
    result = client.fit(ROWS, MEASURED, batch_size=5, validate_every=2)
    assert [one.step for one in result.validations] == [2]


def test_empty_validation_rows_are_refused_before_a_step_is_made(client: SFTClient, record: Record):
    with pytest.raises(DataInvalid, match="no rows to validate on"):
        client.fit(ROWS, [], batch_size=2)
    assert record.trained == []


def test_a_loss_that_is_not_finite_makes_the_whole_not_finite():
    def answer(loss: float | None, weight: float) -> ValidateResponse:
        told: dict[str, Any] = {"loss": loss, "perplexity": None, "token_accuracy": 0.0, "supervised_tokens": 1}
        return ValidateResponse(**told, weight=weight, global_steps=1, metrics={})

    assert merge_validations([answer(1.0, 1), answer(None, 1)]).loss is None
    assert merge_validations([answer(1.0, 1), answer(None, 0)]).loss == 1.0
    assert merge_validations([answer(5000.0, 1)]).perplexity is None
    with pytest.raises(DataInvalid, match="no supervised token"):
        merge_validations([answer(None, 0)])


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_saved_in_between_and_hold_what_was_trained_by_then(client: SFTClient, record: Record):
    result = client.fit(ROWS, batch_size=2, save_every=2)
    assert [checkpoint.step for checkpoint in result.checkpoints] == [2, 4, 5]
    assert {checkpoint.state for checkpoint in result.checkpoints} == {"ready"}
    assert result.checkpoint_id == f"lab/exact-sft-{record.job_id}-step5"
    for checkpoint in result.checkpoints:
        assert record.named[checkpoint.name].weights == rows_after(chunks(ROWS, 2)[: checkpoint.step])


def test_a_checkpoint_that_fails_its_verification_fails_the_fit(stack: Stack, client: SFTClient, record: Record):
    stack.verdict = "failed"
    with pytest.raises(CheckpointUnverified, match="step5"):
        client.fit(ROWS, batch_size=2)


def test_a_fit_ends_the_session_unless_told_otherwise(stack: Stack, client: SFTClient):
    first = stack.sessions[client.submit()]
    client.fit(ROWS, batch_size=5)
    assert first.state is SessionState.COMPLETED
    second = stack.sessions[client.submit()]
    client.fit(ROWS, batch_size=5, complete=False)
    assert second.state is SessionState.RUNNING


def test_fit_opens_the_session_that_it_is_told_of(stack: Stack, client: SFTClient):
    client.fit(ROWS, batch_size=4, model="lab/exact", job_id="mine", lora={"lora_rank": 8})
    assert stack.sessions["mine"].weights == rows_after(chunks(ROWS, 4))
    assert stack.sessions["mine"].request.config.model == "lab/exact"
    client.fit(ROWS, batch_size=5, complete=False, model="lab/exact", job_id="next")
    assert stack.sessions["next"].weights == rows_after(chunks(ROWS, 5))
    with pytest.raises(InvalidField, match="model belongs to a session that is yet to be submitted"):
        client.fit(ROWS, batch_size=4, model="lab/other")
    with pytest.raises(InvalidField, match="rank: there is no such field"), SFTClient(stack.url) as other:
        other.fit(ROWS, batch_size=4, rank=8)


def test_fits_of_one_session_follow_each_other(client: SFTClient, record: Record):
    client.fit(ROWS[:4], batch_size=2, complete=False)
    result = client.fit(ROWS[4:], batch_size=2)
    assert record.weights == rows_after(chunks(ROWS, 2))
    assert [step.step for step in result.steps] == [1, 2, 3]


# -- tracking and progress -------------------------------------------------------------------------------------------


def test_a_tracker_is_told_each_step_and_validation_in_order(client: SFTClient, record: Record):
    tracker = Recorder()
    result = client.fit(ROWS, MEASURED, batch_size=5, tracker=tracker)
    assert [(step, sorted(metrics)[0].split("/")[0]) for step, metrics in tracker.logged] == [
        (1, "train"), (2, "train"), (2, "val"),
    ]  # fmt: skip
    assert [metrics["train/loss"] for _, metrics in tracker.logged[:2]] == list(result.losses)
    assert tracker.logged[2][1]["val/loss"] == result.validations[0].loss


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_is_redrawn_on_a_terminal_and_nothing_elsewhere(record: Record, client: SFTClient):
    answer = client.train_step(ROWS[:1])
    shown, silent = Terminal(), io.StringIO()
    for out in (shown, silent):
        progress = Progress(out)
        progress.step(1, 2, answer)
        progress.step(2, 2, answer)
        progress.clear()
    assert silent.getvalue() == ""
    lines = shown.getvalue().split("\r\x1b[K")
    assert lines[1].startswith("[##########..........] step 1/2  loss 0.")
    assert lines[2].startswith("[####################] step 2/2  loss 0.")
    assert "1,000 tokens/s" in lines[2]
    assert lines[-1] == ""


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_bad_row_is_named_by_its_number_in_the_data(client: SFTClient, record: Record):
    rows = [*ROWS[:7], {"bad": 1}, *ROWS]
    with pytest.raises(DataInvalid) as caught:
        client.fit(rows, batch_size=3)
    assert caught.value.row == 7
    assert caught.value.message == "row 7, /bad: this row cannot be used"
    with pytest.raises(DataInvalid) as caught:
        client.evaluate([*MEASURED, {**MEASURED[0], "bad": 1}], batch_size=2)
    assert caught.value.row == 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1, "epochs": 1, "steps": 1}, "steps"),
        ({"batch_size": 1, "save_every": 0}, "save_every"),
        ({"batch_size": 1, "seed": -1}, "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(client: SFTClient, options: dict[str, Any], param: str):
    with pytest.raises(InvalidField) as caught:
        client.fit(ROWS, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("data", "options", "error", "says"),
    [
        ([], {}, DataInvalid, "no rows"),
        (iter([]), {}, DataInvalid, "no rows"),
        (["text"], {}, DataInvalid, "row 0: must be a mapping of column to value, found a string"),
        ([{"n": math.nan}], {}, DataInvalid, "row 0: has no JSON form"),
        (iter([*ROWS[:2], 3]), {}, DataInvalid, "row 2: must be a mapping"),
        ({"prompt": ["a"]}, {}, DataInvalid, "pass a list of rows"),
        (3, {}, DataInvalid, "must be iterable, found int"),
        ("missing.jsonl", {}, FileMissing, "missing.jsonl"),
        ("rows.parquet", {}, DataInvalid, "convert it to one of .jsonl"),
        (iter(ROWS), {"epochs": 2}, InvalidField, "gives its rows once"),
        (iter(ROWS), {"shuffle": True}, InvalidField, "cannot be shuffled"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    client: SFTClient, record: Record, data: Any, options: dict[str, Any], error: type[Exception], says: str
):
    with pytest.raises(error, match=says):
        client.fit(data, batch_size=4, **options)


def test_a_client_without_a_session_says_what_to_do(client: SFTClient):
    with pytest.raises(BadRequest, match="submit one"):
        client.fit(ROWS, batch_size=1)


def test_a_config_that_does_not_fit_is_refused_by_name_and_nothing_is_sent(stack: Stack, client: SFTClient):
    with pytest.raises(InvalidField, match="rank: there is no such field"):
        client.submit(model="m", rank=8)
    with pytest.raises(InvalidField, match=r"lora\.lora_rank"):
        client.submit(lora={"lora_rank": 0})
    assert stack.submits == 0


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_submit_that_is_sent_again_opens_one_session(stack: Stack, client: SFTClient):
    assert client.submit(job_id="mine", seed=1) == "mine"
    assert client.submit(job_id="mine", seed=1) == "mine"
    assert list(stack.sessions) == ["mine"]
    with pytest.raises(Conflict):
        client.submit(job_id="mine", seed=2)


def test_only_what_was_set_is_sent(stack: Stack, client: SFTClient):
    record = stack.sessions[client.submit(SessionConfig(seed=3), lora={"lora_rank": 8})]
    assert record.request.config.seed == 3
    assert record.request.config.lora is not None
    assert record.request.config.lora.lora_rank == 8


def test_waiting_gives_up_when_told_to(stack: Stack, client: SFTClient):
    stack.start_seconds = 60
    with pytest.raises(Unavailable, match=r"does not run after 0\.05 s"):
        client.submit(job_id="slow", timeout=0.05)


def test_a_session_that_fails_says_why(stack: Stack, client: SFTClient, record: Record):
    stack.loop.call_soon_threadsafe(stack.fail, record, "the disk is full")
    with pytest.raises(JobFailure, match="failed: the disk is full"):
        client.fit(ROWS, batch_size=1)


def test_a_session_that_is_cancelled_ends_the_fit(stack: Stack, client: SFTClient, record: Record):
    stack.step_seconds = 0.05
    with SFTClient(stack.url) as other:
        threading.Timer(0.15, other.cancel, [record.job_id]).start()
        with pytest.raises(JobFailure, match="was cancelled"):
            client.fit(ROWS, batch_size=1)
        assert other.job_status(record.job_id).status is SessionState.CANCELLED


def test_sessions_are_listed_without_their_tokens(client: SFTClient, record: Record):
    (listed,) = client.list_jobs()
    assert (listed.job_id, listed.status, listed.server_url) == (record.job_id, SessionState.RUNNING, None)


def test_an_unknown_session_is_not_found(client: SFTClient):
    with pytest.raises(JobNotFound):
        client.job_status("nobody")
    with pytest.raises(JobNotFound):
        client.resume("nobody")


def test_the_scheduler_wants_its_key_and_says_so():
    with running_stack(api_key="s3cret") as stack:
        with SFTClient(stack.url, "wrong", max_retries=0) as client, pytest.raises(Unauthorized):
            client.submit()
        with SFTClient(stack.url, "s3cret") as client:
            client.submit()
            client.fit(ROWS, batch_size=5)


def test_the_token_of_a_session_is_never_logged(stack: Stack, client: SFTClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    record = stack.sessions[client.submit()]
    client.fit(ROWS, batch_size=5)
    assert any(line.name == "httpx" for line in caplog.records)
    assert record.token not in caplog.text


def test_heartbeats_keep_a_session_whose_client_is_slow(stack: Stack, client: SFTClient):
    def slow() -> Iterator[Row]:
        yield ROWS[0]
        time.sleep(2.0)
        yield ROWS[1]

    record = stack.sessions[client.submit(lease_seconds=1)]
    client.fit(slow(), batch_size=1)
    assert record.lives == 1
    assert record.heartbeats >= 5


# -- the low-level calls ---------------------------------------------------------------------------------------------


def test_a_step_is_answered_once_and_a_replay_gets_the_first_answer(client: SFTClient, record: Record):
    first = client.train_step(ROWS[:2], step=1, cursor={"at": 2})
    assert client.train_step(ROWS[:2], step=1, cursor={"at": 2}) == first
    with pytest.raises(Conflict, match="another body"):
        client.train_step(ROWS[2:4], step=1)
    with pytest.raises(InvalidField, match="too far ahead"):
        client.train_step(ROWS[2:4], step=9)
    assert len(record.trained) == 1
    assert client.status().cursor == {"at": 2}


def test_accumulation_under_the_clients_control_equals_one_step_on_all(client: SFTClient, record: Record):
    client.forward_backward(ROWS[:2], step=1)
    client.forward_backward(ROWS[2:4], step=2)
    answer = client.optim_step(step=3, lr=0.5)
    assert (answer.step, answer.global_steps, answer.lr) == (3, 1, 0.5)
    client.save_checkpoint("mine", wait=False)
    batches = [canonical({"rows": rows}) for rows in chunks(ROWS[:4], 2)]
    assert record.weights == folded(INITIAL, batches)


def test_a_checkpoint_can_be_gone_back_to(client: SFTClient, record: Record):
    client.train_step(ROWS[:1], step=1)
    saved = client.save_checkpoint("before").checkpoint
    client.train_step(ROWS[1:2], step=2)
    client.load_checkpoint("before", step=3)
    client.train_step(ROWS[2:3], step=4)
    client.save_checkpoint()
    assert record.weights == rows_after([ROWS[:1], ROWS[2:3]])
    assert [one.name for one in client.checkpoints()] == ["before", "step4"]
    assert saved.identifier.endswith("-before")
    with pytest.raises(CheckpointNotFound):
        client.load_checkpoint("nothing")


def test_the_small_calls_answer(client: SFTClient, record: Record):
    assert client.health().status == "healthy"
    assert client.heartbeat().next_step == 1
    assert client.validate(MEASURED[:1]).loss == 1.0
    assert client.complete().status is SessionState.COMPLETED


def test_a_batch_is_given_in_one_form(client: SFTClient, record: Record):
    with pytest.raises(InvalidField, match="exactly one form"):
        client.train_step()
    with pytest.raises(InvalidField, match="exactly one form"):
        client.train_step(ROWS, sequences=[{"tokens": [1, 2]}])


def test_a_client_reaches_a_session_that_another_one_opened(stack: Stack, record: Record):
    with SFTClient(stack.url, max_retries=0, poll_seconds=0.01) as other:
        other.attach(record.job_id)
        assert other.status().job_id == record.job_id

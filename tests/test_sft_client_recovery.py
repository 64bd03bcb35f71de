"""Servers that die, answers that are lost, clients that stop: the weights are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apis.errors import BadRequest, Conflict, DataInvalid, JobFailure, Unavailable
from apis.sft_sessions.models import SessionState
from post_training.client import SFTClient
from tests.sft_contract_parts import Weights, rows_after
from tests.sft_contract_server import Record, Stack, down, kill, running_stack

Row = dict[str, Any]
ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(20)]
BATCHES = [ROWS[begin : begin + 2] for begin in range(0, 20, 2)]
UNDISTURBED = rows_after(BATCHES)
VALIDATION = [{"loss": 1.0, "weight": 1.0, "tokens": 1, "right": 1}]

DATA: dict[str, Callable[[], Any]] = {
    "rows that can be picked": lambda: ROWS,
    "rows that come once": lambda: iter(ROWS),
    "a function": lambda: lambda: iter(ROWS),
}


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        stack.step_seconds = 0.005
        yield stack


def connect(stack: Stack, **options: Any) -> SFTClient:
    return SFTClient(stack.url, **{"max_retries": 0, "poll_seconds": 0.01, "outage_seconds": 10, **options})


@pytest.fixture
def client(stack: Stack) -> Iterator[SFTClient]:
    with connect(stack) as client:
        yield client


def submitted(stack: Stack, client: SFTClient, **fields: Any) -> Record:
    return stack.sessions[client.submit(**{"save_every_n_steps": 3, **fields})]


KILLS = [(number, when, "rows that come once") for number in (1, 3, 6, 10) for when in ("before", "after")]


@pytest.mark.parametrize(("number", "when", "data"), [*KILLS, *((5, "after", form) for form in DATA)])
def test_a_server_that_is_killed_at_a_step_changes_nothing(
    stack: Stack, client: SFTClient, number: int, when: str, data: str
):
    record = submitted(stack, client)
    stack.faults[when, number] = kill
    result = client.fit(DATA[data](), batch_size=2)
    assert record.lives == 2
    assert record.weights == UNDISTURBED
    assert [step.step for step in result.steps] == list(range(1, 11))
    assert [step.loss for step in result.steps] == undisturbed_losses()


def test_an_answer_that_is_lost_for_good_is_the_only_thing_missing(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    stack.keep_answers = False
    stack.faults["after", 6] = kill
    result = client.fit(ROWS, batch_size=2)
    assert record.weights == UNDISTURBED
    assert [step.loss for step in result.steps] == [*undisturbed_losses()[:5], None, *undisturbed_losses()[6:]]


def undisturbed_losses() -> list[float]:
    return [int(rows_after(BATCHES[: n + 1])[:8], 16) / 2**32 for n in range(10)]


def test_a_server_that_dies_again_and_again_changes_nothing(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    for number in (2, 4, 5, 7, 9):
        stack.faults["after", number] = kill
    client.fit(iter(ROWS), batch_size=2)
    assert record.lives == 6
    assert record.weights == UNDISTURBED


def test_what_was_never_durable_is_trained_again_from_the_start(stack: Stack, client: SFTClient):
    record = submitted(stack, client, save_every_n_steps=1000)
    stack.faults["after", 9] = kill
    client.fit(iter(ROWS), batch_size=2)
    assert record.weights == UNDISTURBED
    assert [number for number, _ in record.trained] == [*range(1, 10), *range(1, 11)]


async def lose_checkpoints(stack: Stack) -> None:
    """A fault: the training servers die, and what they saved turns out to be damaged."""
    for record in stack.sessions.values():
        record.durable = Weights()
    await kill(stack)


@pytest.mark.parametrize("form", ["rows that can be picked", "a function"])
def test_checkpoints_that_are_lost_as_well_are_made_again_from_rows_that_can_be_read_again(
    stack: Stack, client: SFTClient, form: str
):
    record = submitted(stack, client)
    stack.faults["after", 8] = lose_checkpoints
    client.fit(DATA[form](), batch_size=2, steps=10)
    assert record.weights == UNDISTURBED
    assert [number for number, _ in record.trained] == [*range(1, 9), *range(1, 11)]


def test_checkpoints_that_are_lost_as_well_as_the_rows_are_an_error_that_says_so(stack: Stack, client: SFTClient):
    submitted(stack, client)
    stack.faults["after", 8] = lose_checkpoints
    with pytest.raises(DataInvalid, match="step 1 of the fit is to be sent again, for the session went back"):
        client.fit(iter(ROWS), batch_size=2)


@pytest.mark.parametrize("number", [4, 10])
def test_a_server_that_dies_after_it_saved_a_checkpoint_saves_it_once(stack: Stack, client: SFTClient, number: int):
    record = submitted(stack, client)
    stack.faults["saved", number] = kill
    result = client.fit(ROWS, batch_size=2, save_every=4)
    assert record.weights == UNDISTURBED
    assert [checkpoint.step for checkpoint in result.checkpoints] == [4, 8, 10]
    assert [checkpoint.step for checkpoint in record.checkpoints] == [4, 8, 10]


def test_a_validation_is_made_of_the_weights_it_is_due_for_also_after_a_loss(stack: Stack, client: SFTClient):
    record = submitted(stack, client, save_every_n_steps=1000)
    stack.faults["after", 5] = kill
    result = client.fit(ROWS, VALIDATION, batch_size=2, validate_every=5)
    assert [(one.step, one.global_steps) for one in result.validations] == [(5, 5), (10, 10)]
    assert record.weights == UNDISTURBED


def test_scheduler_and_server_that_are_away_together_are_waited_for(stack: Stack):
    with connect(stack, max_retries=2) as client:
        record = submitted(stack, client)
        stack.faults["before", 5] = down(0.3)
        client.fit(ROWS, batch_size=2)
    assert record.weights == UNDISTURBED


def test_a_scheduler_that_stays_away_ends_the_fit_with_the_reason(stack: Stack):
    with connect(stack, outage_seconds=0.2) as client:
        submitted(stack, client)
        stack.faults["before", 5] = down(60)
        with pytest.raises(Unavailable, match="cannot reach"):
            client.fit(ROWS, batch_size=2)


def test_a_server_that_never_gets_over_a_step_ends_the_fit(stack: Stack, client: SFTClient):
    stack.notice_seconds = 0

    async def always(stack: Stack) -> None:
        stack.faults["before", 3] = always
        stack.kill()

    submitted(stack, client)
    stack.faults["before", 3] = always
    with pytest.raises(Unavailable):
        client.fit(ROWS, batch_size=2)


def test_a_session_that_fails_meanwhile_ends_the_fit(stack: Stack, client: SFTClient):
    record = submitted(stack, client)

    async def fail(stack: Stack) -> None:
        stack.fail(record, "the worker died three times")

    stack.faults["before", 3] = fail
    with pytest.raises(JobFailure, match="died three times"):
        client.fit(ROWS, batch_size=2)


def test_a_fit_does_not_resend_what_it_never_sent(stack: Stack, client: SFTClient):
    submitted(stack, client, save_every_n_steps=1000)
    client.train_step(ROWS[:1], step=1)
    stack.faults["before", 4] = kill
    with pytest.raises(JobFailure, match="went back to step 1, before the first of this fit"):
        client.fit(ROWS, batch_size=2)


# -- clients that stop -----------------------------------------------------------------------------------------------


def interrupting(after: int) -> Iterator[Row]:
    """Rows, and Ctrl-C before row `after`."""
    for n, row in enumerate(ROWS):
        if n == after:
            signal.raise_signal(signal.SIGINT)
        yield row


@pytest.mark.parametrize("after", [1, 6, 13])
def test_ctrl_c_saves_a_checkpoint_and_the_session_can_be_resumed(
    stack: Stack, client: SFTClient, after: int, capsys: pytest.CaptureFixture[str]
):
    record = submitted(stack, client, save_every_n_steps=1000)
    with pytest.raises(KeyboardInterrupt):
        client.fit(interrupting(after), batch_size=2)
    steps = after // 2
    assert [checkpoint.step for checkpoint in record.checkpoints] == ([steps] if steps else [])
    assert record.weights == rows_after(BATCHES[:steps])
    wait_for(lambda: record.paused)
    assert record.state is SessionState.QUEUED
    assert "Ctrl-C again" in capsys.readouterr().err
    result = client.fit(iter(ROWS), batch_size=2, resume=record.job_id)
    assert record.weights == UNDISTURBED
    assert [step.step for step in result.steps] == list(range(steps + 1, 11))
    assert result.total_steps == 10


def test_ctrl_c_while_an_answer_is_waited_for_loses_nothing(stack: Stack, client: SFTClient):
    stack.step_seconds = 0.1
    record = submitted(stack, client)
    threading.Timer(0.35, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        client.fit(ROWS, batch_size=2)
    done = record.durable.number
    assert record.checkpoints[-1].step == done
    assert 0 < done < 10
    stack.step_seconds = 0
    client.fit(ROWS, batch_size=2, resume=record.job_id)
    assert record.weights == UNDISTURBED
    assert [number for number, _ in record.trained] == list(range(1, 11))


def test_ctrl_c_while_the_session_waits_for_a_device_cancels_what_fit_has_opened(stack: Stack, client: SFTClient):
    stack.start_seconds = 60
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        client.fit(ROWS, batch_size=2, job_id="opened")
    assert stack.sessions["opened"].state is SessionState.CANCELLED


def test_ctrl_c_while_the_session_waits_for_a_device_leaves_one_that_was_submitted_before(
    stack: Stack, client: SFTClient
):
    stack.start_seconds = 60
    client.submit(job_id="before", wait=False)
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        client.fit(ROWS, batch_size=2)
    assert stack.sessions["before"].state is SessionState.STARTING


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


CLIENT = """
import sys, time
from post_training.client import SFTClient
rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(20)]
def slowly():
    for n, row in enumerate(rows):
        if n == 11:
            time.sleep(60)
        yield row
with SFTClient(sys.argv[1], poll_seconds=0.01) as client:
    client.submit(job_id="killed", lease_seconds=1, save_every_n_steps=1000)
    client.fit(slowly(), batch_size=2)
"""


def test_a_client_that_is_killed_loses_its_device_and_another_one_goes_on(stack: Stack, client: SFTClient):
    process = subprocess.Popen([sys.executable, "-c", CLIENT, stack.url])
    try:
        wait_for(lambda: "killed" in stack.sessions and len(stack.sessions["killed"].trained) == 5, 60)
    finally:
        process.kill()
        process.wait()
    record = stack.sessions["killed"]
    wait_for(lambda: record.paused)
    result = client.fit(iter(ROWS), batch_size=2, resume="killed")
    assert record.lives == 2
    assert record.weights == UNDISTURBED
    assert [number for number, _ in record.trained] == list(range(1, 11))
    assert result.steps[0].step == 6


def test_a_session_that_lost_its_lease_meanwhile_is_resumed_by_fit(stack: Stack, client: SFTClient):
    record = submitted(stack, client)

    async def pause(stack: Stack) -> None:
        assert record.server is not None
        record.server.save()
        stack.pause(record)

    stack.faults["before", 6] = pause
    client.fit(ROWS, batch_size=2)
    assert record.lives == 2
    assert record.weights == UNDISTURBED


# -- what cannot be resumed ------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(stack: Stack, client: SFTClient) -> Record:
    """A session whose fit was interrupted after three steps."""
    record = submitted(stack, client)
    with pytest.raises(KeyboardInterrupt):
        client.fit(Interrupting(ROWS), batch_size=2)
    return record


class Interrupting(list[Row]):
    """A list that is interrupted when its row 6 is read for the second time; the first is for its hash."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += index == 6
        if index == 6 and self.reads == 2:
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)


def test_other_rows_are_refused(client: SFTClient, stopped: Record):
    other = [*ROWS[:7], {"prompt": "another", "completion": "row"}, *ROWS[8:]]
    for data in (other, ROWS[:-1], ROWS[::-1]):
        with pytest.raises(DataInvalid, match="not the rows"):
            client.fit(data, batch_size=2, resume=stopped.job_id)
    client.fit(ROWS, batch_size=2, resume=stopped.job_id)
    assert stopped.weights == UNDISTURBED


def test_rows_that_come_once_are_checked_as_far_as_they_were_used(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    with pytest.raises(KeyboardInterrupt):
        client.fit(interrupting(7), batch_size=2)
    for data in (ROWS[1:], ROWS[:3], [*ROWS[:5], ROWS[0], *ROWS[6:]]):
        with pytest.raises(DataInvalid, match="not the rows"):
            client.fit(iter(data), batch_size=2, resume=record.job_id)


@pytest.mark.parametrize(
    ("options", "param"), [({"batch_size": 4}, "batch_size"), ({"batch_size": 2, "shuffle": True}, "shuffle")]
)
def test_other_batches_of_the_same_rows_are_refused(
    client: SFTClient, stopped: Record, options: dict[str, Any], param: str
):
    with pytest.raises(BadRequest) as caught:
        client.fit(ROWS, resume=stopped.job_id, **options)
    assert caught.value.param == param


def test_a_session_that_was_driven_by_hand_says_nothing_of_its_place(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    client.train_step(ROWS[:2], step=1)
    with pytest.raises(BadRequest, match="was not trained by fit"):
        client.fit(ROWS, batch_size=2, resume=record.job_id)


def test_a_session_that_has_ended_is_not_resumed(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    client.fit(ROWS, batch_size=2)
    with pytest.raises(Conflict, match="has ended"):
        client.fit(ROWS, batch_size=2, resume=record.job_id)


def test_a_resumed_shuffle_goes_on_in_its_order(stack: Stack, client: SFTClient):
    options: dict[str, Any] = {"batch_size": 3, "epochs": 3, "shuffle": True, "seed": 5}
    record = submitted(stack, client)
    with pytest.raises(KeyboardInterrupt):
        client.fit(Interrupting(ROWS), **options)
    client.fit(ROWS, resume=record.job_id, **options)
    other = submitted(stack, client)
    client.fit(ROWS, **options)
    assert record.weights == other.weights


def test_a_fit_resumed_at_the_end_of_an_epoch_skips_none(stack: Stack, client: SFTClient):
    record = submitted(stack, client)
    stops = iter([10])

    def rows() -> Iterator[Row]:
        yield from ROWS
        if next(stops, None):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        client.fit(rows, batch_size=2, epochs=2)
    assert record.durable.number == 10
    client.fit(rows, batch_size=2, epochs=2, resume=record.job_id)
    assert record.weights == rows_after(BATCHES * 2)


def test_a_fit_that_was_interrupted_after_its_last_step_is_saved_and_completed(stack: Stack, client: SFTClient):
    record = submitted(stack, client)

    async def interrupt(stack: Stack) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    stack.faults["after", 10] = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.fit(ROWS, batch_size=2)
    result = client.fit(ROWS, batch_size=2, resume=record.job_id)
    assert record.state is SessionState.COMPLETED
    assert record.weights == UNDISTURBED
    assert result.total_steps == 10
    assert result.steps == ()

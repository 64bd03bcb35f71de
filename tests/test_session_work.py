"""What a full disk does to a session, whose calls are done here in the test's own process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from apis.errors import Conflict, DiskFull
from post_training.checkpoints.space import free_bytes
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import tokenize_dataset
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import JobSpec, SessionSettings
from post_training.session_tokens import token_digest
from post_training.worker import session_process
from post_training.worker.announcing import Announcer
from post_training.worker.loading import checkpoint_size, load, trainer_of
from post_training.worker.progress import ProgressReport
from post_training.worker.saving import Saver
from post_training.worker.session_calls import Call, CallQueue
from post_training.worker.session_messages import SaveWork, StepWork
from post_training.worker.session_process import SessionServer
from post_training.worker.session_state import Boundary, Session
from post_training.worker.session_work import do
from tests.job_bench import Bench, FaultyLease, rows, sigterm_kept
from tests.tiny_llama import save_tiny_llama


@dataclass
class Opened:
    """A session, and what goes wrong with it: `disk_is_full` for checkpoints, `store_is_full` for what steps tell."""

    session: Session
    data: list[TokenizedRow]
    disk_is_full: bool = False
    store_is_full: bool = False

    def call(self, kind: str, work: Any, number: int | None = None) -> Future[dict[str, Any]]:
        queue = self.session.calls
        answer = queue.submit(Call(kind, work, changes=number is not None, number=number, digest=f"{number}"))
        taken = queue.take(0)
        assert taken is not None
        do(self.session, taken)
        return answer

    def step(self, number: int) -> Future[dict[str, Any]]:
        return self.call("train_step", StepWork(self.data), number)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


def tokenized(base: Path) -> list[TokenizedRow]:
    return list(tokenize_dataset(rows(2), ChatTokenizer.from_dir(base), None, False, 96).rows)


@pytest.fixture
def opened(tmp_path: Path, base: Path) -> Iterator[Opened]:
    bench = Bench(tmp_path / "home", base, model_module="providers.torchtune.model")
    settings = SessionSettings(token_sha256=token_digest("t"), lease_seconds=300, window=4)
    spec: JobSpec = bench.submit("s", rows(1)).model_copy(update={"dataset": None, "session": settings})
    made: list[Opened] = []

    def at(name: str, step: int | None) -> None:
        if made and made[0].store_is_full and name == "update" and step is not None:
            raise DiskFull("no room in the store")

    def free(path: Path) -> int:
        return 0 if made and made[0].disk_is_full else free_bytes(path)

    with sigterm_kept(), FaultyLease(bench.store, bench.claim(), at) as lease:
        trainer = trainer_of(lease, spec, load(lease, spec, "cpu", None).model, 1)
        with Announcer(lease, spec, bench.home) as announcer:
            saver = Saver(lease, spec, bench.home, checkpoint_size(spec, trainer), announcer, free)
            report, calls = ProgressReport(lease), CallQueue(window=4)
            session = Session(lease, spec, bench.home, trainer, saver, report, calls, Boundary())
            made.append(Opened(session, tokenized(base)))
            yield made[0]
    bench.store.database.close()


def test_a_save_without_room_is_an_answer_and_the_session_goes_on(opened: Opened):
    opened.step(1).result(0)
    opened.disk_is_full = True
    with pytest.raises(DiskFull, match="are free"):
        opened.call("save_checkpoint", SaveWork("kept", wait=False)).result(0)
    assert opened.step(2).result(0)["global_steps"] == 2
    opened.disk_is_full = False
    saved = opened.call("save_checkpoint", SaveWork("kept", wait=False)).result(0)
    assert (saved["checkpoint"]["step"], opened.session.durable) == (2, 2)


@pytest.mark.parametrize("announced", [False, True])
def test_a_damaged_checkpoint_is_written_anew_when_its_step_is_saved_again(opened: Opened, announced: bool):
    session = opened.session
    opened.step(1).result(0)
    opened.call("save_checkpoint", SaveWork("kept", wait=False)).result(0)
    if announced:
        session.saver.announce(session.unverified.popleft(), session.report.progress, last=True)
    (row,) = session.rows()
    file = session.home / row.path / "adapter" / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    saved = opened.call("save_checkpoint", SaveWork("kept", wait=False)).result(0)
    assert file.read_bytes() == content
    assert saved["checkpoint"]["state"] == ("ready" if announced else "verifying")
    assert [row.name for row in session.unverified] == ["kept"] if announced else ["kept", "kept"]


def test_a_step_that_is_saved_keeps_its_name_when_it_is_saved_without_one(opened: Opened):
    opened.step(1).result(0)
    opened.call("save_checkpoint", SaveWork("mine", wait=False)).result(0)
    assert opened.call("save_checkpoint", SaveWork(None, wait=False)).result(0)["checkpoint"]["name"] == "mine"
    with pytest.raises(Conflict, match="step 1 is saved already, as 'mine'"):
        opened.call("save_checkpoint", SaveWork("other", wait=False)).result(0)


def healthy(server: SessionServer) -> bool:
    return httpx.get(f"{server.url}/api/v1/health", timeout=10).status_code == 200


def test_a_training_server_that_dies_before_it_is_opened_is_started_again(opened: Opened):
    with SessionServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        server.open(opened.session)
        assert healthy(server)


def test_a_training_server_that_hangs_is_replaced(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_process, "HUNG_SECONDS", 1.0)
    monkeypatch.setattr(session_process, "LOOK_SECONDS", 0.1)
    with SessionServer() as server:
        server.open(opened.session)
        assert server.silent_for() > 0
        os.kill(server.pid, signal.SIGSTOP)
        assert server.silent_for() == 0.0
        assert server.alive  # it may be busy
        time.sleep(1.1)
        assert not server.alive
        before = server.url
        server.start_again(opened.session)
        assert server.alive
        assert server.url != before
        assert healthy(server)


def test_a_step_that_was_made_is_never_given_back_to_be_made_again(opened: Opened):
    opened.step(1).result(0)
    opened.store_is_full = True
    with pytest.raises(DiskFull):
        opened.step(2)  # out of the session, which ends, and not into an answer that asks for the step again
    assert opened.session.trainer.step == 2
    assert opened.session.calls.done == 1

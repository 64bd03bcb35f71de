"""A session in its worker: from its model to its end. `session_work.py` does the client's calls, one after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sqlalchemy.orm import Session as StoreSession

from apis.errors import Conflict, DiskFull, NothingTrained, PostgradError, Unavailable
from apis.post_training.models import JobStatus
from post_training.checkpoints.space import FreeBytes, check_start, free_bytes
from post_training.checkpoints.state import restore_rng
from post_training.jobs.moves import find_job
from post_training.jobs.spec import JobSpec
from post_training.sessions import SERVER
from post_training.training.interruption import Interrupted
from post_training.training.trainer import Trainer
from post_training.worker.announcing import Announcer
from post_training.worker.epochs import SaveTimer
from post_training.worker.keeping import discard_unannounced, release_room, unproven
from post_training.worker.lease import Lease
from post_training.worker.loading import checkpoint_size, load, trainer_of
from post_training.worker.progress import ProgressReport, peak_bytes
from post_training.worker.resume import CURSOR, find_resume_point
from post_training.worker.saving import Saver
from post_training.worker.session_calls import CallQueue
from post_training.worker.session_process import SessionServer
from post_training.worker.session_state import Boundary, Session, answers_of
from post_training.worker.session_work import default_name, do, save_named, save_to_resume, saved_answer

logger = logging.getLogger(__name__)

End = Callable[[Session], None]
"""Stores how a session ended."""
LOOK_SECONDS = 0.2
"""Between two looks at the lease and at the client's silence, where no call comes."""
STORE_LOOK_SECONDS = 1.0
"""Between two looks whether the scheduler was asked to complete the session."""


def run_session(
    lease: Lease, spec: JobSpec, home: Path, *, device: str | None = None, free: FreeBytes = free_bytes
) -> None:
    """Serve a session until its client completes it or falls silent, and store how it ended.

    Args:
        device, free: as for `run_job`.

    Raises:
        Interrupted: the lease said stop. On a stop by the server all that was done is saved.
        PostgradError: why the session failed.
    """
    report = ProgressReport(lease)
    with SessionServer() as server:
        trainer = _load(lease, spec, home, device, report, free)
        with Announcer(lease, spec, home) as announcer:
            size = checkpoint_size(spec, trainer)
            check_start(home, size, after=1, inside=2, free=free)
            saver = Saver(lease, spec, home, size, announcer, free)
            session = _resumed(lease, spec, home, trainer, saver, report)
            server.open(session)
            try:
                _Serving(session, server).run()(session)
            except BaseException as error:
                session.calls.end(_why(error, lease))
                raise
            for call in session.completing:
                call.answer.set_result({"message": "the session is completed"})
            for call in session.pausing:
                call.answer.set_result({"message": f"the session is paused, saved at step {session.durable}"})
            session.calls.end(Unavailable("the session is over on this server; ask the scheduler for its status"))


def _load(
    lease: Lease, spec: JobSpec, home: Path, device: str | None, report: ProgressReport, free: FreeBytes
) -> Trainer:
    assert spec.session is not None
    report.phase("load_model")
    check_start(home, checkpoint_size(spec), after=1, inside=0, free=free)
    loaded = load(lease, spec, device, None)
    total = spec.session.total_steps
    report.progress.total_steps = total
    lease.update(
        progress=report.progress,
        resources=loaded.resources,
        report={**spec.session.labels, **loaded.facts, "seed": spec.seed, "lr": spec.lr},
        message=loaded.message,
    )
    return trainer_of(lease, spec, loaded.model, total or 1)


def _resumed(
    lease: Lease, spec: JobSpec, home: Path, trainer: Trainer, saver: Saver, report: ProgressReport
) -> Session:
    """The session as its newest usable checkpoint has it, or from the beginning."""
    assert spec.session is not None
    torch.manual_seed(spec.seed)  # the first attempt's; a later one takes the checkpoint's states
    found = find_resume_point(lease, home)
    if found is None:
        return Session(lease, spec, home, trainer, saver, report, CallQueue(spec.session.window), Boundary())
    place = found.meta[CURSOR]
    trainer.load_state(found.tensors, found.meta)
    restore_rng(found.tensors)
    report.progress = found.progress
    boundary = Boundary.at(place, found.tensors)
    calls = CallQueue(spec.session.window, boundary.number, answers_of(place))
    session = Session(lease, spec, home, trainer, saver, report, calls, boundary, boundary.number)
    session.unverified.extend(unproven(session.rows()))
    message = f"resumed from the checkpoint of step {boundary.number}: {trainer.step} updates done"
    lease.update(progress=report.progress, message=message)
    return session


class _Serving:
    """The time in which a session's server answers."""

    def __init__(self, session: Session, server: SessionServer) -> None:
        assert session.spec.session is not None
        self._session = session
        self._server = server
        self._settings = session.spec.session
        self._timer = SaveTimer(session.spec.training_config.save_every_n_steps)
        self._looked_at = 0.0
        self._asked_to_complete = False

    def run(self) -> End:
        """Do calls until the session ends, and say how."""
        lease = self._session.lease
        self._session.report.phase("serve")
        self._tell_where("the training server answers: its client may begin")
        self._timer.restart()
        try:
            while True:
                if (outcome := self._turn()) is not None:
                    return outcome
        except Interrupted:
            if lease.stop_reason == "stopped":
                self._save_before_going()
            raise

    def _tell_where(self, message: str) -> None:
        lease = self._session.lease
        attempt = lease.store.get(lease.job_uuid).attempt
        lease.update(resources={SERVER: {"url": self._server.url, "attempt": attempt}}, message=message)

    def _turn(self) -> End | None:
        """One call, if one comes soon, and all that is to be looked after between two calls."""
        session = self._session
        if session.lease.should_stop():
            raise Interrupted
        if not self._server.alive:
            self._server.start_again(session)
            self._tell_where("the training server died and was started again, at another address")
        call = session.calls.take(LOOK_SECONDS)
        if call is not None:
            do(session, call)
            if call.changes and not session.trainer.gradients_wait and self._timer.due(session.trainer.step):
                self._save_inside()
        self._settle()
        if not session.calls.idle:
            return None
        if self._to_be_completed():
            return self._completed()
        if (why := self._why_pause()) is not None:
            self._save_before_going()
            return lambda session: _store_paused(session, why)
        return None

    def _why_pause(self) -> str | None:
        if self._session.pausing:
            return "paused by its client"
        if self._server.revoked():
            return "the API key that it belongs to was revoked"
        seconds = self._settings.lease_seconds
        return f"its client was silent for {seconds:g} s" if self._server.silent_for() > seconds else None

    def _save_inside(self) -> None:
        began = time.monotonic()
        try:
            save_to_resume(self._session)
            message = f"saved step {self._session.durable} in {time.monotonic() - began:.1f} s"
        except DiskFull as error:
            message = f"step {self._session.boundary.number} was not saved: {error.message}"
        self._timer.saved(time.monotonic() - began)
        self._session.lease.update(message=message)

    def _settle(self) -> None:
        """Announce what has been verified, begin to verify what comes next, and answer those who waited for it."""
        session, announcer = self._session, self._session.saver.announcer
        announcer.settle()
        if not announcer.busy and session.unverified:
            row = session.unverified.popleft()
            session.saver.announce(row, session.report.progress, last=False)
        if session.awaited:
            self._answer_saves()

    def _answer_saves(self) -> None:
        session = self._session
        ready = {row.step: row for row in session.rows() if row.announced_at is not None}
        for number, call in list(session.awaited):
            if number in ready:
                session.awaited.remove((number, call))
                session.calls.finish(call, saved_answer(session, ready[number]))

    def _to_be_completed(self) -> bool:
        session = self._session
        if not self._asked_to_complete and time.monotonic() - self._looked_at >= STORE_LOOK_SECONDS:
            self._looked_at = time.monotonic()
            job = session.lease.store.get(session.spec.job_uuid)
            self._asked_to_complete = job.completion_requested_at is not None
        return self._asked_to_complete or bool(session.completing)

    def _completed(self) -> End:
        """Save what is not saved, and wait until all is announced."""
        session = self._session
        if session.report.progress.supervised_tokens_seen == 0:
            raise NothingTrained(
                "the session was completed before any step had a supervised token and changed a weight"
            )
        save_named(session, default_name(session))
        while session.unverified or session.saver.announcer.busy:
            session.saver.announcer.wait(session.report.progress)
            self._settle()
        self._answer_saves()
        return _store_completed

    def _save_before_going(self) -> None:
        """Save the newest step; else the session goes on from an older one, and its client sends the rest again."""
        try:
            save_to_resume(self._session)
        except (PostgradError, OSError) as error:
            if self._session.lease.stop_reason == "lost":
                raise
            logger.warning("step %d could not be saved: %s", self._session.boundary.number, error)


def _store_completed(session: Session) -> None:
    """End the session with success. Raises LeaseLost."""
    lease = session.lease
    lease.update(resources={"peak_memory_bytes": peak_bytes()})
    release_room(lease, session.home)
    discard_unannounced(lease, session.home)
    lease.finish(JobStatus.completed, "completed by its client")


def _store_paused(session: Session, why: str) -> None:
    """Give the device back until the client resumes the session. Raises LeaseLost."""
    lease = session.lease
    release_room(lease, session.home)

    def pause(store: StoreSession) -> None:
        job = find_job(store, lease.job_uuid)
        job.paused = job.completion_requested_at is None  # else it takes a device once more, to be completed

    lease.finish(JobStatus.scheduled, f"{why}; saved at step {session.durable}", also=pause)


def _why(error: BaseException, lease: Lease) -> PostgradError:
    """What calls are answered with that a session's end leaves open."""
    if lease.stop_reason == "cancelled":
        return Conflict("the session was cancelled")
    if isinstance(error, Interrupted):
        return Unavailable("the server stops: the session goes on with the next one, from its newest checkpoint")
    if isinstance(error, PostgradError):
        return Unavailable(f"the session failed: {error.message}")
    return Unavailable("the session's worker failed; the scheduler's status says more")

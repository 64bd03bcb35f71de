"""What each call of a session's client does, and its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from apis.errors import BadRequest, CheckpointNotFound, Conflict, DiskFull, ModelInvalid
from apis.post_training.models import PostTrainingMetric
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.layout import TRAINING_STATE, check_files
from post_training.checkpoints.state import load_training_state, masters_of, restore_rng
from post_training.data.batching import micro_batches
from post_training.data.types import FlatBatch, TokenizedRow
from post_training.jobs.tables import CheckpointRow
from post_training.training.trainer import StepResult
from post_training.worker.announcing import session_id
from post_training.worker.progress import finite
from post_training.worker.saving import Snapshot
from post_training.worker.session_calls import Answer, Call
from post_training.worker.session_messages import LoadWork, SaveWork, StepWork, UpdateWork
from post_training.worker.session_state import Session


def do(session: Session, call: Call) -> None:
    """Do one call and answer it, now or later.

    What is wrong with a call is its answer, and its number is free again. A save that finds no room can be tried again;
    a step whose numbers find none in the store was made, and ends the session.

    Raises:
        PostgradError, Interrupted: what ends the session.
    """
    try:
        answer = _WORK[call.kind](session, call)
    except (BadRequest, CheckpointNotFound, DiskFull) as error:
        if call.changes and isinstance(error, DiskFull):
            raise
        session.calls.refuse(call, error)
        return
    if answer is None:
        session.calls.put_off(call)
    else:
        session.calls.finish(call, answer)


def save_named(session: Session, name: str, validation_loss: float | None = None) -> CheckpointRow:
    """Save the session's newest boundary under a name, to be verified and announced.

    One that is saved already stays, unless its files are damaged: then it is written anew.

    Raises:
        BadRequest: nothing was trained, or the name or the place is taken by another checkpoint.
        DiskFull, LeaseLost, ModelInvalid.
    """
    boundary = session.boundary
    identifier = session_id(session.spec, name)
    known = _known(session, name)
    if known is not None and _intact(session, known):
        return known
    if session.report.progress.supervised_tokens_seen == 0:
        raise BadRequest("nothing has been trained yet: call train_step before save_checkpoint", param="name")
    if known is None:
        ModelCatalog(session.lease.store.database, session.home).refuse_taken([identifier])
    loss = boundary.loss / boundary.weight if boundary.weight else session.report.progress.loss
    metric = PostTrainingMetric(epoch=0, train_loss=loss or 0.0, validation_loss=validation_loss)
    row = session.saver.save_named(_snapshot(session, metric, name))
    boundary.loss = boundary.weight = 0.0
    session.durable = boundary.number
    session.unverified.append(row)
    return row


def _known(session: Session, name: str) -> CheckpointRow | None:
    """The checkpoint of the newest boundary under this name. Raises Conflict where either has another one."""
    number = session.boundary.number
    for row in session.rows():
        if row.name == name and row.step == number:
            return row
        if row.name == name:
            raise Conflict(f"there is a checkpoint {name!r} of step {row.step}: choose another name", param="name")
        if row.name is not None and row.step == number:
            raise Conflict(f"step {row.step} is saved already, as {row.name!r}", param="name")
    return None


def _intact(session: Session, row: CheckpointRow) -> bool:
    try:
        check_files(session.home / row.path)
    except ModelInvalid:
        return False
    return True


def save_to_resume(session: Session) -> None:
    """Save the newest boundary for the session alone, unless a checkpoint holds it. Raises as `save_named`."""
    if session.boundary.number > session.durable:
        session.saver.save_inside(_snapshot(session, None, None))
        session.durable = session.boundary.number


def default_name(session: Session) -> str:
    """By the updates that were made, unless this step is saved under a name already.

    After going back to a checkpoint there may be another of as many updates; then by the call.
    """
    name, number = f"step{session.trainer.step}", session.boundary.number
    names = {row.step: row.name for row in session.rows() if row.name is not None}
    if number in names:
        return names[number]
    return f"{name}_call{number}" if name in names.values() else name


def told(session: Session, row: CheckpointRow) -> Answer:
    """A checkpoint with a name, as clients see it."""
    assert row.name is not None
    return {
        "name": row.name,
        "identifier": session_id(session.spec, row.name),
        "step": row.step,
        "global_steps": (row.metrics or {}).get("global_steps", row.step),
        "state": "verifying" if row.announced_at is None else "ready",
        "created_at": row.created_at.isoformat(),
    }


def saved_answer(session: Session, row: CheckpointRow) -> Answer:
    checkpoint = told(session, row)
    result = {"global_steps": checkpoint["global_steps"], "checkpoint_dir": checkpoint["identifier"], "name": row.name}
    return {"checkpoint": checkpoint, "result": result}


def _snapshot(session: Session, metric: PostTrainingMetric | None, name: str | None) -> Snapshot:
    boundary = session.boundary
    place, progress = boundary.place(session.calls), session.report.progress
    return Snapshot(session.trainer, 0, boundary.number, place, progress, boundary.rng, metric, name)


# -- each kind of call ------------------------------------------------------------------------------------------------


def _train_step(session: Session, call: Call) -> Answer:
    if session.trainer.gradients_wait:
        raise Conflict("gradients wait for optim_step: call that before train_step", param="step")
    work: StepWork = call.work
    return _stepped(session, call, session.trainer.train_step(_batches(session, work.rows), lr=work.lr))


def _optim_step(session: Session, call: Call) -> Answer:
    if not session.trainer.gradients_wait:
        raise Conflict("no gradients wait: call forward_backward before optim_step", param="step")
    work: UpdateWork = call.work
    return _stepped(session, call, session.trainer.optim_step(lr=work.lr))


def _stepped(session: Session, call: Call, result: StepResult) -> Answer:
    session.boundary.advance(_number(call), call.work.cursor, result)
    session.report.step(result, 0, session.trainer.model.device)
    session.boundary.check(_number(call))
    metrics = {"train/loss": result.loss, "train/grad_norm": result.grad_norm, "train/lr": result.lr}
    return {
        **_common(session, call, metrics),
        "loss": finite(result.loss),
        "grad_norm": finite(result.grad_norm),
        "lr": result.lr,
        "tokens": result.tokens,
        "supervised_tokens": result.supervised_tokens,
        "weight": result.weight,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "skipped": result.skipped,
    }


def _forward_backward(session: Session, call: Call) -> Answer:
    began = time.perf_counter()
    batches = _batches(session, call.work.rows)
    sums = session.trainer.forward_backward(batches)
    return {
        **_common(session, call, {"train/loss": sums.mean}),
        "loss": finite(sums.mean),
        "tokens": sum(len(batch.tokens) for batch in batches),
        "supervised_tokens": sums.tokens,
        "weight": sums.weight,
        "seconds": time.perf_counter() - began,
    }


def _validate(session: Session, call: Call) -> Answer:
    result = session.trainer.validate(_batches(session, call.work.rows))
    metrics = {"val/loss": result.loss, "val/token_accuracy": result.token_accuracy}
    return {
        "loss": finite(result.loss),
        "perplexity": finite(result.perplexity),
        "token_accuracy": finite(result.token_accuracy),
        "supervised_tokens": result.supervised_tokens,
        "weight": result.weight,
        "global_steps": session.trainer.step,
        "metrics": _finite(metrics),
    }


def _save_checkpoint(session: Session, call: Call) -> Answer | None:
    work: SaveWork = call.work
    if work.cursor is not None:
        session.boundary.cursor = work.cursor
    row = save_named(session, work.name or default_name(session), work.validation_loss)
    if row.announced_at is None and work.wait:
        session.awaited.append((row.step, call))
        return None
    return saved_answer(session, row)


def _load_checkpoint(session: Session, call: Call) -> Answer:
    work: LoadWork = call.work
    row = next((row for row in session.rows() if row.name == work.name), None)
    if row is None:
        known = ", ".join(repr(row.name) for row in session.rows() if row.name is not None) or "none yet"
        raise CheckpointNotFound(f"the session has no checkpoint {work.name!r}; it has {known}", param="name")
    directory, trainer = session.home / row.path, session.trainer
    check_files(directory)
    tensors, meta = load_training_state(directory / TRAINING_STATE)
    trainer.drop_gradients()
    if work.optimizer:
        trainer.load_state(tensors, meta)
        restore_rng(tensors)
    else:
        trainer.masters.load(masters_of(tensors))
        trainer.restart_optimizer()
    session.boundary.loss = session.boundary.weight = 0.0
    session.boundary.advance(_number(call), work.cursor)
    session.report.progress.step = trainer.step
    session.lease.update(progress=session.report.progress, message=f"went back to checkpoint {work.name}")
    return _common(session, call, {})


def _complete(session: Session, call: Call) -> None:
    session.completing.append(call)


def _pause(session: Session, call: Call) -> None:
    session.pausing.append(call)


def _batches(session: Session, rows: list[TokenizedRow]) -> list[FlatBatch]:
    return list(micro_batches(rows, session.spec.worker.micro_batch_tokens))


def _number(call: Call) -> int:
    assert call.number is not None  # it has its turn
    return call.number


def _common(session: Session, call: Call, metrics: Mapping[str, float]) -> Answer:
    return {
        "step": call.number,
        "global_steps": session.trainer.step,
        "last_durable_step": session.durable,
        "metrics": _finite(metrics),
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if finite(value) is not None}


_WORK: dict[str, Callable[[Session, Call], Answer | None]] = {
    "train_step": _train_step,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "validate": _validate,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "complete": _complete,
    "pause": _pause,
}

"""The loop of `SFTClient.fit`: batches sent ahead, validations and checkpoints between them, one result at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from apis.errors import BadRequest, CheckpointUnverified, DataInvalid
from apis.sft_sessions.training_models import SessionCheckpoint, TrainingStatusResponse, TrainStepResponse
from post_training.client import sft_calls
from post_training.client.sft_data import Batches, Part
from post_training.client.sft_pipeline import Pipeline
from post_training.client.sft_progress import Progress
from post_training.client.sft_result import FitOptions, FitResult, StepResult, ValidationResult, merge_validations
from post_training.client.sft_rows import as_batch, located
from post_training.client.sft_session import Session
from post_training.client.tracking import Tracking

_VERIFY_POLL_SECONDS = (0.1, 2.0)


class Fit:
    """One run of the loop.

    Args:
        resumed: whether to go on from the cursor that `status` gives back.
        validation: gives all validation batches, whenever it is called; None for no validation.

    Raises:
        DataInvalid: it resumes, and these are other rows than before.
        BadRequest: it resumes what no fit, or one with other settings, has begun.
    """

    def __init__(
        self,
        session: Session,
        status: TrainingStatusResponse,
        batches: Batches,
        options: FitOptions,
        *,
        resumed: bool = False,
        validation: Callable[[], Iterator[Part]] | None = None,
        tracker: Tracking | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._session, self._batches, self._options = session, batches, options
        self._validation, self._tracker, self._progress = validation, tracker, progress or Progress()
        self._steps: list[StepResult] = []
        self._validations: list[ValidationResult] = []
        self._saved: list[SessionCheckpoint] = []
        self._settings = {"batch_size": options.batch_size, "shuffle": options.shuffle}
        if options.shuffle:
            self._settings["seed"] = options.seed
        self._done = _seek(batches, status, self._settings) if resumed else 0
        self._pipeline = Pipeline(
            session,
            batches,
            status,
            self._done,
            cursor=self._cursor,
            on_step=self._on_step,
            on_status=self._progress.waiting,
        )

    def run(self) -> FitResult:
        """Train to the end. Ctrl-C saves a checkpoint and leaves the session to be resumed, then is raised again."""
        try:
            self._train()
            self._save_last()
            self._await_verified()
            if self._options.complete:
                self._progress.doing("completing")
                self._session.complete()
        except KeyboardInterrupt:
            self._leave()
            raise
        except Exception:
            # A step that is still on its way would be done behind the back of whoever goes on from here.
            self._pipeline.drain()
            raise
        finally:
            self._progress.clear()
        return FitResult(
            self._session.job_id, self._done, tuple(self._steps), tuple(self._validations), tuple(self._saved)
        )

    def _train(self) -> None:
        options = self._options
        while (options.steps is None or self._done < options.steps) and self._pipeline.push():
            self._done += 1
            if _due(self._done, options.validate_every):
                self._validate()
            if _due(self._done, options.save_every):
                self._save()
        self._pipeline.settle()
        if self._validation is not None and not _due(self._done, options.validate_every):
            self._validate()

    def _cursor(self, step: int, part: Part) -> dict[str, Any]:
        place = {"step": step + 1, "epoch": part.epoch, "position": part.position, "data": part.data}
        return {**place, **self._settings}

    def _on_step(self, step: int, part: Part, answer: TrainStepResponse | None) -> None:
        self._steps.append(StepResult(step + 1, part.epoch, answer))
        if self._tracker is not None and answer is not None:
            self._progress.clear()
            self._tracker.log(_train_metrics(answer, part.epoch), answer.global_steps)
        self._progress.step(step + 1, self._options.steps or self._batches.total, answer)

    # -- between steps -------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        validation = self._validation
        if validation is None:
            return
        self._progress.doing("validation")
        result = self._pipeline.settled(lambda: validate_all(self._session, validation()))
        self._validations.append(replace(result, step=self._done))
        if self._tracker is not None:
            self._progress.clear()
            self._tracker.log(_validation_metrics(result), result.global_steps)

    def _save(self) -> None:
        self._progress.doing("saving a checkpoint")
        self._saved.append(self._pipeline.settled(self._save_here))

    def _save_here(self) -> SessionCheckpoint:
        """Save what the session holds now. It may be saved already: by hand, or by a call whose answer was lost."""
        number = self._pipeline.last_number
        for known in self._session.send(sft_calls.checkpoints()):
            if known.step == number and known.state != "failed":
                return known
        call = sft_calls.save_checkpoint({"after_step": number, "wait": False})
        return self._session.send(call).checkpoint

    def _save_last(self) -> None:
        if not self._saved or self._saved[-1].step != self._pipeline.last_number:
            self._save()

    def _await_verified(self) -> None:
        """Raises CheckpointUnverified where one of the checkpoints does not hold what was trained."""
        self._progress.doing("verifying the checkpoint")
        pause, longest = _VERIFY_POLL_SECONDS
        while True:
            listed = self._pipeline.settled(lambda: self._session.send(sft_calls.checkpoints()))
            known = {checkpoint.identifier: checkpoint for checkpoint in listed}
            # A damaged one is discarded when the session resumes.
            self._saved = [known[each.identifier] for each in self._saved if each.identifier in known]
            self._save_last()
            if all(checkpoint.state != "verifying" for checkpoint in self._saved):
                break
            time.sleep(pause)
            pause = min(longest, pause * 2)
        for checkpoint in self._saved:
            if checkpoint.state == "failed":
                raise CheckpointUnverified(
                    f"checkpoint {checkpoint.identifier!r} could not be verified; the log of session "
                    f"{self._session.job_id!r} says why"
                )

    def _leave(self) -> None:
        self._progress.say("Interrupted: a checkpoint is saved first. Ctrl-C again leaves at once.")
        try:
            self._pipeline.settle()
            if self._pipeline.last_number > 0:
                self._save_last()
            self._session.pause()
        finally:
            # Without its heartbeat the session loses its device once the lease is over, if it has it still.
            self._session.disconnect()


def validate_all(session: Session, parts: Iterator[Part]) -> ValidationResult:
    """Validate on every row, each call holding one batch.

    Raises:
        DataInvalid: no row has a supervised token, or a row cannot be used; it is named by its number in the data.
    """
    answers = []
    for part in parts:
        try:
            answers.append(session.send(sft_calls.validate(as_batch(part.rows))))
        except DataInvalid as error:
            raise located(error, part.numbers) from None
    return merge_validations(answers)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _seek(batches: Batches, status: TrainingStatusResponse, settings: dict[str, Any]) -> int:
    """Go to where the session is in its data; how many steps of the fit were done."""
    if status.next_step == 1:
        return 0
    cursor = status.cursor or {}
    try:
        step, epoch = int(cursor["step"]), int(cursor["epoch"])
        position, data = int(cursor["position"]), str(cursor["data"])
    except (KeyError, TypeError, ValueError):
        raise BadRequest(
            f"session {status.job_id!r} was not trained by fit, so it does not say where in its data it is: go on with "
            "train_step, or call fit without resume"
        ) from None
    for name, value in settings.items():
        if cursor.get(name) != value:
            raise BadRequest(
                f"the session was begun with {name} {cursor.get(name)!r}, not {value!r}: a resumed fit goes on with "
                "the same batches",
                param=name,
            )
    batches.seek(step, epoch, position, data)
    return step


def _train_metrics(answer: TrainStepResponse, epoch: int) -> dict[str, float]:
    measured = {
        "train/loss": answer.loss,
        "train/grad_norm": answer.grad_norm,
        "train/lr": answer.lr,
        "train/tokens": answer.tokens,
        "train/tokens_per_second": answer.tokens_per_second,
        "train/epoch": epoch,
    }
    return {name: float(value) for name, value in measured.items() if value is not None}


def _validation_metrics(result: ValidationResult) -> dict[str, float]:
    measured = {
        "val/loss": result.loss,
        "val/perplexity": result.perplexity,
        "val/token_accuracy": result.token_accuracy,
    }
    return {name: float(value) for name, value in measured.items() if value is not None}

"""`SFTClient`: supervised fine-tuning as functions. The client holds the data and the loop, the stack the model."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from uuid import uuid4

from apis.errors import InvalidField
from apis.sft_sessions.models import (
    SessionActionResponse,
    SessionConfig,
    SessionStatusResponse,
    SubmitJobRequest,
)
from apis.sft_sessions.training_models import (
    CallResponse,
    EndResponse,
    ForwardBackwardResponse,
    HealthResponse,
    SaveCheckpointResponse,
    SessionCheckpoint,
    TrainingStatusResponse,
    TrainStepResponse,
    ValidateResponse,
)
from post_training.client import sft_calls
from post_training.client.calls import build_request
from post_training.client.core import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT, Settings
from post_training.client.sft_data import open_batches, validation_parts
from post_training.client.sft_fit import Fit, validate_all
from post_training.client.sft_progress import Progress
from post_training.client.sft_result import FitOptions, FitResult, ValidationResult
from post_training.client.sft_rows import Rows
from post_training.client.sft_session import OnStatus, Session
from post_training.client.tracking import Tracking

DEFAULT_OUTAGE_SECONDS = 600.0
DEFAULT_POLL_SECONDS = 0.5


class SFTClient:
    """One session of supervised fine-tuning, driven from here.

        with SFTClient("http://127.0.0.1:8321") as client:
            client.submit(model="my-model", lora={"lora_rank": 16}, seed=0)
            result = client.fit(rows, batch_size=8, epochs=1)
        print(result.checkpoint_id)

    A session that was submitted holds a device once it runs, until it is completed, cancelled, or hears nothing of
    its client for its `lease_seconds`; then it is saved, and waits to be resumed. While this client is connected, a
    thread of its own sends heartbeats. Leaving the `with` block ends those, and nothing else.

    Calls that carry a `step` number may be sent again, and are where an answer is lost; others are not. Everything that
    goes wrong is raised as the `PostgradError` with the server's code.

    Args:
        base_url: of the stack. None: `POSTGRAD_BASE_URL`, else `LLAMA_STACK_BASE_URL`, else `http://127.0.0.1:8321`.
        api_key: sent as a bearer token. None: `POSTGRAD_API_KEY`, else `LLAMA_STACK_API_KEY`, else none.
        timeout: seconds for one attempt of one request; steps, validations and checkpoints may take ten minutes.
        max_retries: further attempts after the first.
        outage_seconds: how long the stack or the training server may be away before that is raised.
        poll_seconds: time between two looks at a session that waits.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
        outage_seconds: float = DEFAULT_OUTAGE_SECONDS,
        poll_seconds: float = DEFAULT_POLL_SECONDS,
    ) -> None:
        settings = Settings.resolve(base_url, api_key, timeout, max_retries)
        self._session = Session(settings, outage_seconds, poll_seconds)

    # -- the scheduler -------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        return self._session.settings.base_url

    @property
    def job_id(self) -> str:
        """The session's id. Raises BadRequest before one is submitted or resumed."""
        return self._session.job_id

    def submit(
        self,
        config: SessionConfig | None = None,
        *,
        job_id: str | None = None,
        num_gpus: int | None = None,
        wait: bool = True,
        timeout: float | None = None,
        on_status: OnStatus | None = None,
        **fields: Any,
    ) -> str:
        """Open a session.

        Args:
            config: or its fields by name: `submit(model="my-model", seed=0)`.
            job_id: of the new session; None: one is made here. The same again with the same config is the same session.
            wait: for its training server, for `timeout` seconds at most, or for ever.
            on_status: told what the scheduler says, each time it is asked.

        Returns:
            its id.

        Raises:
            InvalidField: a field does not fit; nothing was sent.
            BadRequest, NotFound, QueueFull: the scheduler refuses it.
            JobFailure: it ended before it ran.
            Unavailable: the stack is away, or `timeout` is over.
        """
        content = {
            "config": build_request(SessionConfig, config, fields).model_dump(mode="json", exclude_unset=True),
            "job_id": job_id if job_id is not None else f"sft-{uuid4().hex[:12]}",
            "num_gpus": num_gpus,
        }
        request = build_request(
            SubmitJobRequest, None, {name: value for name, value in content.items() if value is not None}
        )
        answer = self._session.ask(sft_calls.submit_job(request))
        self._session.adopt(answer.job_id)
        if wait:
            self.wait(timeout=timeout, on_status=on_status)
        return answer.job_id

    def attach(self, job_id: str) -> None:
        """Talk about a session that was submitted before; its state is left alone."""
        self._session.adopt(job_id)

    def wait(self, *, timeout: float | None = None, on_status: OnStatus | None = None) -> TrainingStatusResponse:
        """Wait until the training server answers. Raises JobFailure where the session has ended, and Unavailable."""
        return self._session.connect(timeout=timeout, on_status=on_status)

    def resume(
        self, job_id: str | None = None, *, timeout: float | None = None, on_status: OnStatus | None = None
    ) -> TrainingStatusResponse:
        """Have a session that was paused go on, and wait for its training server; one that runs is connected to.

        Raises:
            JobNotFound
            Conflict: it has ended.
            Unavailable
        """
        self._session.adopt(job_id if job_id is not None else self.job_id)
        self._session.ask(sft_calls.resume_job(self.job_id))
        return self._session.connect(resume=True, timeout=timeout, on_status=on_status)

    def job_status(self, job_id: str | None = None) -> SessionStatusResponse:
        """What the scheduler says. Its `server_url` holds the session's token: do not log it. Raises JobNotFound."""
        return self._session.ask(sft_calls.job_status(job_id if job_id is not None else self.job_id))

    def list_jobs(self) -> list[SessionStatusResponse]:
        """All sessions of the caller's, oldest first."""
        return self._session.ask(sft_calls.list_jobs())

    def cancel(self, job_id: str | None = None) -> SessionActionResponse:
        """End a session without a result; checkpoints that it saved stay. Raises JobNotFound."""
        target = job_id if job_id is not None else self.job_id
        answer = self._session.ask(sft_calls.cancel_job(target))
        self._session.leave(target)
        return answer

    def complete(self) -> SessionStatusResponse:
        """Have the session saved and ended with success, and wait for that. Raises JobFailure, Conflict."""
        return self._session.complete()

    def pause(self) -> EndResponse:
        """Have the session saved and its device given back; `resume` goes on with it. Raises Unavailable."""
        return self._session.pause()

    # -- the training server -------------------------------------------------------------------------------------

    def health(self) -> HealthResponse:
        """Raises Unavailable where the training server does not answer."""
        return self._session.send(sft_calls.health())

    def status(self) -> TrainingStatusResponse:
        """Where the session stands: its next step, the last durable one, the cursor of its client."""
        return self._session.send(sft_calls.training_status())

    def heartbeat(self) -> TrainingStatusResponse:
        """Renew the lease; the client does so by itself."""
        return self._session.send(sft_calls.heartbeat())

    def train_step(
        self,
        rows: list[dict[str, Any]] | None = None,
        *,
        sequences: list[Any] | None = None,
        batch_data: dict[str, Any] | None = None,
        step: int | None = None,
        lr: float | None = None,
        cursor: dict[str, Any] | None = None,
    ) -> TrainStepResponse:
        """One optimizer update on one batch, which is given in one of three forms.

        Args:
            rows: in one of the data formats.
            sequences: token ids, as `apis.sft_sessions.training_models.TokenSequence` or its fields.
            batch_data: OpenTinker's serialised tensor batch.
            step: the call's number, which makes it safe to send again; see `status().next_step`.
            lr: the learning rate of this step; None: what the schedule says.
            cursor: where the caller is in its data; `status` gives it back after a restart.

        Raises:
            InvalidField: the batch is given in no form, or in several.
            BadRequest: a row cannot be used, the number is beyond the window, or was used for another batch.
            TooLarge: the batch is over the server's limit.
            Unavailable
        """
        fields = _batch(rows, sequences, batch_data) | {"step": step, "lr": lr, "cursor": cursor}
        return self._session.send(sft_calls.train_step(fields))

    def forward_backward(
        self,
        rows: list[dict[str, Any]] | None = None,
        *,
        sequences: list[Any] | None = None,
        batch_data: dict[str, Any] | None = None,
        step: int | None = None,
        cursor: dict[str, Any] | None = None,
    ) -> ForwardBackwardResponse:
        """Add a batch's gradients to those that wait for `optim_step`. Arguments and errors as of `train_step`."""
        fields = _batch(rows, sequences, batch_data) | {"step": step, "cursor": cursor}
        return self._session.send(sft_calls.forward_backward(fields))

    def optim_step(
        self, *, step: int | None = None, lr: float | None = None, cursor: dict[str, Any] | None = None
    ) -> TrainStepResponse:
        """One update by the gradients that wait: their mean over all their tokens. Raises as `train_step` does."""
        return self._session.send(sft_calls.optim_step({"step": step, "lr": lr, "cursor": cursor}))

    def validate(
        self,
        rows: list[dict[str, Any]] | None = None,
        *,
        sequences: list[Any] | None = None,
        batch_data: dict[str, Any] | None = None,
        after_step: int | None = None,
    ) -> ValidateResponse:
        """Losses of one batch, which the model does not learn from. Raises as `train_step` does."""
        fields = _batch(rows, sequences, batch_data) | {"after_step": after_step}
        return self._session.send(sft_calls.validate(fields))

    def evaluate(self, data: Rows, *, batch_size: int = 8) -> ValidationResult:
        """Validate on all rows, in calls of `batch_size` that are weighted by their tokens.

        Raises:
            DataInvalid: there are no rows, or one cannot be used.
        """
        return validate_all(self._session, validation_parts(data, batch_size)())

    def save_checkpoint(
        self,
        name: str | None = None,
        *,
        after_step: int | None = None,
        cursor: dict[str, Any] | None = None,
        wait: bool = True,
    ) -> SaveCheckpointResponse:
        """Save the adapter as a model that can be served.

        Args:
            name: of the checkpoint; None: `step<N>`.
            after_step: wait until this step is done.
            wait: until it is verified, not only until it is on disk.
        """
        fields = {"name": name, "after_step": after_step, "cursor": cursor, "wait": wait}
        return self._session.send(sft_calls.save_checkpoint(fields))

    def load_checkpoint(
        self, name: str, *, optimizer: bool = True, step: int | None = None, cursor: dict[str, Any] | None = None
    ) -> CallResponse:
        """Go back to a checkpoint of this session, with the state of its optimizer or without.

        Raises:
            CheckpointNotFound
        """
        fields = {"name": name, "optimizer": optimizer, "step": step, "cursor": cursor}
        return self._session.send(sft_calls.load_checkpoint(fields))

    def checkpoints(self) -> list[SessionCheckpoint]:
        """Those of the session, oldest first."""
        return self._session.send(sft_calls.checkpoints())

    # -- the whole loop ------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Rows,
        validation: Rows | None = None,
        *,
        batch_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        validate_every: int | None = None,
        save_every: int | None = None,
        validation_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        resume: str | None = None,
        complete: bool = True,
        tracker: Tracking | None = None,
        **fields: Any,
    ) -> FitResult:
        """Train on rows, step by step, and save the result.

        Batches are sent ahead of their answers, as far as the session's `window` allows. A server that goes away is
        waited for, and gets again what it has not saved; the result is the same, byte for byte, as without that.

        Args:
            train: any iterable of rows (a `datasets.Dataset` is one), a function that gives one, or the path of a
                .jsonl, .json or .csv file. An iterator is read once, and what the server has not saved is kept.
            validation: rows to measure the loss on, in the same forms; all of them, weighted by tokens.
            batch_size: rows of a step. The last step of an epoch takes what is left.
            epochs: passes over the rows; left out with `steps`: one.
            steps: optimizer steps, over as many epochs as they take, also where they end within one.
            validate_every: steps between validations; None: one at the end.
            save_every: steps between checkpoints. The last is always saved.
            validation_batch_size: rows of a validation call; None: `batch_size`.
            shuffle: each epoch in an order of its own, drawn from `seed` as a whole job draws it.
            resume: id of a session whose fit was interrupted: it goes on where that one was. Needs the same rows.
            complete: end the session when all is done, so that its device is free.
            tracker: told the metrics of each step and validation; see `post_training.client.tracking`.
            fields: what `submit` takes, to open the session as well: `fit(rows, batch_size=8, model="my-model")`.

        Returns:
            losses, validations and checkpoints.

        Raises:
            DataInvalid: there are no rows; one cannot be used; or `resume` with other rows.
            BadRequest: options that contradict each other, or other than those of the fit that is resumed; there is no
                session yet, or `fields` for one that there is.
            JobFailure: the session failed or was cancelled.
            Unavailable: a server was away for longer than `outage_seconds`.
            KeyboardInterrupt: after a checkpoint was saved and the session paused: its device is free, and it can be
                resumed. A session that was opened by `fields` and has not begun is cancelled.
        """
        options = FitOptions(
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            validate_every=validate_every,
            save_every=save_every,
            validation_batch_size=validation_batch_size,
            shuffle=shuffle,
            seed=seed,
            complete=complete,
        )
        batches = open_batches(train, batch_size, epochs=options.passes, shuffle=shuffle, seed=seed)
        parts = None if validation is None else validation_parts(validation, validation_batch_size or batch_size)
        progress = Progress()
        if fields:
            self._open_for_fit(resume, fields)
        try:
            status = self._status_for_fit(resume, progress.waiting)
        except KeyboardInterrupt:
            if fields:
                self.cancel()
            raise
        return Fit(
            self._session,
            status,
            batches,
            options,
            resumed=resume is not None,
            validation=parts,
            tracker=tracker,
            progress=progress,
        ).run()

    def _open_for_fit(self, resume: str | None, fields: dict[str, Any]) -> None:
        name = next(iter(fields))
        if resume is not None or self._session.is_open:
            raise InvalidField(f"{name} belongs to a session that is yet to be submitted; this one is", param=name)
        self.submit(wait=False, **fields)

    def _status_for_fit(self, resume: str | None, on_status: OnStatus) -> TrainingStatusResponse:
        if resume is not None:
            return self.resume(resume, on_status=on_status)
        return self._session.training_status(on_status)

    def close(self) -> None:
        """Stop the heartbeats and close the connections. The session goes on until its lease is over."""
        self._session.close()

    def __enter__(self) -> SFTClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batch(
    rows: list[dict[str, Any]] | None, sequences: list[Any] | None, batch_data: dict[str, Any] | None
) -> dict[str, Any]:
    return {"rows": rows, "sequences": sequences, "batch_data": batch_data}

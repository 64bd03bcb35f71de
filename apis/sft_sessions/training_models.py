"""What the training server of one session is asked and answers. Paths and names are OpenTinker's where it has them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from apis.common import MAX_INTEGER, JsonObject, RequestModel, ResponseModel
from apis.sft_sessions.numbers import NO_BOOLEAN


class ArrayData(RequestModel):
    """Numbers in little-endian order, row by row, in base64. bf16 is the upper half of an fp32 number."""

    dtype: Literal["int64", "int32", "uint16", "float32", "bfloat16"]
    shape: list[Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]] = Field(min_length=1, max_length=1)
    data: str


_Integer = Annotated[int, Field(strict=True)]
_Number = Annotated[float, Field(strict=True)]


def _list_or_array(numbers: TypeAdapter[list[Any]]) -> WrapValidator:
    """Faults are those of the form that was sent: a union's would name both, at places that the body does not have."""

    def check(value: Any, _handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, ArrayData):
            return value
        if isinstance(value, dict):
            return ArrayData.model_validate(value)
        if isinstance(value, list):
            return numbers.validate_python(value)
        raise ValueError("give a list of numbers, or an array as {dtype, shape, data}")

    return WrapValidator(check)


Numbers = Annotated[list[_Integer] | ArrayData, _list_or_array(TypeAdapter(list[_Integer]))]
Weights = Annotated[list[_Number] | ArrayData, _list_or_array(TypeAdapter(list[_Number]))]


class TokenSequence(RequestModel):
    """One row as tokens.

    Attributes:
        tokens: [n].
        labels: [n], as transformers has them: the token itself where it is trained on, -100 elsewhere; not shifted.
        weights: [n], the loss weight of predicting each token from those before it: finite, not negative. Without
            labels and weights every token but the first has weight 1. Nothing comes before the first token, so its
            own label or weight counts for nothing.
    """

    tokens: Numbers
    labels: Numbers | None = None
    weights: Weights | None = None

    @model_validator(mode="after")
    def _labels_or_weights(self) -> TokenSequence:
        if self.labels is not None and self.weights is not None:
            raise ValueError("give labels or weights, not both")
        return self


class Batch(RequestModel):
    """Rows for one call, in one of three forms.

    Attributes:
        rows: objects in one of the data formats; rendered and tokenized by the server as a job does it.
        sequences: token ids.
        batch_data: OpenTinker's serialised tensor batch: `batch` with `input_ids` [B, T] and `attention_mask` [B, T]
            and, at most one of the two, `labels` [B, T] or `loss_mask` [B, T] (the weight of predicting that very
            token, as `weights` above); `position_ids` where they count the tokens that are attended to.
    """

    rows: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    sequences: list[TokenSequence] | None = Field(default=None, min_length=1)
    batch_data: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Batch:
        if sum(form is not None for form in (self.rows, self.sequences, self.batch_data)) != 1:
            raise ValueError("give the batch in exactly one form: rows, sequences or batch_data")
        return self


StepNumber = Annotated[
    Annotated[int, Field(ge=1, le=MAX_INTEGER), NO_BOOLEAN] | None,
    Field(description="Counts the calls that change the model, from 1. null: in the order of arrival, unprotected"),
]
AfterStep = Annotated[
    Annotated[int, Field(ge=0, le=MAX_INTEGER), NO_BOOLEAN] | None, Field(description="Wait until this step is done")
]
MAX_CURSOR_BYTES = 2**16


def _short(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None and len(json.dumps(value)) > MAX_CURSOR_BYTES:
        raise ValueError(
            f"a cursor takes at most {MAX_CURSOR_BYTES} bytes as JSON: keep a place in the data, not the data"
        )
    return value


Cursor = Annotated[
    JsonObject | None,
    AfterValidator(_short),
    Field(description="Where the client is in its data, at most 64 KiB; kept with the checkpoint, given back"),
]
Rate = Annotated[
    Annotated[float, Field(ge=0, le=10, allow_inf_nan=False), NO_BOOLEAN] | None,
    Field(description="null: what the schedule says. A warm-up may begin at 0"),
]


class ForwardBackwardRequest(Batch):
    step: StepNumber = None
    cursor: Cursor = None


class TrainStepRequest(ForwardBackwardRequest):
    lr: Rate = None


class OptimStepRequest(RequestModel):
    step: StepNumber = None
    lr: Rate = None
    cursor: Cursor = None


class CallResponse(ResponseModel):
    """What every call that changes the model answers.

    Attributes:
        step: the call's number.
        global_steps: optimizer steps done.
        last_durable_step: the newest call whose effect a checkpoint holds; those after it are lost with the process.
        metrics: numbers, as OpenTinker has them, by name.
    """

    status: Literal["success"] = "success"
    step: int
    global_steps: int
    last_durable_step: int
    metrics: dict[str, float]


class TrainStepResponse(CallResponse):
    """Losses in nats, weighted, before the update. null: not finite, and then `skipped`: nothing was changed."""

    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    supervised_tokens: int
    weight: float
    seconds: float
    tokens_per_second: float
    skipped: bool


class ForwardBackwardResponse(CallResponse):
    loss: float | None
    tokens: int
    supervised_tokens: int
    weight: float
    seconds: float


class ValidateRequest(Batch):
    after_step: AfterStep = None


class ValidateResponse(ResponseModel):
    """Means over the supervised tokens of this call. Merge calls by `weight`, accuracies by `supervised_tokens`."""

    status: Literal["success"] = "success"
    loss: float | None
    perplexity: float | None
    token_accuracy: float | None
    supervised_tokens: int
    weight: float
    global_steps: int
    metrics: dict[str, float]


CheckpointName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]{0,63}$", description="Letters, digits, `_` and `.`; no `-`")
]


class SaveCheckpointRequest(RequestModel):
    name: CheckpointName | None = Field(default=None, description="null: step<N>")
    after_step: AfterStep = None
    cursor: Cursor = None
    validation_loss: float | None = Field(
        default=None, allow_inf_nan=False, description="What the client measured; the best checkpoint is told by it"
    )
    wait: bool = Field(default=True, description="Answer once it is verified, not as soon as it is on disk")


class SessionCheckpoint(ResponseModel):
    """A checkpoint of a session. `identifier` is a model id that inference serves once `state` is ready."""

    name: str
    identifier: str
    step: int
    global_steps: int
    state: Literal["verifying", "ready", "failed"]
    created_at: datetime


class SaveCheckpointResponse(ResponseModel):
    status: Literal["success"] = "success"
    checkpoint: SessionCheckpoint
    result: dict[str, Any] = Field(description="In OpenTinker's words: global_steps, checkpoint_dir (the model id)")


class LoadCheckpointRequest(RequestModel):
    """Go back to a checkpoint of this session. It is numbered as every call that changes the model."""

    name: CheckpointName
    optimizer: bool = Field(default=True, description="The optimizer's state too, and the place in the schedule")
    step: StepNumber = None
    cursor: Cursor = None


class ListCheckpointsResponse(ResponseModel):
    checkpoints: list[SessionCheckpoint]


class HealthResponse(ResponseModel):
    status: Literal["healthy"] = "healthy"
    server: str = "sft_training"


class TrainingStatusResponse(ResponseModel):
    """Where the session stands.

    Attributes:
        next_step: the number of the next call that changes the model.
        last_durable_step: see `CallResponse`; after a restart `next_step` follows it.
        cursor: what the client gave with the newest step that is done.
        pending_gradients: whether gradients wait for an optim_step.
    """

    status: Literal["running"] = "running"
    is_initialized: bool = True
    job_id: str
    model: str
    global_steps: int
    next_step: int
    last_durable_step: int
    window: int
    lease_seconds: float
    cursor: dict[str, Any] | None = None
    pending_gradients: bool = False
    phase: str | None = None


class EndResponse(ResponseModel):
    status: Literal["success"] = "success"
    message: str

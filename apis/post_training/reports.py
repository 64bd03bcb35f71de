"""What a look at the data before training answers, and a job stores of it."""

from __future__ import annotations

from pydantic import Field

from apis.common import ResponseModel
from apis.post_training.models import DatasetFormat


class RowNumbers(ResponseModel):
    count: int
    first_rows: list[int] = Field(description="The first 20, from 0")


class DroppedRows(RowNumbers):
    """Rows that are not trained on: too long where `on_overlength` is `drop`, or left without a supervised token."""

    overlength: RowNumbers
    unsupervised: RowNumbers


class SampleRun(ResponseModel):
    text: str
    supervised: bool = Field(description="Whether these tokens carry loss")


class DatasetReport(ResponseModel):
    """A data set as it is trained on; tokens are those of the rows that are kept."""

    rows: int = Field(description="Rows read")
    format: DatasetFormat
    tokens: int
    supervised_tokens: int
    longest_row_tokens: int = Field(description="Before truncation")
    truncated: RowNumbers
    dropped: DroppedRows
    control_tokens: RowNumbers = Field(description="Rows whose own text holds the text of a control token")
    sample: list[SampleRun] = Field(description="The first kept row as the model reads it, with its loss mask")
    fingerprint: str = Field(description="sha256 of all tokens and weights")


class ValidationSplit(ResponseModel):
    training_rows: int
    validation_rows: int


class MemoryEstimate(ResponseModel):
    """Bytes at the peak; docs/training.md has the formula."""

    device_kind: str
    base_bytes: int
    adapter_bytes: int = Field(description="With gradients, fp32 masters and the optimizer's moments")
    activation_bytes: int = Field(description="Of the largest micro-batch")
    logit_bytes: int
    runtime_bytes: int
    total_bytes: int


class TimeEstimate(ResponseModel):
    seconds: float | None = Field(description="Of the training steps; null where no job like it has completed")
    tokens_per_second: float | None
    jobs: int = Field(description="How many jobs this is known from")
    note: str


class PreflightReport(ResponseModel):
    """What a job would train on and take; the job's own `report` has the same keys."""

    dataset: DatasetReport
    validation_dataset: DatasetReport | None = None
    validation_split: ValidationSplit | None = None
    seed: int
    max_seq_len: int
    n_epochs: int
    batch_size: int
    lr: float
    steps_per_epoch: int = Field(description="Optimizer steps of the first epoch")
    total_steps: int
    warmup_steps: int
    tokens_per_epoch: int = Field(description="Tokens of the first epoch's steps")
    largest_step_tokens: int
    longest_kept_tokens: int = Field(description="After truncation")
    trainable_parameters: int
    memory: MemoryEstimate
    time: TimeEstimate

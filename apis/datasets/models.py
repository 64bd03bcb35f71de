"""Data sets: registered by source, read as rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from apis.common import Identifier, JsonObject, RequestModel, ResponseModel

Row = dict[str, Any]


class DatasetPurpose(StrEnum):
    post_training_messages = "post-training/messages"
    eval_question_answer = "eval/question-answer"
    eval_messages_answer = "eval/messages-answer"


class URIDataSource(RequestModel):
    """`file:///…` or a plain path under an allowed root, a `data:` URI, or `huggingface://datasets/<org>/<name>?split=…`."""

    type: Literal["uri"] = "uri"
    uri: str = Field(min_length=1)


class RowsDataSource(RequestModel):
    type: Literal["rows"] = "rows"
    rows: list[Row]


DataSource = Annotated[URIDataSource | RowsDataSource, Field(discriminator="type")]
DATA_SOURCE: TypeAdapter[DataSource] = TypeAdapter(DataSource)
"""Reads a stored source back."""


class RegisterDatasetRequest(RequestModel):
    purpose: DatasetPurpose = DatasetPurpose.post_training_messages
    source: DataSource
    metadata: JsonObject | None = None
    dataset_id: Identifier | None = Field(default=None, description="null: dataset-<uuid4>")


class Dataset(ResponseModel):
    identifier: str
    provider_resource_id: str
    provider_id: str
    type: Literal["dataset"] = "dataset"
    purpose: DatasetPurpose
    source: DataSource
    source_truncated: bool = Field(
        default=False,
        description="whether `source.rows` holds the first rows only; /datasetio/iterrows has all of them",
    )
    metadata: dict[str, Any] = {}


class ListDatasetsResponse(ResponseModel):
    data: list[Dataset]


class AppendRowsRequest(RequestModel):
    rows: list[Row]


class IterrowsResponse(ResponseModel):
    """One page of rows. `has_more` says whether rows follow it, also where no limit was asked for."""

    data: list[Row]
    has_more: bool
    url: str | None = None

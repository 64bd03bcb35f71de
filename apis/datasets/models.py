"""Data sets: registered by source, read as rows."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, computed_field

from apis.common import Identifier, JsonObject, RequestModel, ResponseModel

Row = dict[str, Any]
# Said in the schema only: pydantic's own mark warns whenever the field is read, to be answered with included.
_DEPRECATED: dict[str, Any] = {"deprecated": True}


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
    dataset_schema: dict[str, Any] = Field(
        default={}, description="Empty: the rows say what they hold", json_schema_extra=_DEPRECATED
    )

    @computed_field(
        description="The URI of `source`, where clients up to 0.1.7 look for it", json_schema_extra=_DEPRECATED
    )
    @property
    def url(self) -> URIDataSource | None:
        return self.source if isinstance(self.source, URIDataSource) else None


class ListDatasetsResponse(ResponseModel):
    data: list[Dataset]


class AppendRowsRequest(RequestModel):
    rows: list[Row]
    dataset_id: Identifier | None = Field(default=None, description="The same as in the path, where it is given")


class IterrowsResponse(ResponseModel):
    """One page of rows. `has_more` says whether rows follow it, also where no limit was asked for."""

    data: list[Row]
    has_more: bool
    next_start_index: int | None = Field(default=None, description="Where to read on; null: these were the last")
    url: str | None = None

"""Models: base models and checkpoints under one kind of id."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from apis.common import MAX_IDENTIFIER_LENGTH, Identifier, JsonObject, RequestModel, ResponseModel

ModelType = Literal["llm", "embedding"]


class RegisterModelRequest(RequestModel):
    model_id: Identifier
    provider_model_id: Annotated[str, Field(max_length=MAX_IDENTIFIER_LENGTH)] | None = Field(
        default=None, description="A registered model or checkpoint this id shall stand for; null: `model_id` itself"
    )
    provider_id: Annotated[str, Field(max_length=MAX_IDENTIFIER_LENGTH)] | None = None
    metadata: JsonObject | None = None
    model_type: ModelType | None = "llm"
    model_validation: bool | None = Field(
        default=None, description="Whether to check that the model is there, which is always done"
    )


class Model(ResponseModel):
    """Both Llama Stack's fields and OpenAI's, since clients of either read it."""

    identifier: str
    provider_resource_id: str
    provider_id: str
    type: Literal["model"] = "model"
    metadata: dict[str, Any] = {}
    model_type: ModelType = "llm"
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str = "postgrad"
    custom_metadata: dict[str, Any] = {}


class ListModelsResponse(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Model]

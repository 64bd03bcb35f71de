"""The models API."""

from apis.models.models import (
    ListModelsResponse,
    Model,
    ModelType,
    RegisterModelRequest,
)
from apis.models.protocol import Models

__all__ = [
    "ListModelsResponse",
    "Model",
    "ModelType",
    "Models",
    "RegisterModelRequest",
]

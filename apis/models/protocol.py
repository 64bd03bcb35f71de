"""What the stack's model catalog must be able to do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from apis.models.models import ListModelsResponse, Model, RegisterModelRequest


@runtime_checkable
class Models(Protocol):
    async def list_models(self) -> ListModelsResponse: ...

    async def get_model(self, model_id: str) -> Model:
        """Raises ModelNotFound."""
        ...

    async def register_model(self, request: RegisterModelRequest) -> Model:
        """Give a known model another id. Raises ModelNotFound, Conflict."""
        ...

    async def unregister_model(self, model_id: str) -> None:
        """Forget the id; files stay. Raises ModelNotFound."""
        ...

"""The models API over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Response

from apis.models.models import ListModelsResponse, Model, RegisterModelRequest
from apis.models.protocol import Models


def create_router(impl: Models) -> APIRouter:
    """Serve `impl` under `/models`; mount with the prefix of the API's version."""
    router = APIRouter(tags=["models"])

    @router.get("/models")
    async def list_models() -> ListModelsResponse:
        return await impl.list_models()

    @router.post("/models")
    async def register_model(request: RegisterModelRequest) -> Model:
        return await impl.register_model(request)

    @router.get("/models/{model_id:path}")
    async def get_model(model_id: str) -> Model:
        return await impl.get_model(model_id)

    @router.delete("/models/{model_id:path}", status_code=204, response_class=Response)
    async def unregister_model(model_id: str) -> None:
        await impl.unregister_model(model_id)

    return router

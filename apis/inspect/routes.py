"""The inspect API over HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from apis.inspect.models import HealthInfo, ListProvidersResponse, ListRoutesResponse, ProviderInfo, VersionInfo
from apis.inspect.protocol import Inspect


def create_router(impl: Inspect) -> APIRouter:
    """Serve `impl`; mount with the prefix of the API's version."""
    router = APIRouter(tags=["inspect"])

    @router.get("/version")
    async def version() -> VersionInfo:
        return await impl.version()

    @router.get("/health")
    async def health() -> HealthInfo:
        return await impl.health()

    @router.get("/providers")
    async def list_providers() -> ListProvidersResponse:
        return await impl.list_providers()

    @router.get("/providers/{provider_id:path}")
    async def get_provider(provider_id: str) -> ProviderInfo:
        return await impl.get_provider(provider_id)

    @router.get("/inspect/routes")
    async def list_routes() -> ListRoutesResponse:
        return await impl.list_routes()

    return router

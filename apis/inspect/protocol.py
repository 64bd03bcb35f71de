"""What the running stack tells about itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from apis.inspect.models import HealthInfo, ListProvidersResponse, ListRoutesResponse, ProviderInfo, VersionInfo


@runtime_checkable
class Inspect(Protocol):
    async def version(self) -> VersionInfo: ...

    async def health(self) -> HealthInfo: ...

    async def list_providers(self) -> ListProvidersResponse: ...

    async def get_provider(self, provider_id: str) -> ProviderInfo:
        """Raises NotFound."""
        ...

    async def list_routes(self) -> ListRoutesResponse: ...

"""What the running stack says about itself."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

from apis.errors import NotFound, Unavailable
from apis.inspect.models import (
    HealthInfo,
    ListProvidersResponse,
    ListRoutesResponse,
    ProviderInfo,
    RouteInfo,
    VersionInfo,
)
from distributions.resolver import BuiltProvider

_SECRET = re.compile(r"(key|token|secret|password|credentials)$", re.IGNORECASE)
# A router's tag is the API it serves; data sets are served by whoever provides datasetio.
_PROVIDED_BY = {"datasets": "datasetio", "models": "inference"}


class StackInspection:
    """Implements `apis.inspect.Inspect`.

    Args:
        openapi: gives the server's OpenAPI document; called late, since routes are added after this is made.
        store_answers: whether the store can be read. Every provider works on it, so none is healthy without it.
    """

    def __init__(
        self,
        providers: Sequence[BuiltProvider],
        openapi: Callable[[], dict[str, Any]],
        store_answers: Callable[[], Awaitable[bool]],
    ) -> None:
        self._providers = [_describe(provider) for provider in providers]
        self._openapi = openapi
        self._store_answers = store_answers

    async def version(self) -> VersionInfo:
        return VersionInfo(version=version("postgrad"))

    async def health(self) -> HealthInfo:
        """Raises Unavailable where the store does not answer."""
        if not await self._store_answers():
            raise Unavailable("the store of jobs, models and data sets does not answer; the server's log says why")
        return HealthInfo(status="OK")

    async def list_providers(self) -> ListProvidersResponse:
        health = HealthInfo(status="OK" if await self._store_answers() else "Error")
        return ListProvidersResponse(data=[p.model_copy(update={"health": health}) for p in self._providers])

    async def get_provider(self, provider_id: str) -> ProviderInfo:
        for provider in (await self.list_providers()).data:
            if provider.provider_id == provider_id:
                return provider
        known = ", ".join(provider.provider_id for provider in self._providers)
        raise NotFound(f"there is no provider {provider_id!r}; there are: {known}", param="provider_id")

    async def list_routes(self) -> ListRoutesResponse:
        routes = [
            RouteInfo(route=path, method=method.upper(), provider_types=self._types(operation.get("tags", [])))
            for path, operations in self._openapi()["paths"].items()
            for method, operation in operations.items()
        ]
        return ListRoutesResponse(data=sorted(routes, key=lambda r: (r.route, r.method)))

    def _types(self, tags: Sequence[str]) -> list[str]:
        apis = {_PROVIDED_BY.get(tag, tag) for tag in tags}
        return [provider.provider_type for provider in self._providers if provider.api in apis]


def _describe(built: BuiltProvider) -> ProviderInfo:
    planned = built.planned
    return ProviderInfo(
        api=planned.api.value,
        provider_id=planned.provider_id,
        provider_type=planned.spec.provider_type,
        config=_without_secrets(planned.config.model_dump(mode="json")),
        health=HealthInfo(status="OK"),
    )


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "********" if v and _SECRET.search(k) else _without_secrets(v) for k, v in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list) else value

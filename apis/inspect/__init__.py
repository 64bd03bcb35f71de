"""The inspect API: version, health, providers, routes. Facts about the running stack, so no provider has it."""

from apis.inspect.models import (
    HealthInfo,
    ListProvidersResponse,
    ListRoutesResponse,
    ProviderInfo,
    RouteInfo,
    VersionInfo,
)
from apis.inspect.protocol import Inspect

__all__ = [
    "HealthInfo",
    "Inspect",
    "ListProvidersResponse",
    "ListRoutesResponse",
    "ProviderInfo",
    "RouteInfo",
    "VersionInfo",
]

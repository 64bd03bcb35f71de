"""What a stack says about itself."""

from __future__ import annotations

from typing import Any

from apis.common import ResponseModel


class VersionInfo(ResponseModel):
    version: str


class HealthInfo(ResponseModel):
    status: str


class ProviderInfo(ResponseModel):
    api: str
    provider_id: str
    provider_type: str
    config: dict[str, Any] = {}
    health: HealthInfo


class ListProvidersResponse(ResponseModel):
    data: list[ProviderInfo]


class RouteInfo(ResponseModel):
    route: str
    method: str
    provider_types: list[str]


class ListRoutesResponse(ResponseModel):
    data: list[RouteInfo]

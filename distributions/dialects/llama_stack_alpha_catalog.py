"""Data sets, models and inspection at /alpha, for clients up to 0.0.63: verbs in the path, bare lists and maps."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Literal

from fastapi import APIRouter, Query, Request, Response

from apis.common import MAX_INTEGER, Identifier, RequestModel, ResponseModel
from apis.datasets.models import Dataset, RegisterDatasetRequest, URIDataSource
from apis.datasets.protocol import Datasets
from apis.inspect.models import HealthInfo, ProviderInfo, RouteInfo
from apis.inspect.protocol import Inspect
from apis.models.models import Model, RegisterModelRequest
from apis.models.protocol import Models
from distributions.dialects.llama_stack_datasets import AppendRowsFlatRequest, RowsPage, rows_page
from distributions.dialects.words import speak

_VERSION = re.compile("alpha|v[0-9]+[a-z]*")


class AlphaDatasetRequest(RequestModel):
    dataset_id: Identifier


class AlphaModelRequest(RequestModel):
    model_id: Identifier


class AlphaDataset(ResponseModel):
    """`url`: where the rows come from; empty for rows that were sent. `dataset_schema` is left to the rows."""

    identifier: str
    provider_resource_id: str
    provider_id: str
    type: Literal["dataset"] = "dataset"
    url: str = ""
    dataset_schema: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


def create_alpha_datasets_router(impl: Datasets) -> APIRouter:
    """Serve `impl` under `/datasets` and `/datasetio`; mount at `/alpha`."""
    router = APIRouter(tags=["datasets"], deprecated=True)

    @router.post("/datasets/register", status_code=204, response_class=Response)
    async def register_dataset_alpha(request: RegisterDatasetRequest) -> None:
        await impl.register_dataset(request)

    @router.get("/datasets/list")
    async def list_datasets_alpha() -> list[AlphaDataset]:
        return [_dataset(dataset) for dataset in (await impl.list_datasets()).data]

    @router.get("/datasets/get")
    async def get_dataset_alpha(dataset_id: str = Query()) -> AlphaDataset:
        return _dataset(await impl.get_dataset(dataset_id))

    @router.post("/datasets/unregister", status_code=204, response_class=Response)
    async def unregister_dataset_alpha(request: AlphaDatasetRequest) -> None:
        await impl.unregister_dataset(request.dataset_id)

    @router.get("/datasetio/get-rows-paginated")
    async def get_rows_alpha(
        dataset_id: str = Query(),
        rows_in_page: int = Query(-1, ge=-1, le=MAX_INTEGER),
        page_token: str | None = None,
        filter_condition: str | None = None,
    ) -> RowsPage:
        return await rows_page(impl, dataset_id, rows_in_page, page_token, filter_condition)

    @router.post("/datasetio/append-rows", status_code=204, response_class=Response)
    async def append_rows_alpha(request: AppendRowsFlatRequest) -> None:
        await impl.append_rows(request.dataset_id, request.rows)

    return router


def _dataset(dataset: Dataset) -> AlphaDataset:
    return AlphaDataset(
        identifier=dataset.identifier,
        provider_resource_id=dataset.provider_resource_id,
        provider_id=dataset.provider_id,
        url=dataset.source.uri if isinstance(dataset.source, URIDataSource) else "",
        metadata=dataset.metadata,
    )


def create_alpha_models_router(impl: Models) -> APIRouter:
    """Serve `impl` under `/models`; mount at `/alpha`."""
    router = APIRouter(tags=["models"], deprecated=True)

    @router.get("/models/list")
    async def list_models_alpha() -> list[Model]:
        return (await impl.list_models()).data

    @router.get("/models/get")
    async def get_model_alpha(http: Request, identifier: str = Query()) -> Model:
        speak(http.scope, {"model_id": "identifier"})
        return await impl.get_model(identifier)

    @router.post("/models/register")
    async def register_model_alpha(request: RegisterModelRequest) -> Model:
        return await impl.register_model(request)

    @router.post("/models/unregister", status_code=204, response_class=Response)
    async def unregister_model_alpha(request: AlphaModelRequest) -> None:
        await impl.unregister_model(request.model_id)

    return router


def create_alpha_inspect_router(impl: Inspect) -> APIRouter:
    """Serve `impl`; mount at `/alpha`."""
    router = APIRouter(tags=["inspect"], deprecated=True)

    @router.get("/health")
    async def health_alpha() -> HealthInfo:
        return await impl.health()

    @router.get("/providers/list")
    async def list_providers_alpha() -> dict[str, list[ProviderInfo]]:
        """By the API that they provide."""
        by_api: dict[str, list[ProviderInfo]] = defaultdict(list)
        for provider in (await impl.list_providers()).data:
            by_api[provider.api].append(provider)
        return by_api

    @router.get("/routes/list")
    async def list_routes_alpha() -> dict[str, list[RouteInfo]]:
        """By the first word behind the version, such as `post-training`."""
        by_name: dict[str, list[RouteInfo]] = defaultdict(list)
        for route in (await impl.list_routes()).data:
            first, *rest = route.route.strip("/").split("/")
            by_name[rest[0] if rest and _VERSION.fullmatch(first) else first].append(route)
        return by_name

    return router

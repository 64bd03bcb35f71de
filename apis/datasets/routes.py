"""The datasets and datasetio APIs over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Query, Response

from apis.common import MAX_INTEGER
from apis.datasets.models import (
    AppendRowsRequest,
    Dataset,
    IterrowsResponse,
    ListDatasetsResponse,
    RegisterDatasetRequest,
)
from apis.datasets.protocol import Datasets
from apis.errors import InvalidField


def create_router(impl: Datasets) -> APIRouter:
    """Serve `impl` under `/datasets` and `/datasetio`; mount with the prefix of the API's version."""
    router = APIRouter(tags=["datasets"])

    @router.post("/datasets")
    async def register_dataset(request: RegisterDatasetRequest) -> Dataset:
        return await impl.register_dataset(request)

    @router.get("/datasets")
    async def list_datasets() -> ListDatasetsResponse:
        return await impl.list_datasets()

    @router.get("/datasets/{dataset_id:path}")
    async def get_dataset(dataset_id: str) -> Dataset:
        return await impl.get_dataset(dataset_id)

    @router.delete("/datasets/{dataset_id:path}", status_code=204, response_class=Response)
    async def unregister_dataset(dataset_id: str) -> None:
        await impl.unregister_dataset(dataset_id)

    @router.get("/datasetio/iterrows/{dataset_id:path}")
    async def iterrows(
        dataset_id: str,
        start_index: int | None = Query(None, ge=0, le=MAX_INTEGER),
        limit: int | None = Query(None, ge=-1, le=MAX_INTEGER),
    ) -> IterrowsResponse:
        page = await impl.iterrows(dataset_id, start_index, limit)
        following = (start_index or 0) + len(page.data) if page.has_more else None
        return page.model_copy(update={"next_start_index": following})

    @router.post("/datasetio/append-rows/{dataset_id:path}", status_code=204, response_class=Response)
    async def append_rows(dataset_id: str, request: AppendRowsRequest) -> None:
        if request.dataset_id not in (None, dataset_id):
            raise InvalidField(f"dataset_id is not that of the path, {dataset_id!r}", param="dataset_id")
        await impl.append_rows(dataset_id, request.rows)

    return router

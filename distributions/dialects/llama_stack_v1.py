"""What Llama Stack's clients from 0.1 to 0.5 send, put into the words of the typed spec.

The shapes of their bodies are translated before the routes see them; their flat job routes and old row routes are
routes of their own. All of it ends in the same Protocols.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from apis.common import MAX_INTEGER, Identifier, RequestModel
from apis.datasets.models import Row
from apis.datasets.protocol import Datasets
from apis.errors import InvalidField
from apis.inspect.models import ListProvidersResponse
from apis.inspect.protocol import Inspect
from apis.post_training.models import PostTrainingJobArtifactsResponse, PostTrainingJobStatusResponse
from apis.post_training.protocol import PostTraining

Body = dict[str, Any]

_JSON_FIELDS = ("training_config", "algorithm_config")
_VERSIONS = ("v1", "v1alpha", "v1beta")
_MAX_TOKEN_DIGITS = 18  # below MAX_INTEGER whatever the digits


def translate_supervised_fine_tune(body: Body) -> Body:
    """Accept what the command line client sends.

    `training_config` and `algorithm_config` may be JSON inside a string, `checkpoint_dir` may be "" or "null" for none,
    and an `algorithm_config` without its `type` is told by its fields.

    Raises:
        InvalidField: a string that is not JSON.
    """
    changed = dict(body)
    for field in _JSON_FIELDS:
        if isinstance(body.get(field), str):
            changed[field] = _decoded(body[field], field)
    if changed.get("checkpoint_dir") in ("", "null"):
        changed["checkpoint_dir"] = None
    algorithm = changed.get("algorithm_config")
    if isinstance(algorithm, dict) and "type" not in algorithm:
        changed["algorithm_config"] = {"type": "QAT" if "quantizer_name" in algorithm else "LoRA", **algorithm}
    return changed


def translate_preference_optimize(body: Body) -> Body:
    """Configs as JSON strings, as for `translate_supervised_fine_tune`. Raises InvalidField."""
    decoded = {field: _decoded(body[field], field) for field in _JSON_FIELDS if isinstance(body.get(field), str)}
    return {**body, **decoded}


def translate_dataset_registration(body: Body) -> Body:
    """Accept a `source` without its `type`, and the form of 0.1.0 to 0.1.7 with `url` and `dataset_schema`."""
    changed = dict(body)
    if "source" not in body and isinstance(body.get("url"), dict):
        changed = {k: v for k, v in body.items() if k not in ("url", "dataset_schema", "provider_dataset_id")}
        changed["source"] = dict(body["url"])
    if changed.get("provider_id", "") is None:
        del changed["provider_id"]
    source = changed.get("source")
    if isinstance(source, dict) and "type" not in source:
        kind = next((key for key in ("uri", "rows") if key in source), None)
        changed["source"] = {"type": kind, **source} if kind else source
    return changed


def _decoded(text: str, field: str) -> Any:
    if text.strip() == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{field} is a string that does not hold JSON: {error}", param=field) from None


def body_translations() -> dict[str, Callable[[Body], Body]]:
    """Translation of each path that needs one, under every version prefix it is served at."""
    tails = {
        "post-training/supervised-fine-tune": translate_supervised_fine_tune,
        "post-training/preflight": translate_supervised_fine_tune,
        "post-training/preference-optimize": translate_preference_optimize,
        "datasets": translate_dataset_registration,
    }
    return {f"/{version}/{tail}": translation for version in _VERSIONS for tail, translation in tails.items()}


class CancelJobRequest(RequestModel):
    job_uuid: Identifier


def create_flat_job_router(impl: PostTraining) -> APIRouter:
    """Job routes that name the job in the query or the body, as clients up to 0.5 do."""
    router = APIRouter(prefix="/post-training/job", tags=["post_training"])

    @router.get("/status")
    async def get_job_status_flat(job_uuid: str = Query()) -> PostTrainingJobStatusResponse:
        return await impl.get_job_status(job_uuid)

    @router.get("/artifacts")
    async def get_job_artifacts_flat(job_uuid: str = Query()) -> PostTrainingJobArtifactsResponse:
        return await impl.get_job_artifacts(job_uuid)

    @router.post("/cancel", status_code=204, response_class=Response)
    async def cancel_job_flat(request: CancelJobRequest) -> None:
        await impl.cancel_job(request.job_uuid)

    return router


class RowsPage(BaseModel):
    rows: list[Row]
    total_count: int
    next_page_token: str | None = None


class AppendRowsFlatRequest(RequestModel):
    dataset_id: Identifier
    rows: list[Row]


def create_rows_router(impl: Datasets) -> APIRouter:
    """Rows as clients 0.1.0 to 0.1.7 page through them: `page_token` is the number of the first row wanted."""
    router = APIRouter(prefix="/datasetio", tags=["datasets"])

    @router.get("/rows")
    async def get_rows(
        dataset_id: str = Query(),
        rows_in_page: int = Query(-1, ge=-1, le=MAX_INTEGER),
        page_token: str | None = None,
        filter_condition: str | None = None,
    ) -> RowsPage:
        if filter_condition:
            raise InvalidField("rows are not filtered here; leave filter_condition out", param="filter_condition")
        start = _page_start(page_token)
        page = await impl.iterrows(dataset_id, start, rows_in_page)
        token = str(start + len(page.data)) if page.has_more else None
        return RowsPage(rows=page.data, total_count=len(page.data), next_page_token=token)

    @router.post("/rows", status_code=204, response_class=Response)
    async def append_rows_flat(request: AppendRowsFlatRequest) -> None:
        await impl.append_rows(request.dataset_id, request.rows)

    return router


def _page_start(token: str | None) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit()) or len(token) > _MAX_TOKEN_DIGITS:
        raise InvalidField("page_token is the next_page_token of the page before", param="page_token")
    return int(token)


def create_inspect_router(impl: Inspect) -> APIRouter:
    """The provider list where client 0.1.0 looks for it."""
    router = APIRouter(tags=["inspect"])

    @router.get("/inspect/providers")
    async def list_providers_inspect() -> ListProvidersResponse:
        return await impl.list_providers()

    return router

"""Data sets as clients 0.1.0 to 0.1.7 register and page through them, and what later ones leave out."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from apis.common import MAX_INTEGER, Identifier, RequestModel
from apis.datasets.models import Row
from apis.datasets.protocol import Datasets
from apis.errors import InvalidField
from distributions.dialects.words import Words

Body = dict[str, Any]

# Llama Stack's own names of who reads a data set; here the source itself says that.
UPSTREAM_PROVIDERS = ("localfs", "huggingface", "meta-reference")
_MAX_TOKEN_DIGITS = 18  # below MAX_INTEGER whatever the digits


def translate_dataset_registration(body: Body) -> Body:
    """Accept a `source` without its `type`, and the form of 0.1.0 to 0.1.7 with `url` and `dataset_schema`.

    `url` is an object with `uri` or, up to 0.0.61, a text. The schema, which those clients cannot leave out, says
    nothing that the rows do not.

    Raises:
        InvalidField: `provider_dataset_id` is another id than `dataset_id`.
    """
    given = {key: value for key, value in body.items() if value is not None}
    changed = _from_url(given) if _has_url(given) else given
    source = changed.get("source")
    if isinstance(source, dict):
        source = {key: value for key, value in source.items() if value is not None}
        kind = next((key for key in ("uri", "rows") if key in source), None)
        changed["source"] = {"type": kind, **source} if kind else source
    return changed


def registration_words(body: Body) -> Words:
    """What `translate_provider` makes of a body, in the body's own words."""
    words: dict[str, str] = {}
    given = {key: value for key, value in body.items() if value is not None}
    if given.get("provider_id") is not None and "provider_id" not in (given.get("metadata") or {}):
        words["metadata.provider_id"] = "provider_id"
    if _has_url(given):
        place = "url.uri" if isinstance(given["url"], dict) else "url"
        words |= {"source": "url", "source.uri": "metadata.path" if _hub_source(given) else place}
    return words


def _has_url(body: Body) -> bool:
    return "source" not in body and "url" in body


def translate_provider(body: Body) -> Body:
    """A registration over HTTP. Besides `translate_dataset_registration`: `provider_id` chooses a configured provider
    where it names one that is not Llama Stack's. Raises InvalidField."""
    changed = translate_dataset_registration(body)
    provider = changed.pop("provider_id", None)
    metadata = changed.get("metadata") or {}
    if provider is None or provider in UPSTREAM_PROVIDERS or not isinstance(metadata, dict):
        return changed
    return {**changed, "metadata": {"provider_id": provider, **metadata}}


def _from_url(body: Body) -> Body:
    kept = {k: v for k, v in body.items() if k not in ("url", "dataset_schema", "provider_dataset_id")}
    if body.get("provider_dataset_id") not in (None, body.get("dataset_id")):
        raise InvalidField(
            "a data set has one id here: leave provider_dataset_id out, or give dataset_id again",
            param="provider_dataset_id",
        )
    url = body["url"]
    source = dict(url) if isinstance(url, dict) else {"uri": url}
    return {**kept, "source": _hub_source(body) or source}


def _hub_source(body: Body) -> Body | None:
    """The hub data set that the metadata names: with provider `huggingface`, `load_dataset` was called with it."""
    metadata = body.get("metadata")
    if body.get("provider_id") != "huggingface" or not isinstance(metadata, dict):
        return None
    options = {key: value for key, value in metadata.items() if isinstance(value, str)}
    path = options.pop("path", None)
    if path is None:
        return None
    query = f"?{urlencode(options)}" if options else ""
    return {"type": "uri", "uri": f"huggingface://datasets/{quote(path)}{query}"}


class RowsPage(BaseModel):
    rows: list[Row]
    total_count: int
    next_page_token: str | None = None


class AppendRowsFlatRequest(RequestModel):
    dataset_id: Identifier
    rows: list[Row]


async def rows_page(
    impl: Datasets, dataset_id: str, rows_in_page: int, page_token: str | None, filter_condition: str | None
) -> RowsPage:
    """One page; `page_token` is the number of the first row wanted. Raises InvalidField, DatasetNotFound."""
    if filter_condition:
        raise InvalidField("rows are not filtered here; leave filter_condition out", param="filter_condition")
    start = _page_start(page_token)
    page = await impl.iterrows(dataset_id, start, rows_in_page)
    token = str(start + len(page.data)) if page.has_more else None
    return RowsPage(rows=page.data, total_count=len(page.data), next_page_token=token)


def _page_start(token: str | None) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit()) or len(token) > _MAX_TOKEN_DIGITS:
        raise InvalidField("page_token is the next_page_token of the page before", param="page_token")
    return int(token)


def create_rows_router(impl: Datasets) -> APIRouter:
    """Rows where clients 0.1.0 to 0.1.7 look for them."""
    router = APIRouter(prefix="/datasetio", tags=["datasets"], deprecated=True)

    @router.get("/rows")
    async def get_rows(
        dataset_id: str = Query(),
        rows_in_page: int = Query(-1, ge=-1, le=MAX_INTEGER),
        page_token: str | None = None,
        filter_condition: str | None = None,
    ) -> RowsPage:
        return await rows_page(impl, dataset_id, rows_in_page, page_token, filter_condition)

    @router.post("/rows", status_code=204, response_class=Response)
    async def append_rows_flat(request: AppendRowsFlatRequest) -> None:
        await impl.append_rows(request.dataset_id, request.rows)

    return router

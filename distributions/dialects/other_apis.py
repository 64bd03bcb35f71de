"""Lists of APIs that are not served here, which Llama Stack's command line clients show: nothing is in them."""

from __future__ import annotations

from fastapi import APIRouter

from apis.common import ResponseModel

# `shields list`, `toolgroups list`, `vector_dbs list`, `scoring_functions list`, `eval_tasks list` of 0.1.0 to 0.7.0.
LISTS = ("shields", "toolgroups", "tools", "vector-dbs", "scoring-functions", "eval-tasks", "eval/benchmarks")


class EmptyList(ResponseModel):
    data: list[None] = []


def create_other_apis_router() -> APIRouter:
    """Mount at `/v1`."""
    router = APIRouter(tags=["other"], deprecated=True)
    for name in LISTS:
        router.add_api_route(f"/{name}", _nothing, methods=["GET"], response_model=EmptyList, name=f"list {name}")
    return router


async def _nothing() -> EmptyList:
    return EmptyList()

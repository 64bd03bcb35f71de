"""Lists of APIs that are not served here, which Llama Stack's clients and command lines show: nothing is in them."""

from __future__ import annotations

from fastapi import APIRouter

from apis.common import ResponseModel

# By the prefix that clients 0.1.0 to 0.7.0 have for them.
LISTS = {
    "/v1": (
        "shields",
        "toolgroups",
        "tools",
        "memory-banks",
        "vector-dbs",
        "vector_stores",
        "scoring-functions",
        "eval-tasks",
        "eval/benchmarks",
    ),
    "/v1alpha": ("eval/benchmarks",),
}
ALPHA_LISTS = ("shields", "memory-banks", "scoring-functions", "eval-tasks")


class EmptyList(ResponseModel):
    data: list[None] = []


def create_other_apis_router() -> APIRouter:
    """Mount without a prefix."""
    router = APIRouter(tags=["other"], deprecated=True)
    for prefix, names in LISTS.items():
        for name in names:
            path = f"{prefix}/{name}"
            router.add_api_route(path, _nothing, methods=["GET"], response_model=EmptyList, name=f"list {name}")
    for name in ALPHA_LISTS:
        path = f"/alpha/{name}/list"
        router.add_api_route(path, _bare, methods=["GET"], response_model=list[None], name=f"list {name} alpha")
    return router


async def _nothing() -> EmptyList:
    return EmptyList()


async def _bare() -> list[None]:
    return []

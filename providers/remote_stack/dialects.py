"""Which dialect the other server speaks, told by the routes that it lists."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from apis.errors import NotSupported
from post_training.client.core import Call
from post_training.client.transport import AsyncTransport
from providers.remote_stack.config import RemoteStackConfig
from providers.remote_stack.llama_stack import ROUTES, LlamaStackServer
from providers.remote_stack.server import PostgradServer, RemoteServer, settings_of

# Each generation by routes that those before it did not have; the newest first. 0.2.23 serves jobs at both places and
# may list the newer one alone, with data sets still at the older. A Llama Stack lists those routes alone whose API has
# a provider of its own, so data sets are told by the routes of their rows.
_FLAT, _OLD_FLAT = "/v1alpha/post-training/job/status", "/v1/post-training/job/status"
_TOLD_BY: tuple[tuple[str, frozenset[str]], ...] = (
    ("postgrad", frozenset({"/v1alpha/post-training/jobs/{}/events"})),
    ("llama-stack-0.6", frozenset({"/v1alpha/post-training/jobs/{}/status"})),
    ("llama-stack-0.3", frozenset({_FLAT, "/v1beta/datasetio/iterrows/{}"})),
    ("llama-stack-0.1", frozenset({_OLD_FLAT})),
    ("llama-stack-0.1", frozenset({_FLAT})),
)


async def connect(config: RemoteStackConfig) -> RemoteServer:
    """The server in the dialect that it speaks.

    Raises:
        NotSupported: it has no post-training that is known here.
        Unavailable: it does not answer.
    """
    dialect = config.dialect if config.dialect != "auto" else dialect_of(await _routes(config))
    return PostgradServer(config) if dialect == "postgrad" else LlamaStackServer(config, ROUTES[dialect])


def dialect_of(routes: Collection[str]) -> str:
    """The newest dialect among routes such as `/v1alpha/post-training/jobs/{job_uuid}/status`.

    Raises:
        NotSupported: none is.
    """
    plain = {_without_names(route) for route in routes}
    for dialect, needed in _TOLD_BY:
        if needed <= plain:
            return dialect
    raise NotSupported(
        "the server behind this provider lists no post-training routes that are known here; it must be a Postgrad, or "
        "a Llama Stack of 0.1.8 to 0.6.1 that serves post_training"
    )


def _without_names(route: str) -> str:
    return "/".join("{}" if part.startswith("{") else part for part in route.split("/"))


async def _routes(config: RemoteStackConfig) -> list[str]:
    transport = AsyncTransport(settings_of(config))
    try:
        return await transport.send(Call("GET", "/v1/inspect/routes", _parse_routes))
    finally:
        await transport.close()


def _parse_routes(body: Any) -> list[str]:
    listed = body.get("data") if isinstance(body, dict) else None
    return [str(one.get("route")) for one in listed or [] if isinstance(one, dict)]

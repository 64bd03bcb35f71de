"""Brings the data sets that a job names to the other server, once each."""

from __future__ import annotations

import hashlib
import json
from typing import TypeVar

from apis.datasets.models import Row
from apis.errors import TooLarge
from apis.post_training.models import PreferenceOptimizeRequest, PreflightRequest, SupervisedFineTuneRequest
from post_training.catalog.datasets import DatasetCatalog
from providers.remote_stack.server import RemoteServer

RequestT = TypeVar("RequestT", SupervisedFineTuneRequest, PreferenceOptimizeRequest, PreflightRequest)

MAX_BYTES = 48 * 2**20
"""Of rows as JSON: within the 64 MiB that a Postgrad takes as one body."""
_PAGE_ROWS = 10_000
_NAME_LENGTH = 200


async def with_remote_rows(request: RequestT, catalog: DatasetCatalog, server: RemoteServer) -> RequestT:
    """The request as the other server takes it: its data sets are there from now on, under other ids.

    Raises:
        DatasetNotFound: a data set is not registered here.
        TooLarge: it is too large to be sent.
    """
    # Which provider was meant is said of the ones here.
    request = request.model_copy(update={"provider_id": None})
    data = request.training_config.data_config
    if data is None:
        return request
    ids = {"dataset_id": await _bring(data.dataset_id, catalog, server)}
    if data.validation_dataset_id is not None:
        ids["validation_dataset_id"] = await _bring(data.validation_dataset_id, catalog, server)
    training = request.training_config.model_copy(update={"data_config": data.model_copy(update=ids)})
    return request.model_copy(update={"training_config": training})


async def _bring(dataset_id: str, catalog: DatasetCatalog, server: RemoteServer) -> str:
    rows, digest = await _read(dataset_id, catalog)
    # Named by what it holds: a data set that was changed here is another one there, and the same is sent once.
    remote_id = f"{dataset_id[:_NAME_LENGTH].rstrip('/')}-{digest[:16]}"
    if not await server.has_rows(remote_id):
        await server.register_rows(remote_id, rows)
    return remote_id


async def _read(dataset_id: str, catalog: DatasetCatalog) -> tuple[list[Row], str]:
    rows: list[Row] = []
    size, digest = 0, hashlib.sha256()
    start: int | None = 0
    while start is not None:
        page = await catalog.iterrows(dataset_id, start, _PAGE_ROWS)
        for row in page.data:
            line = json.dumps(row, sort_keys=True).encode()
            digest.update(line + b"\n")
            size += len(line) + 2
        rows += page.data
        if size > MAX_BYTES:
            raise TooLarge(
                f"data set {dataset_id!r} has over {MAX_BYTES >> 20} MiB of rows, more than is sent to another server; "
                "train on the server itself, with the data set registered there",
                param="training_config.data_config.dataset_id",
            )
        start = page.next_start_index
    return rows, digest.hexdigest()

"""What the stack's data set catalog, and a source of rows, must be able to do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from apis.datasets.models import (
    Dataset,
    DataSource,
    IterrowsResponse,
    ListDatasetsResponse,
    RegisterDatasetRequest,
    Row,
)


@runtime_checkable
class Datasets(Protocol):
    async def register_dataset(self, request: RegisterDatasetRequest) -> Dataset:
        """Register durably. The same id and source again is a no-op; another source raises Conflict.

        Raises DataInvalid for a source that cannot be read or has no rows, InvalidField for one not allowed here.
        """
        ...

    async def list_datasets(self) -> ListDatasetsResponse: ...

    async def get_dataset(self, dataset_id: str) -> Dataset:
        """The data set; of rows sent inline the first MiB, see `Dataset.source_truncated`. Raises DatasetNotFound."""
        ...

    async def unregister_dataset(self, dataset_id: str) -> None:
        """Raises DatasetNotFound."""
        ...

    async def iterrows(
        self, dataset_id: str, start_index: int | None = None, limit: int | None = None
    ) -> IterrowsResponse:
        """Rows `[start_index, start_index + limit)`; a limit of None or -1 means to the end.

        One answer holds at most 64 MiB of rows; where `has_more` is true, ask again from the row after the last.

        Raises:
            DatasetNotFound: no such data set.
            InvalidField: a negative or impossible number.
        """
        ...

    async def append_rows(self, dataset_id: str, rows: list[Row]) -> None:
        """Append durably. Raises DatasetNotFound, InvalidField where the source cannot be appended to."""
        ...


@runtime_checkable
class DatasetIO(Protocol):
    """A provider of `datasetio`: says which sources it reads and under which rules.

    `source_policy` is handed to workers, which read rows by themselves: a plain JSON object that
    `post_training.data.sources.SourcePolicy` parses.

    Attributes:
        provider_id: the id the provider has in the run.yaml; each data set carries that of its provider.
    """

    provider_id: str

    def accepts(self, source: DataSource) -> bool: ...

    def source_policy(self) -> dict[str, object]: ...

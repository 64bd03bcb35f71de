"""The datasets API (with datasetio rows)."""

from apis.datasets.models import (
    AppendRowsRequest,
    Dataset,
    DatasetPurpose,
    DataSource,
    IterrowsResponse,
    ListDatasetsResponse,
    RegisterDatasetRequest,
    Row,
    RowsDataSource,
    URIDataSource,
)
from apis.datasets.protocol import DatasetIO, Datasets

__all__ = [
    "AppendRowsRequest",
    "DataSource",
    "Dataset",
    "DatasetIO",
    "DatasetPurpose",
    "Datasets",
    "IterrowsResponse",
    "ListDatasetsResponse",
    "RegisterDatasetRequest",
    "Row",
    "RowsDataSource",
    "URIDataSource",
]

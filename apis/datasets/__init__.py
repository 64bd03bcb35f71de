"""The datasets API (with datasetio rows)."""

from apis.datasets.models import *  # noqa: F403  the models are this package's public names
from apis.datasets.protocol import DatasetIO as DatasetIO
from apis.datasets.protocol import Datasets as Datasets

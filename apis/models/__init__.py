"""The models API."""

from apis.models.models import *  # noqa: F403  the models are this package's public names
from apis.models.protocol import Models as Models

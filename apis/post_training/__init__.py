"""The post_training API: submit, list, status, artifacts, cancel, logs."""

from apis.post_training.models import *  # noqa: F403  the models are this package's public names
from apis.post_training.protocol import PostTraining as PostTraining

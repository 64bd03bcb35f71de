"""The inference API: chat completions and completions, as OpenAI's clients speak them."""

from apis.inference.models import *  # noqa: F403  the models are this package's public names
from apis.inference.protocol import Inference as Inference

"""The inspect API: version, health, providers, routes. Facts about the running stack, so no provider has it."""

from apis.inspect.models import *  # noqa: F403  the models are this package's public names

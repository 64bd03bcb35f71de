"""`random_llama` for worker processes that verify their checkpoints themselves, without the seconds a child takes.

A worker finds it by its module name, as it finds a provider's own.
"""

from __future__ import annotations

from post_training.training.model import ModelConfig
from post_training.worker import announcing
from tests.job_bench import VerifierHere
from tests.random_llama import RandomLlama
from tests.random_llama import load_model as load_random

setattr(announcing, "Verifier", VerifierHere)  # noqa: B010 - a stand-in in another module, said to the type checker


def load_model(config: ModelConfig) -> RandomLlama:
    if config.seed == BROKEN_SEED:
        raise RuntimeError("nobody foresaw this")
    return load_random(config)


BROKEN_SEED = 13

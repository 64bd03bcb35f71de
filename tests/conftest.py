"""Fixtures shared by all tests."""

from __future__ import annotations

import os

from tests.model_fixture import smollm2

# One model per process on a small machine: threads that fight for two cores only make tests slow and noisy.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__all__ = ["smollm2"]

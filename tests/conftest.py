"""Fixtures shared by all tests."""

from __future__ import annotations

import os

from tests.model_fixture import smollm2

# Tests run models in several processes at once: threads that spin would take the cores from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__all__ = ["smollm2"]

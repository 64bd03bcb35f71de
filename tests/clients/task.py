"""What a driver is told: where the server is, and the names and rows of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE = "lab/tiny"
"""The id of the base model; with a slash, as real ones have."""
WORDS = ["red", "brown", "quick", "lazy", "old", "slow", "town", "sea", "tree", "books"]


def task(url: str, version: str, name: str, server_version: str, folder: Path) -> dict[str, Any]:
    """The task of one run. `name` is unique among those of one version; jobs and data sets are named after both."""
    return {
        "url": url,
        "version": version,
        "model": BASE,
        "job": f"runs/{version}-{name}",
        "dataset": f"lab/{version}-{name}",
        "alias": f"lab/mine-{version}-{name}",
        "exchanges": [(f"Say {WORDS[n % 10]} {n}", f"The {WORDS[(n + 3) % 10]} hen.") for n in range(12)],
        "folder": str(folder),
        "server_version": server_version,
    }

"""A preflight over many short rows, as a user waits for it."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from benchmarks.stack import Stack, request
from benchmarks.workspace import data_rows

ROWS = 10_000
_ASKED, _ANSWERED = 16, 9
"""Words; SmolLM2's template makes 64 tokens of these, its system message included."""


def short_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of two turns, words of real answers."""
    words = " ".join(row["output"] for row in data_rows(400)[1]).split()
    draw = random.Random(seed)

    def turns() -> list[dict[str, str]]:
        start = draw.randrange(len(words) - _ASKED - _ANSWERED)
        middle, end = start + _ASKED, start + _ASKED + _ANSWERED
        asked, answer = " ".join(words[start:middle]), " ".join(words[middle:end])
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]

    return [{"messages": turns()} for _ in range(count)]


def preflight_seconds(stack: Stack, repeats: int) -> tuple[list[float], list[float], float]:
    """Of rows never seen before, of the same rows once more, and the mean number of tokens of a row."""
    first, again, tokens = [], [], []
    for number in range(repeats):
        name = f"short-{number}"
        stack.client.datasets.register({"type": "rows", "rows": short_rows(ROWS, number)}, dataset_id=name)
        wanted = request("none", dataset=name)
        for seconds in (first, again):
            began = time.perf_counter()
            report = stack.client.post_training.preflight(**wanted)
            seconds.append(time.perf_counter() - began)
        tokens.append(report.dataset.tokens / ROWS)
        stack.client.datasets.unregister(name)
    return first, again, statistics.mean(tokens)

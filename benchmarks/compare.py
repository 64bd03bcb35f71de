"""When two runs may be compared, and by what: ratios of runs whose losses agree, or the reason why there is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import Result

STEP_TOLERANCE = {"bf16": 2e-2, "fp32": 2e-3}
"""Largest relative difference of the losses of one step where both trained on the same rows."""
HELD_OUT_TOLERANCE = 2e-2
"""Largest relative difference of the losses on held-out rows where they did not."""
SAME_TOKENS = 0.02
"""Runs over other rows may differ by this share of tokens and still count as having seen the same number."""


@dataclass(frozen=True)
class Agreement:
    """Whether two runs learned the same.

    Attributes:
        difference: the largest relative difference of their losses.
        by: `steps` where both trained on the same rows step by step, else `held-out rows`.
        refused: why no ratio may be given; None where it may.
    """

    difference: float
    by: str
    refused: str | None


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of each pair of runs, and the smallest and largest of them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Relative to theirs; NaN where a loss is. Raises ValueError where the series differ in length."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    # `max` alone passes over a NaN that does not come first.
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def agree(ours: Result, theirs: Result, dtype: str, held_out: tuple[float, float] | None = None) -> Agreement:
    """Compare the losses of two runs.

    Args:
        held_out: our and their loss on held-out rows at the end; needed where the rows of their steps differ.
    """
    if ours.plan is not None and ours.plan == theirs.plan:
        return _judged(largest_difference(ours.losses, theirs.losses), "steps", STEP_TOLERANCE[dtype])
    seen, other = sum(ours.tokens), sum(theirs.tokens)
    if abs(seen - other) > SAME_TOKENS * other:
        return Agreement(float("nan"), "held-out rows", f"trained on {seen:,} tokens, the other on {other:,}")
    if held_out is None:
        return Agreement(float("nan"), "held-out rows", "other rows in each step, and no loss on held-out rows")
    return _judged(largest_difference(held_out[:1], held_out[1:]), "held-out rows", HELD_OUT_TOLERANCE)


def _judged(difference: float, by: str, tolerance: float) -> Agreement:
    # Written so that NaN is refused too.
    within = difference <= tolerance
    return Agreement(
        difference, by, None if within else f"losses differ by {difference:.1e}, more than {tolerance:.0e}"
    )


def worst(agreements: Sequence[Agreement]) -> Agreement:
    """Of several repetitions, one that is refused, else the one that differs most."""
    refused = [each for each in agreements if each.refused is not None]
    return refused[0] if refused else max(agreements, key=lambda each: each.difference)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Pair by pair, each pair of one repetition."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))

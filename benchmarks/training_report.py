"""The results of `benchmarks.training` as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Result, Settings
from benchmarks.compare import Agreement, agree, ratio, worst
from benchmarks.report import series, table
from benchmarks.workspace import HELD_OUT_ROWS

Key = tuple[str, str]
"""A case's name and its dtype."""


@dataclass
class Runs:
    """All results of one run of the script.

    Attributes:
        results: by case and dtype, and in it by repetition.
        failed: why a case gave no result.
        held_out: losses on held-out rows after the first repetition.
    """

    results: dict[Key, dict[int, Result]] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)
    held_out: dict[Key, float] = field(default_factory=dict)
    _folders: dict[Key, dict[int, Path]] = field(default_factory=dict)

    def add(self, number: int, case: str, dtype: str, result: Result, folder: Path) -> None:
        self.results.setdefault((case, dtype), {})[number] = result
        self._folders.setdefault((case, dtype), {})[number] = folder

    def fail(self, case: str, dtype: str, reason: str) -> None:
        self.failed[case, dtype] = reason

    def of(self, number: int, dtype: str) -> dict[str, Result]:
        """The results of one repetition by case, in the order in which they ran."""
        return {key[0]: runs[number] for key, runs in self.results.items() if key[1] == dtype and number in runs}

    def folders(self, number: int) -> dict[Key, Path]:
        return {key: folders[number] for key, folders in self._folders.items() if number in folders}


def body(runs: Runs, settings: Settings, what: str, threads: int, ours: Sequence[str]) -> str:
    """The section without its heading."""
    parts = [_method(runs, settings, what, threads), _speeds(runs, settings), _ratios(runs, settings, ours)]
    if runs.failed:
        parts.append(
            "No result:\n\n" + "\n".join(f"* {c}, {d}: {_last_line(why)}" for (c, d), why in runs.failed.items())
        )
    parts.append(_losses(runs))
    return "\n\n".join(parts)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:300]


def _method(runs: Runs, s: Settings, what: str, threads: int) -> str:
    rows = s.batch * s.accumulation
    repeats = max((len(each) for each in runs.results.values()), default=0)
    work = (
        f"{what} (at most {s.longest} tokens each, the last {HELD_OUT_ROWS} held out), LoRA of rank {s.rank} and alpha "
        f"{s.alpha:g} on all seven linear layers, AdamW at {s.lr:g} without decay, {s.warmup} warm-up steps and a "
        f"cosine, prompt masked, {rows} rows a step (packed: {rows} packs of {s.longest} tokens; peers "
        f"{s.batch} at a time), {threads} threads, {repeats} repetitions in turn."
    )
    how = (
        f"Tokens/s: tokens without padding over the wall time of the steps after the first {s.skip}. Memory: the "
        "process's peak until the last step. Figures are medians over repetitions; a ratio is the median of the ratios "
        "of two runs of one repetition, with the smallest and the largest."
    )
    return f"{work} {how}"


def _speeds(runs: Runs, s: Settings) -> str:
    header = [
        "case",
        "dtype",
        "tokens/s",
        "supervised/s",
        "padding",
        "s/step",
        "peak GiB",
        "1st step s",
        "held-out loss",
    ]
    rows = [_speed(key, list(each.values()), runs.held_out.get(key), s) for key, each in runs.results.items()]
    return table(header, rows)


def _speed(key: Key, results: list[Result], held_out: float | None, s: Settings) -> list[str]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    first = results[0]
    return [
        *key,
        f"{median([r.rate(s.skip) for r in results]):.0f}",
        f"{median([r.rate(s.skip, supervised=True) for r in results]):.0f}",
        f"{1 - sum(first.tokens) / sum(first.padded_tokens):.0%}",
        f"{median([r.step_seconds(s.skip) for r in results]):.2f}",
        f"{median([r.peak_rss / 2**30 for r in results]):.2f}",
        f"{median([r.setup + r.ends[0] for r in results]):.1f}",
        "" if held_out is None else f"{held_out:.4f}",
    ]


def _ratios(runs: Runs, s: Settings, ours: Sequence[str]) -> str:
    """Ours against each peer; where ours ran on that peer's rows, that run of ours, and against all rows else."""
    header = ["ours against", "dtype", "ours", "tokens/s, times", "memory, times", "largest loss difference"]
    rows = []
    for peer in runs.results:
        for name in ours:
            found = _counterpart(runs, peer, name)
            if found is not None and not peer[0].startswith(tuple(ours)):
                rows.append(_ratio(runs, found, peer, s))
    return table(header, rows) if rows else "No peer was measured."


def _counterpart(runs: Runs, peer: Key, name: str) -> Key | None:
    """Our run on the peer's rows; where none has the same, one that comes nearest in number of tokens."""
    theirs = _first(runs, peer)
    candidates = [key for key in runs.results if key[0].startswith(f"{name} on ") and key[1] == peer[1]]
    same = [key for key in candidates if theirs.plan is not None and _first(runs, key).plan == theirs.plan]
    by_tokens = sorted(candidates, key=lambda key: abs(sum(_first(runs, key).tokens) - sum(theirs.tokens)))
    return next(iter([*same, *by_tokens]), None)


def _first(runs: Runs, key: Key) -> Result:
    return next(iter(runs.results[key].values()))


def _ratio(runs: Runs, ours: Key, peer: Key, s: Settings) -> list[str]:
    mine, theirs = runs.results[ours], runs.results[peer]
    pairs = [(mine[number], theirs[number]) for number in mine if number in theirs]
    held_out = (runs.held_out[ours], runs.held_out[peer]) if {ours, peer} <= runs.held_out.keys() else None
    verdict = worst([agree(a, b, peer[1], held_out) for a, b in pairs])
    return [peer[0], peer[1], ours[0], *_figures(pairs, verdict, s), f"{verdict.difference:.1e} of {verdict.by}"]


def _figures(pairs: list[tuple[Result, Result]], verdict: Agreement, s: Settings) -> list[str]:
    if verdict.refused is not None:
        return [f"refused: {verdict.refused}", "refused"]
    speeds = ratio([a.rate(s.skip) for a, _ in pairs], [b.rate(s.skip) for _, b in pairs])
    memory = ratio([a.peak_rss for a, _ in pairs], [b.peak_rss for _, b in pairs])
    return [str(speeds), str(memory)]


def _losses(runs: Runs) -> str:
    lines = [series(f"{case} {dtype}", _first(runs, (case, dtype)).losses) for case, dtype in runs.results]
    return "Losses step by step, of the first repetition:\n\n```\n" + "\n".join(lines) + "\n```"

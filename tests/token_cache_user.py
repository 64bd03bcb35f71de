"""A process that reads, writes and evicts cached tokens without rest, beside others that do the same.

python -m tests.token_cache_user FOLDER SEED     exits with 0 where every entry it saw was whole
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from post_training.data.preflight import TokenizedDataset
from post_training.data.token_cache import TokenCache
from post_training.data.token_rows import TokenRows
from post_training.data.types import TokenizedRow

TURNS = 300
LIMIT_BYTES = 6_000


def dataset(*lengths: int, note: str = "") -> TokenizedDataset:
    """Rows of these lengths."""
    made = [
        TokenizedRow(n, np.arange(length, dtype=np.int32), np.full(length, 0.5, dtype=np.float32))
        for n, length in enumerate(lengths)
    ]
    return TokenizedDataset(made, {"rows": len(made), "note": note})


def same(one: TokenizedDataset, other: TokenizedDataset) -> bool:
    """Byte for byte, types included."""
    return one.report == other.report and all(
        (a.row, a.tokens.dtype, a.tokens.tobytes(), a.weights.dtype, a.weights.tobytes())
        == (b.row, b.tokens.dtype, b.tokens.tobytes(), b.weights.dtype, b.weights.tobytes())
        for a, b in zip(one.rows, other.rows, strict=True)
    )


def put(cache: TokenCache, key: str, data: TokenizedDataset) -> TokenRows:
    """As a job's rows come into the cache."""
    with cache.writing(key) as draft:
        stored = draft.store(iter(data.rows))
        draft.finish(data.report)
    return stored


def main(folder: Path, seed: int) -> int:
    cache = TokenCache(folder, LIMIT_BYTES)
    hits = 0
    for turn in range(TURNS):
        number = (turn * 7 + seed) % 5
        expected = dataset(50 + number, note=str(number))
        found = cache.get(str(number) * 64)
        hits += found is not None
        if found is not None and not same(found, expected):
            return 1
        if found is None or turn % 3 == 0:
            stored = put(cache, str(number) * 64, expected)
            if not same(TokenizedDataset(stored, expected.report), expected):
                return 1
    return 0 if hits else 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

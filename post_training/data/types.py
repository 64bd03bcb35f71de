"""The shapes that data takes on its way to the trainer. numpy only: no torch on this floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
"""A chat message as OpenAI has it: role, content, optional tool_calls, tool_call_id, name, weight (0 or 1)."""


@dataclass(frozen=True)
class Conversation:
    """One row as messages.

    Attributes:
        row: 0-based number of the row in its data set.
        messages: at least one.
        tools: JSON-schema tool definitions for the chat template, or None.
    """

    row: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PlainText:
    """One row as text without turns: continued pre-training. `row` is its 0-based number in its data set."""

    row: int
    text: str


Example = Conversation | PlainText


@dataclass(frozen=True)
class TokenizedRow:
    """One row as tokens.

    Attributes:
        row: 0-based number of the row in its data set.
        tokens: [n] int32.
        weights: [n] float32, the loss weight of predicting `tokens[i]` from what precedes it; weights[0] is 0.
    """

    row: int
    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]

    @property
    def supervised(self) -> int:
        """How many tokens carry loss."""
        return int(np.count_nonzero(self.weights))


@dataclass(frozen=True)
class FlatBatch:
    """Rows concatenated without padding; the unit of one forward and backward pass.

    Attributes:
        tokens: [T] int64.
        positions: [T] int64, restarting at 0 in each segment.
        targets: [T] int64, the next token of the same segment; 0 where there is none.
        weights: [T] float32, the loss weight of predicting targets[t] at t; 0 at the last token of each segment.
        lengths: segment lengths, summing to T.
        rows: the row number of each segment.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def supervised(self) -> int:
        return int(np.count_nonzero(self.weights))

    @property
    def weight_sum(self) -> float:
        return float(self.weights.sum(dtype=np.float64))

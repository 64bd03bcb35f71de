"""Keys and values of the tokens so far, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROOM = 256


class KeyValueCache:
    """Of one sequence, for all layers: [L, 2, H, capacity, D], of which the first `length` positions are filled.

    A cache that is concatenated anew for each token copies 2 L H D n numbers for the token after n others. This one has
    room to write into and doubles when it is full, so each number is copied less than twice in all.
    """

    def __init__(self, layers: Sequence[Any], length: int, window: int | None) -> None:
        """Take over, layer by layer, what transformers' cache holds of the prompt; that one is empty afterwards.

        Args:
            layers: each with `keys` and `values` [1, H, n, D] of the last n positions.
            length: tokens read.
            window: a token attends to itself and to `window - 1` before it; None: to all before it.
        """
        self.length, self._window = length, window
        _, heads, _, width = layers[0].keys.shape
        self._all: Tensor = layers[0].keys.new_empty((len(layers), 2, heads, length + ROOM, width))
        for own, layer in zip(self._all, layers, strict=True):
            held = slice(length - layer.keys.shape[2], length)
            own[0, :, held], own[1, :, held] = layer.keys[0], layer.values[0]
            layer.keys = layer.values = None

    @property
    def capacity(self) -> int:
        return self._all.shape[3]

    def advance(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Make place for one more token, whose key and value the caller writes.

        Returns:
            By layer: that place [2, H, 1, D]; the keys [1, H, n, D] the token attends to, its own last; the values.
        """
        if self.length == self.capacity:
            self._all = torch.cat((self._all, torch.empty_like(self._all)), dim=3)
        self.length += 1
        start = 0 if self._window is None else max(0, self.length - self._window)
        seen = self._all[:, :, :, start : self.length]
        return seen[:, :, :, -1:].unbind(), seen[:, :1].unbind(), seen[:, 1:].unbind()

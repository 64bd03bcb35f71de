"""Hyperparameters that a request leaves out: functions of the model's width and of how many rows there are.

docs/training.md has them in a table, with the reason and the source of each number.
"""

from __future__ import annotations

import math

_LR, _LR_WIDTH = 3e-4, 2048
_LR_BOUNDS = (5e-5, 1e-3)
_EPOCH_BATCHES = 20
_BATCH_SIZE = 8
_LARGE_BATCH_SIZE = 32
_LARGE_EPOCH_BATCHES = 1000
_EPOCHS = 3
_JOB_STEPS = 60
_JOB_ROWS = 25_000
MAX_DEFAULT_EPOCHS = 10


def default_lr(hidden_size: int) -> float:
    """The highest learning rate for LoRA under adam or adamw, by the model's width; two significant digits.

    3e-4 at a width of 2,048, falling with the square root of the width, from 1e-3 at most to 5e-5 at least.
    """
    lowest, highest = _LR_BOUNDS
    return float(f"{min(highest, max(lowest, _LR * math.sqrt(_LR_WIDTH / hidden_size))):.2g}")


def lr_of_all_weights(lora_lr: float) -> float:
    """The rate where every weight is trained, for a model whose LoRA rate is `lora_lr`: a tenth.

    Schulman et al. 2025, *LoRA Without Regret*, find LoRA's best rate about ten times that of full fine-tuning.
    """
    return float(f"{lora_lr / 10:.2g}")


def default_batch_size(units: int) -> int:
    """Rows of a batch for a data set of `units` rows, or packs of a batch for `units` packs.

    8, or what makes 1,000 batches an epoch but at most 32, where that is more; less where there would be fewer than 20.
    """
    size = max(_BATCH_SIZE, min(_LARGE_BATCH_SIZE, units // _LARGE_EPOCH_BATCHES))
    return max(1, min(size, units // _EPOCH_BATCHES))


def default_epochs(rows: int, steps: int) -> int:
    """Passes over `rows` rows that take `steps` optimizer steps each.

    3; up to 10 where the job would have fewer than 60 steps; fewer, at least 1, where it would read more than 25,000
    rows.
    """
    epochs = min(MAX_DEFAULT_EPOCHS, max(_EPOCHS, math.ceil(_JOB_STEPS / steps)))
    return max(1, min(epochs, _JOB_ROWS // rows))

"""Which rows a job trains on and validates on, and in which steps: the same for a preflight and for the job itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apis.errors import DataInvalid
from apis.post_training.models import DataConfig, OptimizerConfig
from post_training.catalog.model_sizes import context_length
from post_training.data.batching import EpochPlan, epoch_order, steps
from post_training.data.token_rows import row_lengths, take_rows
from post_training.data.types import TokenizedRow
from post_training.defaults import default_batch_size, default_epochs
from post_training.jobs.spec import JobSpec

_SPLIT_STREAM = 2**32 - 1  # no epoch has this number, so no epoch's order is drawn from the same stream
_MAX_DEFAULT_WARMUP = 100
_UNTOLD_CONTEXT = 2048  # the shortest that a family has whose config does not tell: Llama's, in transformers


def max_seq_len(spec: JobSpec) -> int:
    """The request's, else the provider's default, at most the model's context."""
    data = spec.training_config.data_config
    if data is not None and data.max_seq_len is not None:
        return data.max_seq_len
    config: dict[str, Any] = json.loads((Path(spec.model.base_dir) / "config.json").read_bytes())
    return min(spec.worker.default_max_seq_len, context_length(config) or _UNTOLD_CONTEXT)


def settle(spec: JobSpec, rows: Sequence[TokenizedRow], earlier: Mapping[str, Any] | None = None) -> JobSpec:
    """The job with the batch size and the epochs that its request left out.

    Args:
        rows: those to train on.
        earlier: the report of an earlier attempt of the job; what that trained with holds.
    """
    config, known, data = spec.training_config, earlier or {}, _data_config(spec)
    size = data.batch_size or known.get("batch_size") or default_batch_size(len(_steps(spec, rows, 0, 1)))
    epochs = config.n_epochs or known.get("n_epochs")
    if epochs is None:
        planned = _steps(spec, rows, 0, size, config.gradient_accumulation_steps)
        epochs = default_epochs(len(rows), len(planned))
    return spec.settled({"n_epochs": epochs, "batch_size": size})


def plan_epoch(spec: JobSpec, rows: Sequence[TokenizedRow], epoch: int) -> EpochPlan:
    """The row indices of each optimizer step of an epoch of a settled job."""
    config = spec.training_config
    return _steps(spec, rows, epoch, spec.batch_size, config.gradient_accumulation_steps, config.max_steps_per_epoch)


def count_steps(spec: JobSpec, rows: Sequence[TokenizedRow]) -> int:
    """Optimizer steps of the whole job."""
    if _data_config(spec).packed:
        # How rows fill packs depends on their order, which differs from epoch to epoch.
        return sum(len(plan_epoch(spec, rows, epoch)) for epoch in range(spec.n_epochs))
    return spec.n_epochs * len(plan_epoch(spec, rows, 0))


def warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Those of the request, else a tenth of all steps, at most 100."""
    if config.num_warmup_steps is not None:
        return config.num_warmup_steps
    return min(_MAX_DEFAULT_WARMUP, total_steps // 10)


def split_rows(
    rows: Sequence[TokenizedRow], part: float, seed: int
) -> tuple[Sequence[TokenizedRow], Sequence[TokenizedRow]]:
    """Rows to train on and rows to validate on, each in their order; at least one of each.

    Which go where follows from the seed and the number of rows.

    Raises:
        DataInvalid: there are fewer than two rows.
    """
    if len(rows) < 2:
        raise DataInvalid(
            "a validation_split needs at least 2 rows that can be trained on; add rows, or leave it out",
            param="training_config.data_config.validation_split",
        )
    count = min(len(rows) - 1, max(1, round(part * len(rows))))
    held_out = np.zeros(len(rows), dtype=bool)
    held_out[np.random.Generator(np.random.PCG64([seed, _SPLIT_STREAM])).permutation(len(rows))[:count]] = True
    return take_rows(rows, np.flatnonzero(~held_out)), take_rows(rows, np.flatnonzero(held_out))


def validation_rows(spec: JobSpec, rows: Sequence[TokenizedRow]) -> Sequence[TokenizedRow]:
    """All rows, or those of the first `max_validation_steps` batches."""
    limit = spec.training_config.max_validation_steps
    return rows if limit is None else rows[: limit * spec.batch_size]


def _steps(
    spec: JobSpec,
    rows: Sequence[TokenizedRow],
    epoch: int,
    batch_size: int,
    accumulation: int = 1,
    max_steps: int | None = None,
) -> EpochPlan:
    data = _data_config(spec)
    return steps(
        row_lengths(rows),
        order=epoch_order(len(rows), data.shuffle, spec.seed, epoch),
        batch_size=batch_size,
        accumulation=accumulation,
        packed=bool(data.packed),
        max_seq_len=max_seq_len(spec),
        max_steps=max_steps,
    )


def _data_config(spec: JobSpec) -> DataConfig:
    data = spec.training_config.data_config
    assert data is not None  # no job is accepted without
    return data

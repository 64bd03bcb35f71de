"""All the rows of a job, read, checked, tokenised and planned, with the report on them. No torch here.

A preflight and the job's worker both come through here, so the report before a job is the report of the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apis.datasets.models import DATA_SOURCE
from apis.errors import DataInvalid
from post_training.data.chat import ChatTokenizer
from post_training.data.planning import count_steps, max_seq_len, plan_epoch, settle, split_rows, warmup_steps
from post_training.data.preflight import TokenizedDataset, tokenize_dataset
from post_training.data.sources import RowReader, SourcePolicy, open_rows
from post_training.data.token_cache import TokenCache
from post_training.data.token_key import cache_key
from post_training.data.token_rows import TokenRows, row_bytes, row_lengths, temporary_rows
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec


@dataclass(frozen=True)
class JobRows:
    """What a job trains and validates on.

    Attributes:
        spec: the job's, with the epochs and the batch size that it trains with.
        report: that JSON can hold: `dataset` and, where the job has them, `validation_dataset` (as `tokenize_dataset`
            reports them, with the `fingerprint` of their rows) and `validation_split`; `seed`, `max_seq_len`,
            `n_epochs`, `batch_size`, `lr`, `steps_per_epoch` (of the first epoch), `total_steps`, `warmup_steps`,
            `tokens_per_epoch`, `largest_step_tokens` and `longest_kept_tokens`.
    """

    spec: JobSpec
    training: TokenizedDataset
    validation: TokenizedDataset | None
    report: dict[str, Any]


def read_job_rows(spec: JobSpec, home: Path, earlier: Mapping[str, Any] | None = None) -> JobRows:
    """Read, check and tokenise everything that a job trains and validates on, or take it from the cache under `home`.

    Args:
        earlier: the report of an earlier attempt; see `settle`.

    Raises:
        DataInvalid: with the row's number; `param` names the field of the data set.
        DiskFull: there is no room for the rows.
        Unavailable: a source could not be read in time.
    """
    cache = TokenCache.under(home)
    assert spec.dataset is not None  # a session's rows come from its client
    training, digest = _read(spec, spec.dataset, "dataset_id", cache)
    report = {"dataset": digest}
    validation = None
    if spec.validation is not None:
        validation, report["validation_dataset"] = _read(spec, spec.validation, "validation_dataset_id", cache)
    config = spec.training_config.data_config
    if validation is None and config is not None and config.validation_split is not None:
        kept, held_out = split_rows(training.rows, config.validation_split, spec.seed)
        training, validation = replace(training, rows=kept), replace(training, rows=held_out)
        report["validation_split"] = {"training_rows": len(kept), "validation_rows": len(held_out)}
    settled = settle(spec, training.rows, earlier)
    return JobRows(settled, training, validation, {**report, **_plan_report(settled, training.rows)})


def tokenize(spec: JobSpec, reference: DatasetRef, cache: TokenCache | None = None) -> TokenizedDataset:
    """Read, check and tokenise a data set, or take it from the cache; its rows lie in a file either way.

    Raises:
        DataInvalid: with the row's number.
        DiskFull: there is no room for the rows.
    """
    source = DATA_SOURCE.validate_python(reference.source)
    reader = open_rows(source, SourcePolicy.model_validate(reference.policy))
    if cache is None:
        return _tokenize(spec, reader, temporary_rows)
    content = reader.digest()
    if content is None:
        return _tokenize(spec, reader, cache.temporary)
    key = cache_key(spec, content)
    found = cache.get(key)
    if found is not None:
        return found
    with cache.writing(key) as draft:
        made = _tokenize(spec, reader, draft.store)
        # A file may be written to while it is read: only what is read the same before and after has this key.
        if reader.digest() == content:
            draft.finish(made.report)
    return made


def fingerprint(rows: Sequence[TokenizedRow]) -> str:
    """sha256 of all tokens and weights in order, hexadecimal."""
    if isinstance(rows, TokenRows) and rows.sha256 is not None:
        return rows.sha256
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row_bytes(row))
    return digest.hexdigest()


def _read(
    spec: JobSpec, reference: DatasetRef, field: str, cache: TokenCache
) -> tuple[TokenizedDataset, dict[str, Any]]:
    try:
        data = tokenize(spec, reference, cache)
    except DataInvalid as error:
        named = DataInvalid(
            f"data set {reference.dataset_id!r}, {error.message}", param=f"training_config.data_config.{field}"
        )
        named.row, named.pointer = error.row, error.pointer
        raise named from error
    return data, {**data.report, "fingerprint": fingerprint(data.rows)}


def _tokenize(
    spec: JobSpec, reader: RowReader, store: Callable[[Iterable[TokenizedRow]], TokenRows]
) -> TokenizedDataset:
    data = spec.training_config.data_config
    assert data is not None  # no job is accepted without
    return tokenize_dataset(
        reader,
        ChatTokenizer.from_dir(Path(spec.model.base_dir), now=spec.created_at),
        data_format=data.data_format,
        train_on_input=bool(data.train_on_input),
        max_seq_len=max_seq_len(spec),
        columns=data.columns,
        on_overlength=data.on_overlength,
        store=store,
    )


def _plan_report(spec: JobSpec, rows: Sequence[TokenizedRow]) -> dict[str, Any]:
    plan, lengths = plan_epoch(spec, rows, 0), row_lengths(rows)
    sizes = plan.sizes(lengths)
    total = count_steps(spec, rows)
    return {
        "seed": spec.seed,
        "max_seq_len": max_seq_len(spec),
        "n_epochs": spec.n_epochs,
        "batch_size": spec.batch_size,
        "lr": spec.lr,
        "steps_per_epoch": len(plan),
        "total_steps": total,
        "warmup_steps": warmup_steps(spec.training_config.optimizer_config, total),
        "tokens_per_epoch": int(sizes.sum()),
        "largest_step_tokens": int(sizes.max()),
        "longest_kept_tokens": int(lengths.max()),
    }

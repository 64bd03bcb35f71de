"""The peak memory of a process that handles many rows, in bytes, on standard output.

python -m tests.token_rows_memory stored COUNT FOLDER            rows of 64 tokens into the cache and out of it
python -m tests.token_rows_memory job COUNT FOLDER MODEL_DIR     a file of rows of some 680 tokens, as a worker reads it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from apis.post_training.models import LoraFinetuningConfig, TrainingConfig
from post_training.data.batching import micro_batches
from post_training.data.job_rows import fingerprint, read_job_rows
from post_training.data.planning import plan_epoch
from post_training.data.token_cache import TokenCache
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings


def peak_memory() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def stored(count: int, folder: Path) -> None:
    """All that is done to rows, but for training."""
    cache, key = TokenCache(folder), "0" * 64
    with cache.writing(key) as draft:
        written = draft.store(_rows(count))
        draft.finish({})
    found = cache.get(key)
    assert found is not None
    order = np.random.default_rng(0).permutation(count)
    view = written.take(order)
    assert fingerprint(found.rows) == fingerprint(written) != fingerprint(view)
    assert sum(len(batch.lengths) for batch in micro_batches(found.rows, 4096)) == count


def _rows(count: int) -> Iterator[TokenizedRow]:
    for number in range(count):
        yield TokenizedRow(number, np.full(64, number, np.int32), np.ones(64, np.float32))


def job(count: int, folder: Path, model_dir: Path) -> None:
    """Read and plan a job twice: tokenised, and from the cache."""
    file = folder / "text.jsonl"
    with file.open("w") as lines:
        for number in range(count):
            lines.write(json.dumps({"text": f"The brown hen {number}. " * 70}) + "\n")
    data = {"dataset_id": "data", "data_format": "text", "max_seq_len": 2048, "validation_split": 0.1}
    config = {"n_epochs": 1, "data_config": data, "optimizer_config": {"lr": 1e-3}}
    spec = JobSpec(
        job_uuid="job",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        provider_id="p",
        model=ModelRef(identifier="tiny", base_identifier="tiny", base_dir=str(model_dir)),
        training_config=TrainingConfig.model_validate(config),
        algorithm_config=LoraFinetuningConfig(),
        dataset=DatasetRef(
            dataset_id="data",
            source={"type": "uri", "uri": str(file)},
            policy={"allowed_roots": [str(folder)]},
        ),
        worker=WorkerSettings(model_module="none"),
    )
    for _ in range(2):
        rows = read_job_rows(spec, folder)
        plan = plan_epoch(rows.spec, rows.training.rows, 0)
        assert sum(len(step) for step in plan) == len(rows.training.rows) == count - round(0.1 * count)
        for index in plan[len(plan) // 2]:
            assert len(rows.training.rows[index].tokens) > 400


def main() -> None:
    what, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if what == "stored":
        stored(count, folder)
    else:
        job(count, folder, Path(sys.argv[4]))
    print(peak_memory())


if __name__ == "__main__":
    main()

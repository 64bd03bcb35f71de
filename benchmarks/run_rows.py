"""A large data set through a worker's own reading, then steps at random places of it, in a process of its own.

    python -m benchmarks.run_rows ORDER.json

Prints one JSON object; see `Growth` in benchmarks/growth_rows.py, which starts this.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from apis.datasets.models import URIDataSource
from apis.post_training.models import LoraFinetuningConfig, TrainingConfig
from benchmarks.measured import peak_rss
from post_training.data.batching import micro_batches
from post_training.data.job_rows import read_job_rows
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings

MODULE = "providers.torchtune.model"


def spec_of(file: Path, model_dir: Path) -> JobSpec:
    """A job over the file, four rows a step."""
    data = {"dataset_id": "rows", "batch_size": 4, "max_seq_len": 512}
    training = {"n_epochs": 1, "data_config": data, "optimizer_config": {"lr": 3e-4}}
    return JobSpec(
        job_uuid="growth",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        provider_id="torchtune",
        model=ModelRef(identifier="model", base_identifier="model", base_dir=str(model_dir)),
        training_config=TrainingConfig.model_validate(training),
        algorithm_config=LoraFinetuningConfig(),
        dataset=DatasetRef(
            dataset_id="rows",
            source=URIDataSource(uri=str(file)).model_dump(),
            policy=SourcePolicy(allowed_roots=[str(file.parent)]).model_dump(),
        ),
        worker=WorkerSettings(model_module=MODULE),
    )


def read(order: dict[str, Any]) -> dict[str, Any]:
    """What a submit checks, what a worker reads the first time and what it reads again: seconds, and memory after."""
    file, home = Path(order["file"]), Path(order["home"])
    spec = spec_of(file, Path(order["model_dir"]))
    told: dict[str, Any] = {}
    began = time.perf_counter()
    check_rows(open_rows(URIDataSource(uri=str(file)), SourcePolicy(allowed_roots=[str(file.parent)])), None)
    told["checked"] = time.perf_counter() - began
    began = time.perf_counter()
    rows = read_job_rows(spec, home)
    told["tokenized"] = time.perf_counter() - began
    told["tokens"] = rows.report["dataset"]["tokens"]
    told["tokenizing_peak"] = peak_rss()
    del rows
    began = time.perf_counter()
    read_job_rows(spec, home)
    return told | {"read_again": time.perf_counter() - began}


def train(order: dict[str, Any], rows: Sequence[TokenizedRow]) -> dict[str, Any]:
    """Steps over rows at random places of the data set.

    The file repeats a pool of rows, and the same draws choose the same rows of the pool whatever the file's length: so
    the steps of a large set and of a small one do the same work.
    """
    import torch

    from post_training.training.model import LoraSettings, ModelConfig
    from post_training.training.optim import OptimSettings
    from post_training.training.trainer import Trainer
    from post_training.worker.setup import set_threads
    from providers.torchtune.model import load_model

    set_threads(order["threads"])
    config = ModelConfig(Path(order["model_dir"]), LoraSettings(), dtype=order["dtype"], kernels=order["kernels"])
    trainer = Trainer(load_model(config), OptimSettings(order["steps"] + order["skip"]))
    draw, pool = np.random.default_rng(0), order["pool"]
    blocks = np.random.default_rng(1)
    torch.manual_seed(0)
    tokens, seconds, losses = 0, 0.0, []
    for number in range(order["steps"] + order["skip"]):
        chosen = draw.integers(0, pool, 4) + pool * blocks.integers(0, max(1, len(rows) // pool), 4)
        began = time.perf_counter()
        batch = list(micro_batches([rows[index % len(rows)] for index in chosen], 4096))
        losses.append(trainer.train_step(batch).loss)
        if number >= order["skip"]:
            tokens, seconds = tokens + sum(len(each.tokens) for each in batch), seconds + time.perf_counter() - began
    return {"rate": tokens / seconds, "peak": peak_rss(), "last_loss": losses[-1]}


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    if order["part"] == "read":
        told = read(order)
    else:
        spec = spec_of(Path(order["file"]), Path(order["model_dir"]))
        told = train(order, read_job_rows(spec, Path(order["home"])).training.rows)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

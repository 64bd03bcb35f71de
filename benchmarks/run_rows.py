"""A large data set through a worker's own reading, then steps at random places of it, in a process of its own.

    python -m benchmarks.run_rows ORDER.json

Prints one JSON object; see `Growth` in benchmarks/growth_rows.py, which starts this.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apis.datasets.models import URIDataSource
from apis.post_training.models import LoraFinetuningConfig, TrainingConfig
from benchmarks.measured import peak_rss
from post_training.data.batching import micro_batches
from post_training.data.job_rows import JobRows, read_job_rows
from post_training.data.planning import plan_epoch
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings

if TYPE_CHECKING:
    from post_training.training.trainer import Trainer

MODULE = "providers.torchtune.model"
ROWS_A_STEP = 4


def spec_of(file: Path, model_dir: Path) -> JobSpec:
    """A job over the file, four rows a step."""
    data = {"dataset_id": "rows", "batch_size": ROWS_A_STEP, "max_seq_len": 512}
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


@dataclass
class Side:
    """One data set that is trained on: the places of its steps' rows, and what they took."""

    data: JobRows
    pool: int
    tokens: int = 0
    seconds: float = 0.0
    reading: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        self.plan = plan_epoch(self.data.spec, self.data.training.rows, 0)

    def step(self, trainer: Trainer, number: int, drawn: NDArray[np.int64], *, counts: bool) -> None:
        """Train on the drawn rows of the pool, each in the repetition that the shuffled plan says."""
        rows = self.data.training.rows
        chosen = drawn + self.pool * (self.plan[number % len(self.plan)][: len(drawn)] // self.pool)
        began = time.perf_counter()
        batch = list(micro_batches([rows[index % len(rows)] for index in chosen], 4096))
        read = time.perf_counter()
        self.loss = trainer.train_step(batch).loss
        if counts:
            self.tokens += sum(len(each.tokens) for each in batch)
            self.seconds += time.perf_counter() - began
            self.reading += read - began


def train(order: dict[str, Any]) -> dict[str, Any]:
    """Steps over rows at random places of the data set and, in turn with them, of the one it is compared with.

    Files repeat a pool of rows, and the same draws choose the same rows of the pool whatever the file's length: so both
    do the same work, in one process and at the same time, whatever else the machine does.
    """
    home, model_dir = Path(order["home"]), Path(order["model_dir"])
    files = [Path(order[name]) for name in ("file", "reference")]
    own, reference = (Side(read_job_rows(spec_of(file, model_dir), home), order["pool"]) for file in files)
    trainer = _trainer(order, model_dir)
    draw = np.random.default_rng(0)
    for number in range(order["steps"] + order["skip"]):
        drawn = draw.integers(0, order["pool"], ROWS_A_STEP)
        for side in (own, reference) if number % 2 else (reference, own):
            side.step(trainer, number, drawn, counts=number >= order["skip"])
    assert own.tokens == reference.tokens
    return {
        "rate": own.tokens / own.seconds,
        "against": reference.seconds / own.seconds,
        "reading": own.reading / own.seconds,
        "peak": peak_rss(),
        "last_loss": own.loss,
    }


def _trainer(order: dict[str, Any], model_dir: Path) -> Trainer:
    import torch

    from post_training.training.model import LoraSettings, ModelConfig
    from post_training.training.optim import OptimSettings
    from post_training.training.trainer import Trainer
    from post_training.worker.setup import set_threads
    from providers.torchtune.model import load_model

    set_threads(order["threads"])
    config = ModelConfig(model_dir, LoraSettings(), dtype=order["dtype"], kernels=order["kernels"])
    torch.manual_seed(0)
    return Trainer(load_model(config), OptimSettings(2 * (order["steps"] + order["skip"])))


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(read(order) if order["part"] == "read" else train(order)))


if __name__ == "__main__":
    main()

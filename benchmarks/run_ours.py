"""Our own training in a process of its own: the model and trainer of a job's worker, without HTTP and store.

python -m benchmarks.run_ours ORDER.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from benchmarks.measured import CLOCK, finish

# isort: split
import torch
from safetensors.torch import load_file, save_file

from benchmarks.cases import Order
from benchmarks.workspace import START, Workspace
from post_training.data.batching import micro_batches
from post_training.jobs.spec import WorkerSettings
from post_training.training.model import Dtype, LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from post_training.worker.setup import set_threads
from providers.torchtune.model import load_model

MODULE = "providers.torchtune.model"


def trainer_of(order: Order, workspace: Workspace) -> Trainer:
    """A trainer as a job's worker makes one, with the workspace's initial adapter where it has one."""
    s = order.settings
    config = ModelConfig(
        workspace.model_dir,
        LoraSettings(s.rank, s.alpha),
        dtype=cast(Dtype, order.dtype),
        seed=s.seed,
        kernels=order.case.options["kernels"],
    )
    optim = OptimSettings(order.steps, lr=s.lr, warmup_steps=s.warmup, max_grad_norm=s.max_grad_norm)
    trainer = Trainer(load_model(config), optim)
    if (workspace.folder / START).exists():
        trainer.masters.load(load_file(workspace.folder / START))
    return trainer


def main(order: Order) -> None:
    set_threads(order.threads)
    workspace = Workspace.open(order.workspace)
    trainer = trainer_of(order, workspace)
    assert order.plan is not None
    most = WorkerSettings(model_module=MODULE).micro_batch_tokens
    torch.manual_seed(order.settings.seed)
    CLOCK.begin()
    for step in order.plan:
        batches = list(micro_batches([workspace.rows[index] for index in step], most))
        CLOCK.losses.append(trainer.train_step(batches).loss)
        CLOCK.step()
    taken = [[workspace.rows[index].tokens.tolist() for index in step] for step in order.plan]
    finish(order, workspace, [(step, sum(len(row) for row in step)) for step in taken], accumulation=1)
    save_file(trainer.masters.snapshot(), order.out / "adapter.safetensors")


if __name__ == "__main__":
    main(Order.load(Path(sys.argv[1])))

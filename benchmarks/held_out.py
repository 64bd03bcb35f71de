"""Losses of trained adapters on the held-out rows, all computed alike: fp32, our own model.

python -m benchmarks.held_out WORKSPACE RANK ALPHA OUT.json FOLDER...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.workspace import Workspace
from post_training.data.batching import micro_batches
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from providers.torchtune.model import load_model

MICRO_BATCH_TOKENS = 2048


def loss_of(workspace: Workspace, folder: Path, lora: LoraSettings) -> float:
    """In nats, of the adapter that a measured process left in `folder`."""
    under_our_names = folder / "adapter.safetensors"
    adapter_dir = None if under_our_names.exists() else folder / "adapter"
    trainer = Trainer(
        load_model(ModelConfig(workspace.model_dir, lora, dtype="fp32", adapter_dir=adapter_dir)), OptimSettings(1)
    )
    if adapter_dir is None:
        trainer.masters.load(load_file(under_our_names))
    return trainer.validate(micro_batches(workspace.held_out, MICRO_BATCH_TOKENS)).loss


def main() -> None:
    workspace = Workspace.open(Path(sys.argv[1]))
    lora = LoraSettings(int(sys.argv[2]), float(sys.argv[3]))
    losses = {folder: loss_of(workspace, Path(folder), lora) for folder in sys.argv[5:]}
    Path(sys.argv[4]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()

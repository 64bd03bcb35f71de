"""From a job's spec to a trainer on its device, the same on every attempt. For whole jobs and for sessions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from post_training.checkpoints.layout import TRAINING_STATE
from post_training.checkpoints.space import CheckpointSize, estimate
from post_training.checkpoints.state import load_training_state, masters_of
from post_training.jobs.spec import JobSpec
from post_training.training.model import TrainableModel
from post_training.training.trainer import Trainer
from post_training.worker import setup
from post_training.worker.lease import Lease


@dataclass(frozen=True)
class Loaded:
    """A model on its device.

    Attributes:
        resources: what it runs with, which later attempts take over.
    """

    identifier: str
    model: TrainableModel
    device: str
    resources: dict[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        """For the job's report."""
        return {"trainable_parameters": self.trainable, "computation": asdict(self.model.computation)}

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self.model.adapter_parameters().values())

    @property
    def message(self) -> str:
        return f"loaded {self.identifier}: {self.trainable:,} trainable parameters"


def load(lease: Lease, spec: JobSpec, device: str | None, tokens: int | None) -> Loaded:
    """Load the job's model.

    Args:
        device: PyTorch's name; None: what an earlier attempt used, else what the spec says.
        tokens: what the job is to read in all; None: nobody knows.

    Raises:
        PostgradError: as the provider's `load_model` and `setup.choose_device`.
    """
    first = lease.store.get(lease.job_uuid).resources or {}
    chosen = setup.choose_device(device or first.get("device", spec.worker.device))
    # What the first attempt ran with: another number of threads could change the last bit of a sum.
    threads = setup.set_threads(first.get("threads", spec.worker.threads))
    # An attempt that stored none ran before there was a choice.
    kernels = first.get("kernels", "plain") if first else setup.choose_kernels(spec, tokens)
    model = setup.load_model(spec, chosen, kernels)
    dtype = spec.training_config.dtype or "bf16"
    resources = {"device": chosen, "threads": threads, "dtype": dtype, "kernels": model.computation.kernels}
    return Loaded(spec.model.identifier, model, chosen, resources)


def trainer_of(lease: Lease, spec: JobSpec, model: TrainableModel, total_steps: int) -> Trainer:
    """A trainer that stops when the lease says so.

    Args:
        total_steps: of the schedule of the learning rate.
    """
    config = spec.training_config
    optim = setup.optim_settings(config.optimizer_config, total_steps, config.max_grad_norm)
    trainer = Trainer(model, optim, should_stop=lease.should_stop)
    _take_exact_adapter(spec, trainer)
    return trainer


def checkpoint_size(spec: JobSpec, trainer: Trainer | None = None) -> CheckpointSize:
    """What a checkpoint of the job takes on disk; without the trainer, what is known before the model is: the merged
    model's part.

    Raises:
        ModelInvalid: a merged model is wanted and the base's weight files are damaged or missing.
    """
    tensors = [] if trainer is None else list(trainer.masters.tensors.values())
    worker, optimizer = spec.worker, spec.training_config.optimizer_config
    return estimate(
        sum(tensor.numel() for tensor in tensors),
        len(tensors),
        optimizer.optimizer_type.value,
        Path(spec.model.base_dir),
        worker.merged_dtype if spec.trains_all or "merged" in worker.export else None,
        momentum=bool(optimizer.momentum),
        adapter=not spec.trains_all,
    )


def _take_exact_adapter(spec: JobSpec, trainer: Trainer) -> None:
    """Go on from a checkpoint of ours with its fp32 masters: what a bf16 model loaded of them is rounded."""
    if spec.model.adapter_dir is None:
        return
    state = Path(spec.model.adapter_dir).parent / TRAINING_STATE
    if state.is_dir():
        trainer.masters.load(masters_of(load_training_state(state)[0]))

"""From a job's spec to what its loop needs: device, model, tokenised rows, trainer."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from apis.datasets.models import DATA_SOURCE
from apis.errors import InvalidField
from apis.post_training.models import LoraFinetuningConfig, OptimizerConfig
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import TokenizedDataset, tokenize_dataset
from post_training.data.sources import SourcePolicy, open_rows
from post_training.data.types import TokenizedRow
from post_training.jobs.spec import DatasetRef, JobSpec
from post_training.training.model import LoraSettings, ModelConfig, TrainableModel
from post_training.training.optim import OptimSettings

LoadModel = Callable[[ModelConfig], TrainableModel]


def choose_device(wanted: str) -> str:
    """`auto` is CUDA if there is one. Raises InvalidField where CUDA is asked for and absent."""
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidField(f"device {wanted!r} is configured but this machine has no CUDA device", param="device")
    return wanted


def set_threads(threads: int | None) -> int:
    """Fix PyTorch's CPU threads: those given, else OMP_NUM_THREADS, else all usable cores. Returns their number."""
    wanted = threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or usable_cores()
    torch.set_num_threads(wanted)
    return wanted


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def fingerprint(rows: Sequence[TokenizedRow]) -> str:
    """sha256 of all tokens and weights in order, hexadecimal."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row.tokens.tobytes())
        digest.update(row.weights.tobytes())
    return digest.hexdigest()


def lora_settings(config: LoraFinetuningConfig) -> LoraSettings:
    return LoraSettings(
        rank=config.rank,
        alpha=config.alpha,
        attn_modules=tuple(config.lora_attn_modules),
        mlp=config.apply_lora_to_mlp,
        output=config.apply_lora_to_output,
    )


def load_model(spec: JobSpec, device: str) -> TrainableModel:
    """Load the job's model through the module its provider named."""
    loader: LoadModel = importlib.import_module(spec.worker.model_module).load_model
    training = spec.training_config
    return loader(
        ModelConfig(
            base_dir=Path(spec.model.base_dir),
            lora=lora_settings(spec.algorithm_config),
            adapter_dir=Path(spec.model.adapter_dir) if spec.model.adapter_dir else None,
            dtype=training.dtype or "bf16",
            device=device,
            seed=spec.seed,
            activation_checkpointing=bool(training.efficiency_config.enable_activation_checkpointing),
        )
    )


def max_seq_len(spec: JobSpec) -> int:
    """The request's, else the provider's default, at most the model's context."""
    data = spec.training_config.data_config
    if data is not None and data.max_seq_len is not None:
        return data.max_seq_len
    config: dict[str, Any] = json.loads((Path(spec.model.base_dir) / "config.json").read_bytes())
    context = config.get("max_position_embeddings")
    return (
        min(spec.worker.default_max_seq_len, context) if isinstance(context, int) else spec.worker.default_max_seq_len
    )


def tokenize(spec: JobSpec, reference: DatasetRef) -> TokenizedDataset:
    """Read, check and tokenise a data set. Raises DataInvalid with the row's number."""
    data = spec.training_config.data_config
    assert data is not None  # no job is accepted without
    source = DATA_SOURCE.validate_python(reference.source)
    return tokenize_dataset(
        open_rows(source, SourcePolicy.model_validate(reference.policy)),
        ChatTokenizer.from_dir(Path(spec.model.base_dir), now=spec.created_at),
        data_format=data.data_format,
        train_on_input=bool(data.train_on_input),
        max_seq_len=max_seq_len(spec),
    )


def optim_settings(config: OptimizerConfig, total_steps: int, max_grad_norm: float | None) -> OptimSettings:
    warmup = config.num_warmup_steps
    return OptimSettings(
        total_steps=total_steps,
        optimizer=config.optimizer_type.value,
        lr=config.lr,
        weight_decay=config.weight_decay,
        warmup_steps=min(100, total_steps // 10) if warmup is None else warmup,
        max_grad_norm=max_grad_norm,
    )

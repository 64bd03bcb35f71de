"""From a job's spec to what its loop needs: device, threads, model, rows, settings of the optimizer."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from apis.errors import InvalidField
from apis.post_training.models import FullFinetuningConfig, OptimizerConfig, RunnableAlgorithm
from post_training.catalog.model_files import tensor_headers
from post_training.data.planning import warmup_steps
from post_training.jobs.devices import usable_cores
from post_training.jobs.spec import JobSpec
from post_training.training.model import KernelForm, LoraSettings, ModelConfig, TrainableModel
from post_training.training.optim import OptimSettings

WORTH_COMPILING = 2e13
"""Floating-point operations of a job from which on compiled kernels win back the time it takes to compile them: that is
10 to 20 s of two CPU cores once, and a third of the time of all steps, at 400 GFLOP/s."""

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


def lora_settings(config: RunnableAlgorithm) -> LoraSettings:
    """Those of an adapter; where every weight is trained they say nothing."""
    if isinstance(config, FullFinetuningConfig):
        return LoraSettings()
    return LoraSettings(
        rank=config.rank,
        alpha=config.alpha,
        attn_modules=tuple(config.lora_attn_modules),
        mlp=config.apply_lora_to_mlp,
        output=config.apply_lora_to_output,
        dora=bool(config.use_dora),
        rslora=bool(config.use_rslora),
        dropout=config.lora_dropout or 0.0,
        quantized_base=bool(config.quantize_base),
    )


def choose_kernels(spec: JobSpec, tokens: int | None) -> KernelForm:
    """The form a job is computed in that is to read `tokens` tokens in all its epochs; None: nobody knows how many."""
    if spec.worker.kernels != "auto":
        return spec.worker.kernels
    if tokens is None:
        return "fused"
    weights = sum(math.prod(header.shape) for header in tensor_headers(Path(spec.model.base_dir)).values())
    # Forward 2 operations for each weight and token, backward through a frozen base 2 more.
    return "compiled" if 4 * weights * tokens >= WORTH_COMPILING else "fused"


def load_model(spec: JobSpec, device: str, kernels: KernelForm = "fused") -> TrainableModel:
    """Load the job's model through the module its provider named."""
    loader: LoadModel = importlib.import_module(spec.worker.model_module).load_model
    training = spec.training_config
    return loader(
        ModelConfig(
            base_dir=Path(spec.model.base_dir),
            lora=lora_settings(spec.algorithm_config),
            full=spec.trains_all,
            adapter_dir=Path(spec.model.adapter_dir) if spec.model.adapter_dir else None,
            dtype=training.dtype or "bf16",
            device=device,
            seed=spec.seed,
            activation_checkpointing=bool(training.efficiency_config.enable_activation_checkpointing),
            kernels=kernels,
        )
    )


def optim_settings(config: OptimizerConfig, total_steps: int, max_grad_norm: float | None) -> OptimSettings:
    assert config.lr is not None  # no job is accepted without
    return OptimSettings(
        total_steps=total_steps,
        optimizer=config.optimizer_type.value,
        lr=config.lr,
        weight_decay=config.weight_decay,
        warmup_steps=warmup_steps(config, total_steps),
        max_grad_norm=max_grad_norm,
        schedule=config.lr_schedule or "cosine",
        min_lr_ratio=config.min_lr_ratio or 0.0,
        betas=config.betas,
        eps=config.eps,
        momentum=config.momentum,
    )

"""What a job will take: memory by a formula over the model's shapes, time from jobs that have run. No torch here.

Memory, in bytes, with e bytes a number (fp32 4, bf16 2), D hidden size, I intermediate size, A attention heads times
head size, L layers, V vocabulary, T tokens of the largest micro-batch:

    base         e of each weight; 0.516 of each weight of the layers where the base is held in NF4
    adapter      fp32: 4 weight + 4 gradient; bf16: 2 + 2, and 4 + 4 of the fp32 master; 4 a moment
    activations  1.5 T L (e (3 D + 3 A + 4 I) + 8 D): what autograd keeps of a layer of torchtune's, by
                 saved_tensors_hooks on a Llama, and half as much again for what is computed beside it and what the
                 allocator keeps, as measured; with activation checkpointing 1.5 T (L e D and one layer of the above).
                 The fast path keeps about two thirds of that
    logits       min(T, 512) V (e + 12): a chunk in e, and its fp32 copy, probabilities and gradient
    runtime      of a process with PyTorch; not on an accelerator
    loading      beside the above, not at the same time: the base and, on a CPU, its mapped files

LoRA dropout and DoRA keep more activations than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import select

from apis.post_training.models import FullFinetuningConfig, JobStatus, LoraFinetuningConfig
from post_training.catalog import model_sizes
from post_training.catalog.model_files import CONFIG_FILE, TensorHeader, read_json, tensor_headers
from post_training.jobs.database import Database
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import JobRow

_DTYPE_BYTES = {"fp32": 4, "bf16": 2}
# 4 bits, and 8 bits of scale for each 64 weights (Dettmers et al. 2023, arXiv:2305.14314, double quantization).
_NF4_BYTES = (4 + 8 / 64) / 8
_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
_LOGIT_POSITIONS = 512
_HELD = 1.5
_RUNTIME_BYTES = 450 * 2**20
_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
# The newest jobs say most about the machine as it is now.
_SPEED_JOBS = 5
_LOOKED_AT = 100


@dataclass(frozen=True)
class _Shape:
    """A model's sizes as its config.json has them."""

    hidden: int
    intermediate: int
    attention: int
    kv: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> _Shape:
        """Raises ModelInvalid where the config does not tell."""
        hidden, heads = model_sizes.width(config), model_sizes.heads(config)
        head = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        sizes = (model_sizes.intermediate(config), head * heads, head * kv_heads, model_sizes.layers(config))
        return cls(hidden, *sizes, config["vocab_size"])


def estimates(database: Database, spec: JobSpec, report: dict[str, Any], device_kind: str) -> dict[str, Any]:
    """Estimates for a job with the report of `read_job_rows`: `trainable_parameters`, `memory`, `time`.

    Raises:
        ModelInvalid: the base's files are damaged or missing.
    """
    trainable = trainable_parameters(spec)
    return {
        "trainable_parameters": trainable,
        "memory": memory(spec, report, trainable, device_kind),
        "time": duration(database, spec, report, device_kind),
    }


def trainable_parameters(spec: JobSpec) -> int:
    """How many numbers the job's adapters have: rank (in + out) of each adapted matrix, and out with DoRA.

    The model's own where all of them are trained.
    """
    base = Path(spec.model.base_dir)
    shape, lora = _Shape.of(read_json(base / CONFIG_FILE)), spec.algorithm_config
    if isinstance(lora, FullFinetuningConfig):
        return sum(math.prod(header.shape) for header in tensor_headers(base).values())
    parts = [part for name, header in tensor_headers(base).items() for part in _adapted(name, header, shape, lora)]
    return sum(lora.rank * (rows + columns) + (rows if lora.use_dora else 0) for rows, columns in parts)


def memory(spec: JobSpec, report: dict[str, Any], trainable: int, device_kind: str) -> dict[str, Any]:
    """Bytes at the peak, as the module's docstring has the formula: `<part>_bytes`, and `total_bytes`."""
    config, base_dir = spec.training_config, Path(spec.model.base_dir)
    size = _DTYPE_BYTES[config.dtype or "bf16"]
    headers, shape = tensor_headers(base_dir), _Shape.of(read_json(base_dir / CONFIG_FILE))
    tokens = min(report["largest_step_tokens"], max(spec.worker.micro_batch_tokens, report["longest_kept_tokens"]))
    checkpointing = bool(config.efficiency_config.enable_activation_checkpointing)
    lora = spec.algorithm_config
    quantized = isinstance(lora, LoraFinetuningConfig) and bool(lora.quantize_base)
    parts = {
        "base_bytes": 0 if spec.trains_all else _base_bytes(headers, size, quantized),
        "adapter_bytes": trainable * _bytes_each(spec, size),
        "activation_bytes": _activation_bytes(shape, tokens, size, checkpointing),
        "logit_bytes": min(tokens, _LOGIT_POSITIONS) * shape.vocabulary * (size + 12),
        "runtime_bytes": _RUNTIME_BYTES if device_kind == "cpu" else 0,
    }
    files = sum(file.stat().st_size for file in {header.file for header in headers.values()})
    loading = _base_bytes(headers, size, False) + (files + _RUNTIME_BYTES if device_kind == "cpu" else 0)
    return {"device_kind": device_kind, **parts, "total_bytes": max(sum(parts.values()), loading)}


def duration(database: Database, spec: JobSpec, report: dict[str, Any], device_kind: str) -> dict[str, Any]:
    """Seconds of the training steps, from the median speed of the newest completed jobs that are like this one.

    Loading, validation and checkpoints come on top.
    """
    dtype = spec.training_config.dtype or "bf16"
    speeds = _speeds(database, spec.model.base_identifier, dtype, device_kind)
    what = f"completed on {spec.model.base_identifier} in {dtype} on a {device_kind} device here"
    if not speeds:
        return {"seconds": None, "tokens_per_second": None, "jobs": 0, "note": f"unknown: no job has {what} yet"}
    speed = median(speeds)
    tokens = report["tokens_per_epoch"] * report["n_epochs"]
    noun = "job" if len(speeds) == 1 else "jobs"
    note = f"by the speed of {len(speeds)} {noun} {what}; loading, validation and checkpoints come on top"
    return {"seconds": tokens / speed, "tokens_per_second": speed, "jobs": len(speeds), "note": note}


def _speeds(database: Database, base: str, dtype: str, device_kind: str) -> list[float]:
    query = select(JobRow.spec, JobRow.progress).where(
        JobRow.status == JobStatus.completed, JobRow.device_kind == device_kind
    )
    with database.reading() as session:
        found = session.execute(query.order_by(JobRow.sequence.desc()).limit(_LOOKED_AT)).all()
    alike = [
        progress["tokens_per_second"]
        for spec, progress in found
        if progress
        and progress.get("tokens_per_second")
        and spec["model"]["base_identifier"] == base
        and (spec["training_config"].get("dtype") or "bf16") == dtype
    ]
    return alike[:_SPEED_JOBS]


def _adapted(name: str, header: TensorHeader, shape: _Shape, lora: LoraFinetuningConfig) -> list[tuple[int, int]]:
    """Rows and columns of each matrix with an adapter of its own in this tensor of the base."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if not name.endswith(".weight") or len(header.shape) != 2:
        return []
    rows, columns = header.shape
    modules = lora.lora_attn_modules
    if layer in modules:
        return [(rows, columns)]
    if layer == "qkv_proj":
        sizes = {"q_proj": shape.attention, "k_proj": shape.kv, "v_proj": shape.kv}
        return [(sizes[part], columns) for part in sizes if part in modules]
    if layer in _MLP:
        parts = 2 if layer == "gate_up_proj" else 1
        return [(rows // parts, columns)] * parts if lora.apply_lora_to_mlp else []
    named = {"o_proj": "output_proj"}.get(layer, layer)
    return [(rows, columns)] if named in modules or (layer == "lm_head" and lora.apply_lora_to_output) else []


def _base_bytes(headers: dict[str, TensorHeader], size: int, quantized: bool) -> int:
    def each(name: str, header: TensorHeader) -> float:
        return _NF4_BYTES if quantized and ".layers." in name and len(header.shape) == 2 else size

    return math.ceil(sum(math.prod(header.shape) * each(name, header) for name, header in headers.items()))


def _bytes_each(spec: JobSpec, size: int) -> int:
    """Of a trained number: itself and its gradient in the network, the fp32 master and its gradient, the moments."""
    optimizer = spec.training_config.optimizer_config
    moments = _MOMENTS[optimizer.optimizer_type.value] + bool(optimizer.momentum)
    return 4 * moments + (8 if size == 4 else 2 * size + 8)


def _activation_bytes(shape: _Shape, tokens: int, size: int, checkpointing: bool) -> int:
    layer = size * (3 * shape.hidden + 3 * shape.attention + 4 * shape.intermediate) + 8 * shape.hidden
    kept = shape.layers * size * shape.hidden + layer if checkpointing else shape.layers * layer
    return math.ceil(_HELD * tokens * kept)

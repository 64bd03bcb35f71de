"""How much room checkpoints take, and whether the disk has it. No torch here."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apis.errors import DiskFull
from post_training.catalog.model_files import tensor_headers
from post_training.checkpoints.layout import RESERVE, disk_full

FreeBytes = Callable[[Path], int]

_FP32_BYTES = 4
_MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
_MERGED_BYTES = {"fp32": 4, "bf16": 2}
# What a merged model takes from its base beside the weights, and an adapter from its tokenizer.
_COPIED_SUFFIXES = (".json", ".jinja", ".model")
# A tensor's entry in a safetensors header or index; measured 130 to 170 bytes for a layer of a Llama.
_HEADER_BYTES = 256
# manifest, JSON, random states, and what files and folders round up to.
_FIXED_BYTES = 96 << 10
RESERVE_BYTES = 4 << 20
_REMEDY = "free some space, or move $POSTGRAD_HOME to a larger disk"


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of one checkpoint.

    Attributes:
        inside: inside an epoch: adapter and training state.
        after: after an epoch: with the merged model where that is exported.
    """

    inside: int
    after: int


def estimate(
    parameters: int,
    tensors: int,
    optimizer: str,
    base_dir: Path,
    merged_dtype: Literal["fp32", "bf16"] | None = None,
    *,
    momentum: bool = False,
    adapter: bool = True,
) -> CheckpointSize:
    """What one checkpoint takes on disk, a little more than less.

    Args:
        parameters, tensors: how many numbers are trained, in how many tensors.
        optimizer: `adam` and `adamw` keep two moments of each parameter, `sgd` one with `momentum`, else none.
        base_dir: the Hugging Face directory of the base model.
        merged_dtype: of the merged model, None where there is none.
        adapter: whether what is trained is written as an adapter beside its training state.

    Raises:
        ModelInvalid: a merged model is wanted and the base's weight files are damaged or missing.
    """
    moments = _MOMENTS[optimizer] + momentum
    copied = _copied_bytes(base_dir)
    # fp32: the adapter, the masters, the moments. Each moment has a tensor of its own, as has each count of steps.
    copies = 1 + moments + adapter
    trained = parameters * _FP32_BYTES * copies + tensors * _HEADER_BYTES * (copies + 1)
    inside = trained + copied + _FIXED_BYTES
    merged = 0 if merged_dtype is None else _merged_bytes(base_dir, merged_dtype) + copied
    return CheckpointSize(inside, inside + merged)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of `path`, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def check_start(home: Path, size: CheckpointSize, *, after: int, inside: int, free: FreeBytes = free_bytes) -> None:
    """Refuse to start what could not be kept.

    Args:
        after: how many checkpoints after epochs are still to come.
        inside: how many inside an epoch lie there at most at one time.

    Raises:
        DiskFull: saying what is needed and what is free.
    """
    needed, there = after * size.after + inside * size.inside, free(home)
    if there < needed:
        raise DiskFull(
            f"the job's checkpoints need {format_bytes(needed)} of disk, {format_bytes(there, floor=True)} are free: "
            f"{after} after epochs of {format_bytes(size.after)} each, and up to {inside} inside an epoch of "
            f"{format_bytes(size.inside)} each; {_REMEDY}, or train fewer epochs"
        )


def check_save(home: Path, needed: int, step: int, free: FreeBytes = free_bytes) -> None:
    """Raises DiskFull where the next checkpoint, of `needed` bytes, has no room."""
    there = free(home)
    if there < needed:
        raise DiskFull(
            f"the checkpoint of step {step} needs {format_bytes(needed)} of disk, {format_bytes(there, floor=True)} "
            f"are free; {_REMEDY}"
        )


def hold_reserve(folder: Path) -> None:
    """Take room for what a job's end writes to its store, which mostly lies on the same disk.

    Without it a job that fills the disk could not even say so.

    Raises:
        DiskFull: there is no such room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Random, since some file systems store zeros in no space at all.
        (folder / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
    except OSError as error:
        if full := disk_full(error, "the job's files"):
            raise full from error
        raise


def release_reserve(folder: Path) -> None:
    """Give the room of `hold_reserve` back."""
    (folder / RESERVE).unlink(missing_ok=True)


def format_bytes(count: int, *, floor: bool = False) -> str:
    """`1.5 GiB`, or `0.4 MiB` below one GiB; rounded up, so that what is asked for is enough, or down."""
    unit, name = (1 << 30, "GiB") if count >= 1 << 30 else (1 << 20, "MiB")
    tenths = count * 10 / unit
    return f"{(math.floor(tenths) if floor else math.ceil(tenths)) / 10:.1f} {name}"


def _copied_bytes(base_dir: Path) -> int:
    files = [path for path in base_dir.iterdir() if path.suffix in _COPIED_SUFFIXES]
    return sum(path.stat().st_size for path in files if path.is_file())


def _merged_bytes(base_dir: Path, dtype: Literal["fp32", "bf16"]) -> int:
    headers = tensor_headers(base_dir).values()
    return sum(math.prod(header.shape) * _MERGED_BYTES[dtype] + _HEADER_BYTES for header in headers)

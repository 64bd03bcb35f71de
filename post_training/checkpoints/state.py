"""Training state on disk: named tensors as safetensors, everything else as JSON. Never pickle.

Names of tensors in the state are `<kind>.<name>`; `master.<parameter name>` are the fp32 master weights of the adapter,
which verification reloads, `rng.cpu` and `rng.cuda.<n>` the random generators.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from apis.errors import ModelInvalid
from post_training.checkpoints.layout import FULL_ERRORS
from post_training.training.trainer import MASTER_PREFIX

TENSORS, META = "state.safetensors", "state.json"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to a safetensors file, each with storage of its own, from any device.

    Raises:
        OSError: with ENOSPC or EDQUOT where the disk or the quota is full.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(_unshared(plain), path, metadata)
    except SafetensorError as error:
        # The library says an I/O error in words only.
        for number in FULL_ERRORS:
            if f"os error {number})" in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if start in seen else tensor
        seen.add(start)
    return result


def save_training_state(directory: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a training state into an existing directory.

    Args:
        tensors: by name, any dtype and device; restored bit for bit.
        meta: JSON values; floats come back exactly.

    Raises:
        OSError: with ENOSPC where the disk is full.
        TypeError: `meta` holds something that is not JSON.
    """
    save_tensors(directory / TENSORS, tensors)
    (directory / META).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def load_training_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_training_state` wrote; tensors on the CPU.

    Raises:
        ModelInvalid: a file is missing or damaged.
    """
    try:
        return load_file(directory / TENSORS), json.loads((directory / META).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelInvalid(
            f"the training state of checkpoint {directory.parent.name} cannot be read ({type(error).__name__}): "
            "go on from an earlier checkpoint"
        ) from error


def load_meta(directory: Path) -> dict[str, Any]:
    """The plain values of a training state. Raises OSError, ValueError where its file is gone or damaged."""
    return json.loads((directory / META).read_text(encoding="utf-8"))


def masters_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The master weights of a training state, by parameter name."""
    return {
        name.removeprefix(MASTER_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MASTER_PREFIX)
    }


def rng_tensors() -> dict[str, Tensor]:
    """The states of torch's generators, [n] uint8 each: `rng.cpu`, and `rng.cuda.<n>` for each visible GPU."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"rng.cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Set torch's generators to the states in `tensors`; a GPU that is not here is passed over."""
    torch.set_rng_state(tensors["rng.cpu"].to(torch.uint8))
    for index in range(torch.cuda.device_count()):
        if (state := tensors.get(f"rng.cuda.{index}")) is not None:
            torch.cuda.set_rng_state(state.to(torch.uint8), index)

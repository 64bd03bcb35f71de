"""Events of optimizer steps: their line of the log, and how the store keeps them.

A job may have hundreds of thousands of steps, and the names of their numbers and the line of the log say nothing new
each time. Such an event is packed into some 50 bytes, from which both are made again.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

_FLOATS = ("loss", "lr", "grad_norm", "seconds")
_INTEGERS = ("epoch", "tokens", "supervised_tokens")
# Skipped, the floats, the integers, total_steps, memory_bytes; on an accelerator its memory_bytes follow.
_NUMBERS = struct.Struct("<?4d3IIQ")
_DEVICE_MEMORY = struct.Struct("<Q")


def step_line(numbers: Mapping[str, Any], total_steps: int | None) -> str:
    """What the log says of a step.

    Args:
        numbers: as in the event's data; a loss or gradient norm that was not finite is None.
    """
    step = f"step {numbers['step']}/{total_steps}" if total_steps else f"step {numbers['step']}"
    if numbers["skipped"]:
        why = "loss or gradient not finite" if numbers["supervised_tokens"] else "no supervised token"
        return f"{step} skipped: {why}"
    loss, grad_norm = (math.nan if numbers[name] is None else numbers[name] for name in ("loss", "grad_norm"))
    return (
        f"{step} loss {loss:.4f} lr {numbers['lr']:.3g} grad norm {grad_norm:.3g} "
        f"{numbers['tokens_per_second']:.0f} tokens/s"
    )


def pack_step(message: str, data: Mapping[str, Any], total_steps: int | None) -> bytes | None:
    """A step's message and data in few bytes; None where they could not be read again exactly as they are."""
    try:
        floats = [math.nan if data[name] is None else data[name] for name in _FLOATS]
        integers = [data[name] for name in _INTEGERS]
        packed = _NUMBERS.pack(data["skipped"], *floats, *integers, total_steps or 0, data["memory_bytes"])
        if "device_memory_bytes" in data:
            packed += _DEVICE_MEMORY.pack(data["device_memory_bytes"])
        again = unpack_step(data["step"], packed)
    except (KeyError, TypeError, ZeroDivisionError, struct.error):
        return None  # other numbers than a trainer's
    return packed if (message, _as_stored(data)) == (again[0], _as_stored(again[1])) else None


def unpack_step(step: int, packed: bytes) -> tuple[str, dict[str, Any]]:
    """The message and the data of which `pack_step` made `packed`."""
    skipped, loss, lr, grad_norm, seconds, *integers, total_steps, memory = _NUMBERS.unpack_from(packed)
    epoch, tokens, supervised_tokens = integers
    data = {
        "step": step,
        "epoch": epoch,
        "loss": None if math.isnan(loss) else loss,
        "lr": lr,
        "grad_norm": None if math.isnan(grad_norm) else grad_norm,
        "tokens": tokens,
        "supervised_tokens": supervised_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "skipped": skipped,
        "memory_bytes": memory,
    }
    if len(packed) > _NUMBERS.size:
        data["device_memory_bytes"] = _DEVICE_MEMORY.unpack_from(packed, _NUMBERS.size)[0]
    return step_line(data, total_steps), data


def _as_stored(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)

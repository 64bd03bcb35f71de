"""Adapter tensors between torchtune's names and layout and PEFT's.

Rows of q and k are permuted where torchtune rotates pairs: those of B and of the magnitudes. (A is not: its rows are no
outputs.) Phi-3's parts become one adapter of the fused layer, see `adapter_config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from apis.errors import ModelInvalid
from post_training.catalog.lora_files import ADAPTER_WEIGHTS
from providers.torchtune.adapter_config import FUSED, PEFT_NAMES, AdapterShape, fused_parts
from providers.torchtune.architecture import Architecture
from providers.torchtune.convert import deinterleave, interleave

_LAYER = re.compile(r"layers\.(\d+)\.(attn|mlp)\.(\w+)")
_A = ".lora_a.weight"
_BLOCKS = {"attn": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Factors:
    """The adapter of one layer: A [rank, in], B [out, rank] and, with DoRA, the rows' lengths [out]."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    def named(self, module: str) -> Iterator[tuple[str, Tensor]]:
        """By PEFT's keys."""
        yield f"base_model.model.{module}.lora_A.weight", self.a
        yield f"base_model.model.{module}.lora_B.weight", self.b
        if self.magnitude is not None:
            yield f"base_model.model.{module}.lora_magnitude_vector", self.magnitude


def to_peft(parameters: dict[str, Tensor], architecture: Architecture, shape: AdapterShape) -> dict[str, Tensor]:
    """Adapter parameters under PEFT's names, as copies in the dtype given.

    Args:
        parameters: by torchtune's name, such as `layers.0.attn.q_proj.lora_a.weight`.
    """
    factors = {module: _factors(parameters, module, architecture) for module in _modules(parameters)}
    return {
        key: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, one in _fuse(factors, architecture, shape).items()
        for key, tensor in one.named(name)
    }


def _factors(parameters: dict[str, Tensor], module: str, architecture: Architecture) -> Factors:
    lengths = parameters.get(f"{module}.magnitude")
    return Factors(
        parameters[f"{module}.lora_a.weight"],
        _rows(parameters[f"{module}.lora_b.weight"], module, architecture),
        None if lengths is None else _rows(lengths, module, architecture),
    )


def from_peft(
    adapter_dir: Path, expected: dict[str, torch.Size], architecture: Architecture, shape: AdapterShape
) -> dict[str, Tensor]:
    """The parameters of a PEFT adapter by torchtune's names, in the dtype stored.

    Args:
        expected: shape of every adapter parameter by torchtune's name.

    Raises:
        ModelInvalid: a tensor is missing, unexpected or mis-shaped, or an adapter of a fused layer is not made of
            separate blocks.
    """
    stored = _load(adapter_dir)
    parameters: dict[str, Tensor] = {}
    for module in _modules(expected):
        found = _stored_factors(stored, module, architecture, shape)
        parameters[f"{module}.lora_a.weight"] = found.a
        parameters[f"{module}.lora_b.weight"] = _rows(found.b, module, architecture, inverse=True)
        if found.magnitude is not None:
            parameters[f"{module}.magnitude"] = _rows(found.magnitude, module, architecture, inverse=True)
    for name, size in expected.items():
        if parameters[name].shape != size:
            raise ModelInvalid(f"the adapter's {name} has shape {list(parameters[name].shape)}, not {list(size)}")
    _refuse_others(stored, to_peft(parameters, architecture, shape))
    return parameters


def _modules(names: dict[str, Tensor] | dict[str, torch.Size]) -> list[str]:
    return [name.removesuffix(_A) for name in names if name.endswith(_A)]


def _rows(b: Tensor, module: str, architecture: Architecture, inverse: bool = False) -> Tensor:
    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}.get(module.rpartition(".")[2])
    if heads is None or not architecture.interleaved_rope:
        return b
    if b.shape[0] != heads * architecture.head_dim:
        raise ModelInvalid(f"the adapter's {module} has {b.shape[0]} rows, not {heads * architecture.head_dim}")
    return interleave(b, heads) if inverse else deinterleave(b, heads)


def _peft_name(module: str, leaf: str | None = None) -> str:
    found = _LAYER.fullmatch(module)
    if found is None:
        return PEFT_NAMES[module]
    layer, block, own = found.groups()
    return f"model.layers.{layer}.{_BLOCKS[block]}.{leaf or PEFT_NAMES[own]}"


def _whole_of(module: str, architecture: Architecture, shape: AdapterShape) -> tuple[str, tuple[str, ...]] | None:
    """The fused layer that `module` is a part of and its adapted parts, or None."""
    own = module.rpartition(".")[2]
    for whole, parts in fused_parts(architecture, shape).items():
        if own in parts:
            return whole, parts
    return None


def _fuse(factors: dict[str, Factors], architecture: Architecture, shape: AdapterShape) -> dict[str, Factors]:
    fused: dict[str, Factors] = {}
    for module, one in factors.items():
        whole = _whole_of(module, architecture, shape)
        if whole is None:
            fused[_peft_name(module)] = one
            continue
        name, parts = whole
        block = module.rpartition(".")[0]
        fused[_peft_name(module, name)] = _block_structured(
            [factors[f"{block}.{part}"] for part in parts], _part_rows(name, architecture), parts
        )
    return fused


def _block_structured(found: list[Factors], rows: dict[str, int], parts: tuple[str, ...]) -> Factors:
    """A stacked [n rank, in]; B [rows of the whole, n rank] with each part's B at its own rows and columns."""
    a = torch.cat([one.a for one in found])
    b = found[0].b.new_zeros(sum(rows.values()), a.shape[0])
    for (first, last, left, right), one in zip(_places(rows, parts, found[0].a.shape[0]), found, strict=True):
        b[first:last, left:right] = one.b
    lengths = [one.magnitude for one in found if one.magnitude is not None]
    return Factors(a, b, torch.cat(lengths) if lengths else None)


def _places(rows: dict[str, int], parts: tuple[str, ...], rank: int) -> list[tuple[int, int, int, int]]:
    """(first row, last row, first column, last column) of each adapted part's block in B."""
    places, first = [], 0
    for name, count in rows.items():
        if name in parts:
            left = parts.index(name) * rank
            places.append((first, first + count, left, left + rank))
        first += count
    return places


def _part_rows(whole: str, a: Architecture) -> dict[str, int]:
    kv = a.num_kv_heads * a.head_dim
    rows = {"q_proj": a.num_heads * a.head_dim, "k_proj": kv, "v_proj": kv}
    return {part: rows.get(part, a.intermediate_dim) for part in FUSED[whole]}


def _stored_factors(stored: dict[str, Tensor], module: str, architecture: Architecture, shape: AdapterShape) -> Factors:
    whole = _whole_of(module, architecture, shape)
    name = _peft_name(module, whole[0] if whole else None)
    a, b = (_get(stored, f"base_model.model.{name}.lora_{which}.weight") for which in "AB")
    lengths = _get(stored, f"base_model.model.{name}.lora_magnitude_vector") if shape.dora else None
    if whole is None:
        return Factors(a, b, lengths)
    rows, parts = _part_rows(whole[0], architecture), whole[1]
    if b.shape != (sum(rows.values()), a.shape[0]) or a.shape[0] != shape.rank * len(parts):
        raise ModelInvalid(f"the adapter's {name} does not have the shape of {len(parts)} blocks")
    first, last, left, right = _places(rows, parts, shape.rank)[parts.index(module.rpartition(".")[2])]
    return Factors(a[left:right], b[first:last, left:right], None if lengths is None else lengths[first:last])


def _get(stored: dict[str, Tensor], name: str) -> Tensor:
    if name not in stored:
        raise ModelInvalid(f"the adapter lacks {name}")
    return stored[name]


def _load(adapter_dir: Path) -> dict[str, Tensor]:
    try:
        return load_file(adapter_dir / ADAPTER_WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"the adapter's {ADAPTER_WEIGHTS} cannot be read ({type(error).__name__})") from None


def _refuse_others(stored: dict[str, Tensor], back: dict[str, Tensor]) -> None:
    """What is loaded must say all that is stored: no further tensor, nothing outside a fused layer's blocks."""
    for name, tensor in stored.items():
        if name not in back:
            raise ModelInvalid(f"the adapter holds {name}, which this request does not train")
        if not torch.equal(tensor, back[name]):
            raise ModelInvalid(f"the adapter's {name} mixes the parts of a fused layer and cannot be continued here")

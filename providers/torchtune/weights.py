"""The weight files of a Hugging Face model, checked by their headers: cheap, and without torch.

A safetensors file starts with an 8-byte little-endian length and a JSON header that names each tensor's type, shape and
place, so that names, shapes and truncation are seen without reading the weights.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apis.errors import ModelInvalid, UnsupportedModel
from providers.torchtune.architecture import Architecture

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_FLOAT_TYPES = ("F32", "BF16", "F16")
_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.ckpt")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file's header has it. `dtype` is safetensors' name for it, such as `BF16`."""

    file: Path
    dtype: str
    shape: Shape


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files that make up the model.

    Raises:
        ModelInvalid: there are none, a file of the index is missing, or the weights are pickles.
    """
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if (model_dir / INDEX_FILE).is_file():
        return [_shard(model_dir, name) for name in _shard_names(model_dir / INDEX_FILE)]
    raise _no_weights(model_dir)


def check_weights(model_dir: Path, architecture: Architecture) -> dict[str, TensorHeader]:
    """Hold names, shapes and types of all stored tensors against the architecture.

    Returns:
        header by Hugging Face name, of the tensors the model uses and of a tied model's own `lm_head.weight`.

    Raises:
        ModelInvalid: naming the first missing, unexpected or mis-shaped tensor or a damaged file.
        UnsupportedModel: a weight is not in a floating-point type.
    """
    expected = expected_shapes(architecture)
    # A tied model may store its output layer as well; loading holds it equal to the embedding.
    optional = {LM_HEAD: expected[EMBEDDING]} if architecture.tied else {}
    found = _headers(weight_files(model_dir))
    for name in expected:
        if name not in found:
            raise ModelInvalid(f"the weights lack {name}, which config.json calls for; get the whole model")
    for name, header in found.items():
        _check_tensor(name, header, (expected | optional).get(name))
    return found


def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Shape by Hugging Face name of every weight that a model of this architecture has, in layer order."""
    a = architecture
    shapes: dict[str, Shape] = {EMBEDDING: (a.vocab_size, a.embed_dim)}
    for layer in range(a.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(a).items()}
    shapes["model.norm.weight"] = (a.embed_dim,)
    if not a.tied:
        shapes[LM_HEAD] = (a.vocab_size, a.embed_dim)
    return shapes


def _layer_shapes(a: Architecture) -> dict[str, Shape]:
    q, kv, dim, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.embed_dim, a.intermediate_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    if a.fused:
        shapes |= {"self_attn.qkv_proj.weight": (q + 2 * kv, dim), "mlp.gate_up_proj.weight": (2 * inner, dim)}
    else:
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        shapes |= {f"self_attn.{name}.weight": (n, dim) for name, n in rows.items()}
        shapes |= {f"mlp.{name}.weight": (inner, dim) for name in ("gate_proj", "up_proj")}
        if a.family == "qwen2":
            shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    return shapes | {"self_attn.o_proj.weight": (dim, q), "mlp.down_proj.weight": (dim, inner)}


def _check_tensor(name: str, header: TensorHeader, expected: Shape | None) -> None:
    if expected is None:
        raise ModelInvalid(f"the weights hold {name}, which a model of this config.json does not have")
    if header.shape != expected:
        raise ModelInvalid(f"{name} has shape {list(header.shape)}, config.json calls for {list(expected)}")
    if header.dtype not in _FLOAT_TYPES:
        raise UnsupportedModel(
            f"{name} is stored as {header.dtype}, not as F32, BF16 or F16: the weights are quantized; "
            "use the unquantized model, or a provider that computes it, such as inline::huggingface"
        )


def _headers(files: list[Path]) -> dict[str, TensorHeader]:
    found: dict[str, TensorHeader] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            # Old Llama exports store a constant table that no loader uses.
            if not name.endswith("rotary_emb.inv_freq"):
                found[name] = TensorHeader(file, entry["dtype"], tuple(entry["shape"]))
    return found


def _read_header(file: Path) -> dict[str, Any]:
    """The header without its metadata entry; raises ModelInvalid if the file is cut short or no safetensors file."""
    damaged = ModelInvalid(f"{file.name} is damaged or incomplete; get the file again")
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise damaged
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size != 8 + length + end:
            raise damaged
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        raise damaged from None
    return header


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelInvalid(f"{index.name} is damaged; get the file again") from None
    if not names:
        raise ModelInvalid(f"{index.name} names no weight file; get the file again")
    return names


def _shard(model_dir: Path, name: str) -> Path:
    # A name with a folder in it could point outside the model directory.
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ModelInvalid(f"{INDEX_FILE} names {name!r}, which is no safetensors file beside it")
    if not (model_dir / name).is_file():
        raise ModelInvalid(f"{name}, which {INDEX_FILE} names, is missing; get the whole model")
    return model_dir / name


def _no_weights(model_dir: Path) -> ModelInvalid:
    if any(model_dir.glob("consolidated.*.pth")):
        return ModelInvalid(
            "the model is in Meta's format (consolidated.*.pth), which are pickles; get its Hugging Face form "
            f"({SINGLE_FILE}), or convert it with transformers' convert_llama_weights_to_hf"
        )
    for pattern in _PICKLES:
        for pickle in sorted(model_dir.glob(pattern)):
            return ModelInvalid(
                f"the weights are a pickle ({pickle.name}), which can run code when it is loaded; get the model as "
                f"{SINGLE_FILE}, or load it once where you trust it and save it with transformers' save_pretrained"
            )
    return ModelInvalid(f"the model directory has no {SINGLE_FILE} (nor {INDEX_FILE}); get the whole model")

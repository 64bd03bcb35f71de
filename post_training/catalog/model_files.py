"""The files of a Hugging Face model, checked by what they say of themselves: cheap, and without torch.

A safetensors file is 8 bytes, little-endian length n; n bytes of JSON that name each tensor's type, shape and place;
the data (huggingface/safetensors, README). So names, shapes and truncation are seen without reading the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apis.errors import ModelInvalid

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file's header has it. `dtype` is safetensors' name for it, such as `BF16`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path, remedy: str = "get the whole model again") -> dict[str, Any]:
    """The JSON object in a file of a model.

    Raises:
        ModelInvalid: there is no such file, or it holds something else; the message ends with `remedy`.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelInvalid(f"{path.parent.name} has no {path.name}: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{where} cannot be read as JSON ({type(error).__name__}): {remedy}") from error
    if not isinstance(content, dict):
        raise ModelInvalid(f"{where} is not a JSON object: {remedy}")
    return content


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files that make up the model: one, or the shards of its index, as transformers chooses.

    Raises:
        ModelInvalid: there are none, or the weights are pickles; the index is damaged or names a file that is missing.
    """
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if (model_dir / INDEX_FILE).is_file():
        return [_shard(model_dir, name) for name in sorted(set(_weight_map(model_dir).values()), key=str)]
    raise _no_weights(model_dir)


def tensor_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """What every weight file holds, by tensor name.

    Raises:
        ModelInvalid: as `weight_files`; a file is damaged, or lacks a tensor that the index says it holds.
    """
    files = weight_files(model_dir)
    found = {name: header for file in files for name, header in _headers(file).items()}
    if files != [model_dir / SINGLE_FILE]:
        for name, file in _weight_map(model_dir).items():
            if name not in found or found[name].file.name != file:
                raise ModelInvalid(
                    f"{model_dir.name}/{file} lacks {name}, which {INDEX_FILE} says it holds: download it again"
                )
    return found


def _headers(file: Path) -> dict[str, TensorHeader]:
    where, size = f"{file.parent.name}/{file.name}", file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelInvalid(f"{where} is no safetensors file, or was cut short: download it again")
        content = stream.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(content).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {name: TensorHeader(file, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelInvalid(f"{where} has a damaged header: download it again") from error
    if 8 + length + end != size:
        raise ModelInvalid(f"{where} has {size} bytes, its header asks for {8 + length + end}: download it again")
    return found


def _weight_map(model_dir: Path) -> dict[str, Any]:
    weight_map = read_json(model_dir / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{model_dir.name}/{INDEX_FILE} has no weight_map: download it again")
    for file in weight_map.values():
        # A name with a folder in it could point outside the model directory.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelInvalid(f"{model_dir.name}/{INDEX_FILE} names {file!r}, which is no safetensors file beside it")
    return weight_map


def _shard(model_dir: Path, name: str) -> Path:
    if not (model_dir / name).is_file():
        raise ModelInvalid(f"{model_dir.name}/{name}, which {INDEX_FILE} names, is missing: get the whole model")
    return model_dir / name


def _no_weights(model_dir: Path) -> ModelInvalid:
    pickles = sorted(path.name for path in model_dir.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if any(name.startswith("consolidated") for name in pickles):
        return ModelInvalid(
            f"{model_dir.name} is a model in Meta's format ({pickles[0]}), which is pickle: get its Hugging Face form, "
            f"which has {CONFIG_FILE} and *.safetensors, and import that"
        )
    if pickles:
        return ModelInvalid(
            f"{model_dir.name} has its weights as pickle ({pickles[0]}), which can run code and is never loaded: get "
            f"them as {SINGLE_FILE}, or load them where you trust them and save with transformers' save_pretrained"
        )
    return ModelInvalid(
        f"{model_dir.name} has neither {SINGLE_FILE} nor {INDEX_FILE}: point at the folder that holds the whole model, "
        "or get it again"
    )

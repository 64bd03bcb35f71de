"""A model as one GGUF file for llama.cpp and what is built on it, written by the `gguf` package.

    python -m post_training.checkpoints.gguf_export < request.json

A checkpoint is merged in fp32 first and the merge is verified, so what the file loses it loses to its number format
alone. Against transformers in fp32, llama.cpp's logits then differ by about 5e-4 (f32), 2e-2 (bf16) and 4e-2 (q8_0),
relative Frobenius.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType
from safetensors import safe_open
from torch import Tensor

from apis.errors import ModelInvalid
from post_training.checkpoints.child import serve_child
from post_training.checkpoints.export import merge
from post_training.checkpoints.gguf_architecture import Layout, read_layout
from post_training.checkpoints.gguf_tokenizer import read_vocabulary
from post_training.checkpoints.layout import disk_full

GgufDtype = Literal["f32", "bf16", "f16", "q8_0"]

_FORMATS: dict[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_QUANTIZATION_VERSION = 2  # of the blocks of q8_0: GGML_QNT_VERSION of ggml


def write_gguf(
    model_dir: Path, out_file: Path, name: str, dtype: GgufDtype = "f32", description: str | None = None
) -> None:
    """Write the whole Hugging Face model in `model_dir` as a GGUF file, one tensor at a time.

    Args:
        name: what the file says the model is called.
        dtype: of the matrices; vectors are always f32, as llama.cpp expects them. Where the rows of a matrix are no
            multiple of q8_0's 32 numbers, it is f16.
        description: what the file says of the model, as `general.description`.

    Raises:
        UnsupportedModel: the architecture, the tokenizer or an option of them is not known; see `read_layout` and
            `read_vocabulary`.
        ModelInvalid: a file of the model is missing or damaged, or a number has no place in `dtype`.
        OSError: with ENOSPC where the disk is full.
    """
    layout = read_layout(model_dir)
    vocabulary = read_vocabulary(model_dir, layout.vocab_size)
    writer = gguf.GGUFWriter(out_file, gguf.MODEL_ARCH_NAMES[layout.architecture])
    try:
        writer.add_name(name)
        if description is not None:
            writer.add_description(description)
        writer.add_file_type(_FORMATS[dtype][1])
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        layout.write_fields(writer)
        vocabulary.write(writer)
        _write_tensors(writer, layout, dtype)
    finally:
        writer.close()


def _write_tensors(writer: gguf.GGUFWriter, layout: Layout, dtype: GgufDtype) -> None:
    extra = layout.extra_tensors()
    shapes = {layout.names[name]: header.shape for name, header in layout.tensors.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in extra.items()}
    for name, shape in shapes.items():
        stored = _stored(shape, dtype)
        size = int(np.prod(gguf.quant_shape_to_byte_shape(shape, stored)))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in (*_converted(layout), *extra.items()):
        writer.write_tensor_data(_numbers(name, tensor, _stored(tuple(tensor.shape), dtype)))


def _stored(shape: tuple[int, ...], dtype: GgufDtype) -> GGMLQuantizationType:
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    wanted = _FORMATS[dtype][0]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else GGMLQuantizationType.F16


def _converted(layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its GGUF name in the order of `layout.tensors`, fp32."""
    for file in dict.fromkeys(header.file for header in layout.tensors.values()):
        with safe_open(file, framework="pt") as shard:
            for name, header in layout.tensors.items():
                if header.file == file:
                    yield layout.names[name], layout.convert(name, shard.get_tensor(name).to(torch.float32))


def _numbers(name: str, tensor: Tensor, stored: GGMLQuantizationType) -> np.ndarray:
    numbers = np.ascontiguousarray(tensor.numpy())
    if not np.isfinite(numbers).all():
        raise ModelInvalid(f"{name} holds NaN or infinite values: it cannot be exported")
    if stored == GGMLQuantizationType.F16 and np.abs(numbers).max() > np.finfo(np.float16).max:
        raise ModelInvalid(f"{name} holds values beyond f16's range: export as bf16 or f32")
    return gguf.quantize(numbers, stored)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Merge where there is an adapter, and prove it; then write the file."""
    base_dir, out_file = Path(request["base_dir"]), Path(request["out_file"])
    try:
        if request["adapter_dir"] is None:
            write_gguf(base_dir, out_file, request["name"], request["dtype"])
            return {}
        read_vocabulary(base_dir, read_layout(base_dir).vocab_size)  # refuse before the merge, which takes long
        with tempfile.TemporaryDirectory(dir=out_file.parent, prefix=f"{out_file.name}.merged-") as folder:
            return _merge_and_write(base_dir, Path(request["adapter_dir"]), Path(folder), request)
    except OSError as error:
        if full := disk_full(error, "the GGUF file"):
            raise full from error
        raise


def _merge_and_write(base_dir: Path, adapter_dir: Path, merged: Path, request: dict[str, Any]) -> dict[str, Any]:
    from post_training.checkpoints.verify import verify_merged  # verify builds on export

    merge(base_dir, adapter_dir, merged, "fp32")
    report = verify_merged(base_dir, adapter_dir, merged, "fp32")
    write_gguf(merged, Path(request["out_file"]), request["name"], request["dtype"], request["description"])
    return report


if __name__ == "__main__":
    serve_child(_serve)

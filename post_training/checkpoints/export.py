"""What leaves a training run: a PEFT adapter, and a whole model with the adapter merged in.

    python -m post_training.checkpoints.export < request.json

Adapter and merged model never share a folder: transformers reads a config.json beside an adapter_config.json as "this
model with that adapter" and would apply the adapter a second time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from apis.errors import ModelInvalid
from post_training.catalog.model_files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json, weight_files
from post_training.checkpoints.child import serve_child
from post_training.checkpoints.layout import disk_full
from post_training.checkpoints.state import save_tensors

ADAPTER_TENSORS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_SHARD_BYTES = 2 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
)
_MODEL_FILES = (*TOKENIZER_FILES, "generation_config.json")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
_LORA_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<kind>[AB]\.weight|magnitude_vector)")
_A, _B, _MAGNITUDE = "A.weight", "B.weight", "magnitude_vector"
_UNSUPPORTED = ("fan_in_fan_out", "modules_to_save", "lora_bias", "target_parameters", "layer_replication")


@dataclass
class MergeReport:
    """What a merge did.

    Attributes:
        modules: how many weights were changed.
        delta_norm: Frobenius norm of all the updates together, in fp32 arithmetic.
        relative_loss: Frobenius norm of what rounding to the saved dtype took from (or added to) the updates, over
            `delta_norm`; 0 for fp32.
    """

    dtype: str
    modules: int = 0
    delta_norm: float = 0.0
    relative_loss: float = 0.0


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], base_identifier: str, base_dir: Path
) -> None:
    """Write a folder that plain `PeftModel.from_pretrained(base, directory)` loads, with the base's tokenizer.

    Args:
        tensors: by PEFT's keys; saved in fp32.
        config: the content of adapter_config.json; `base_model_name_or_path` is set here.

    Raises:
        ModelInvalid: a tensor is not finite.
        OSError: with ENOSPC where the disk is full.
    """
    full = {key: tensor.detach().to(torch.float32) for key, tensor in tensors.items()}
    for key, tensor in full.items():
        if not torch.isfinite(tensor).all():
            raise ModelInvalid(f"adapter tensor {key} holds NaN or infinite values: it cannot be saved")
    save_tensors(directory / ADAPTER_TENSORS, full, {"format": "pt"})
    _write_json(directory / ADAPTER_CONFIG, {**config, "base_model_name_or_path": base_identifier})
    _copy(base_dir, directory, TOKENIZER_FILES)


def write_whole(
    directory: Path, tensors: Mapping[str, Tensor], base_dir: Path, dtype: Literal["fp32", "bf16"] = "fp32"
) -> None:
    """Write a whole Hugging Face model, of which every weight was trained, with the base's config and tokenizer.

    Args:
        tensors: by Hugging Face's names; saved as `dtype`. Those that are tied to others are left out.

    Raises:
        ModelInvalid: a tensor is not finite, or the base is quantized.
        OSError: with ENOSPC where the disk is full.
    """
    writer = _ShardWriter(directory)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelInvalid(f"{name} holds NaN or infinite values: it cannot be saved")
        writer.add(name, tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor)
    writer.finish()
    _write_json(
        directory / CONFIG_FILE, _config_with_dtype(read_json(base_dir / CONFIG_FILE), dtype, _is_tied(base_dir))
    )
    _copy(base_dir, directory, _MODEL_FILES)


def merge(base_dir: Path, adapter_dir: Path, out_dir: Path, dtype: Literal["fp32", "bf16"] = "fp32") -> MergeReport:
    """Write base + adapter as a whole Hugging Face model into `out_dir`, one tensor at a time.

    W' = W + s * B @ A in fp32, with s = alpha / r (Hu et al. 2021, arXiv:2106.09685), or alpha / sqrt(r) where the
    adapter says rsLoRA (Kalajdzievski 2023, arXiv:2312.03732). Where it says DoRA, each row of W' is brought to the
    length that the adapter holds for it (Liu et al. 2024, arXiv:2402.09353). Then saved as `dtype`. Tied embeddings
    stay tied: no lm_head is written.

    Raises:
        ModelInvalid: the adapter does not fit the base, is of a kind that cannot be merged exactly, or targets an
            embedding that is tied to the output.
        OSError: with ENOSPC where the disk is full.
    """
    config = read_json(base_dir / CONFIG_FILE)
    tied = _is_tied(base_dir)
    updates = LoraUpdates(adapter_dir)
    updates.refuse_tied(tied)
    out_dir.mkdir(parents=True, exist_ok=True)
    report = MergeReport(dtype)
    sums = _Sums()
    writer = _ShardWriter(out_dir)
    for name, weight in _base_tensors(base_dir):
        if not (tied and name == "lm_head.weight"):
            writer.add(name, _merged(name, weight, updates, _DTYPES[dtype], sums))
    updates.refuse_unused()
    writer.finish()
    _write_json(out_dir / CONFIG_FILE, _config_with_dtype(config, dtype, tied))
    _copy(base_dir, out_dir, _MODEL_FILES)
    report.modules, report.delta_norm = sums.modules, math.sqrt(sums.delta)
    report.relative_loss = math.sqrt(sums.loss / sums.delta) if sums.delta else 0.0
    return report


@dataclass
class _Sums:
    modules: int = 0
    delta: float = 0.0
    loss: float = 0.0


class LoraUpdates:
    """The weight updates of a PEFT LoRA or DoRA adapter, each to be applied once.

    Raises:
        ModelInvalid: the adapter is unreadable, incomplete, or of another kind.
    """

    def __init__(self, adapter_dir: Path) -> None:
        self._config = read_json(adapter_dir / ADAPTER_CONFIG, "it is no adapter, or damaged")
        self._refuse_other_kinds()
        wanted = {_A, _B, _MAGNITUDE} if self._config.get("use_dora") else {_A, _B}
        self._factors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in _load(adapter_dir / ADAPTER_TENSORS).items():
            match = _LORA_KEY.fullmatch(key)
            if match is None:
                raise ModelInvalid(f"adapter tensor {key} is not a LoRA factor of a linear layer: it cannot be merged")
            self._factors.setdefault(match["module"], {})[match["kind"]] = tensor.to(torch.float32)
        for module, found in self._factors.items():
            if found.keys() != wanted:
                raise ModelInvalid(_odd_factors(module, found))

    def apply(self, name: str, weight: Tensor) -> Tensor | None:
        """The weight `name` as the adapter changes it, or None where it leaves it alone; both [out, in] fp32."""
        module = name.removesuffix(".weight")
        found = self._factors.pop(module, None) if name.endswith(".weight") else None
        if found is None:
            return None
        changed = weight + self._update(module, found[_A], found[_B], weight.shape)
        if _MAGNITUDE not in found:
            return changed
        lengths = found[_MAGNITUDE]
        if lengths.shape != weight.shape[:1]:
            raise ModelInvalid(
                f"the adapter of {module} has {list(lengths.shape)} row lengths for {weight.shape[0]} rows"
            )
        return changed * (lengths / torch.linalg.norm(changed, dim=1))[:, None]

    def _update(self, module: str, a: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tuple(shape):
            raise ModelInvalid(
                f"the adapter of {module} has shapes {list(b.shape)} @ {list(a.shape)}, its weight {list(shape)}: "
                "it belongs to another model"
            )
        return self._scale(module, a.shape[0]) * (b @ a)

    def refuse_tied(self, tied: bool) -> None:
        for module in self._factors:
            if tied and module.endswith(("lm_head", "embed_tokens")):
                raise ModelInvalid(
                    f"the adapter changes {module}, whose weight serves as embedding and output both: a merge would "
                    "change the two; use the adapter as it is, or train without apply_lora_to_output"
                )

    def refuse_unused(self) -> None:
        if self._factors:
            raise ModelInvalid(f"the base has no weight {min(self._factors)}.weight for the adapter: wrong base model")

    def _scale(self, module: str, rank: int) -> float:
        stated = self._pattern("rank_pattern", module, self._config["r"])
        if stated != rank:
            raise ModelInvalid(f"the adapter of {module} has rank {rank}, {ADAPTER_CONFIG} says {stated}")
        alpha = self._pattern("alpha_pattern", module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pattern(self, kind: str, module: str, default: float) -> float:
        # PEFT's own rule: a key is a regular expression for the end of the module's name.
        for key, value in (self._config.get(kind) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default

    def _refuse_other_kinds(self) -> None:
        kind = self._config.get("peft_type")
        if kind != "LORA":
            raise ModelInvalid(f"{ADAPTER_CONFIG} says {kind}; only LORA adapters can be merged")
        found = [key for key in _UNSUPPORTED if self._config.get(key)]
        if self._config.get("bias", "none") != "none":
            found.append("bias")
        if found:
            raise ModelInvalid(f"{ADAPTER_CONFIG} uses {found[0]}, which cannot be merged exactly here")


def _odd_factors(module: str, found: Mapping[str, Tensor]) -> str:
    names = " and ".join(kind.partition(".")[0] for kind in sorted(found))
    return f"the adapter of {module} has only its {names} factor for what {ADAPTER_CONFIG} says: it is damaged"


class _ShardWriter:
    """Collects tensors into files of at most MAX_SHARD_BYTES, named as transformers names them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > MAX_SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._directory / SINGLE_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index_content = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        _write_json(self._directory / INDEX_FILE, index_content)

    def _flush(self) -> None:
        save_tensors(self._part(len(self._shards)), self._pending, {"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._directory / f"part-{index}.safetensors"


def _merged(name: str, weight: Tensor, updates: LoraUpdates, dtype: torch.dtype, sums: _Sums) -> Tensor:
    if not weight.is_floating_point():
        return weight
    full = weight.to(torch.float32)
    changed = updates.apply(name, full)
    if changed is None:
        return full.to(dtype)
    saved = changed.to(dtype)
    sums.modules += 1
    sums.delta += _squared(changed - full)
    if dtype != torch.float32:
        sums.loss += _squared(saved.to(torch.float32) - changed)
    return saved


def _squared(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _base_tensors(base_dir: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(base_dir):
        with _damage_is_said(file), safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  a shard is not iterable itself
                yield name, shard.get_tensor(name)


def _load(path: Path) -> dict[str, Tensor]:
    with _damage_is_said(path):
        return load_file(path)


@contextmanager
def _damage_is_said(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, SafetensorError) as error:
        raise ModelInvalid(f"{path.parent.name}/{path.name} is missing or damaged") from error


def _is_tied(base_dir: Path) -> bool:
    # The default differs between architectures, so the flag in the file is not enough.
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_dir, local_files_only=True)
    return bool(getattr(config, "tie_word_embeddings", False))


def _config_with_dtype(config: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    if "quantization_config" in config:
        raise ModelInvalid("the base model is quantized: merge on the original, unquantized model")
    changed = {key: value for key, value in config.items() if key not in ("dtype", "_name_or_path")}
    # Old releases of transformers read only this key, new ones read it too.
    return changed | {"torch_dtype": _DTYPE_NAMES[dtype], "tie_word_embeddings": tied}


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Merge, then prove the result: see `post_training.checkpoints.verify.verify_merged`."""
    base_dir, adapter_dir, out_dir = (Path(request[key]) for key in ("base_dir", "adapter_dir", "out_dir"))
    try:
        report = merge(base_dir, adapter_dir, out_dir, request["dtype"])
    except OSError as error:
        if full := disk_full(error, "the merged model"):
            raise full from error
        raise
    from post_training.checkpoints.verify import verify_merged  # verify builds on this module

    return asdict(report) | verify_merged(base_dir, adapter_dir, out_dir, request["dtype"])


if __name__ == "__main__":
    serve_child(_serve)

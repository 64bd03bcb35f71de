"""A checkpoint proves itself: reloaded as its users would, it must compute what the trainer computed.

    python -m post_training.checkpoints.verify < requests.jsonl

runs apart from the trainer (`verification.py` has it run), so that nothing it still holds in memory can make a bad file
look good. All in fp32 on the CPU: the provider's model with the trainer's saved master weights gives the reference
logits; plain transformers + PEFT, and the merged model, must give the same. All of them hold the adapter against the
base as it is stored; where it was trained against a quantized base, what that changes is measured beside.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from apis.errors import CheckpointUnverified, ModelInvalid
from post_training.checkpoints.child import serve_child
from post_training.checkpoints.export import ADAPTER_TENSORS
from post_training.checkpoints.layout import ADAPTER, MERGED, TRAINING_STATE, check_files
from post_training.checkpoints.state import load_training_state, masters_of
from post_training.checkpoints.verification import BF16_BOUND, FP32_BOUND, VerifyReport
from post_training.processes import return_memory
from post_training.training.model import LoraSettings, ModelConfig, Segments, TrainableModel

PROBE_LENGTHS = (96, 64, 32)
PROBE_SEED = 20_240_131
# A difference of FP32_BOUND swaps two tokens only where their logits lie closer than this part of a row's RMS.
TIE_MARGIN = 1e-4
_base_found: dict[tuple[tuple[str, int, int], ...], Tensor] = {}


def probe_segments(base_dir: Path) -> list[Tensor]:
    """Token ids of the probe: deterministic, spread over the vocabulary, within the model's context; [n] int64 each."""
    config = AutoConfig.from_pretrained(base_dir, local_files_only=True)
    limits = (getattr(config, "max_position_embeddings", None), getattr(config, "sliding_window", None))
    longest = min((limit for limit in limits if limit), default=PROBE_LENGTHS[0])
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return [torch.randint(config.vocab_size, (min(n, longest),), generator=generator) for n in PROBE_LENGTHS]


def verify(request: dict[str, Any]) -> VerifyReport:
    """Verify one checkpoint in this process.

    Raises:
        CheckpointUnverified: as `verification.Verifier` has it.
    """
    checkpoint, base_dir = Path(request["checkpoint_dir"]), Path(request["base_dir"])
    try:
        check_files(checkpoint)
        tensors, _ = load_training_state(checkpoint / TRAINING_STATE)
    except ModelInvalid as error:
        raise CheckpointUnverified(error.message) from error
    masters = masters_of(tensors)
    if request.get("full"):
        return _verify_whole(checkpoint, base_dir, request["model_module"], masters)
    _check_tensors(masters, load_file(checkpoint / ADAPTER / ADAPTER_TENSORS))
    probe = probe_segments(base_dir)
    lora = LoraSettings(**request["lora"])
    stored_base = ModelConfig(base_dir, replace(lora, quantized_base=False), dtype="fp32")
    trainer = _trainer_logits(request["model_module"], stored_base, masters, probe)
    has_merged = (checkpoint / MERGED).is_dir()
    base, adapter, merged = _peft_logits(base_dir, checkpoint / ADAPTER, probe, merge=not has_merged)
    dtype = _saved_dtype(checkpoint / MERGED) if has_merged else None
    if merged is None:
        merged = _plain_logits(checkpoint / MERGED, probe)
    report = VerifyReport(
        adapter_error=relative_error(adapter, trainer),
        merged_error=relative_error(merged, trainer),
        merged_dtype=dtype,
        change=relative_error(adapter, base),
        tokens=len(trainer),
    )
    if lora.quantized_base:
        trained_base = ModelConfig(base_dir, lora, dtype="fp32")
        quantized = _trainer_logits(request["model_module"], trained_base, masters, probe)
        report.quantization_change = relative_error(quantized, trainer)
    _judge(report, trainer, adapter, merged)
    return report


def _verify_whole(checkpoint: Path, base_dir: Path, module: str, masters: dict[str, Tensor]) -> VerifyReport:
    """Of a checkpoint for which every weight was trained: its whole model against the trainer's.

    Raises:
        CheckpointUnverified
    """
    _refuse_not_finite(masters)
    probe = probe_segments(base_dir)
    trainer = _trainer_logits(module, ModelConfig(base_dir, full=True, dtype="fp32"), masters, probe)
    whole = _plain_logits(checkpoint / MERGED, probe)
    base = _base_logits(_load_plain(base_dir), base_dir, probe)
    report = VerifyReport(
        adapter_error=None,
        merged_error=relative_error(whole, trainer),
        merged_dtype=_saved_dtype(checkpoint / MERGED),
        change=relative_error(whole, base),
        tokens=len(trainer),
    )
    exact = report.merged_dtype != "bf16"
    _check_error("the whole model", report.merged_error, FP32_BOUND if exact else BF16_BOUND)
    if exact and not same_argmax(whole, trainer):
        raise CheckpointUnverified(f"the checkpoint ranks other tokens first than the trainer: {_numbers(report)}")
    if report.change == 0:
        raise CheckpointUnverified(f"training changed nothing: {_numbers(report)}")
    return report


def verify_merged(base_dir: Path, adapter_dir: Path, merged_dir: Path, dtype: str) -> dict[str, float]:
    """Compare a merged model with the base and adapter it was made of, in fp32.

    Returns:
        `merged_error` and `change`, as in VerifyReport.

    Raises:
        CheckpointUnverified: they differ by more than the dtype's bound.
    """
    probe = probe_segments(base_dir)
    base, adapter, _ = _peft_logits(base_dir, adapter_dir, probe, merge=False)
    merged = _plain_logits(merged_dir, probe)
    error = relative_error(merged, adapter)
    _check_error("the merged model", error, FP32_BOUND if dtype == "fp32" else BF16_BOUND)
    return {"merged_error": error, "change": relative_error(adapter, base)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, Frobenius, in float64; not a number is infinite."""
    found, expected = found.double(), expected.double()
    error = float((found - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def same_argmax(found: Tensor, expected: Tensor) -> bool:
    """Whether both rank the same token first in every row [N, V], rows with a near-tie aside."""
    top = expected.topk(2, dim=-1).values
    margin = TIE_MARGIN * expected.square().mean(dim=-1).sqrt()
    clear = top[:, 0] - top[:, 1] > margin
    return bool((found.argmax(-1) == expected.argmax(-1))[clear].all())


def _check_tensors(masters: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
    if not masters or not adapter:
        raise CheckpointUnverified("the checkpoint holds no trained weights: training state or adapter is empty")
    _refuse_not_finite(masters | adapter)
    if not any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name):
        raise CheckpointUnverified(
            "training changed nothing: every B factor of the adapter is zero; check the learning rate and the data"
        )


def _refuse_not_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointUnverified(f"{name} holds NaN or infinite values: lower the learning rate")


def _trainer_logits(module: str, config: ModelConfig, masters: dict[str, Tensor], probe: list[Tensor]) -> Tensor:
    """Logits [T, V] of the provider's own model with the trainer's master weights."""
    model: TrainableModel = importlib.import_module(module).load_model(config)
    parameters = model.adapter_parameters()
    if parameters.keys() != masters.keys():
        odd = min(parameters.keys() ^ masters.keys())
        raise CheckpointUnverified(f"parameter {odd} is in only one of the model and its training state")
    model.module.eval()
    with torch.inference_mode():
        for name, parameter in parameters.items():
            if parameter.shape != masters[name].shape:
                raise CheckpointUnverified(f"{name} is {list(masters[name].shape)}, not {list(parameter.shape)}")
            parameter.copy_(masters[name])
        return model.output(model.hidden_states(_flat(probe))).float()


def _flat(probe: list[Tensor]) -> Segments:
    positions = torch.cat([torch.arange(len(segment)) for segment in probe])
    return Segments(torch.cat(probe), positions, tuple(len(segment) for segment in probe))


def _peft_logits(
    base_dir: Path, adapter_dir: Path, probe: list[Tensor], *, merge: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits [T, V] of the base, of base + adapter in PEFT, and of PEFT's own merge where that is asked for."""
    model = _load_plain(base_dir)
    base = _base_logits(model, base_dir, probe)
    peft = PeftModel.from_pretrained(model, str(adapter_dir), local_files_only=True)
    # PEFT passes over keys it does not know; what it took must be what the file holds.
    unused = (
        load_file(adapter_dir / ADAPTER_TENSORS).keys()
        ^ get_peft_model_state_dict(peft, save_embedding_layers=False).keys()
    )
    if unused:
        raise CheckpointUnverified(f"PEFT does not take the adapter as it is: {min(unused)} is left over")
    adapter = _logits(peft, probe)
    return base, adapter, _logits(peft.merge_and_unload(), probe) if merge else None


def _base_logits(model: nn.Module, base_dir: Path, probe: list[Tensor]) -> Tensor:
    """Those of the base as its files are now; a process that verifies a job's checkpoints computes them once."""
    states = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sorted(base_dir.iterdir())]
    key = tuple(states)
    if key not in _base_found:
        _base_found.clear()
        _base_found[key] = _logits(model, probe)
    return _base_found[key]


def _plain_logits(directory: Path, probe: list[Tensor]) -> Tensor:
    return _logits(_load_plain(directory), probe)


def _load_plain(directory: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()


def _logits(model: nn.Module, probe: list[Tensor]) -> Tensor:
    """Logits [T, V], each segment by itself."""
    with torch.inference_mode():
        return torch.cat([model(input_ids=segment[None], use_cache=False).logits[0].float() for segment in probe])


def _saved_dtype(merged_dir: Path) -> str:
    config = AutoConfig.from_pretrained(merged_dir, local_files_only=True)
    return "bf16" if config.dtype == torch.bfloat16 else "fp32"


def _judge(report: VerifyReport, trainer: Tensor, adapter: Tensor, merged: Tensor) -> None:
    assert report.adapter_error is not None  # there is an adapter
    _check_error("the adapter, loaded by PEFT,", report.adapter_error, FP32_BOUND)
    exact = report.merged_dtype != "bf16"
    _check_error("the merged model", report.merged_error, FP32_BOUND if exact else BF16_BOUND)
    if not same_argmax(adapter, trainer) or (exact and not same_argmax(merged, trainer)):
        raise CheckpointUnverified(f"the checkpoint ranks other tokens first than the trainer: {_numbers(report)}")
    if report.change == 0:
        raise CheckpointUnverified(f"the adapter, loaded by PEFT, has no effect on the base: {_numbers(report)}")


def _check_error(what: str, error: float, bound: float) -> None:
    if not error <= bound:
        raise CheckpointUnverified(
            f"{what} does not compute what was trained: its logits differ by {error:.3g} (relative Frobenius), "
            f"allowed is {bound:g}"
        )


def _numbers(report: VerifyReport) -> str:
    return ", ".join(f"{name} {value}" for name, value in report.model_dump().items())


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    try:
        return verify(request).model_dump()
    finally:
        return_memory()  # this process waits for the next checkpoint, perhaps for long


if __name__ == "__main__":
    serve_child(_serve)

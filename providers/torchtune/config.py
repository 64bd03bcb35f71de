"""Configuration of `inline::torchtune`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

logger = logging.getLogger(__name__)

ExportForm = Literal["adapter", "merged"]


class TorchtunePostTrainingConfig(BaseModel):
    """What a run.yaml may say under the provider's `config:`.

    Attributes:
        torch_seed: seed of jobs that give none.
        checkpoint_format: upstream's name for `export`: `huggingface` means [adapter], `meta` [adapter, merged].
        export: which forms of the trained model each checkpoint holds.
        merged_dtype: fp32 keeps what was trained; bf16 halves the size and rounds (the loss is measured and reported).
        default_model: trained when a request names no model.
        device: the kind of device that jobs ask for where the request does not say; `auto`: any of the stack's.
        threads: CPU threads of a worker; null: $OMP_NUM_THREADS, else the usable cores divided by the stack's devices.
        micro_batch_tokens: most tokens in one forward pass; more memory for larger values, never another result.
        kernels: `plain` computes by torchtune's own modules; `fused` the same function in fewer, larger operations;
            `compiled` that, with element-wise operations compiled; `auto`: `compiled` for jobs that gain by it.
        model_roots: folders that a request's `checkpoint_dir` may point into; null: the state folder's `models`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)

    torch_seed: int | None = Field(default=None, ge=0, lt=2**63)
    checkpoint_format: Literal["meta", "huggingface"] | None = None
    export: list[ExportForm] | None = None
    merged_dtype: Literal["fp32", "bf16"] = "fp32"
    default_model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    micro_batch_tokens: int = Field(default=4096, ge=16)
    kernels: Literal["auto", "compiled", "fused", "plain"] = "auto"
    model_roots: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _warn_of_meta(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("checkpoint_format") == "meta":
            logger.warning(
                "checkpoint_format: meta has no counterpart here; checkpoints hold a PEFT adapter and a merged "
                "Hugging Face model instead (export: [adapter, merged])"
            )
        return values

    @property
    def forms(self) -> tuple[ExportForm, ...]:
        """The forms to write; the adapter always."""
        chosen = self.export if self.export is not None else self._from_format()
        return ("adapter", "merged") if "merged" in chosen else ("adapter",)

    def _from_format(self) -> list[ExportForm]:
        return ["adapter", "merged"] if self.checkpoint_format == "meta" else ["adapter"]

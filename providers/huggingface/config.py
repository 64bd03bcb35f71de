"""Configuration of `inline::huggingface`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

logger = logging.getLogger(__name__)

ExportForm = Literal["adapter", "merged"]


class HuggingfacePostTrainingConfig(BaseModel):
    """What a run.yaml may say under the provider's `config:`.

    Attributes:
        torch_seed: seed of jobs that give none.
        checkpoint_format: upstream's name for `export`: `huggingface` means [adapter], `full_state` [adapter, merged].
        export: which forms of the trained model each checkpoint holds.
        merged_dtype: fp32 keeps what was trained; bf16 halves the size and rounds (the loss is measured and reported).
        default_model: trained when a request names no model.
        device: the kind of device that jobs ask for where the request does not say; `auto`: any of the stack's.
        threads: CPU threads of a worker; null: $OMP_NUM_THREADS, else the usable cores divided by the stack's devices.
        micro_batch_tokens: most tokens in one forward pass; more memory for larger values, never another result.
        max_seq_length: the most tokens of a row where a request does not say; at most the model's context.
        kernels: `plain` runs each row by itself through the library's own modules; `fused` all rows of a batch in one
            pass where the model allows, and the loss with its gradient. `auto`: `fused`.
        model_roots: folders that a request's `checkpoint_dir` may point into; null: the state folder's `models`.
        distributed_backend: upstream's; null is its only value here, since jobs run on one device each.
        dpo_output_dir: upstream's; checkpoints lie in the state folder, so it is read with a warning.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)

    torch_seed: int | None = Field(default=None, ge=0, lt=2**63)
    checkpoint_format: Literal["full_state", "huggingface"] | None = None
    export: list[ExportForm] | None = None
    merged_dtype: Literal["fp32", "bf16"] = "fp32"
    default_model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    micro_batch_tokens: int = Field(default=4096, ge=16)
    max_seq_length: int = Field(default=4096, ge=8)
    kernels: Literal["auto", "fused", "plain"] = "auto"
    model_roots: list[str] | None = None
    distributed_backend: None = None
    dpo_output_dir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _warn_of_output_dir(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("dpo_output_dir"):
            logger.warning("dpo_output_dir has no effect here: checkpoints lie in the state folder")
        return values

    @property
    def forms(self) -> tuple[ExportForm, ...]:
        """The forms to write; the adapter always."""
        chosen = self.export if self.export is not None else self._from_format()
        return ("adapter", "merged") if "merged" in chosen else ("adapter",)

    def _from_format(self) -> list[ExportForm]:
        return ["adapter", "merged"] if self.checkpoint_format == "full_state" else ["adapter"]

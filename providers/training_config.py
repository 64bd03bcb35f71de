"""What the configurations of all providers that train in this stack's workers have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ExportForm = Literal["adapter", "merged"]


class LocalTrainingConfig(BaseModel):
    """Fields that every such provider has.

    Attributes:
        torch_seed: seed of jobs that give none.
        export: which forms of the trained model each checkpoint holds.
        merged_dtype: fp32 keeps what was trained; bf16 halves the size and rounds (the loss is measured and reported).
        default_model: trained when a request names no model.
        device: the kind of device that jobs ask for where the request does not say; `auto`: any of the stack's.
        threads: CPU threads of a worker; null: $OMP_NUM_THREADS, else the usable cores divided by the stack's devices.
        micro_batch_tokens: most tokens in one forward pass; more memory for larger values, never another result.
        model_roots: folders that a request's `checkpoint_dir` may point into; null: the state folder's `models`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)

    torch_seed: int | None = Field(default=None, ge=0, lt=2**63)
    export: list[ExportForm] | None = None
    merged_dtype: Literal["fp32", "bf16"] = "fp32"
    default_model: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    micro_batch_tokens: int = Field(default=4096, ge=16)
    model_roots: list[str] | None = None

    @property
    def forms(self) -> tuple[ExportForm, ...]:
        """The forms to write; the adapter always."""
        merged = "merged" in self.export if self.export is not None else self.format_is_merged
        return ("adapter", "merged") if merged else ("adapter",)

    @property
    def format_is_merged(self) -> bool:
        """Whether upstream's own setting, where the provider has one, means a merged model as well."""
        return False

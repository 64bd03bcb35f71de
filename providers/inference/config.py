"""What a run.yaml can set for `inline::transformers`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

logger = logging.getLogger(__name__)

_META_REFERENCE = frozenset(
    {
        "model",
        "torch_seed",
        "max_seq_len",
        "max_batch_size",
        "model_parallel_size",
        "create_distributed_process_group",
        "checkpoint_dir",
        "quantization",
    }
)
"""Settings of Llama Stack's inline::meta-reference, in whose place this provider stands in older run.yaml files."""


class TransformersInferenceConfig(BaseModel):
    """Settings of the inference worker."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if there, else the CPU")
    dtype: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 where the device computes it natively, else fp32"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; null: torch's choice")
    default_max_tokens: int = Field(512, ge=1, description="Where a request has no max_tokens")
    max_context_tokens: int | None = Field(
        None, ge=2, description="Most tokens of prompt and answer together; null: what the model was made for"
    )
    max_loaded_models: int = Field(2, ge=1, description="Bases held in memory; the least recently used goes first")
    max_adapters_per_model: int = Field(8, ge=1, description="Adapters held on one base")
    max_pending_requests: int = Field(64, ge=1, description="Running and waiting requests; one more is a 429")
    idle_unload_seconds: float | None = Field(
        900, gt=0, description="The worker ends, and frees its memory, when unused for so long; null: never"
    )

    @model_validator(mode="before")
    @classmethod
    def _take_meta_reference(cls, values: Any) -> Any:
        """Take max_seq_len of a meta-reference section; the rest of it has no counterpart, which one warning says."""
        if not isinstance(values, dict) or not (foreign := _META_REFERENCE & values.keys()):
            return values
        if without := sorted(foreign - {"max_seq_len"}):
            logger.warning("inference: settings of inline::meta-reference without effect here: %s", ", ".join(without))
        kept = {name: value for name, value in values.items() if name not in foreign}
        longest = values.get("max_seq_len")
        return kept if longest is None else {"max_context_tokens": longest, **kept}

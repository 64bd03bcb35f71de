"""Configuration of `inline::torchtune`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import model_validator

from providers.training_config import LocalTrainingConfig

logger = logging.getLogger(__name__)


class TorchtunePostTrainingConfig(LocalTrainingConfig):
    """What a run.yaml may say under the provider's `config:`, beside what all trainers have.

    Attributes:
        checkpoint_format: upstream's name for `export`: `huggingface` means [adapter], `meta` [adapter, merged].
        kernels: `plain` computes by torchtune's own modules; `fused` the same function in fewer, larger operations;
            `compiled` that, with element-wise operations compiled; `auto`: `compiled` for jobs that gain by it.
    """

    checkpoint_format: Literal["meta", "huggingface"] | None = None
    kernels: Literal["auto", "compiled", "fused", "plain"] = "auto"

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
    def format_is_merged(self) -> bool:
        return self.checkpoint_format == "meta"

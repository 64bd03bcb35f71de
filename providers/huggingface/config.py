"""Configuration of `inline::huggingface`."""

from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import Field, model_validator

from providers.training_config import LocalTrainingConfig

logger = logging.getLogger(__name__)


class HuggingfacePostTrainingConfig(LocalTrainingConfig):
    """What a run.yaml may say under the provider's `config:`, beside what all trainers have.

    Attributes:
        checkpoint_format: upstream's name for `export`: `huggingface` means [adapter], `full_state` [adapter, merged].
        max_seq_length: the most tokens of a row where a request does not say; at most the model's context.
        kernels: `plain` runs each row by itself through the library's own modules; `fused` all rows of a batch in one
            pass where the model allows, and the loss with its gradient. `auto`: `fused`.
        distributed_backend: upstream's; null is its only value here, since jobs run on one device each.
        dpo_output_dir: upstream's; checkpoints lie in the state folder, so it is read with a warning.
    """

    checkpoint_format: Literal["full_state", "huggingface"] | None = None
    max_seq_length: int = Field(default=4096, ge=8)
    kernels: Literal["auto", "fused", "plain"] = "auto"
    distributed_backend: None = None
    dpo_output_dir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _warn_of_output_dir(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("dpo_output_dir"):
            logger.warning("dpo_output_dir has no effect here: checkpoints lie in the state folder")
        return values

    @property
    def format_is_merged(self) -> bool:
        return self.checkpoint_format == "full_state"

"""Configuration of remote::huggingface."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class HuggingfaceDatasetsConfig(BaseModel):
    """Nothing to set: configuring this provider is what allows the hub.

    Attributes:
        kvstore: accepted because Llama Stack's run.yaml files have it; data sets are kept in the one store.
    """

    model_config = ConfigDict(extra="forbid")

    kvstore: dict[str, Any] | None = None

"""Configuration of inline::localfs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from post_training.data.sources import DEFAULT_MAX_INLINE_BYTES


class LocalFSConfig(BaseModel):
    """Where data sets may lie.

    Attributes:
        allowed_roots: folders that files may be read from, `~` allowed. None: `<home>/data` alone.
        allow_hub: whether `huggingface://datasets/…` is read from the Hugging Face hub.
        max_inline_bytes: most bytes of rows, or of a `data:` URI, in one request.
        kvstore: accepted because Llama Stack's run.yaml files have it; data sets are kept in the one store.
    """

    model_config = ConfigDict(extra="forbid")

    allowed_roots: list[str] | None = None
    allow_hub: bool = False
    max_inline_bytes: int = Field(default=DEFAULT_MAX_INLINE_BYTES, ge=1)
    kvstore: dict[str, Any] | None = None

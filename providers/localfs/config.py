"""Configuration of inline::localfs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from post_training.data.addresses import check_allowed_host
from post_training.data.sources import DEFAULT_FETCH_SECONDS, DEFAULT_MAX_FETCH_BYTES, DEFAULT_MAX_INLINE_BYTES


class LocalFSConfig(BaseModel):
    """Where data sets may lie.

    Attributes:
        allowed_roots: folders that files may be read from, `~` allowed. None: `<home>/data` alone.
        allow_hub: whether `huggingface://datasets/…` is read from the Hugging Face hub.
        max_inline_bytes: most bytes of rows, or of a `data:` URI, in one request.
        allowed_hosts: what `http(s)://` data sets may be fetched from: `host`, or `host:port` where the port is not the
            scheme's own. A host is meant as it is written, without those below it; one that redirects elsewhere needs
            that one listed, too.
        allow_private_addresses: whether those may have addresses of private networks, or of this machine.
        max_fetch_bytes, fetch_seconds: the most that fetching one file may take.
        kvstore: accepted because Llama Stack's run.yaml files have it; data sets are kept in the one store.
    """

    model_config = ConfigDict(extra="forbid")

    allowed_roots: list[str] | None = None
    allow_hub: bool = False
    max_inline_bytes: int = Field(default=DEFAULT_MAX_INLINE_BYTES, ge=1)
    allowed_hosts: list[str] = []
    allow_private_addresses: bool = False
    max_fetch_bytes: int = Field(default=DEFAULT_MAX_FETCH_BYTES, ge=1)
    fetch_seconds: float = Field(default=DEFAULT_FETCH_SECONDS, gt=0, le=3600)
    kvstore: dict[str, Any] | None = None

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: list[str]) -> list[str]:
        return [check_allowed_host(entry) for entry in value]

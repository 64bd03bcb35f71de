"""Configuration of `remote::llama-stack`."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

DialectName = Literal["auto", "postgrad", "llama-stack-0.1", "llama-stack-0.3", "llama-stack-0.6"]


class RemoteStackConfig(BaseModel):
    """Which server trains."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    url: str = Field(description="The other server, such as `https://gpu.example:8321`")
    api_key: str | None = Field(
        default=None, repr=False, description="Sent to it as a bearer token; null: none, whatever the environment says"
    )
    dialect: DialectName = Field(
        default="auto",
        description="What it speaks: another Postgrad, or a Llama Stack of 0.1.8 to 0.2.23, of 0.3 to 0.5, or of "
        "0.6; `auto`: told by the routes that it lists",
    )
    timeout_seconds: float = Field(default=60.0, gt=0, le=3600, description="For one request to it")
    poll_seconds: float = Field(
        default=2.0, ge=0.1, le=60, description="How often a Llama Stack, which has no events, is asked for news"
    )

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{value!r} is not a server's URL; give one such as http://127.0.0.1:8322")
        if parts.username or parts.password:
            raise ValueError("a URL with a password in it would be shown; give an api_key")
        return value.rstrip("/")

"""What provider and worker say to each other: JSON lines, one object each, requests told apart by number.

provider -> worker   {"id": 7, "generate": {…GenerateRequest…}}      {"id": 7, "cancel": true}
worker -> provider   {"id": 7, "text": "…"}                          any number of these, then one of
                     {"id": 7, "done": {…Done…}}                     {"id": 7, "error": {…WireError…}}
                     {"fatal": "…"}                                  the worker cannot run, and ends
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from apis.errors import PostgradError, error_class


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelFiles(_Message):
    """A model resolved to files.

    Attributes:
        identifier: for messages to the client, which must not show paths.
        weights_dir: Hugging Face directory of the base, or of a merged model.
        adapter_dir: PEFT adapter on top of it, or None.
    """

    identifier: str
    weights_dir: Path
    adapter_dir: Path | None = None


class Sampling(_Message):
    """How to choose tokens.

    Temperature 0 is greedy; a null seed draws a new one; null max_tokens is the default; null top_k is all tokens.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class GenerateRequest(_Message):
    """One generation, from `messages` (with `tools`) through the chat template, or from a plain `prompt`."""

    model: ModelFiles
    sampling: Sampling = Sampling()
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None


class Done(_Message):
    """How a generation ended. `completion_tokens` counts the stop token, where one ended it."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class WireError(_Message):
    """An error of apis/errors.py as data."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: PostgradError) -> WireError:
        return cls(code=error.code, message=error.message, param=error.param)

    def to_exception(self) -> PostgradError:
        """The same class as the worker raised."""
        return (error_class(self.code) or PostgradError)(self.message, param=self.param)

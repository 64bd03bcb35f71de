"""What an inference provider must be able to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from apis.inference.models import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)


@runtime_checkable
class Inference(Protocol):
    """Text from models: bases and checkpoints alike.

    Every method raises ModelNotFound for an unknown model, BadRequest for a request the model cannot serve, QueueFull
    when too many requests wait, and Unavailable when the model cannot run now. A stream raises them from its first step
    on. Cancelling a call, or closing a stream, stops the generation.
    """

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion: ...

    def stream_chat_completion(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]: ...

    async def completion(self, request: CompletionRequest) -> Completion: ...

    def stream_completion(self, request: CompletionRequest) -> AsyncIterator[Completion]: ...

"""`inline::transformers`: the stack's models answer, in a worker process. Imports no torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from apis.inference.models import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    GenerationRequest,
    Usage,
)
from providers.inference.channel import WorkerPool
from providers.inference.config import TransformersInferenceConfig
from providers.inference.wire import Done, GenerateRequest, ModelFiles, Sampling
from providers.spec import ProviderDeps


class Resolved(Protocol):
    """What is needed of a model that the catalog found."""

    @property
    def identifier(self) -> str: ...
    @property
    def base_dir(self) -> Path: ...
    @property
    def adapter_dir(self) -> Path | None: ...
    @property
    def merged_dir(self) -> Path | None: ...


class Catalog(Protocol):
    """What is needed of the stack's model catalog."""

    def resolve(self, identifier: str) -> Resolved:
        """Raises ModelNotFound."""
        ...


async def get_provider_impl(config: TransformersInferenceConfig, deps: ProviderDeps) -> TransformersInference:
    return TransformersInference(config, deps.models)


class TransformersInference:
    """The inference Protocol. Its worker starts with the first request and ends with `shutdown`."""

    def __init__(self, config: TransformersInferenceConfig, models: Catalog) -> None:
        self.pool = WorkerPool(config)
        self._models = models

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        files = await self._resolve(request.model)
        text, done = await self._whole_text(_chat_request(request, files))
        choice = ChatChoice(message=AnswerMessage(content=text), finish_reason=done.finish_reason)
        return ChatCompletion(**_head("chatcmpl", files), choices=[choice], usage=_usage([done]))

    async def stream_chat_completion(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        files = await self._resolve(request.model)
        head, opened, ends = _head("chatcmpl", files), False, []
        async with aclosing(self.pool.generate(_chat_request(request, files))) as events:
            async for event in events:
                if not opened:
                    opened = True
                    yield _chunk(head, Delta(role="assistant", content=""))
                if isinstance(event, str):
                    yield _chunk(head, Delta(content=event))
                else:
                    ends.append(event)
                    yield _chunk(head, Delta(), event)
        if request.include_usage:
            yield ChatCompletionChunk(**head, choices=[], usage=_usage(ends))

    async def completion(self, request: CompletionRequest) -> Completion:
        files = await self._resolve(request.model)
        choices, ends = [], []
        for index, prompt in enumerate(request.prompt):
            text, done = await self._whole_text(_text_request(request, files, prompt))
            choices.append(CompletionChoice(index=index, text=text, finish_reason=done.finish_reason))
            ends.append(done)
        return Completion(**_head("cmpl", files), choices=choices, usage=_usage(ends))

    async def stream_completion(self, request: CompletionRequest) -> AsyncIterator[Completion]:
        files = await self._resolve(request.model)
        head, ends = _head("cmpl", files), []
        for index, prompt in enumerate(request.prompt):
            async with aclosing(self.pool.generate(_text_request(request, files, prompt))) as events:
                async for event in events:
                    if isinstance(event, str):
                        choice = CompletionChoice(index=index, text=event)
                    else:
                        ends.append(event)
                        choice = CompletionChoice(index=index, text="", finish_reason=event.finish_reason)
                    yield Completion(**head, choices=[choice])
        if request.include_usage:
            yield Completion(**head, choices=[], usage=_usage(ends))

    async def shutdown(self) -> None:
        """End the worker; requests that run get Unavailable."""
        await self.pool.shutdown()

    async def _resolve(self, model: str) -> ModelFiles:
        found = await asyncio.to_thread(self._models.resolve, model)
        merged_only = found.adapter_dir is None and found.merged_dir is not None
        return ModelFiles(
            identifier=found.identifier,
            # The adapter first: it shares its base with other checkpoints.
            weights_dir=found.merged_dir if merged_only and found.merged_dir else found.base_dir,
            adapter_dir=found.adapter_dir,
        )

    async def _whole_text(self, request: GenerateRequest) -> tuple[str, Done]:
        pieces: list[str] = []
        async with aclosing(self.pool.generate(request)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return "".join(pieces), event
                pieces.append(event)
        raise AssertionError("a generation ends with Done or an error")


def _chat_request(request: ChatCompletionRequest, files: ModelFiles) -> GenerateRequest:
    shown = () if request.tool_choice == "none" else request.tools or ()
    return GenerateRequest(
        model=files,
        sampling=_sampling(request, request.max_completion_tokens or request.max_tokens),
        messages=tuple(_template_message(message) for message in request.messages),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in shown),
    )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: "developer" is OpenAI's newer word for "system"."""
    role = "system" if message.role == "developer" else message.role
    return message.model_dump(exclude_none=True, exclude={"annotations"}) | {"role": role}


def _text_request(request: CompletionRequest, files: ModelFiles, prompt: str) -> GenerateRequest:
    return GenerateRequest(model=files, sampling=_sampling(request, request.max_tokens), prompt=prompt)


def _sampling(request: GenerationRequest, max_tokens: int | None) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=tuple(request.stop or ()),
    )


def _head(prefix: str, files: ModelFiles) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": files.identifier}


def _chunk(head: dict[str, Any], delta: Delta, done: Done | None = None) -> ChatCompletionChunk:
    choice = ChunkChoice(delta=delta, finish_reason=done.finish_reason if done else None)
    return ChatCompletionChunk(**head, choices=[choice])


def _usage(ends: list[Done]) -> Usage:
    read, generated = sum(end.prompt_tokens for end in ends), sum(end.completion_tokens for end in ends)
    return Usage(prompt_tokens=read, completion_tokens=generated, total_tokens=read + generated)

"""Inference in Llama Stack's own shapes: whole answers and its streams of events.

A stream just ends: its clients read every event as JSON, so a `[DONE]` would break them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from apis.common import ResponseModel
from apis.inference.answers import STREAM_RESPONSES, streamed, while_connected
from apis.inference.models import ChatCompletion, ChatCompletionChunk, Completion, FinishReason, Usage
from apis.inference.protocol import Inference
from distributions.dialects.llama_stack_inference import ChatCompletionBody, CompletionBody, StopReason
from distributions.dialects.words import speak


class Metric(ResponseModel):
    metric: str
    value: float
    unit: str | None = None


class _Answer(ResponseModel):
    logprobs: None = None
    metrics: list[Metric] | None = None


class CompletionMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    stop_reason: StopReason
    tool_calls: list[dict[str, Any]] = []


class ChatCompletionAnswer(_Answer):
    completion_message: CompletionMessage


class TextDelta(ResponseModel):
    type: Literal["text"] = "text"
    text: str


class ChatCompletionEvent(ResponseModel):
    """`delta` is a plain text for clients up to 0.0.63."""

    event_type: Literal["start", "progress", "complete"]
    delta: TextDelta | str
    logprobs: None = None
    stop_reason: StopReason | None = None


class ChatCompletionEventChunk(ResponseModel):
    event: ChatCompletionEvent
    metrics: list[Metric] | None = None


class CompletionAnswer(_Answer):
    content: str
    stop_reason: StopReason


class CompletionChunk(_Answer):
    delta: str
    stop_reason: StopReason | None = None


def create_inference_router(impl: Inference, *, plain_deltas: bool = False) -> APIRouter:
    """Serve `impl` under `/inference`.

    Args:
        plain_deltas: a chat's stream gives each piece as a plain text, as clients up to 0.0.63 expect it.
    """
    router = APIRouter(prefix="/inference", tags=["inference"], deprecated=True)

    @router.post("/chat-completion", response_model=ChatCompletionAnswer, responses=STREAM_RESPONSES)
    async def chat_completion_llama_stack(
        request: ChatCompletionBody, http: Request
    ) -> Response | ChatCompletionAnswer:
        speak(http.scope, request.words())
        spec = request.spec()
        if spec.stream:
            return await streamed(http, _chat_events(impl.stream_chat_completion(spec), plain_deltas), end=None)
        answer = await while_connected(http, impl.chat_completion(spec))
        return answer if isinstance(answer, Response) else _chat_answer(answer)

    @router.post("/completion", response_model=CompletionAnswer, responses=STREAM_RESPONSES)
    async def completion_llama_stack(request: CompletionBody, http: Request) -> Response | CompletionAnswer:
        speak(http.scope, request.words())
        spec = request.spec()
        if spec.stream:
            return await streamed(http, _completion_events(impl.stream_completion(spec)), end=None)
        answer = await while_connected(http, impl.completion(spec))
        return answer if isinstance(answer, Response) else _completion_answer(answer)

    return router


def _stop_reason(reason: FinishReason | None) -> StopReason:
    return "out_of_tokens" if reason == "length" else "end_of_turn"


def _metrics(usage: Usage | None) -> list[Metric] | None:
    if usage is None:
        return None
    return [Metric(metric=name, value=value, unit="tokens") for name, value in usage.model_dump().items()]


def _chat_answer(answer: ChatCompletion) -> ChatCompletionAnswer:
    choice = answer.choices[0]
    message = CompletionMessage(content=choice.message.content, stop_reason=_stop_reason(choice.finish_reason))
    return ChatCompletionAnswer(completion_message=message, metrics=_metrics(answer.usage))


def _completion_answer(answer: Completion) -> CompletionAnswer:
    choice = answer.choices[0]
    reason = _stop_reason(choice.finish_reason)
    return CompletionAnswer(content=choice.text, stop_reason=reason, metrics=_metrics(answer.usage))


async def _chat_events(
    chunks: AsyncIterator[ChatCompletionChunk], plain: bool
) -> AsyncIterator[ChatCompletionEventChunk]:
    """`start` once the model answers, `progress` with each piece, `complete` with the reason and the token counts."""

    def event(kind: Literal["start", "progress", "complete"], text: str, **more: Any) -> ChatCompletionEvent:
        return ChatCompletionEvent(event_type=kind, delta=text if plain else TextDelta(text=text), **more)

    reason, usage, started = None, None, False
    async with _closing(chunks):
        async for chunk in chunks:
            if not started:
                started = True
                yield ChatCompletionEventChunk(event=event("start", ""))
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    yield ChatCompletionEventChunk(event=event("progress", choice.delta.content))
    end = event("complete", "", stop_reason=_stop_reason(reason))
    yield ChatCompletionEventChunk(event=end, metrics=_metrics(usage))


async def _completion_events(chunks: AsyncIterator[Completion]) -> AsyncIterator[CompletionChunk]:
    """Each piece as it comes; the last one is empty and has the reason and the token counts."""
    reason, usage = None, None
    async with _closing(chunks):
        async for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.text:
                    yield CompletionChunk(delta=choice.text)
    yield CompletionChunk(delta="", stop_reason=_stop_reason(reason), metrics=_metrics(usage))


@asynccontextmanager
async def _closing(chunks: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Stop the generation behind `chunks` when the block ends."""
    try:
        yield
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()

"""The inference API over HTTP: JSON answers, or Server-Sent Events as OpenAI has them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from apis.inference.answers import STREAM_RESPONSES, streamed, while_connected
from apis.inference.models import ChatCompletion, ChatCompletionRequest, Completion, CompletionRequest
from apis.inference.protocol import Inference


def create_router(impl: Inference) -> APIRouter:
    """Serve `impl` under `/chat/completions` and `/completions`; mount with the prefix of the API's version."""
    router = APIRouter(tags=["inference"])

    @router.post("/chat/completions", response_model=ChatCompletion, responses=STREAM_RESPONSES)
    async def chat_completion(request: ChatCompletionRequest, http: Request) -> Response | ChatCompletion:
        if request.stream:
            return await streamed(http, impl.stream_chat_completion(request))
        return await while_connected(http, impl.chat_completion(request))

    @router.post("/completions", response_model=Completion, responses=STREAM_RESPONSES)
    async def completion(request: CompletionRequest, http: Request) -> Response | Completion:
        if request.stream:
            return await streamed(http, impl.stream_completion(request))
        return await while_connected(http, impl.completion(request))

    return router

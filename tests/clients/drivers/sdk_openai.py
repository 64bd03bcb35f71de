"""OpenAI's verbs, which clients from 0.2.3 on and the `openai` package spell alike.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from flow import equal, is_a
from plain import TEXT_TOKENS, Way


def openai_way(client: Any, name: str = "openai chat") -> Way:
    """OpenAI's verbs on any client that has them."""

    def chat(model: str, text: str) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=TEXT_TOKENS
        )
        equal((answer.object, answer.choices[0].message.role), ("chat.completion", "assistant"), "object and role")
        is_a(answer.created, int, "created")
        return answer.choices[0].message.content

    def chat_stream(model: str, text: str) -> list[str]:
        messages = [{"role": "user", "content": text}]
        chunks = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=TEXT_TOKENS, stream=True
        )
        return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]

    def completion(model: str, text: str) -> str:
        answer = client.completions.create(model=model, prompt=text, temperature=0, max_tokens=TEXT_TOKENS)
        equal(answer.object, "text_completion", "object")
        return answer.choices[0].text

    def completion_stream(model: str, text: str) -> list[str]:
        chunks = client.completions.create(model=model, prompt=text, temperature=0, max_tokens=TEXT_TOKENS, stream=True)
        return [chunk.choices[0].text for chunk in chunks if chunk.choices]

    return Way(name, "sdk", chat, chat_stream, completion, completion_stream)

"""Formats of one question and one answer, and plain text."""

from __future__ import annotations

from apis.errors import DataInvalid
from post_training.data.format_fields import Fields, exchange, objects, text
from post_training.data.format_messages import content
from post_training.data.types import Conversation, PlainText


def read_instruct(fields: Fields) -> Conversation:
    """Llama Stack's `chat_completion_input` (a list of one user message, or its JSON text) and `expected_answer`."""
    index, pointer = fields.index, fields.pointer("chat_completion_input")
    prompts = objects(fields.decoded("chat_completion_input"), index, pointer)
    if len(prompts) != 1:
        raise DataInvalid(
            f"must hold exactly 1 message, found {len(prompts)}; use data_format 'dialog' or 'messages' for more",
            row=index,
            pointer=pointer,
        )
    role = prompts[0].get("role", "user")
    if role != "user":
        raise DataInvalid(f"must be 'user', found {role!r}", row=index, pointer=f"{pointer}/0/role")
    question = content(prompts[0].get("content"), index, f"{pointer}/0/content")
    return exchange(question, fields.answer("expected_answer"), index)


def read_prompt_completion(fields: Fields) -> Conversation:
    return exchange(fields.text("prompt"), fields.answer("completion"), fields.index)


def read_alpaca(fields: Fields) -> Conversation:
    """`instruction`, then an empty line and `input` where there is one, as the question; `output` as the answer."""
    prompt, given = fields.text("instruction"), fields.value("input")
    context = text("" if given is None else given, fields.index, fields.pointer("input"))
    return exchange(f"{prompt}\n\n{context}" if context else prompt, fields.answer("output"), fields.index)


def read_text(fields: Fields) -> PlainText:
    return PlainText(fields.index, fields.answer("text"))

"""Formats of one question and one answer, and plain text."""

from __future__ import annotations

from typing import Any

from apis.errors import DataInvalid
from post_training.data.format_fields import Fields, exchange, objects, text
from post_training.data.format_messages import content
from post_training.data.records import json_type
from post_training.data.types import Conversation, Message, PlainText


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
    """`instruction`, then an empty line and `input` where there is one, as the question; `output` as the answer.

    As in LLaMA-Factory, `system` and `history`, a list of [question, answer] pairs, come before it where they hold
    something, and the answers of the history are learnt as well.
    """
    prompt, context = fields.text("instruction"), fields.optional_text("input")
    asked = exchange(f"{prompt}\n\n{context}" if context else prompt, fields.answer("output"), fields.index)
    system = fields.optional_text("system")
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return Conversation(fields.index, [*first, *_history(fields), *asked.messages])


def _history(fields: Fields) -> list[Message]:
    pointer = fields.pointer("history")
    turns = fields.decoded("history") if fields.value("history") not in (None, "") else []
    if not isinstance(turns, list):
        raise DataInvalid(
            f"must be a list of [question, answer] pairs, found {json_type(turns)}", row=fields.index, pointer=pointer
        )
    return [message for i, turn in enumerate(turns) for message in _turn(turn, fields.index, f"{pointer}/{i}")]


def _turn(turn: Any, index: int, pointer: str) -> list[Message]:
    if not isinstance(turn, list) or len(turn) != 2:
        found = f"a list of {len(turn)}" if isinstance(turn, list) else json_type(turn)
        raise DataInvalid(f"must be a [question, answer] pair, found {found}", row=index, pointer=pointer)
    question, answer = (text(part, index, f"{pointer}/{i}") for i, part in enumerate(turn))
    if not answer:
        raise DataInvalid(
            "is empty, so there is nothing to learn; fill it or leave the pair out", row=index, pointer=f"{pointer}/1"
        )
    return exchange(question, answer, index).messages


def read_text(fields: Fields) -> PlainText:
    return PlainText(fields.index, fields.answer("text"))

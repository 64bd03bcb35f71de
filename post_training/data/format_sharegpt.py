"""ShareGPT rows as LLaMA-Factory writes them: turns with `from` and `value`, and the columns `system` and `tools`."""

from __future__ import annotations

from typing import Any

from apis.errors import DataInvalid
from post_training.data.format_fields import Fields, decoded, objects, text
from post_training.data.format_messages import read_function, read_tools, require_assistant, weight
from post_training.data.records import json_type
from post_training.data.types import Conversation, Message

_CALL = "function_call"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    _CALL: "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}


def read_sharegpt(fields: Fields) -> Conversation:
    """Turns become messages: `function_call` one with tool calls, `observation` and `tool` the tool's result."""
    index, pointer = fields.index, fields.pointer("conversations")
    turns = objects(fields.decoded("conversations"), index, pointer)
    messages = [_message(turn, index, f"{pointer}/{i}") for i, turn in enumerate(turns)]
    messages = _with_system(messages, fields)
    require_assistant(messages, index, pointer)
    _number_calls(messages)
    return Conversation(index, messages, read_tools(fields, bare=True))


def _message(turn: dict[str, Any], index: int, pointer: str) -> Message:
    source = _source(turn, index, pointer)
    role = _ROLES[source]
    value = text(turn.get("value"), index, f"{pointer}/value")
    if role == "assistant" and not value:
        raise DataInvalid("is empty, so there is nothing to learn", row=index, pointer=f"{pointer}/value")
    message: Message = {"role": role}
    if source == _CALL:
        message["tool_calls"] = _calls(value, index, f"{pointer}/value")
    else:
        message["content"] = value
    if turn.get("weight") is not None:
        message["weight"] = weight(turn["weight"], role, index, f"{pointer}/weight")
    return message


def _source(turn: dict[str, Any], index: int, pointer: str) -> str:
    source = turn.get("from")
    if source is None and "role" in turn:
        raise DataInvalid(
            "has 'role', not 'from': read the column as data_format 'messages' with "
            'columns {"messages": "conversations"}',
            row=index,
            pointer=pointer,
        )
    if not isinstance(source, str) or source not in _ROLES:
        found = "it is missing" if source is None else f"found {source!r}"
        raise DataInvalid(f"must be one of {', '.join(_ROLES)}; {found}", row=index, pointer=f"{pointer}/from")
    return source


def _calls(value: str, index: int, pointer: str) -> list[dict[str, Any]]:
    """One call as JSON text, or a list of several."""
    calls = decoded(value, index, pointer)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) for call in calls):
        found = "an empty list" if not calls else next(json_type(call) for call in calls if not isinstance(call, dict))
        raise DataInvalid(
            f'must be {{"name": …, "arguments": {{…}}}} or a list of such, found {found}', row=index, pointer=pointer
        )
    return [{"type": "function", "function": read_function(call, index, pointer)} for call in calls]


def _with_system(messages: list[Message], fields: Fields) -> list[Message]:
    """The messages, after the one of the column `system` where it holds something."""
    content = fields.optional_text("system")
    if not content:
        return messages
    if messages[0]["role"] == "system":
        raise DataInvalid(
            "gives a second system message beside that of the first turn; keep one of them",
            row=fields.index,
            pointer=fields.pointer("system"),
        )
    return [{"role": "system", "content": content}, *messages]


def _number_calls(messages: list[Message]) -> None:
    """Give calls ids and results the id they answer, in order: the format has none, and some templates demand them."""
    waiting: list[str] = []
    made = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = f"call{made:05d}"  # nine characters, as Mistral's templates require
            waiting.append(call["id"])
            made += 1
        if message["role"] == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)

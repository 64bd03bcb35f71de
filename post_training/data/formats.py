"""Rows to conversations: each data format checked as it is read, each fault named by row and JSON pointer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from apis.datasets.models import Row
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.records import decode_value, json_type
from post_training.data.types import Conversation, Message

COLUMNS: dict[DatasetFormat, tuple[str, ...]] = {
    DatasetFormat.messages: ("messages",),
    DatasetFormat.dialog: ("dialog",),
    DatasetFormat.instruct: ("chat_completion_input", "expected_answer"),
    DatasetFormat.prompt_completion: ("prompt", "completion"),
    DatasetFormat.alpaca: ("instruction", "output"),
}
"""The columns each format must have, in the order in which formats are recognised."""

_ROLES = ("system", "user", "assistant", "tool")
_OBSOLETE_KEYS = {"function_call": "use tool_calls", "audio": "only text is trained on", "refusal": "use content"}


def detect_format(row: Row) -> DatasetFormat:
    """The format whose columns `row`, the first row of a data set, has.

    Raises:
        DataInvalid: naming the columns seen and those that would do.
    """
    for data_format, columns in COLUMNS.items():
        if all(column in row for column in columns):
            return data_format
    known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
    raise DataInvalid(f"the columns {_seen(row)} fit no data format. Rename them to those of one of: {known}", row=0)


def to_conversation(row: Row, index: int, data_format: DatasetFormat) -> Conversation:
    """Read one row, the `index`-th (from 0) of its data set, as messages.

    A `developer` message becomes a `system` one, content given as text parts becomes one string, and tool arguments
    given as a JSON string become an object: the shapes that chat templates read.

    Raises:
        DataInvalid: with row, JSON pointer, reason and remedy.
    """
    for column in COLUMNS[data_format]:
        if column not in row:
            raise DataInvalid(
                f"the column {column!r} of data_format {data_format.value!r} is missing; the columns are {_seen(row)}. "
                "Rename one, or give another data_format",
                row=index,
                pointer=f"/{column}",
            )
    return _READERS[data_format](row, index)


def _seen(row: Row) -> str:
    return ", ".join(repr(column) for column in row) or "(none)"


def _instruct(row: Row, index: int) -> Conversation:
    pointer = "/chat_completion_input"
    prompts = _message_list(row["chat_completion_input"], index, pointer)
    if len(prompts) != 1:
        raise DataInvalid(
            f"must hold exactly 1 message, found {len(prompts)}; use data_format 'dialog' or 'messages' for more",
            row=index,
            pointer=pointer,
        )
    role = prompts[0].get("role", "user")
    if role != "user":
        raise DataInvalid(f"must be 'user', found {role!r}", row=index, pointer=f"{pointer}/0/role")
    question = _content(prompts[0].get("content"), index, f"{pointer}/0/content")
    return _exchange(question, _text(row["expected_answer"], index, "/expected_answer"), index, "/expected_answer")


def _prompt_completion(row: Row, index: int) -> Conversation:
    prompt = _text(row["prompt"], index, "/prompt")
    return _exchange(prompt, _text(row["completion"], index, "/completion"), index, "/completion")


def _alpaca(row: Row, index: int) -> Conversation:
    prompt = _text(row["instruction"], index, "/instruction")
    context = _text("" if row.get("input") is None else row["input"], index, "/input")
    answer = _text(row["output"], index, "/output")
    return _exchange(f"{prompt}\n\n{context}" if context else prompt, answer, index, "/output")


def _exchange(question: str, answer: str, index: int, pointer: str) -> Conversation:
    if not answer:
        raise DataInvalid(
            "is empty, so there is nothing to learn; fill it or delete the row", row=index, pointer=pointer
        )
    return Conversation(index, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _dialog(row: Row, index: int) -> Conversation:
    values = _message_list(row["dialog"], index, "/dialog")
    if len(values) < 2:
        raise DataInvalid(f"must hold at least 2 messages, found {len(values)}", row=index, pointer="/dialog")
    messages = [_message(value, index, f"/dialog/{i}") for i, value in enumerate(values)]
    for i, message in enumerate(messages):
        if message["role"] == "tool" or "tool_calls" in message or (message["role"] == "system" and i > 0):
            raise DataInvalid(
                "a dialog holds user and assistant messages, after at most one system message; "
                "use data_format 'messages' for tools",
                row=index,
                pointer=f"/dialog/{i}",
            )
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
    if messages[first]["role"] != "user":
        raise DataInvalid(
            f"must be 'user', found {messages[first]['role']!r}: a dialog begins with the user",
            row=index,
            pointer=f"/dialog/{first}/role",
        )
    _require_assistant(messages, index, "/dialog")
    return Conversation(index, messages)


def _messages(row: Row, index: int) -> Conversation:
    values = _message_list(row["messages"], index, "/messages")
    messages = [_message(value, index, f"/messages/{i}") for i, value in enumerate(values)]
    _require_assistant(messages, index, "/messages")
    if row.get("functions") is not None:
        raise DataInvalid("is OpenAI's older form; use the column 'tools'", row=index, pointer="/functions")
    return Conversation(index, messages, _tools(row.get("tools"), index))


_READERS: dict[DatasetFormat, Callable[[Row, int], Conversation]] = {
    DatasetFormat.messages: _messages,
    DatasetFormat.dialog: _dialog,
    DatasetFormat.instruct: _instruct,
    DatasetFormat.prompt_completion: _prompt_completion,
    DatasetFormat.alpaca: _alpaca,
}


def _require_assistant(messages: list[Message], index: int, pointer: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataInvalid("must hold at least one 'assistant' message to learn from", row=index, pointer=pointer)


def _message_list(value: Any, index: int, pointer: str) -> list[dict[str, Any]]:
    """A list of objects, or JSON text of one."""
    values = _decoded(value, index, pointer)
    if not isinstance(values, list) or not values:
        found = "an empty list" if values == [] else json_type(values)
        raise DataInvalid(f"must be a list of messages, found {found}", row=index, pointer=pointer)
    for i, item in enumerate(values):
        if not isinstance(item, dict):
            raise DataInvalid(f"must be a message object, found {json_type(item)}", row=index, pointer=f"{pointer}/{i}")
    return values


def _decoded(value: Any, index: int, pointer: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return decode_value(value)
    except ValueError as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataInvalid(f"is a string and not valid JSON: {reason}", row=index, pointer=pointer) from None


def _message(value: dict[str, Any], index: int, pointer: str) -> Message:
    """One checked message; keys with a null value are left out, others go to the chat template as they are."""
    message = {key: item for key, item in value.items() if item is not None}
    message["role"] = role = _role(message.get("role"), index, f"{pointer}/role")
    for key, remedy in _OBSOLETE_KEYS.items():
        if key in message:
            raise DataInvalid(f"is not read: {remedy}", row=index, pointer=f"{pointer}/{key}")
    if "weight" in message:
        message["weight"] = _weight(message["weight"], role, index, f"{pointer}/weight")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], role, index, f"{pointer}/tool_calls")
    if "content" in message or "tool_calls" not in message:
        message["content"] = _content(message.get("content"), index, f"{pointer}/content")
    if role == "assistant" and not message.get("content") and not message.get("tool_calls"):
        raise DataInvalid(
            "is empty, so there is nothing to learn: give the assistant content or tool_calls",
            row=index,
            pointer=f"{pointer}/content",
        )
    return message


def _role(role: Any, index: int, pointer: str) -> str:
    if role == "developer":
        return "system"
    if role not in _ROLES:
        found = "it is missing" if role is None else f"found {role!r}"
        raise DataInvalid(f"must be one of {', '.join(_ROLES)}, developer; {found}", row=index, pointer=pointer)
    return role


def _weight(weight: Any, role: str, index: int, pointer: str) -> int:
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataInvalid(f"must be 0 or 1, found {weight!r}", row=index, pointer=pointer)
    if role != "assistant":
        raise DataInvalid(f"only assistant messages have a weight, this is a {role!r} one", row=index, pointer=pointer)
    return int(weight)


def _text(value: Any, index: int, pointer: str) -> str:
    if not isinstance(value, str):
        raise DataInvalid(f"must be a string, found {json_type(value)}", row=index, pointer=pointer)
    return value


def _content(value: Any, index: int, pointer: str) -> str:
    if not isinstance(value, list):
        return _text(value, index, pointer)
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind != "text":
            raise DataInvalid(
                f"must be a text part, found {kind!r}: only text is trained on", row=index, pointer=f"{pointer}/{i}"
            )
    return "".join(_text(part.get("text"), index, f"{pointer}/{i}/text") for i, part in enumerate(value))


def _tool_calls(calls: Any, role: str, index: int, pointer: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise DataInvalid(f"only assistant messages call tools, this is a {role!r} one", row=index, pointer=pointer)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataInvalid("must be a list of tool call objects", row=index, pointer=pointer)
    return [_tool_call(call, index, f"{pointer}/{i}") for i, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], index: int, pointer: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise DataInvalid(f"must be an object, found {json_type(function)}", row=index, pointer=f"{pointer}/function")
    _text(function.get("name"), index, f"{pointer}/function/name")
    arguments = _decoded(function.get("arguments"), index, f"{pointer}/function/arguments")
    if not isinstance(arguments, dict):
        raise DataInvalid(
            f"must be an object or its JSON text, found {json_type(arguments)}",
            row=index,
            pointer=f"{pointer}/function/arguments",
        )
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


def _tools(value: Any, index: int) -> list[dict[str, Any]] | None:
    tools = _decoded(value, index, "/tools") if value != "" else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise DataInvalid(f"must be a list of tools, found {json_type(tools)}", row=index, pointer="/tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataInvalid(
                'must be {"type": "function", "function": {"name": …, "parameters": …}}',
                row=index,
                pointer=f"/tools/{i}",
            )
    return tools

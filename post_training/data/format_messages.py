"""Chat messages as OpenAI writes them: the formats `messages` and `dialog`, and the checks of one message."""

from __future__ import annotations

from typing import Any

from apis.errors import DataInvalid
from post_training.data.format_fields import Fields, decoded, objects, text
from post_training.data.records import json_type
from post_training.data.types import Conversation, Message

ROLES = ("system", "user", "assistant", "tool")
_OBSOLETE_KEYS = {"function_call": "use tool_calls", "audio": "only text is trained on", "refusal": "use content"}


def read_messages(fields: Fields) -> Conversation:
    """`messages`, with the optional column `tools`."""
    index, pointer = fields.index, fields.pointer("messages")
    values = objects(fields.decoded("messages"), index, pointer)
    messages = [read_message(value, index, f"{pointer}/{i}") for i, value in enumerate(values)]
    require_assistant(messages, index, pointer)
    if fields.row.get("functions") is not None and fields.name("tools") != "functions":
        raise DataInvalid("is OpenAI's older form; use the column 'tools'", row=index, pointer="/functions")
    return Conversation(index, messages, read_tools(fields))


def read_dialog(fields: Fields) -> Conversation:
    """Llama Stack's `dialog`: user and assistant messages, after at most one system message."""
    index, pointer = fields.index, fields.pointer("dialog")
    values = objects(fields.decoded("dialog"), index, pointer)
    if len(values) < 2:
        raise DataInvalid(f"must hold at least 2 messages, found {len(values)}", row=index, pointer=pointer)
    messages = [read_message(value, index, f"{pointer}/{i}") for i, value in enumerate(values)]
    for i, message in enumerate(messages):
        if message["role"] == "tool" or "tool_calls" in message or (message["role"] == "system" and i > 0):
            raise DataInvalid(
                "a dialog holds user and assistant messages, after at most one system message; "
                "use data_format 'messages' for tools",
                row=index,
                pointer=f"{pointer}/{i}",
            )
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
    if messages[first]["role"] != "user":
        raise DataInvalid(
            f"must be 'user', found {messages[first]['role']!r}: a dialog begins with the user",
            row=index,
            pointer=f"{pointer}/{first}/role",
        )
    require_assistant(messages, index, pointer)
    return Conversation(index, messages)


def require_assistant(messages: list[Message], index: int, pointer: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataInvalid("must hold at least one 'assistant' message to learn from", row=index, pointer=pointer)


def read_message(value: dict[str, Any], index: int, pointer: str) -> Message:
    """One checked message; keys with a null value are left out, others go to the chat template as they are."""
    message = {key: item for key, item in value.items() if item is not None}
    message["role"] = role = _role(message.get("role"), index, f"{pointer}/role")
    for key, remedy in _OBSOLETE_KEYS.items():
        if key in message:
            raise DataInvalid(f"is not read: {remedy}", row=index, pointer=f"{pointer}/{key}")
    if "weight" in message:
        message["weight"] = weight(message["weight"], role, index, f"{pointer}/weight")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], role, index, f"{pointer}/tool_calls")
    if "content" in message or "tool_calls" not in message:
        message["content"] = content(message.get("content"), index, f"{pointer}/content")
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
    if role not in ROLES:
        found = "it is missing" if role is None else f"found {role!r}"
        raise DataInvalid(f"must be one of {', '.join(ROLES)}, developer; {found}", row=index, pointer=pointer)
    return role


def weight(value: Any, role: str, index: int, pointer: str) -> int:
    """The loss weight of an assistant message, 0 or 1."""
    if isinstance(value, bool) or value not in (0, 1):
        raise DataInvalid(f"must be 0 or 1, found {value!r}", row=index, pointer=pointer)
    if role != "assistant":
        raise DataInvalid(f"only assistant messages have a weight, this is a {role!r} one", row=index, pointer=pointer)
    return int(value)


def content(value: Any, index: int, pointer: str) -> str:
    """Text, or the joined texts of a list of text parts."""
    if not isinstance(value, list):
        return text(value, index, pointer)
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        if kind != "text":
            raise DataInvalid(
                f"must be a text part, found {kind!r}: only text is trained on", row=index, pointer=f"{pointer}/{i}"
            )
    return "".join(text(part.get("text"), index, f"{pointer}/{i}/text") for i, part in enumerate(value))


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
    read = read_function(function, index, f"{pointer}/function")
    return {**call, "type": call.get("type", "function"), "function": read}


def read_function(function: dict[str, Any], index: int, pointer: str) -> dict[str, Any]:
    """A called function: its name, and arguments as an object or its JSON text."""
    text(function.get("name"), index, f"{pointer}/name")
    arguments = decoded(function.get("arguments"), index, f"{pointer}/arguments")
    if not isinstance(arguments, dict):
        raise DataInvalid(
            f"must be an object or its JSON text, found {json_type(arguments)}",
            row=index,
            pointer=f"{pointer}/arguments",
        )
    return {**function, "arguments": arguments}


def read_tools(fields: Fields, bare: bool = False) -> list[dict[str, Any]] | None:
    """The column `tools`: OpenAI's definitions as a list or its JSON text, or None.

    Args:
        bare: whether a definition may also stand without its wrapper, as `{"name": …, "parameters": …}`.
    """
    index, pointer = fields.index, fields.pointer("tools")
    tools = fields.decoded("tools") if fields.value("tools") != "" else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise DataInvalid(f"must be a list of tools, found {json_type(tools)}", row=index, pointer=pointer)
    if bare:
        tools = [_wrapped(tool) for tool in tools]
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataInvalid(
                'must be {"type": "function", "function": {"name": …, "parameters": …}}',
                row=index,
                pointer=f"{pointer}/{i}",
            )
    return tools


def _wrapped(tool: Any) -> Any:
    return {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool

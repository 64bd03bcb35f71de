"""What a row's own text may do to its rendering: text that reads as a control token, parts that a template drops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from apis.errors import InvalidField
from post_training.data.types import Conversation, Example, Message, PlainText

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]


class ControlTokens:
    """The texts of a tokenizer's control tokens, to be found in the text of rows."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted((text for text in texts if text), key=len, reverse=True)
        self._texts = tuple(known)
        self._initials = {text[0] for text in known}
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None

    def found_in(self, example: Example) -> bool:
        return self._pattern is not None and any(self._in_text(text) for text in _texts(example))

    def at_end(self, text: str) -> bool:
        """Whether the text ends in one, white space aside."""
        return text.rstrip().endswith(self._texts)

    def _in_text(self, text: str) -> bool:
        assert self._pattern is not None  # `found_in` looked
        # Most texts have no such character, and then need no search for hundreds of tokens.
        return any(initial in text for initial in self._initials) and self._pattern.search(text) is not None


class PartsCheck:
    """Whether all parts of a conversation reach its rendering by one template, `render`.

    Text that is looked for may stand elsewhere by chance, such as a call's name in the list of tools. So a part is
    changed, and the rendering must change with it: once for each place, since what a template leaves out follows from
    where it stands.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._shown: set[tuple[Any, ...]] = set()

    def check(self, conversation: Conversation, text: str) -> None:
        """Refuse a conversation of which the template leaves something out: a tool, a call, the text of a message.

        Raises:
            InvalidField: naming what is missing from `text`, the conversation's rendering.
        """
        forms = [_form(message) for message in conversation.messages]
        for number, tool in enumerate(conversation.tools or ()):
            if not self._tool_is_shown(conversation, number, text, (forms[0], forms[-1])):
                name = tool["function"]["name"]
                raise InvalidField(f"the model's chat template drops the tool {name!r}; leave it out", param="tools")
        for i in range(len(forms)):
            self._check_message(conversation, i, text, (*forms[max(0, i - 1) : i + 2], min(i, 2), len(forms) - i == 1))

    def _check_message(self, conversation: Conversation, i: int, text: str, place: tuple[Any, ...]) -> None:
        message = conversation.messages[i]
        calls = message.get("tool_calls", ())
        place = (*place, bool(conversation.tools))
        for number, call in enumerate(calls):
            changed = {**message, "tool_calls": _with_another(calls, number)}
            if not self._is_shown(conversation, i, changed, text, ("call", number, *place)):
                remedy = "give each call a message of its own" if number else "give it as content"
                raise _dropped(f"the call of {call['function']['name']!r} in message {i}", remedy)
        if content := message.get("content"):
            spoken = message["role"] in ("user", "assistant")
            changed = {**message, "content": content + "."}
            place = ("content", spoken and content.strip() in text, *place)
            if not self._is_shown(conversation, i, changed, text, place):
                raise _dropped(*_lost_text(message, i))

    def _is_shown(
        self, conversation: Conversation, i: int, changed: Message, text: str, place: tuple[Any, ...]
    ) -> bool:
        messages = [*conversation.messages[:i], changed, *conversation.messages[i + 1 :]]
        return self._differs(messages, conversation.tools, text, place)

    def _tool_is_shown(self, conversation: Conversation, number: int, text: str, place: tuple[Any, ...]) -> bool:
        tools = conversation.tools or []
        place = ("tool", number, tools[number]["function"]["name"] in text, *place)
        return self._differs(conversation.messages, _with_another(tools, number), text, place)

    def _differs(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, text: str, place: tuple[Any, ...]
    ) -> bool:
        if place in self._shown:
            return True
        try:
            if self._render(messages, tools) == text:
                return False
        except InvalidField:  # what the template refuses it reads
            pass
        self._shown.add(place)
        return True


def _form(message: Message) -> tuple[Any, ...]:
    return message["role"], bool(message.get("content")), len(message.get("tool_calls", ()))


def _with_another(functions: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Tools, or calls, of which one has another name."""
    changed = functions[number]
    function = {**changed["function"], "name": changed["function"]["name"] + "_"}
    return [*functions[:number], {**changed, "function": function}, *functions[number + 1 :]]


def _lost_text(message: Message, i: int) -> tuple[str, str]:
    """What of the message is lost, and what to do."""
    role = message["role"]
    if message.get("tool_calls"):
        return f"the text of message {i}, which has calls", "leave it out, or give it a message of its own before them"
    part = f"message {i}, of role {role!r}"
    if role == "system":
        return part, "put its text into the user message"
    return part, "it knows no such role" if role not in ("user", "assistant") else "leave it out"


def _dropped(part: str, remedy: str) -> InvalidField:
    return InvalidField(f"the model's chat template drops {part}: {remedy}", param="messages")


def _texts(example: Example) -> Iterator[str]:
    """Every string of the row that a template may write."""
    if isinstance(example, PlainText):
        yield example.text
        return
    for message in example.messages:
        yield from _strings([value for key, value in message.items() if key != "role"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)

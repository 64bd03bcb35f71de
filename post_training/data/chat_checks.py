"""What a row's own text may do to its rendering: text that reads as a control token, parts that a template drops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
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
    """Whether all parts of a conversation reach its rendering by one template, `render`."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._shown: set[tuple[tuple[str, ...], int]] = set()

    def check(self, conversation: Conversation, text: str) -> None:
        """Refuse a conversation of which the template leaves something out: a tool, a call, a whole message.

        Raises:
            InvalidField: naming what is missing from `text`, the conversation's rendering.
        """
        for tool in conversation.tools or ():
            if (name := tool["function"]["name"]) not in text:
                raise InvalidField(f"the model's chat template drops the tool {name!r}; leave it out", param="tools")
        for i, message in enumerate(conversation.messages):
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise _dropped(f"the call of {call['function']['name']!r} in message {i}", "give it as content")
            if message.get("content") and not self._is_shown(conversation, i, text):
                role = message["role"]
                remedy = "put its text into the user message" if role == "system" else "it knows no such role"
                raise _dropped(f"message {i}, of role {role!r}", remedy)

    def _is_shown(self, conversation: Conversation, i: int, text: str) -> bool:
        message = conversation.messages[i]
        if message["role"] in ("user", "assistant") and message["content"].strip() in text:
            return True
        # Short content may stand elsewhere in the text by chance, so other roles are tried out, once in each position.
        place = tuple(each["role"] for each in conversation.messages), i
        if place not in self._shown:
            messages = list(conversation.messages)
            messages[i] = {**message, "content": message["content"] + "."}
            if self._render(messages, conversation.tools) == text:
                return False
            self._shown.add(place)
        return True


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

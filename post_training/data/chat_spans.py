"""Rows as text, with the characters that are answers: found by rendering message by message, never by searching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from apis.errors import DataInvalid, InvalidField
from post_training.data.chat_checks import ControlTokens, PartsCheck
from post_training.data.types import Conversation, Example, Message, PlainText

_EXCERPT = 60
_BEGINS_WITH_ANSWER = (
    "the conversation begins with the assistant, and the model's chat template cannot render the prompt of its first "
    "message: put a user message before it, or give it weight 0"
)


class Render(Protocol):
    def __call__(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> str: ...


@dataclass(frozen=True)
class Span:
    """Characters [start, end) that one assistant message takes, from its first to its end of turn."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class RenderedRow:
    """A row as text.

    Attributes:
        row: 0-based number of the row in its data set.
        text: the whole rendering, or plain text.
        base: the loss weight of tokens outside all spans.
        spans: the answers whose weight is another.
        ends_in_answer: whether the last message is an answer to learn, so that its end must be a token.
        plain: text without turns.
    """

    row: int
    text: str
    base: float
    spans: tuple[Span, ...] = ()
    ends_in_answer: bool = False
    plain: bool = False


class RowRenderer:
    """Examples to text and spans, by one model's template."""

    def __init__(self, render: Render, control: ControlTokens, eos_token: str) -> None:
        """`eos_token` is the text of EOS, or "" where the model has none."""
        self._render = render
        self._control = control
        self._eos_token = eos_token
        self._parts = PartsCheck(render)

    def render_row(self, example: Example, train_on_input: bool) -> RenderedRow:
        """A row as text, with the spans that its weights need.

        Raises:
            DataInvalid: the template refuses the row, drops a part of it, or renders a message differently once
                others follow it.
            ModelInvalid: the model has no chat template.
        """
        if isinstance(example, PlainText):
            return RenderedRow(example.row, example.text, 1.0, plain=True)
        try:
            return self._conversation(example, float(train_on_input))
        except InvalidField as error:
            raise DataInvalid(error.message, row=example.row) from error

    def _conversation(self, conversation: Conversation, base: float) -> RenderedRow:
        text = self._render(conversation.messages, conversation.tools)
        self._parts.check(conversation, text)
        weights = [
            (i, message.get("weight", 1))
            for i, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        spans = tuple(self._span(conversation, i, text, weight) for i, weight in weights if weight != base)
        ends_in_answer = bool(weights) and weights[-1] == (len(conversation.messages) - 1, 1)
        return RenderedRow(conversation.row, text, base, spans, ends_in_answer)

    def _span(self, conversation: Conversation, i: int, text: str, weight: float) -> Span:
        messages, tools = conversation.messages, conversation.tools
        prompt = self._prompt(messages[:i], tools)
        answered = text if i + 1 == len(messages) else self._render(messages[: i + 1], tools)
        if not text.startswith(answered):
            answered = self._without_closing(answered)
        for part in (prompt, answered):
            if not text.startswith(part):
                reason = _mismatch(part, text) if i else _BEGINS_WITH_ANSWER
                raise DataInvalid(reason, row=conversation.row, pointer=f"/messages/{i}")
        return Span(len(prompt), len(answered), float(weight))

    def _prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        try:
            return self._render(messages, tools, add_generation_prompt=True)
        except InvalidField:
            if messages:
                raise
            raise InvalidField(_BEGINS_WITH_ANSWER) from None

    def _without_closing(self, answered: str) -> str:
        """Phi-3 closes every rendering with EOS behind the turn's own end, and only where no more messages follow."""
        turn = answered.removesuffix(self._eos_token)
        return turn if self._control.at_end(turn) else answered


def _mismatch(part: str, whole: str) -> str:
    same = next((k for k, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    start = max(0, same - _EXCERPT)
    return (
        "the chat template renders this answer differently when other messages follow or precede it, so its tokens "
        f"cannot be told: alone …{part[start : same + _EXCERPT]!r}, in the whole …{whole[start : same + _EXCERPT]!r}. "
        "Split the conversation so that this answer comes last, or give it weight 0; where a system message moves or "
        "goes missing, put its text into the user message"
    )

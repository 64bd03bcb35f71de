"""Messages to tokens and loss weights, by the model's own tokenizer and chat template.

Which tokens are answers follows from rendering the conversation message by message, never from searching its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from apis.errors import DataInvalid, InvalidField, ModelInvalid
from post_training.data.template import ChatTemplate, read_json, read_special_tokens, read_template_sources
from post_training.data.types import Conversation, Message, TokenizedRow

_EXCERPT = 60


@dataclass(frozen=True)
class _Span:
    """Characters [start, end) of a rendering that one assistant message takes, from its first to its end of turn."""

    start: int
    end: int
    weight: float


class ChatTokenizer:
    """Tokenizer and chat template of one model; text and ids equal those of transformers' `apply_chat_template`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_tokens: dict[str, str],
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = special_tokens
        self._added = np.array(sorted(tokenizer.get_added_tokens_decoder()), dtype=np.int64)
        self._text_prefix = _take_text_prefix(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.stop_ids = self._find_stop_ids(eos_ids)

    @classmethod
    def from_dir(cls, model_dir: Path, now: datetime | None = None) -> ChatTokenizer:
        """Read `tokenizer.json` and its companions from a Hugging Face model directory.

        Args:
            now: the date for templates that print today's; a job passes its own, so that every attempt renders alike.

        Raises:
            ModelInvalid: the tokenizer is missing or broken, or the template is not valid.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelInvalid(
                f"the model directory {model_dir.name!r} has no tokenizer.json: load its tokenizer with "
                "transformers.AutoTokenizer and save it there with save_pretrained"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelInvalid(f"the tokenizer.json of {model_dir.name!r} cannot be read: {error}") from None
        special_tokens = read_special_tokens(model_dir)
        sources = read_template_sources(model_dir)
        template = ChatTemplate(sources, special_tokens, now) if sources else None
        return cls(tokenizer, template, special_tokens, _configured_eos_ids(model_dir))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as the model reads it.

        Raises:
            InvalidField: the template refuses the conversation, or would drop its tools.
            ModelInvalid: the model has no chat template.
        """
        if self._template is None:
            raise ModelInvalid("the model has no chat template: add chat_template.jinja to its directory")
        return self._template.render(messages, tools, add_generation_prompt)

    def encode_prompt(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids up to where the assistant's answer begins. Raises as `render` does."""
        return self._encode(self.render(messages, tools, add_generation_prompt=True)).ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of bare text, after the BOS token where the model has one. Raises InvalidField."""
        ids = self._encode(text).ids
        return ids if ids[: len(self._text_prefix)] == self._text_prefix else [*self._text_prefix, *ids]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode_conversation(self, conversation: Conversation, train_on_input: bool = False) -> TokenizedRow:
        """Tokens and weights of one row; none are supervised where every message has weight 0.

        The whole rendering is tokenized at once, as at inference. A token of each assistant message, and of its end
        of turn, has weight 1; the template's white space after the end of turn has not. A token in which prompt and
        answer merge is supervised. With `train_on_input` every token but the first has weight 1, apart from
        messages of weight 0.

        Raises:
            DataInvalid: the template refuses the row, or renders a message differently once others follow it.
            ModelInvalid: the model has no chat template.
        """
        try:
            text = self.render(conversation.messages, conversation.tools)
            spans = self._answer_spans(conversation, text, 0.0 if train_on_input else 1.0)
            encoding = self._encode(text)
        except InvalidField as error:
            raise DataInvalid(error.message, row=conversation.row) from error
        ids = np.array(encoding.ids, dtype=np.int32)
        weights = np.full(len(ids), float(train_on_input), dtype=np.float32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        for span in spans:
            weights[self._tokens_of(span, text, ids, offsets)] = span.weight
        weights[:1] = 0
        return TokenizedRow(conversation.row, ids, weights)

    def segments(self, row: TokenizedRow, max_characters: int) -> list[dict[str, Any]]:
        """The row as text, cut into runs that carry loss and runs that do not: `{"text", "supervised"}`."""
        edges = np.flatnonzero(np.diff(row.weights != 0)) + 1
        runs, left = [], max_characters
        for part in np.split(np.arange(len(row.tokens)), edges):
            text = self.decode(row.tokens[part].tolist(), skip_special_tokens=False)[:left]
            if text:
                runs.append({"text": text, "supervised": bool(row.weights[part[0]])})
            left -= len(text)
        return runs

    def _encode(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise InvalidField("the text holds an unpaired surrogate, which is not text", param="messages") from None

    def _answer_spans(self, conversation: Conversation, text: str, weight: float) -> list[_Span]:
        """Spans of the assistant messages whose message weight is 1 (`weight` 1) or 0 (`weight` 0)."""
        wanted = [
            i
            for i, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and message.get("weight", 1) == weight
        ]
        return [self._answer_span(conversation, i, text, weight) for i in wanted]

    def _answer_span(self, conversation: Conversation, i: int, text: str, weight: float) -> _Span:
        messages, tools = conversation.messages, conversation.tools
        prompt = self.render(messages[:i], tools, add_generation_prompt=True)
        answered = text if i + 1 == len(messages) else self.render(messages[: i + 1], tools)
        # Phi-3 closes every rendering with EOS, which is not there when more messages follow.
        closing = self._special_tokens.get("eos_token", "")
        if closing and not text.startswith(answered):
            answered = answered.removesuffix(closing)
        for part in (prompt, answered):
            if not text.startswith(part):
                raise DataInvalid(_mismatch(part, text), row=conversation.row, pointer=f"/messages/{i}")
        return _Span(len(prompt), len(answered), weight)

    def _tokens_of(
        self, span: _Span, text: str, ids: NDArray[np.int32], offsets: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """[n] which tokens belong to the span."""
        begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
        added = np.isin(ids, self._added)
        inside = (ends > span.start) & (begins < span.end)
        # A control token that swallows white space (`rstrip`) may reach into the answer, but is no part of it.
        inside &= ~added | (begins >= span.start)
        closing = np.flatnonzero(inside & added)
        if len(closing) and not text[ends[closing[-1]] : span.end].strip():
            inside[closing[-1] + 1 :] = False
        return inside

    def _find_stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        eos = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        found = eos_ids | ({eos} if eos is not None else set())
        return frozenset(found | self._turn_end_ids())

    def _turn_end_ids(self) -> set[int]:
        """The token with which the template ends an assistant's turn, told from a rendered sample."""
        if self._template is None:
            return set()
        sample: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            row = self.encode_conversation(Conversation(0, sample))
        except DataInvalid:
            return set()
        answer = row.tokens[row.weights != 0]
        return set(answer[np.isin(answer, self._added)].tolist())


def truncate(row: TokenizedRow, max_seq_len: int) -> TokenizedRow:
    """The first `max_seq_len` tokens of a row."""
    return TokenizedRow(row.row, row.tokens[:max_seq_len], row.weights[:max_seq_len])


def _take_text_prefix(tokenizer: Tokenizer) -> list[int]:
    """The ids that the post-processor puts before text; the post-processor itself is taken out.

    A byte-level one trims spaces off the offsets, which would leave the first space of an answer without weight.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    starts = [k for k in range(len(whole)) if whole[k : k + len(plain)] == plain]
    return whole[: starts[0]] if starts and plain else []


def _configured_eos_ids(model_dir: Path) -> frozenset[int]:
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(model_dir / file).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _mismatch(part: str, whole: str) -> str:
    same = next((k for k, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    start = max(0, same - _EXCERPT)
    return (
        "the chat template renders this answer differently when other messages follow or precede it, so its tokens "
        f"cannot be told: alone …{part[start : same + _EXCERPT]!r}, in the whole …{whole[start : same + _EXCERPT]!r}. "
        "Split the conversation so that this answer comes last, or give it weight 0; where a system message moves or "
        "goes missing, put its text into the user message"
    )

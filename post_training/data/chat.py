"""Messages and plain text to tokens and loss weights, by the model's own tokenizer and chat template.

Which tokens are answers follows from rendering the conversation message by message, never from searching its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from apis.errors import DataInvalid, InvalidField, ModelInvalid
from post_training.data.chat_checks import ControlTokens
from post_training.data.chat_spans import RenderedRow, RowRenderer, Span
from post_training.data.template import ChatTemplate, read_json, read_special_tokens, read_template_sources
from post_training.data.types import Conversation, Example, Message, TokenizedRow

# Rows that are rendered, then tokenized, together: alternating by row costs half as much time again, for both
# interpreter and tokenizer then find the processor's caches full of the other's memory.
_CHUNK_ROWS = 256
_CHUNK_CHARACTERS = 2**18
_T = TypeVar("_T")
_Ids = TypeVar("_Ids", list[int], NDArray[np.int32])


class ChatTokenizer:
    """Tokenizer and chat template of one model; text and ids equal those of transformers' `apply_chat_template`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_tokens: dict[str, str],
        eos_ids: frozenset[int] = frozenset(),
        embeddings: int | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = special_tokens
        self._text_prefix = _take_text_prefix(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder()
        self._eos = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        known_stops = eos_ids | ({self._eos} if self._eos is not None else set())
        special = {index for index, token in added.items() if token.special}
        self._added = self._lookup(added)
        self._ends_turn = self._lookup(special | known_stops)
        self._control = ControlTokens(added[index].content for index in sorted(special))
        self._renderer = RowRenderer(self.render, self._control, special_tokens.get("eos_token", ""))
        self._embeddings = embeddings
        self.stop_ids = frozenset(known_stops | self._turn_end_ids())

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
        size = read_json(model_dir / "config.json").get("vocab_size")
        embeddings = size if isinstance(size, int) else None
        return cls(tokenizer, template, special_tokens, _configured_eos_ids(model_dir), embeddings)

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
        return self._known(self._encode(self.render(messages, tools, add_generation_prompt=True)).ids)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of bare text, after the BOS token where the model has one. Raises InvalidField."""
        return self._known(self._with_prefix(self._encode(text).ids))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def encode_example(self, example: Example, train_on_input: bool = False) -> TokenizedRow:
        """Tokens and weights of one row, as `encode_examples` has them."""
        return next(self.encode_examples([example], train_on_input))

    def encode_examples(self, examples: Iterable[Example], train_on_input: bool = False) -> Iterator[TokenizedRow]:
        """Tokens and weights of each row, in order; none are supervised where every message has weight 0.

        The whole rendering is tokenized at once, as at inference. A token of each assistant message, and of its end
        of turn, has weight 1; the template's white space after the end of turn has not. A token in which prompt and
        answer merge is supervised. Where a template ends an answer with no token of its own, the control token that
        begins the next message ends it and is supervised; after the last answer EOS is added for it. With
        `train_on_input` every token but the first has weight 1, apart from messages of weight 0.

        Plain text is BOS where the model has one, the text, and EOS; every token but the first has weight 1.

        Raises:
            DataInvalid: the template refuses the row, drops a part of it, or renders a message differently once
                others follow it.
            ModelInvalid: the model has no chat template.
        """
        rendered = (self._renderer.render_row(example, train_on_input) for example in examples)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
            # The tokenizer does not hold the interpreter's lock: a run of rows is tokenized while the next is rendered.
            for chunk, encodings in _one_ahead(
                (rows, pool.submit(self._encode_rows, rows)) for rows in _chunks(rendered)
            ):
                yield from map(self._weighted, chunk, encodings.result())

    def has_control_text(self, example: Example) -> bool:
        """Whether the row's own text holds the text of a control token, which becomes that token."""
        return self._control.found_in(example)

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

    def _with_prefix(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._text_prefix)] == self._text_prefix else [*self._text_prefix, *ids]

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if self._eos is None or ids[-1:] == [self._eos] else [*ids, self._eos]

    def _encode(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise InvalidField("the text holds an unpaired surrogate, which is not text", param="messages") from None

    def _encode_rows(self, rows: list[RenderedRow]) -> list[Encoding]:
        try:
            return self._tokenizer.encode_batch([row.text for row in rows], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # of one of them: which one?
            return [self._encode_row(row) for row in rows]

    def _encode_row(self, row: RenderedRow) -> Encoding:
        try:
            return self._encode(row.text)
        except InvalidField as error:
            raise DataInvalid(error.message, row=row.row) from error

    def _weighted(self, row: RenderedRow, encoding: Encoding) -> TokenizedRow:
        """The row's tokens, with what a text needs at its ends, and their weights."""
        if row.plain:
            ids = self._closed(self._with_prefix(encoding.ids))
            weights = np.full(len(ids), row.base, dtype=np.float32)
        else:
            ids, weights = self._conversation(row, encoding)
        weights[:1] = 0
        try:
            return TokenizedRow(row.row, self._known(np.array(ids, dtype=np.int32)), weights)
        except InvalidField as error:
            raise DataInvalid(error.message, row=row.row) from error

    def _known(self, ids: _Ids) -> _Ids:
        """The same ids. Raises InvalidField where the model has no embedding for one of them."""
        if self._embeddings is None or self.vocab_size <= self._embeddings:
            return ids
        unknown = next((index for index in ids if index >= self._embeddings), None)
        if unknown is None:
            return ids
        raise InvalidField(
            f"the text holds the token {self._tokenizer.id_to_token(int(unknown))!r}, number {unknown}, but the model "
            f"knows {self._embeddings} (vocab_size in its config.json): take the tokenizer that belongs to the model, "
            "or resize its embeddings and save it again",
            param="messages",
        )

    def _conversation(self, row: RenderedRow, encoding: Encoding) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        # A token may have no characters of its own, such as a later byte of a character.
        begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
        weights = np.full(len(ids), row.base, dtype=np.float32)
        for span in row.spans:
            weights[self._tokens_of(span, row.text, ids, begins, ends)] = span.weight
        if row.ends_in_answer and self._eos is not None and self._is_open(row.text, ids, begins):
            ids, weights = np.append(ids, np.int32(self._eos)), np.append(weights, np.float32(1))
        return ids, weights

    def _tokens_of(
        self, span: Span, text: str, ids: NDArray[np.int32], begins: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """[k] indices of the tokens of an answer and of its end of turn, of tokens at characters [begin, end)."""
        # A control token that swallows white space (`rstrip`) may reach into the answer, but is no part of it.
        inside = (ends > span.start) & (begins < span.end) & (~self._added[ids] | (begins >= span.start))
        tokens = np.flatnonzero(inside)
        closing = np.flatnonzero(self._ends_turn[ids[tokens]])
        if len(closing) and not text[ends[tokens[closing[-1]]] : span.end].strip():
            tokens = tokens[: closing[-1] + 1]
        follower = int(np.searchsorted(begins, span.end))
        if len(tokens) and follower < len(ids) and not self._ends_turn[ids[tokens[-1]]]:
            tokens = np.append(tokens, follower) if self._ends_turn[ids[follower]] else tokens
        return tokens

    def _is_open(self, text: str, ids: NDArray[np.int32], begins: NDArray[np.int64]) -> bool:
        """Whether no control token closes the text, white space aside."""
        final = int(np.searchsorted(begins, len(text.rstrip()))) - 1
        return final >= 0 and not self._ends_turn[ids[final]]

    def _lookup(self, ids: Iterable[int]) -> NDArray[np.bool_]:
        """[vocab_size] whether each id is one of `ids`."""
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[[index for index in ids if 0 <= index < self.vocab_size]] = True
        return table

    def _turn_end_ids(self) -> set[int]:
        """The tokens with which the template ends an assistant's turn, told from rendered samples."""
        if self._template is None:
            return set()
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        found: set[int] = set()
        for sample in ([question, answer], [question, answer, question]):
            try:
                row = self.encode_example(Conversation(0, sample))
            except DataInvalid:
                continue
            supervised = row.tokens[row.weights != 0]
            answer_text = np.flatnonzero(~self._ends_turn[supervised])
            found.update(supervised[answer_text[-1] + 1 :].tolist() if len(answer_text) else ())
        return found


def _chunks(rows: Iterable[RenderedRow]) -> Iterator[list[RenderedRow]]:
    """Rows in runs; those before a row that cannot be rendered come before its error."""
    chunk: list[RenderedRow] = []
    characters = 0
    try:
        for row in rows:
            chunk.append(row)
            characters += len(row.text)
            if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    except DataInvalid:
        yield chunk
        raise
    yield chunk


def _one_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """The items, each once the next one is begun; those before an error come before it."""
    begun: list[_T] = []
    try:
        for item in items:
            yield from begun
            begun = [item]
    except DataInvalid:
        yield from begun
        raise
    yield from begun


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

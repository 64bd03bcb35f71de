"""Random conversations and settings: what is learnt, what is left out, and what a batch holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.batching import epoch_order, flatten, micro_batches, steps
from post_training.data.chat import ChatTokenizer
from post_training.data.formats import to_example
from post_training.data.preflight import OnOverlength, TokenizedDataset, tokenize_dataset
from post_training.data.types import Example, TokenizedRow
from tests.chat_families import FAMILIES, Family, build

CONTROL = [token for family in FAMILIES for token in family.control_tokens]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
near_text = st.text(st.sampled_from("ab \n\t{}<|>«茶☃\u2028é0123"), max_size=25)
marked_text = st.builds(lambda a, token, b: a + token + b, near_text, st.sampled_from(CONTROL), near_text)
contents = st.one_of(any_text, near_text, near_text.map(str.strip), marked_text)
answers = contents.filter(str.strip)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    built: dict[str, Path] = {family.name: build(family, tmp_path_factory.mktemp(family.name)) for family in FAMILIES}
    return {name: ChatTokenizer.from_dir(folder) for name, folder in built.items()}


@st.composite
def exchanges(draw: st.DrawFn, family: Family) -> list[dict[str, Any]]:
    """A question and its answer, with a tool between them where the family has tools."""
    weight = draw(st.sampled_from([{}, {}, {"weight": 1}, {"weight": 0}]))
    turns: list[dict[str, Any]] = [{"role": "user", "content": draw(contents)}]
    if family.tools and draw(st.booleans()):
        function = {"name": "look_up", "arguments": {"q": draw(contents)}}
        turns.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **weight})
        turns.append({"role": "tool", "content": draw(contents)})
    return [*turns, {"role": "assistant", "content": draw(answers), **weight}]


@st.composite
def rows_of(draw: st.DrawFn, family: Family) -> dict[str, Any]:
    if draw(st.integers(0, 9)) == 0:
        return {"messages": [{"role": "user", "content": "a"}]}  # nothing to learn, which is an error
    messages = [turn for part in draw(st.lists(exchanges(family), min_size=1, max_size=3)) for turn in part]
    if family.system and draw(st.booleans()):
        messages = [{"role": "system", "content": draw(answers)}, *messages]
    calls = any("tool_calls" in message for message in messages)
    return {"messages": messages} | ({"tools": [TOOL]} if calls else {})


Outcome = TokenizedDataset | DataInvalid


@dataclass(frozen=True)
class Drawn:
    family: Family
    rows: list[dict[str, Any]]
    max_seq_len: int
    on_overlength: OnOverlength
    train_on_input: bool


@st.composite
def data_sets(draw: st.DrawFn) -> Drawn:
    family = draw(st.sampled_from(FAMILIES))
    return Drawn(
        family,
        draw(st.lists(rows_of(family), min_size=1, max_size=6)),
        draw(st.one_of(st.integers(8, 120), st.just(10_000))),
        draw(st.sampled_from(["truncate", "drop", "error"])),
        draw(st.booleans()),
    )


def outcome(drawn: Drawn, tokenizer: ChatTokenizer, rows: list[dict[str, Any]], **other: Any) -> Outcome:
    """The data set, or why it is refused."""
    arguments = {
        "train_on_input": drawn.train_on_input,
        "max_seq_len": drawn.max_seq_len,
        "on_overlength": drawn.on_overlength,
    }
    try:
        return tokenize_dataset(rows, tokenizer, None, **{**arguments, **other})
    except DataInvalid as error:
        return error


def usable(drawn: Drawn, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    """The rows that are no error by themselves, though they may hold nothing to learn."""
    kept = []
    for row in drawn.rows:
        alone = outcome(drawn, tokenizer, [row], max_seq_len=10**6)
        if isinstance(alone, TokenizedDataset) or alone.row is None:
            kept.append(row)
        else:
            assert alone.row == 0
    return kept


def answer_spans(row: dict[str, Any], family: Family, tokenizer: ChatTokenizer) -> list[tuple[int, int]]:
    """Characters that the answers to learn add to the conversation: found by the lengths of renderings."""
    messages, tools = row["messages"], row.get("tools")
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1):
            start = len(tokenizer.render(messages[:i], tools, add_generation_prompt=True))
            answered = tokenizer.render(messages[: i + 1], tools)
            closes_the_whole = family.name == "phi3" and i + 1 < len(messages)
            spans.append((start, len(answered) - (len(family.eos) if closes_the_whole else 0)))
    return spans


common = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@common
@given(data_sets())
def test_each_row_learns_something_or_is_rejected_or_dropped_and_counted(
    tokenizers: dict[str, ChatTokenizer], drawn: Drawn
):
    tokenizer = tokenizers[drawn.family.name]
    rows = usable(drawn, tokenizer)
    assume(rows)
    found = outcome(drawn, tokenizer, rows)
    if isinstance(found, DataInvalid):
        event(found.message.split(":")[0][:20])
        whole = [tokenizer.encode_example(example, drawn.train_on_input) for example in examples(rows)]
        long = [row.row for row in whole if len(row.tokens) > drawn.max_seq_len]
        if found.row is not None:
            assert (drawn.on_overlength, found.row) == ("error", long[0])
        else:
            fitting = [row for row in whole if drawn.on_overlength != "drop" or row.row not in long]
            assert not any(row.weights[: drawn.max_seq_len].any() for row in fitting)
        return
    event("kept")
    assert all(row.supervised >= 1 and row.weights[0] == 0 for row in found.rows)
    assert all(len(row.tokens) == len(row.weights) <= drawn.max_seq_len for row in found.rows)
    dropped = found.report["dropped"]
    assert sorted([row.row for row in found.rows] + dropped["first_rows"]) == list(range(len(rows)))
    assert dropped["count"] == dropped["overlength"]["count"] + dropped["unsupervised"]["count"]
    assert found.report["supervised_tokens"] == sum(row.supervised for row in found.rows)


def examples(rows: list[dict[str, Any]]) -> list[Example]:
    return [to_example(row, number, DatasetFormat.messages) for number, row in enumerate(rows)]


@common
@given(data_sets())
def test_weight_lies_inside_the_answers_alone(tokenizers: dict[str, ChatTokenizer], drawn: Drawn):
    tokenizer = tokenizers[drawn.family.name]
    rows = usable(drawn, tokenizer)
    assume(rows)
    for row, example in zip(rows, examples(rows), strict=True):
        encoded = tokenizer.encode_example(example)
        text = tokenizer.render(row["messages"], row.get("tools"))
        spans = answer_spans(row, drawn.family, tokenizer)
        offsets = tokenizer._encode(text).offsets
        assert len(offsets) == len(encoded.tokens)
        for weight, (begin, end) in zip(encoded.weights[1:], offsets[1:], strict=True):
            inside = [span for span in spans if max(end, begin + 1) > span[0] and begin < span[1]]
            if weight:
                assert inside
            # White space after the end of turn is not learnt, nor a control token that reached in from before.
            elif inside and begin >= inside[0][0]:
                assert not text[begin : inside[0][1]].strip()
        everything = tokenizer.encode_example(example, train_on_input=True)
        muted = any(message.get("weight", 1) == 0 for message in row["messages"])
        assert everything.tokens[: len(encoded.tokens)].tolist() == encoded.tokens.tolist()
        assert (everything.supervised == len(everything.tokens) - 1) != muted
        assert not (encoded.weights > everything.weights[: len(encoded.weights)]).any()


@common
@given(data_sets())
def test_rows_together_are_the_rows_alone(tokenizers: dict[str, ChatTokenizer], drawn: Drawn):
    tokenizer = tokenizers[drawn.family.name]
    rows = usable(drawn, tokenizer)
    together = list(tokenizer.encode_examples(examples(rows), drawn.train_on_input))
    for example, row in zip(examples(rows), together, strict=True):
        alone = tokenizer.encode_example(example, drawn.train_on_input)
        assert (row.row, row.tokens.tolist(), row.weights.tolist()) == (
            alone.row,
            alone.tokens.tolist(),
            alone.weights.tolist(),
        )


@st.composite
def token_rows(draw: st.DrawFn) -> list[TokenizedRow]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [
        TokenizedRow(
            number,
            chance.integers(0, 99, length).astype(np.int32),
            np.concatenate([[0], chance.integers(0, 2, length - 1)]).astype(np.float32),
        )
        for number, length in enumerate(lengths)
    ]


def triples(rows: list[TokenizedRow]) -> list[tuple[int, int, int, float]]:
    """(token, target, position, weight) of every prediction, row by row and token by token."""
    return sorted(
        (int(row.tokens[i]), int(row.tokens[i + 1]), i, float(row.weights[i + 1]))
        for row in rows
        for i in range(len(row.tokens) - 1)
    )


@given(
    rows=token_rows(),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    packed=st.booleans(),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    max_seq_len=st.integers(8, 64),
    micro_batch_tokens=st.integers(1, 100),
)
def test_an_epoch_takes_every_prediction_of_every_row_once_whatever_the_batches(
    rows: list[TokenizedRow],
    seed: int,
    epoch: int,
    shuffle: bool,
    packed: bool,
    batch_size: int,
    accumulation: int,
    max_seq_len: int,
    micro_batch_tokens: int,
):
    lengths = [len(row.tokens) for row in rows]
    order = epoch_order(len(rows), shuffle, seed, epoch)
    planned = steps(
        lengths,
        order=order,
        batch_size=batch_size,
        accumulation=accumulation,
        packed=packed,
        max_seq_len=max_seq_len,
    )
    assert sorted(i for step in planned for i in step) == list(range(len(rows)))
    budget = batch_size * accumulation * max_seq_len
    for step in planned if packed else ():
        assert sum(min(lengths[i], max_seq_len) for i in step) <= budget
    batches = [batch for step in planned for batch in micro_batches([rows[i] for i in step], micro_batch_tokens)]
    for batch in batches:
        assert len(batch.tokens) <= micro_batch_tokens or len(batch.lengths) == 1
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(rows)))
    predicted = []
    for batch in batches:
        lasts = set((np.cumsum(batch.lengths) - 1).tolist())
        assert all(batch.weights[last] == 0 for last in lasts)
        predicted += [
            (int(batch.tokens[t]), int(batch.targets[t]), int(batch.positions[t]), float(batch.weights[t]))
            for t in range(len(batch.tokens))
            if t not in lasts
        ]
    assert sorted(predicted) == triples(rows)
    assert sum(batch.weight_sum for batch in batches) == sum(float(row.weights.sum()) for row in rows)
    whole = flatten(rows)
    assert whole.weight_sum == sum(batch.weight_sum for batch in batches)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), max_seq_len=st.integers(8, 64))
def test_a_pack_never_exceeds_its_budget_unless_a_single_row_does(lengths: list[int], max_seq_len: int):
    packs = steps(lengths, order=range(len(lengths)), batch_size=1, packed=True, max_seq_len=max_seq_len)
    assert [i for pack in packs for i in pack] == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= max_seq_len or len(pack) == 1
    # No pack could have taken the next row, too.
    for pack, following in pairwise(packs):
        assert sum(lengths[i] for i in pack) + lengths[following[0]] > max_seq_len

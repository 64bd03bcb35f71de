"""The batch of a session's call: the tokens and weights that a job has, or a refusal that names row and field."""

from __future__ import annotations

import base64
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from apis.errors import DataInvalid, ModelInvalid
from apis.post_training.models import DatasetFormat
from apis.sft_sessions.training_models import Batch, TrainStepRequest
from post_training.client.sft_arrays import encode_tokens
from post_training.data.batching import flatten, micro_batches
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import tokenize_dataset
from post_training.data.session_batches import BatchReader
from post_training.data.token_rows import row_bytes
from post_training.data.types import FlatBatch, TokenizedRow
from tests.tiny_llama import save_tiny_llama

VOCAB = 399
USER = {"role": "user", "content": "The quick brown fox jumps over the lazy dog?"}
ANSWER = {"role": "assistant", "content": "Numbers such as 12, 345 and 6789 are words too."}
TURNS = [
    {"from": "human", "value": "A stack of books?"},
    {"from": "gpt", "value": "They lay on the table, naïve café."},
]

ROWS: dict[DatasetFormat, list[dict[str, Any]]] = {
    DatasetFormat.messages: [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "By the sea."}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]},
    ],
    DatasetFormat.dialog: [{"dialog": [USER, ANSWER]}, {"dialog": json.dumps([USER, ANSWER, USER, ANSWER])}],
    DatasetFormat.instruct: [{"chat_completion_input": json.dumps([USER]), "expected_answer": "The old tree."}],
    DatasetFormat.prompt_completion: [
        {"prompt": "The slow red hen?", "completion": "It sleeps 日本語."},
        {"prompt": "Another town?", "completion": "By the sea."},
    ],
    DatasetFormat.alpaca: [
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"instruction": "Add.", "output": "5", "history": [["1 + 1?", "2"]], "system": "Add."},
    ],
    DatasetFormat.sharegpt: [{"conversations": TURNS}, {"conversations": TURNS * 2, "system": "Be brief."}],
    DatasetFormat.text: [{"text": "The quick brown fox jumps."}, {"text": "And each of them told the story."}],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.from_dir(model_dir)


def test_the_bounds_used_here_are_the_models(model_dir: Path):
    assert json.loads((model_dir / "config.json").read_text())["vocab_size"] == VOCAB


def reader(tokenizer: ChatTokenizer, **options: Any) -> BatchReader:
    defaults: dict[str, Any] = {
        "data_format": None,
        "columns": None,
        "train_on_input": False,
        "max_seq_len": 4096,
        "on_overlength": "truncate",
        "vocab_size": VOCAB,
    }
    return BatchReader(tokenizer, **{**defaults, **options})


@pytest.fixture(scope="module")
def plain(tokenizer: ChatTokenizer) -> BatchReader:
    return reader(tokenizer)


def read(given: BatchReader, **batch: Any) -> list[TokenizedRow]:
    """The rows of a batch that came as JSON."""
    return given.read(TrainStepRequest.model_validate(json.loads(json.dumps(batch))))


def refusal(given: BatchReader, **batch: Any) -> DataInvalid:
    with pytest.raises(DataInvalid) as caught:
        read(given, **batch)
    assert caught.value.http_status == 400
    return caught.value


def content(rows: list[TokenizedRow]) -> list[bytes]:
    return [row_bytes(row) for row in rows]


def lists(rows: list[TokenizedRow]) -> list[tuple[int, list[int], list[float]]]:
    return [(row.row, row.tokens.tolist(), row.weights.tolist()) for row in rows]


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_on_input", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("data_format", list(DatasetFormat))
def test_rows_of_every_format_have_the_tokens_and_weights_of_a_job(
    tokenizer: ChatTokenizer, data_format: DatasetFormat, told: bool, train_on_input: bool
):
    given = data_format if told else None
    job = tokenize_dataset(ROWS[data_format], tokenizer, given, train_on_input, 4096)
    found = read(reader(tokenizer, data_format=given, train_on_input=train_on_input), rows=ROWS[data_format])
    assert len(found) == len(ROWS[data_format])
    assert content(found) == content(list(job.rows))
    assert [row.row for row in found] == list(range(len(found)))
    assert all(row.tokens.dtype == np.int32 and row.weights.dtype == np.float32 for row in found)


@given(st.integers(30, 120))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_cut_where_a_job_cuts_them(tokenizer: ChatTokenizer, limit: int):
    rows = [row for row in ROWS[DatasetFormat.messages] for _ in range(2)]
    job = {row.row: row for row in tokenize_dataset([*rows, rows[0]], tokenizer, None, True, limit).rows}
    found = read(reader(tokenizer, max_seq_len=limit, train_on_input=True), rows=rows)
    assert content(found) == [row_bytes(job[row.row]) for row in found]


def test_the_format_is_told_by_the_first_row_of_each_batch(plain: BatchReader):
    kinds = (DatasetFormat.text, DatasetFormat.alpaca, DatasetFormat.text)
    assert [len(read(plain, rows=ROWS[kind])) for kind in kinds] == [2, 2, 2]
    error = refusal(plain, rows=[*ROWS[DatasetFormat.text], *ROWS[DatasetFormat.alpaca]])
    assert (error.row, error.param) == (2, "rows.2")
    assert "'text' is missing" in error.message or "column 'text'" in error.message


def test_columns_are_read_under_the_names_that_the_session_gives(tokenizer: ChatTokenizer):
    named = reader(tokenizer, columns={"prompt": "q", "completion": "a"})
    renamed = [{"q": row["prompt"], "a": row["completion"]} for row in ROWS[DatasetFormat.prompt_completion]]
    assert content(read(named, rows=renamed)) == content(
        list(tokenize_dataset(ROWS[DatasetFormat.prompt_completion], tokenizer, None, False, 4096).rows)
    )


def test_a_row_that_cannot_be_read_is_named_with_the_place_inside_it(plain: BatchReader):
    broken = {"messages": [USER, {"role": "assistant", "content": 5}]}
    error = refusal(plain, rows=[ROWS[DatasetFormat.messages][0], broken])
    assert (error.row, error.pointer, error.param) == (1, "/messages/1/content", "rows.1")
    error = refusal(plain, rows=[{"question": "?"}])
    assert (error.row, error.param) == (0, "rows.0")
    assert "fit no data format" in error.message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "\ud800"}, "surrogate"),
        ({"text": "a", "note": "\ud800"}, "surrogate"),
        ({"text": "a", "score": math.nan}, "has no JSON form"),
        ({"text": "a", "tree": functools.reduce(lambda inner, _: [inner], range(300), 0)}, "nested too deeply"),
    ],
)
def test_a_row_that_no_data_set_takes_is_none_of_a_batch_either(plain: BatchReader, row: dict[str, Any], reason: str):
    error = refusal(plain, rows=[ROWS[DatasetFormat.text][0], row])
    assert (error.row, error.param) == (1, "rows.1")
    assert reason in error.message


def test_a_row_without_a_supervised_token_is_refused_and_never_left_out(tokenizer: ChatTokenizer):
    muted = {"messages": [USER, {**ANSWER, "weight": 0}]}
    error = refusal(reader(tokenizer), rows=[ROWS[DatasetFormat.messages][0], muted])
    assert (error.row, error.param) == (1, "rows.1")
    assert error.message.startswith("row 1: has no supervised token, ")
    error = refusal(reader(tokenizer, max_seq_len=8), rows=ROWS[DatasetFormat.messages])
    assert error.message.startswith("row 0: has no supervised token within the first 8, ")


def test_a_longer_row_is_refused_where_the_session_says_so(tokenizer: ChatTokenizer):
    rows = ROWS[DatasetFormat.prompt_completion]
    lengths = [len(row.tokens) for row in read(reader(tokenizer), rows=rows)]
    error = refusal(reader(tokenizer, max_seq_len=lengths[0] - 1, on_overlength="error"), rows=rows)
    assert (error.row, error.param) == (0, "rows.0")
    assert f"has {lengths[0]} tokens, more than max_seq_len {lengths[0] - 1}" in error.message
    assert len(read(reader(tokenizer, max_seq_len=lengths[0], on_overlength="error"), rows=rows)) == 2


def test_a_model_without_a_template_refuses_messages_and_takes_tokens(tmp_path: Path):
    bare = reader(ChatTokenizer.from_dir(save_tiny_llama(tmp_path / "bare", chat_template=None)))
    with pytest.raises(ModelInvalid, match="chat_template"):
        read(bare, rows=ROWS[DatasetFormat.messages])
    assert lists(read(bare, sequences=[{"tokens": [5, 6]}])) == [(0, [5, 6], [0, 1])]


# -- sequences -------------------------------------------------------------------------------------------------------


def test_sequences_are_what_they_say(plain: BatchReader):
    found = read(
        plain,
        sequences=[
            {"tokens": [5, 6, 7]},
            {"tokens": [5, 6, 7], "labels": [-100, 6, -100]},
            {"tokens": [5, 6, 7], "weights": [0, 0.5, 2]},
        ],
    )
    assert lists(found) == [(0, [5, 6, 7], [0, 1, 1]), (1, [5, 6, 7], [0, 1, 0]), (2, [5, 6, 7], [0, 0.5, 2])]
    assert all(row.tokens.dtype == np.int32 and row.weights.dtype == np.float32 for row in found)


def test_the_first_tokens_own_label_or_weight_counts_for_nothing(plain: BatchReader):
    found = read(plain, sequences=[{"tokens": [5, 6], "labels": [5, 6]}, {"tokens": [5, 6], "weights": [9, 1]}])
    assert lists(found) == [(0, [5, 6], [0, 1]), (1, [5, 6], [0, 1])]
    for only_first in ({"labels": [5, -100]}, {"weights": [1, 0]}):
        error = refusal(plain, sequences=[{"tokens": [5, 6]}, {"tokens": [5, 6], **only_first}])
        assert (error.row, error.param) == (1, "sequences.1")
        assert "no supervised token" in error.message


sequences = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40)


@given(sequences, st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_and_arrays_of_every_dtype_say_the_same(plain: BatchReader, tokens: list[int], data: st.DataObject):
    supervised = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    supervised[-1] = True
    labels = [token if keep else -100 for token, keep in zip(tokens, supervised, strict=True)]
    expected = [0.0, *map(float, supervised[1:])]
    whole = [torch.int64, torch.int32]
    for dtype in whole:
        sent = {"tokens": wire(torch.tensor(tokens, dtype=dtype)), "labels": wire(torch.tensor(labels, dtype=dtype))}
        assert lists(read(plain, sequences=[sent])) == [(0, tokens, expected)]
    sent = {"tokens": wire(torch.tensor(tokens, dtype=torch.uint16)), "labels": labels}
    assert lists(read(plain, sequences=[sent])) == [(0, tokens, expected)]
    for dtype in (torch.float32, torch.bfloat16, *whole):
        sent = {"tokens": tokens, "weights": wire(torch.tensor(supervised).to(dtype))}
        assert lists(read(plain, sequences=[sent])) == [(0, tokens, expected)]


def wire(values: Tensor) -> dict[str, Any]:
    """An array as a session takes it, by torch's own view of the bytes."""
    return {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape), "data": data_of(values)}


def data_of(values: Tensor) -> str:
    plain = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    return base64.b64encode(plain.numpy().tobytes()).decode()


positive = st.floats(min_value=2.0**-100, max_value=2.0**100, width=32)


@given(st.lists(positive, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bf16_weights_arrive_as_torch_has_them(plain: BatchReader, values: list[float]):
    weights = torch.tensor([0.0, *values]).to(torch.bfloat16)
    sent = {"tokens": list(range(len(weights))), "weights": wire(weights)}
    found = read(plain, sequences=[sent])[0].weights
    assert found.tobytes() == weights.float().numpy().tobytes()


BAD_SEQUENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"tokens": []}, "tokens", "has 0 tokens"),
    ({"tokens": [5]}, "tokens", "has 1 tokens"),
    ({"tokens": [5, VOCAB]}, "tokens", f"the token at position 1 is {VOCAB}, but the model's ids are 0 to {VOCAB - 1}"),
    ({"tokens": [-1, 5]}, "tokens", "the token at position 0 is -1"),
    ({"tokens": [5, 10**30]}, "tokens", "64 bits"),
    ({"tokens": wire(torch.ones(3))}, "tokens", "must be whole numbers"),
    ({"tokens": wire(torch.ones(3).bfloat16())}, "tokens", "must be whole numbers"),
    ({"tokens": {"dtype": "int32", "shape": [3], "data": "AAAA"}}, "tokens", "takes 12 bytes, which are 16 characters"),
    ({"tokens": {"dtype": "int32", "shape": [1], "data": "AAAAAAA="}}, "tokens", "takes 4 bytes, but the data has 5"),
    ({"tokens": {"dtype": "int32", "shape": [3], "data": "AAAA\nAAAAAAAAAAA"}}, "tokens", "is no base64"),
    ({"tokens": {"dtype": "int32", "shape": [3], "data": "____AAAAAAAAAAAA"}}, "tokens", "is no base64"),
    ({"tokens": {"dtype": "int32", "shape": [3], "data": "éAAAAAAAAAAAAAAA"}}, "tokens", "is no base64"),
    ({"tokens": {"dtype": "int64", "shape": [2**63 - 1], "data": ""}}, "tokens", "but the data has 0"),
    ({"tokens": [5, 6, 7], "labels": [-100, 6]}, "labels", "has 2 numbers for 3 tokens"),
    ({"tokens": [5, 6, 7], "labels": [6, 7, -100]}, "labels", "the label at position 0 is 6, but the token there is 5"),
    ({"tokens": [5, 6, 7], "labels": [5, 6, -1]}, "labels", "the label at position 2 is -1"),
    ({"tokens": [5, 6], "labels": wire(torch.ones(2))}, "labels", "must be whole numbers"),
    ({"tokens": [5, 6, 7], "weights": [1, 1]}, "weights", "has 2 numbers for 3 tokens"),
    ({"tokens": [5, 6], "weights": [1, math.nan]}, "weights", "the weight at position 1 is nan"),
    ({"tokens": [5, 6], "weights": [math.inf, 1]}, "weights", "the weight at position 0 is inf"),
    ({"tokens": [5, 6], "weights": [0, -0.5]}, "weights", "the weight at position 1 is -0.5"),
    ({"tokens": [5, 6], "weights": [0, 1e39]}, "weights", "the weight at position 1 is 1e+39"),
    ({"tokens": [5, 6], "weights": wire(torch.tensor([0, math.nan]).bfloat16())}, "weights", "position 1 is nan"),
    ({"tokens": [5, 6], "weights": [0, 0]}, "", "no supervised token"),
]


@pytest.mark.parametrize(("sequence", "field", "reason"), BAD_SEQUENCES)
def test_a_sequence_that_cannot_be_used_is_named(plain: BatchReader, sequence: dict[str, Any], field: str, reason: str):
    error = refusal(plain, sequences=[{"tokens": [5, 6]}, sequence, {"tokens": []}])
    assert error.row == 1
    assert error.param == ".".join(filter(None, ("sequences.1", field)))
    assert error.message.startswith("row 1: ")
    assert reason in error.message


def test_a_longer_sequence_is_cut_or_refused(tokenizer: ChatTokenizer):
    sent = {"tokens": list(range(20)), "weights": [0.0] * 10 + [1.0] * 10}
    assert lists(read(reader(tokenizer, max_seq_len=12), sequences=[sent])) == [
        (0, list(range(12)), [0.0] * 10 + [1.0] * 2)
    ]
    assert "within the first 10" in refusal(reader(tokenizer, max_seq_len=10), sequences=[sent]).message
    error = refusal(reader(tokenizer, max_seq_len=12, on_overlength="error"), sequences=[sent])
    assert (error.row, error.param) == (0, "sequences.0")
    assert "has 20 tokens, more than max_seq_len 12" in error.message


# -- tensors ---------------------------------------------------------------------------------------------------------


def tensor(values: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    """As OpenTinker writes it; of a bf16 tensor, which NumPy has not, the bytes."""
    if isinstance(values, np.ndarray):
        data = base64.b64encode(values.tobytes()).decode()
        fields = {"__type__": "numpy.ndarray", "__dtype__": str(values.dtype), "__shape__": list(values.shape)}
        return {**fields, "__data__": data}
    fields = {"__type__": "torch.Tensor", "__dtype__": str(values.dtype), "__shape__": list(values.shape)}
    return {**fields, "__device__": str(values.device), "__data__": data_of(values)}


def batch_data(**tensors: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "batch": {name: tensor(values) for name, values in tensors.items()},
        "non_tensor_batch": {},
        "meta_info": {},
    }


IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 5, 6, 0], [4, 5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
TOKENS = [[5, 6, 7], [8, 9, 5, 6], [4, 5, 6, 7, 8]]


def test_padding_on_either_side_is_taken_off(plain: BatchReader):
    found = read(plain, batch_data=batch_data(input_ids=IDS, attention_mask=MASK))
    assert lists(found) == [(row, tokens, [0.0, *[1.0] * (len(tokens) - 1)]) for row, tokens in enumerate(TOKENS)]
    assert all(row.tokens.dtype == np.int32 and row.weights.dtype == np.float32 for row in found)


def test_labels_and_loss_masks_stand_at_the_token_they_are_about(plain: BatchReader):
    learnt = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1, 1]])
    expected = [(0, TOKENS[0], [0, 0, 1]), (1, TOKENS[1], [0, 0, 1, 1]), (2, TOKENS[2], [0, 1, 0, 1, 1])]
    labels = torch.where(learnt == 1, IDS, -100)
    assert lists(read(plain, batch_data=batch_data(input_ids=IDS, attention_mask=MASK, labels=labels))) == expected
    for dtype in (torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8):
        sent = batch_data(input_ids=IDS, attention_mask=MASK, loss_mask=learnt.to(dtype))
        assert lists(read(plain, batch_data=sent)) == expected


def test_a_loss_mask_may_weight_tokens(plain: BatchReader):
    weights = torch.tensor([[0, 0, 0, 0.25, 2], [0, 0, 1, 0.5, 0], [0, 0, 0, 0, 3.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        sent = batch_data(input_ids=IDS, attention_mask=MASK, loss_mask=weights.to(dtype))
        assert [row.weights.tolist() for row in read(plain, batch_data=sent)] == [
            [0, 0.25, 2],
            [0, 0, 1, 0.5],
            [0, 0, 0, 0, 3],
        ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_integers_of_every_width_are_read_and_arrays_of_numpy_as_well(plain: BatchReader, dtype: torch.dtype):
    expected = read(plain, batch_data=batch_data(input_ids=IDS, attention_mask=MASK))
    for mask in (torch.bool, torch.uint8, torch.float32, torch.bfloat16):
        sent = batch_data(input_ids=IDS.to(dtype), attention_mask=MASK.to(mask))
        assert content(read(plain, batch_data=sent)) == content(expected)
    sent = batch_data(input_ids=IDS.to(dtype).numpy(), attention_mask=MASK.to(torch.bool).numpy())
    assert content(read(plain, batch_data=sent)) == content(expected)


@given(st.lists(st.tuples(sequences, st.integers(0, 3)), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_padded_batch_says_the_same_as_its_sequences(
    plain: BatchReader, rows: list[tuple[list[int], int]], data: st.DataObject
):
    width = max(len(tokens) + left for tokens, left in rows)
    ids = data.draw(st.sampled_from([0, -1, -100, VOCAB])) * torch.ones(len(rows), width, dtype=torch.int64)
    mask, weights = torch.zeros_like(ids), torch.zeros(len(rows), width)
    sent: list[dict[str, Any]] = []
    for i, (tokens, left) in enumerate(rows):
        own = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(tokens), max_size=len(tokens)))
        own[-1] = 1.0
        place = slice(left, left + len(tokens))
        ids[i, place], mask[i, place], weights[i, place] = torch.tensor(tokens), 1, torch.tensor(own)
        sent.append({"tokens": tokens, "weights": own})
    positions = mask.cumsum(1) - 1
    found = read(
        plain, batch_data=batch_data(input_ids=ids, attention_mask=mask, loss_mask=weights, position_ids=positions)
    )
    assert content(found) == content(read(plain, sequences=sent))


def test_keys_that_tell_rows_apart_are_accepted(plain: BatchReader):
    sent = batch_data(input_ids=IDS, attention_mask=MASK)
    names = {"__type__": "numpy.ndarray", "__dtype__": "object", "__shape__": [3], "__data__": ["a", "b", "c"]}
    kept = {"uid": names, "index": tensor(np.arange(3)), "data_source": names}
    assert content(read(plain, batch_data={**sent, "non_tensor_batch": kept})) == content(read(plain, batch_data=sent))
    for part in ("non_tensor_batch", "meta_info"):
        assert len(read(plain, batch_data={**sent, part: None})) == 3
        assert len(read(plain, batch_data={name: value for name, value in sent.items() if name != part})) == 3


def changed(name: str, value: Any, **others: Any) -> dict[str, Any]:
    """A good batch with another tensor, or another field of it."""
    sent = batch_data(input_ids=IDS, attention_mask=MASK, **others)
    sent["batch"][name] = value if not isinstance(value, Tensor) else tensor(value)
    return sent


def holed(row: int, position: int, value: float, like: Tensor = MASK) -> Tensor:
    filled = like.clone()
    filled[row, position] = value
    return filled


LABELS = torch.where(MASK == 1, IDS, -100)
GOOD = tensor(IDS)
BAD_TENSORS: list[tuple[dict[str, Any], str, int | None, str]] = [
    ({"batch": {}}, "batch.input_ids", None, "is missing"),
    ({"batch": {"input_ids": GOOD}}, "batch.attention_mask", None, "send ones where no row is padded"),
    ({}, "batch", None, "must be an object of tensors"),
    ({"batch": [GOOD]}, "batch", None, "must be an object of tensors"),
    ({"batch": {}, "tensors": {}}, "tensors", None, "no such field"),
    (changed("input_ids", 5), "batch.input_ids", None, "must be a tensor"),
    (changed("input_ids", IDS.float()), "batch.input_ids", None, "must be whole numbers"),
    (changed("input_ids", IDS[0]), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", IDS[:, :1]), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", IDS[:0]), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", holed(1, 2, VOCAB, IDS)), "batch.input_ids", 1, "at position 2"),
    (changed("input_ids", holed(2, 0, -1, IDS)), "batch.input_ids", 2, "at position 0 is -1"),
    (changed("input_ids", {**GOOD, "__shape__": [10**12, 10**12]}), "batch.input_ids", None, "characters of base64"),
    (changed("input_ids", {**GOOD, "__shape__": [10**4000, 10**4000]}), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", {**GOOD, "__shape__": [3, 6]}), "batch.input_ids", None, "takes 144 bytes"),
    (changed("input_ids", {**GOOD, "__shape__": [3, -5]}), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", {**GOOD, "__shape__": [True, 15]}), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", {**GOOD, "__shape__": "35"}), "batch.input_ids", None, "must be [B, T]"),
    (changed("input_ids", {**GOOD, "__dtype__": "torch.float8_e5m2"}), "batch.input_ids", None, "__dtype__ must be"),
    (changed("input_ids", {**GOOD, "__dtype__": ">i8"}), "batch.input_ids", None, "__dtype__ must be"),
    (changed("input_ids", {**GOOD, "__dtype__": None}), "batch.input_ids", None, "__dtype__ must be"),
    (changed("input_ids", {**GOOD, "__type__": "pickle"}), "batch.input_ids", None, "__type__ must be"),
    (changed("input_ids", {**GOOD, "__type__": "PIL.Image"}), "batch.input_ids", None, "__type__ must be"),
    (changed("input_ids", {**GOOD, "__type__": ["torch.Tensor"]}), "batch.input_ids", None, "__type__ must be"),
    (changed("input_ids", {**GOOD, "__data__": [1]}), "batch.input_ids", None, "__data__ must be a string"),
    (changed("input_ids", {**GOOD, "__data__": "!" + GOOD["__data__"][1:]}), "batch.input_ids", None, "no base64"),
    (changed("input_ids", {**GOOD, "__reduce__": "os"}), "batch.input_ids", None, "no field '__reduce__'"),
    (changed("attention_mask", MASK[:2]), "batch.attention_mask", None, "has shape [2, 5], but input_ids has [3, 5]"),
    (changed("attention_mask", holed(1, 1, 2)), "batch.attention_mask", 1, "is 2 at position 1"),
    (changed("attention_mask", holed(2, 1, math.nan, MASK.float())), "batch.attention_mask", 2, "is nan at position 1"),
    (changed("attention_mask", holed(2, 2, 0)), "batch.attention_mask", 2, "a 0 between the row's tokens"),
    (changed("attention_mask", MASK * torch.tensor([[1], [0], [1]])), "batch.attention_mask", 1, "leaves 0 tokens"),
    (changed("attention_mask", torch.eye(3, 5).int()), "batch.attention_mask", 0, "leaves 1 tokens"),
    (changed("labels", holed(1, 1, 7, LABELS)), "batch.labels", 1, "the label at position 1 is 7, but the token there"),
    (changed("labels", holed(0, 1, 0, LABELS)), "batch.labels", 0, "must be -100 at position 1, which is padding"),
    (changed("labels", LABELS.float()), "batch.labels", None, "must be whole numbers"),
    (changed("labels", torch.where(MASK == 1, -100, -100)), "", 0, "no supervised token"),
    (changed("loss_mask", MASK, labels=LABELS), "batch.loss_mask", None, "not both"),
    (changed("loss_mask", torch.ones(3, 5)), "batch.loss_mask", 0, "must be 0 at position 0, which is padding"),
    (changed("loss_mask", holed(2, 3, -1.0, MASK.float())), "batch.loss_mask", 2, "the weight at position 3 is -1.0"),
    (changed("loss_mask", holed(1, 0, math.nan, MASK.bfloat16())), "batch.loss_mask", 1, "at position 0 is nan"),
    (
        changed("loss_mask", {**tensor(MASK.bool()), "__data__": "AgICAgICAgICAgICAgIC"}),
        "batch.loss_mask",
        None,
        "a bool",
    ),
    (changed("position_ids", torch.arange(5).expand(3, 5).contiguous()), "batch.position_ids", 0, "is 2 at position 2"),
    (changed("position_ids", torch.zeros(3, 3, 5).int()), "batch.position_ids", None, "must be [B, T]"),
    (changed("response_mask", MASK[:, 2:]), "batch.response_mask", None, "send loss_mask or labels"),
    (changed("responses", IDS[:, 2:]), "batch.responses", None, "is a part of input_ids already"),
    (changed("old_log_probs", MASK.float()), "batch.old_log_probs", None, "belongs to reinforcement learning"),
    (changed("\ud800" * 500, MASK), "batch." + "\\ud800" * 100, None, "there is no such tensor here"),
    (changed("pixel_values", MASK), "batch.pixel_values", None, "there is no such tensor here"),
    ({**batch_data(), "meta_info": {"temperature": 0.7}}, "meta_info.temperature", None, "has no effect"),
    ({**batch_data(), "meta_info": [1]}, "meta_info", None, "must be an object"),
    ({**batch_data(), "non_tensor_batch": {"reward_model": {}}}, "non_tensor_batch.reward_model", None, "no effect"),
]


@pytest.mark.parametrize(("sent", "field", "row", "reason"), BAD_TENSORS)
def test_a_tensor_that_cannot_be_used_is_named(
    plain: BatchReader, sent: dict[str, Any], field: str, row: int | None, reason: str
):
    error = refusal(plain, batch_data=sent)
    assert error.param == ".".join(filter(None, ("batch_data", field)))
    assert error.row == row
    assert reason in error.message
    assert len(error.message.encode()) < 400


def test_positions_that_count_tokens_from_0_are_accepted_whatever_stands_at_padding(plain: BatchReader):
    counted = MASK.cumsum(1) - 1
    for padding in (0, 1, 99, -1):
        positions = torch.where(MASK == 1, counted, padding)
        found = read(plain, batch_data=batch_data(input_ids=IDS, attention_mask=MASK, position_ids=positions))
        assert [row.tokens.tolist() for row in found] == TOKENS


def test_tensors_longer_than_the_session_takes_are_cut_or_refused(tokenizer: ChatTokenizer):
    sent = batch_data(input_ids=IDS, attention_mask=MASK)
    found = read(reader(tokenizer, max_seq_len=4), batch_data=sent)
    assert [row.tokens.tolist() for row in found] == [tokens[:4] for tokens in TOKENS]
    error = refusal(reader(tokenizer, max_seq_len=4, on_overlength="error"), batch_data=sent)
    assert (error.row, error.param) == (2, "batch_data")


# -- what labels mean ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_over_labels_is_transformers_own(model_dir: Path, plain: BatchReader, side: str):
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    draws = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (4, 24), generator=draws)
    lengths = torch.tensor([24, 9, 17, 2])
    mask = (torch.arange(24) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    # Some labels at the first token of a row, too: no model predicts that.
    learnt = (torch.rand(4, 24, generator=draws) < 0.6).long() * mask
    learnt[3] = mask[3]
    labels = torch.where(learnt == 1, ids, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = 0.0
    with torch.no_grad():
        # Its own loss of each row, weighted by the labels that count in it: after the shift, all but the first.
        for row in range(4):
            kept = mask[row] == 1
            tokens, own = ids[row][kept][None], labels[row][kept][None]
            count = int((own[:, 1:] != -100).sum())
            expected += float(model(input_ids=tokens, labels=own).loss) * count
        total = int(((labels != -100) & (positions > 0)).sum())
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions)
    sent = batch_data(input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions)
    batch = flatten(read(plain, batch_data=sent))
    assert batch.weight_sum == total
    # transformers computes it in fp32, whatever the model.
    assert loss_of(model, batch) == pytest.approx(expected / total, rel=1e-6)
    # And that of the padded batch as a whole, from its logits.
    told = torch.nn.functional.cross_entropy(
        padded.logits[:, :-1].flatten(0, 1), torch.where(positions > 0, labels, -100)[:, 1:].flatten()
    )
    assert loss_of(model, batch) == pytest.approx(float(told), rel=1e-9)


def loss_of(model: LlamaForCausalLM, batch: FlatBatch) -> float:
    """The weighted mean of -log p(target) over a flat batch, each segment computed by itself."""
    total, start = 0.0, 0
    for length in batch.lengths:
        part = slice(start, start + length)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(batch.tokens[part])[None]).logits[0]
        chosen = logits.log_softmax(-1).gather(1, torch.from_numpy(batch.targets[part])[:, None])[:, 0]
        total -= float((chosen * torch.from_numpy(batch.weights[part])).sum())
        start += length
    return total / batch.weight_sum


def test_rows_are_ready_for_micro_batches(plain: BatchReader):
    rows = read(plain, batch_data=batch_data(input_ids=IDS, attention_mask=MASK))
    assert [batch.lengths for batch in micro_batches(rows, 8)] == [(3, 4), (5,)]


# -- how long it takes -------------------------------------------------------------------------------------------------


def test_a_batch_of_8_by_512_is_read_in_well_under_a_few_milliseconds(plain: BatchReader):
    ids = torch.randint(0, VOCAB, (8, 512))
    padded = Batch(batch_data=batch_data(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids))
    arrays = Batch.model_validate(
        {"sequences": [{"tokens": encode_tokens(row), "labels": encode_tokens(row)} for row in ids]}
    )
    numbers = Batch.model_validate({"sequences": [{"tokens": row.tolist()} for row in ids]})
    assert content(plain.read(padded)) == content(plain.read(arrays)) == content(plain.read(numbers))
    for batch in (padded, arrays, numbers):
        taken = []
        for _ in range(20):
            start = time.perf_counter()
            plain.read(batch)
            taken.append(time.perf_counter() - start)
        print(f"{min(taken) * 1e3:.2f} ms")
        assert min(taken) < 5e-3

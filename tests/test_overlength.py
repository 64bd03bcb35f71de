"""`on_overlength`: a row of more than `max_seq_len` tokens is cut, left out, or an error; the report says which."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from apis.errors import DataInvalid
from apis.post_training.models import DataConfig, DatasetFormat
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import OnOverlength, TokenizedDataset, tokenize_dataset
from tests.chat_families import FAMILIES, build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.from_dir(build(FAMILIES[0], tmp_path_factory.mktemp("chatml")))


def prepared(
    rows: list[dict[str, Any]], tokenizer: ChatTokenizer, max_seq_len: int, on_overlength: OnOverlength
) -> TokenizedDataset:
    return tokenize_dataset(rows, tokenizer, None, False, max_seq_len, on_overlength=on_overlength)


def header(tokenizer: ChatTokenizer) -> int:
    return len(tokenizer.encode_prompt([{"role": "user", "content": "a"}]))


def rows(*answers: str, prompt: str = "a") -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": answer} for answer in answers]


def count(*numbers: int) -> dict[str, Any]:
    return {"count": len(numbers), "first_rows": list(numbers)}


MIXED = [*rows("b", "b b b b b b b b"), *rows("b", prompt="c " * 200), *rows("b")]


def test_by_default_rows_are_cut_on_the_right_and_those_without_an_answer_dropped(tokenizer: ChatTokenizer):
    assert DataConfig(dataset_id="d").on_overlength == "truncate"
    found = prepared(MIXED, tokenizer, header(tokenizer) + 4, "truncate")
    assert [row.row for row in found.rows] == [0, 1, 3]
    assert len(found.rows[1].tokens) == header(tokenizer) + 4
    assert found.report["truncated"] == count(1, 2)
    assert found.report["dropped"] == {**count(2), "overlength": count(), "unsupervised": count(2)}


def test_dropped_rows_are_told_apart_by_reason(tokenizer: ChatTokenizer):
    muted = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    kept = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    long = {"messages": [{"role": "user", "content": "c " * 200}, {"role": "assistant", "content": "b"}]}
    found = prepared([muted, long, kept, long], tokenizer, 64, "drop")
    assert [row.row for row in found.rows] == [2]
    assert found.report["truncated"] == count()
    assert found.report["dropped"] == {**count(0, 1, 3), "overlength": count(1, 3), "unsupervised": count(0)}
    assert found.report["longest_row_tokens"] > 200


def test_an_error_names_the_first_row_and_its_length(tokenizer: ChatTokenizer):
    length = header(tokenizer) + 4
    whole = prepared(MIXED, tokenizer, 10_000, "error")
    assert whole.report["dropped"]["count"] == whole.report["truncated"]["count"] == 0
    lengths = [len(row.tokens) for row in whole.rows]
    with pytest.raises(DataInvalid, match=f"row 1: has {lengths[1]} tokens, more than max_seq_len {length}") as caught:
        prepared(MIXED, tokenizer, length, "error")
    assert caught.value.row == 1


def test_the_error_of_a_long_row_comes_before_that_of_a_broken_row_after_it(tokenizer: ChatTokenizer):
    with pytest.raises(DataInvalid, match="row 1: has"):
        prepared([*MIXED, {"prompt": 4}], tokenizer, header(tokenizer) + 4, "error")
    with pytest.raises(DataInvalid, match="row 0, /completion"):
        prepared([{"prompt": "a", "completion": ""}, *MIXED], tokenizer, header(tokenizer) + 4, "error")


def test_a_row_that_just_fits_is_whole(tokenizer: ChatTokenizer):
    (row,) = prepared(rows("b"), tokenizer, header(tokenizer) + 3, "error").rows
    assert len(row.tokens) == header(tokenizer) + 3


def test_a_data_set_of_which_nothing_is_left_is_refused(tokenizer: ChatTokenizer):
    long = rows("b", "c", prompt="c " * 200)
    with pytest.raises(DataInvalid, match="no row is left: each of the 2 has more than max_seq_len 64 tokens"):
        prepared(long, tokenizer, 64, "drop")
    with pytest.raises(DataInvalid, match="no supervised token: none of the 2 rows"):
        prepared(long, tokenizer, 64, "truncate")


def test_only_the_first_row_numbers_are_kept_and_all_are_counted(tokenizer: ChatTokenizer):
    found = prepared([*rows(*["b " * 100] * 50), *rows("b")], tokenizer, 64, "drop")
    assert found.report["dropped"]["overlength"] == {"count": 50, "first_rows": list(range(20))}


LONG = "b " * 300
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG}]
OF_EACH_FORMAT: dict[DatasetFormat, dict[str, Any]] = {
    DatasetFormat.messages: {"messages": TURNS},
    DatasetFormat.dialog: {"dialog": TURNS},
    DatasetFormat.instruct: {"chat_completion_input": TURNS[:1], "expected_answer": LONG},
    DatasetFormat.prompt_completion: {"prompt": "a", "completion": LONG},
    DatasetFormat.alpaca: {"instruction": "a", "output": LONG},
    DatasetFormat.sharegpt: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": LONG}]},
    DatasetFormat.text: {"text": LONG},
}


@pytest.mark.parametrize("data_format", DatasetFormat)
def test_the_cap_holds_for_every_format(tokenizer: ChatTokenizer, data_format: DatasetFormat):
    row = OF_EACH_FORMAT[data_format]
    cut = tokenize_dataset([row], tokenizer, data_format, False, 50)
    assert [len(kept.tokens) for kept in cut.rows] == [50]
    assert cut.report["longest_row_tokens"] > 300
    with pytest.raises(DataInvalid, match="more than max_seq_len 50"):
        tokenize_dataset([row], tokenizer, data_format, False, 50, on_overlength="error")


def test_another_policy_is_refused_by_name():
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"dataset_id": "d", "on_overlength": "wrap"})
    assert caught.value.errors()[0]["loc"] == ("on_overlength",)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(8, 60),
    st.sampled_from(["truncate", "drop"]),
)
def test_every_row_is_kept_or_dropped_and_counted(
    tokenizer: ChatTokenizer, sizes: list[tuple[int, int]], max_seq_len: int, on_overlength: OnOverlength
):
    data = [{"prompt": "c " * a, "completion": "b " * b} for a, b in sizes]
    whole = {row.row: row for row in prepared(data, tokenizer, 10_000, "error").rows}
    fitting = [row for row in whole.values() if on_overlength == "truncate" or len(row.tokens) <= max_seq_len]
    if not any(row.weights[:max_seq_len].any() for row in fitting):
        with pytest.raises(DataInvalid, match=r"no (row is left|supervised token)"):
            prepared(data, tokenizer, max_seq_len, on_overlength)
        return
    found = prepared(data, tokenizer, max_seq_len, on_overlength)
    for row in found.rows:
        assert row.tokens.tolist() == whole[row.row].tokens[:max_seq_len].tolist()
        assert row.weights.tolist() == whole[row.row].weights[:max_seq_len].tolist()
        assert row.supervised >= 1
    long = [number for number, row in whole.items() if len(row.tokens) > max_seq_len]
    kept = [row.row for row in found.rows]
    gone = [number for number in whole if number not in kept]
    assert found.report["dropped"]["first_rows"] == gone
    assert set(gone) <= set(long)
    assert found.report["truncated"]["first_rows"] == (long if on_overlength == "truncate" else [])
    assert kept == sorted(kept)

"""`columns`: a data set's own names for the columns of its format."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from apis.datasets.models import Row, RowsDataSource
from apis.errors import DataInvalid
from apis.post_training.models import DataConfig, DatasetFormat
from post_training.data.formats import detect_format, to_example
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.data.types import Conversation
from tests.shared_data import shared_rows

QUESTION_ANSWER = {"prompt": "question", "completion": "answer"}
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("data_format", "columns", "row"),
    [
        (DatasetFormat.prompt_completion, QUESTION_ANSWER, {"question": "2 + 2?", "answer": "4"}),
        (DatasetFormat.prompt_completion, {"completion": "chosen"}, {"prompt": "2 + 2?", "chosen": "4", "rejected": 5}),
        (DatasetFormat.alpaca, {"output": "response"}, {"instruction": "2 + 2?", "input": "", "response": "4"}),
        (DatasetFormat.alpaca, {"input": "context"}, {"instruction": "2", "context": "", "output": "4"}),
        (DatasetFormat.messages, {"messages": "conversations"}, {"conversations": TALK}),
        (DatasetFormat.messages, {"tools": "functions"}, {"messages": TALK, "functions": []}),
        (DatasetFormat.sharegpt, {"conversations": "turns"}, {"turns": [{"from": "gpt", "value": "4"}]}),
        (DatasetFormat.dialog, {"dialog": "a/b"}, {"a/b": TALK}),
        (DatasetFormat.instruct, {"expected_answer": "gold"}, {"chat_completion_input": TALK[:1], "gold": "4"}),
    ],
)
def test_a_mapped_row_is_recognised_and_read(data_format: DatasetFormat, columns: dict[str, str], row: Row):
    assert detect_format(row, columns) is data_format
    example = to_example(row, 0, data_format, columns)
    assert isinstance(example, Conversation)
    assert example.messages[-1]["content"] == "4"


def test_a_mapped_column_is_read_even_where_one_of_the_formats_own_name_is_there():
    row = {"prompt": "a template", "question": "2 + 2?", "completion": "4"}
    example = to_example(row, 0, DatasetFormat.prompt_completion, {"prompt": "question"})
    assert isinstance(example, Conversation)
    assert example.messages[0]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    ("row", "pointer", "reason"),
    [
        ({"question": "2 + 2?"}, "/answer", "'answer', given for 'completion'"),
        ({"answer": "4", "question": None}, "/question", "must be a string, found null"),
        ({"answer": "", "question": "2 + 2?"}, "/answer", "nothing to learn"),
    ],
)
def test_a_bad_row_is_named_in_the_data_sets_own_words(row: Row, pointer: str, reason: str):
    with pytest.raises(DataInvalid) as caught:
        to_example(row, 9, DatasetFormat.prompt_completion, QUESTION_ANSWER)
    assert (caught.value.row, caught.value.pointer) == (9, pointer)
    assert reason in caught.value.message


def test_a_pointer_escapes_the_characters_of_json_pointers():
    with pytest.raises(DataInvalid) as caught:
        to_example({"a/b~c": 4}, 0, DatasetFormat.text, {"text": "a/b~c"})
    assert caught.value.pointer == "/a~1b~0c"


def test_a_mapped_optional_column_must_be_there():
    with pytest.raises(DataInvalid, match="'context', given for 'input'"):
        to_example({"instruction": "a", "output": "b"}, 2, DatasetFormat.alpaca, {"input": "context"})


def test_columns_that_fit_no_format_under_their_new_names_are_refused_with_both():
    with pytest.raises(DataInvalid) as caught:
        detect_format({"question": "2 + 2?", "solution": "4"}, QUESTION_ANSWER)
    assert "'question', 'solution'" in caught.value.message
    assert "'completion': 'answer'" in caught.value.message


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"data_format": "alpaca", "columns": {"prompt": "question"}}, "reads 'prompt'"),
        ({"columns": {"question": "prompt"}}, "reads 'question'"),
        ({"columns": {"prompt": "question", "output": "answer"}}, "'output', 'prompt'"),
    ],
)
def test_a_key_that_the_format_has_not_is_refused_by_name(values: dict[str, Any], reason: str):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({"dataset_id": "d", **values})
    (error,) = caught.value.errors()
    assert error["loc"] == ("columns",)
    assert reason in error["msg"]


def test_columns_may_be_left_out_or_empty():
    for columns in (None, {}):
        assert DataConfig(dataset_id="d", columns=columns).columns == columns
        assert detect_format({"prompt": "a", "completion": "b"}, columns) is DatasetFormat.prompt_completion


def test_real_questions_and_answers_are_checked_under_the_mapping():
    rows = shared_rows("gsm8k_test.jsonl")[:100]
    reader = open_rows(RowsDataSource(rows=rows), SourcePolicy())
    with pytest.raises(DataInvalid, match="fit no data format"):
        check_rows(reader, None)
    report = check_rows(reader, None, QUESTION_ANSWER)
    assert (report.format, report.rows) == (DatasetFormat.prompt_completion, 100)

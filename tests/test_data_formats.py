"""Data formats: which columns mean what, and how a row that does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apis.datasets.models import Row, RowsDataSource
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.chat import ChatTokenizer
from post_training.data.formats import detect_format, to_example
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.data.types import Conversation
from tests.chat_families import FAMILIES, build
from tests.shared_data import shared_rows

CHATML = next(family for family in FAMILIES if family.end_of_turn == "<|im_end|>" and family.system)
USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}


def messages(*values: dict[str, Any], **columns: Any) -> Row:
    return {"messages": list(values), **columns}


def called(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "add", "arguments": arguments}}


GOOD: list[tuple[DatasetFormat, Row, list[dict[str, Any]]]] = [
    (
        DatasetFormat.instruct,
        {"chat_completion_input": json.dumps([USER]), "expected_answer": "4"},
        [USER, ANSWER],
    ),
    (
        DatasetFormat.instruct,
        {"chat_completion_input": [{"content": "2 + 2?"}], "expected_answer": "4"},
        [USER, ANSWER],
    ),
    (DatasetFormat.dialog, {"dialog": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    (
        DatasetFormat.dialog,
        {"dialog": [{"role": "system", "content": "Add."}, USER, ANSWER, USER, ANSWER]},
        [{"role": "system", "content": "Add."}, USER, ANSWER, USER, ANSWER],
    ),
    (DatasetFormat.messages, messages(USER, ANSWER), [USER, ANSWER]),
    (
        DatasetFormat.messages,
        messages(
            {"role": "developer", "content": "Add."}, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}
        ),
        [{"role": "system", "content": "Add."}, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}],
    ),
    (
        DatasetFormat.messages,
        messages(
            {"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]}, ANSWER
        ),
        [USER, ANSWER],
    ),
    (
        DatasetFormat.messages,
        messages(
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ),
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
    ),
    (DatasetFormat.prompt_completion, {"prompt": "2 + 2?", "completion": "4"}, [USER, ANSWER]),
    (DatasetFormat.alpaca, {"instruction": "2 + 2?", "input": "", "output": "4"}, [USER, ANSWER]),
    (DatasetFormat.alpaca, {"instruction": "2 + 2?", "input": None, "output": "4"}, [USER, ANSWER]),
    (
        DatasetFormat.alpaca,
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        [{"role": "user", "content": "Add.\n\n2 and 2"}, ANSWER],
    ),
    (
        DatasetFormat.alpaca,
        {"instruction": "2 + 2?", "output": "4", "system": "Add.", "history": [["1 + 1?", "2"], ["", "Well?"]]},
        [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "Well?"},
            USER,
            ANSWER,
        ],
    ),
    *(
        (
            DatasetFormat.alpaca,
            {"instruction": "2 + 2?", "output": "4", "system": none, "history": empty},
            [USER, ANSWER],
        )
        for none, empty in ((None, None), ("", ""), ("", []), (None, "[]"))
    ),
    (
        DatasetFormat.alpaca,
        {"instruction": "2 + 2?", "output": "4", "history": json.dumps([["2 + 2?", "4"]])},
        [USER, ANSWER, USER, ANSWER],
    ),
]


def conversation_of(row: Row, index: int, data_format: DatasetFormat) -> Conversation:
    example = to_example(row, index, data_format)
    assert isinstance(example, Conversation)
    return example


@pytest.mark.parametrize(("data_format", "row", "expected"), GOOD)
def test_a_good_row_becomes_these_messages(data_format: DatasetFormat, row: Row, expected: list[dict[str, Any]]):
    assert detect_format({**row, "id": 7}) is data_format
    conversation = conversation_of({**row, "id": 7}, 5, data_format)
    assert conversation.row == 5
    assert conversation.messages == expected


@pytest.mark.parametrize("train_on_input", [False, True])
def test_the_answers_of_an_alpaca_history_are_learnt_and_its_questions_only_with_train_on_input(
    tmp_path: Path, train_on_input: bool
):
    tokenizer = ChatTokenizer.from_dir(build(CHATML, tmp_path))
    row = {
        "instruction": "Third?",
        "output": "gamma",
        "system": "Obey.",
        "history": [["One?", "alpha"], ["Two?", "beta"]],
    }
    encoded = tokenizer.encode_example(conversation_of(row, 0, DatasetFormat.alpaca), train_on_input)
    runs = tokenizer.segments(encoded, 10_000)
    text = "".join(run["text"] for run in runs)
    places = [text.index(part) for part in ("Obey.", "One?", "alpha", "Two?", "beta", "Third?", "gamma")]
    assert places == sorted(places)
    learnt = [run["text"] for run in runs if run["supervised"]]
    if train_on_input:
        assert all(any(part in run for run in learnt) for part in ("Obey.", "One?", "alpha", "gamma"))
    else:
        assert learnt == [f"{answer}{CHATML.end_of_turn}" for answer in ("alpha", "beta", "gamma")]


SYSTEM = {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    "row",
    [
        messages(USER, ANSWER),
        messages(SYSTEM, USER, {**ANSWER, "weight": 0}, USER, ANSWER),
        {"messages": json.dumps([USER, ANSWER])},
        messages(USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, tools=[TOOL]),
    ],
)
def test_a_dialog_that_stands_as_messages_is_read_as_messages(row: Row):
    assert to_example(row, 3, DatasetFormat.dialog) == to_example(row, 3, DatasetFormat.messages)


def test_a_dialog_that_stands_as_messages_has_the_faults_of_messages():
    with pytest.raises(DataInvalid, match="row 3, /messages: must hold at least one 'assistant'"):
        to_example(messages(USER), 3, DatasetFormat.dialog)


def test_a_row_with_a_dialog_is_a_dialog_whatever_else_it_has():
    row = {"dialog": [USER, ANSWER], **messages(SYSTEM, USER, ANSWER)}
    assert conversation_of(row, 0, DatasetFormat.dialog).messages == [USER, ANSWER]
    with pytest.raises(DataInvalid, match="row 0, /dialog: must be a list of messages, found null"):
        to_example({"dialog": None, **messages(USER, ANSWER)}, 0, DatasetFormat.dialog)
    with pytest.raises(DataInvalid, match="'talk', given for 'dialog'"):
        to_example(messages(USER, ANSWER), 0, DatasetFormat.dialog, {"dialog": "talk"})
    with pytest.raises(DataInvalid, match=r"'dialog' is missing; .* A dialog is read from 'messages' as well"):
        to_example({"text": "a"}, 0, DatasetFormat.dialog)


def test_messages_are_the_same_tokens_under_either_name(tmp_path: Path):
    tokenizer = ChatTokenizer.from_dir(build(CHATML, tmp_path))
    row = messages(SYSTEM, USER, ANSWER, USER, {**ANSWER, "content": "four"})
    dialog, plain = (
        tokenizer.encode_example(conversation_of(row, 0, data_format), False)
        for data_format in (DatasetFormat.dialog, DatasetFormat.messages)
    )
    assert list(dialog.tokens) == list(plain.tokens)
    assert list(dialog.weights) == list(plain.weights)


BAD: list[tuple[DatasetFormat, Row, str, str]] = [
    (DatasetFormat.instruct, {"chat_completion_input": "[{'role': 'user'}]", "expected_answer": "4"},
     "/chat_completion_input", "not valid JSON"),
    (DatasetFormat.instruct, {"chat_completion_input": [USER, USER], "expected_answer": "4"},
     "/chat_completion_input", "exactly 1 message, found 2"),
    (DatasetFormat.instruct, {"chat_completion_input": [{"role": "user"}], "expected_answer": "4"},
     "/chat_completion_input/0/content", "must be a string, found null"),
    (DatasetFormat.instruct, {"chat_completion_input": [ANSWER], "expected_answer": "4"},
     "/chat_completion_input/0/role", "must be 'user', found 'assistant'"),
    (DatasetFormat.instruct, {"chat_completion_input": [USER], "expected_answer": 4},
     "/expected_answer", "must be a string, found a number"),
    (DatasetFormat.instruct, {"chat_completion_input": [USER], "expected_answer": ""},
     "/expected_answer", "nothing to learn"),
    (DatasetFormat.dialog, {"dialog": "__import__('os').getcwd()"}, "/dialog", "not valid JSON"),
    (DatasetFormat.dialog, {"dialog": json.dumps(USER)}, "/dialog", "must be a list of messages, found an object"),
    (DatasetFormat.dialog, {"dialog": []}, "/dialog", "found an empty list"),
    (DatasetFormat.dialog, {"dialog": [USER]}, "/dialog", "at least 2 messages, found 1"),
    (DatasetFormat.dialog, {"dialog": [USER, USER]}, "/dialog", "at least one 'assistant'"),
    (DatasetFormat.dialog, {"dialog": [ANSWER, USER]}, "/dialog/0/role", "must be 'user', found 'assistant'"),
    (DatasetFormat.dialog, {"dialog": [USER, {"role": "bot", "content": "4"}]}, "/dialog/1/role", "found 'bot'"),
    (DatasetFormat.dialog, {"dialog": [USER, ANSWER, {"role": "tool", "content": "4"}]}, "/dialog/2", "for tools"),
    (DatasetFormat.dialog, {"dialog": [USER, {"role": "system", "content": "x"}, ANSWER]}, "/dialog/1", "system"),
    (DatasetFormat.messages, messages(), "/messages", "found an empty list"),
    (DatasetFormat.messages, {"messages": "hello"}, "/messages", "not valid JSON"),
    (DatasetFormat.messages, {"messages": None}, "/messages", "found null"),
    (DatasetFormat.messages, {"messages": [USER, "4"]}, "/messages/1", "must be a message object, found a string"),
    (DatasetFormat.messages, messages(USER), "/messages", "at least one 'assistant'"),
    (DatasetFormat.messages, messages(USER, ANSWER, {"role": "function", "content": "4"}),
     "/messages/2/role", "found 'function'"),
    (DatasetFormat.messages, messages({"content": "4"}, ANSWER), "/messages/0/role", "it is missing"),
    (DatasetFormat.messages, messages({"role": ["user"], "content": "4"}, ANSWER), "/messages/0/role", "['user']"),
    (DatasetFormat.messages, messages({"role": "user", "content": 4}, ANSWER), "/messages/0/content", "a number"),
    (DatasetFormat.messages, messages({"role": "user", "content": [{"type": "image_url"}]}, ANSWER),
     "/messages/0/content/0", "only text"),
    (DatasetFormat.messages, messages({"role": "user", "content": [{"type": "text"}]}, ANSWER),
     "/messages/0/content/0/text", "found null"),
    (DatasetFormat.messages, messages(USER, {"role": "assistant", "content": ""}), "/messages/1/content", "is empty"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "tool_calls": []} | {"content": ""}),
     "/messages/1/content", "is empty"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "weight": 2}), "/messages/1/weight", "0 or 1, found 2"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "weight": True}), "/messages/1/weight", "found True"),
    (DatasetFormat.messages, messages({**USER, "weight": 0}, ANSWER), "/messages/0/weight", "only assistant"),
    (DatasetFormat.messages, messages({**USER, "tool_calls": [CALL]}, ANSWER), "/messages/0/tool_calls", "'user'"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "tool_calls": CALL}), "/messages/1/tool_calls", "a list"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "tool_calls": [{"name": "add"}]}),
     "/messages/1/tool_calls/0/function", "must be an object, found null"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "tool_calls": [called("[1]")]}),
     "/messages/1/tool_calls/0/function/arguments", "found an array"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "tool_calls": [called("{")]}),
     "/messages/1/tool_calls/0/function/arguments", "not valid JSON"),
    (DatasetFormat.messages, messages(USER, {**ANSWER, "function_call": {"name": "add"}}),
     "/messages/1/function_call", "use tool_calls"),
    (DatasetFormat.messages, messages(USER, ANSWER, tools=[{"name": "add"}]), "/tools/0", '"function"'),
    (DatasetFormat.messages, messages(USER, ANSWER, tools={"add": TOOL}), "/tools", "must be a list"),
    (DatasetFormat.messages, messages(USER, ANSWER, functions=[TOOL]), "/functions", "use the column 'tools'"),
    (DatasetFormat.prompt_completion, {"prompt": "2 + 2?", "completion": None}, "/completion", "found null"),
    (DatasetFormat.prompt_completion, {"prompt": [USER], "completion": "4"}, "/prompt", "found an array"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "input": 4, "output": "4"}, "/input", "found a number"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": ""}, "/output", "nothing to learn"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "system": ["a"]}, "/system", "found an array"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": "[["}, "/history", "not valid JSON"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": {"a": "b"}},
     "/history", "must be a list of [question, answer] pairs, found an object"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": [["a", "b"], "c"]},
     "/history/1", "must be a [question, answer] pair, found a string"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": [["a"]]}, "/history/0", "a list of 1"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": [["a", None]]},
     "/history/0/1", "must be a string, found null"),
    (DatasetFormat.alpaca, {"instruction": "Add.", "output": "4", "history": [["a", ""]]},
     "/history/0/1", "nothing to learn"),
]  # fmt: skip


@pytest.mark.parametrize(("data_format", "row", "pointer", "reason"), BAD)
def test_a_bad_row_is_named_by_number_and_pointer(data_format: DatasetFormat, row: Row, pointer: str, reason: str):
    with pytest.raises(DataInvalid) as caught:
        to_example(row, 900, data_format)
    assert (caught.value.row, caught.value.pointer) == (900, pointer)
    assert caught.value.message.startswith(f"row 900, {pointer}: ")
    assert reason in caught.value.message


def test_a_missing_column_names_itself_and_the_columns_seen():
    with pytest.raises(DataInvalid) as caught:
        to_example({"instruction": "a", "response": "b"}, 3, DatasetFormat.alpaca)
    assert caught.value.pointer == "/output"
    assert "'output'" in caught.value.message
    assert "'instruction', 'response'" in caught.value.message


def test_columns_that_fit_no_format_name_the_formats_there_are():
    with pytest.raises(DataInvalid) as caught:
        detect_format({"chat": [], "id": 1})
    assert "'chat', 'id'" in caught.value.message
    for data_format in DatasetFormat:
        assert data_format.value in caught.value.message


def test_tools_are_read_from_a_list_or_its_json_text():
    for tools in ([TOOL], json.dumps([TOOL])):
        assert conversation_of(messages(USER, ANSWER, tools=tools), 0, DatasetFormat.messages).tools == [TOOL]
    for tools in (None, [], "", "[]"):
        assert conversation_of(messages(USER, ANSWER, tools=tools), 0, DatasetFormat.messages).tools is None


def check(rows: list[Row], data_format: DatasetFormat | None = None, **limits: int):
    return check_rows(open_rows(RowsDataSource(rows=rows), SourcePolicy()), data_format, None, **limits)


def test_every_row_of_a_small_data_set_is_checked():
    rows: list[Row] = [{"prompt": "a", "completion": "b"} for _ in range(999)]
    report = check(rows)
    assert (report.format, report.rows, report.complete) == (DatasetFormat.prompt_completion, 999, True)
    with pytest.raises(DataInvalid, match="row 999, /completion: must be a string, found null"):
        check([*rows, {"prompt": "a", "completion": None}])


def test_of_a_large_data_set_the_first_rows_are_checked():
    rows: list[Row] = [{"prompt": "a" * 100, "completion": "b"} for _ in range(50)]
    rows[49] = {"prompt": None, "completion": None}
    by_bytes = check(rows, limit_bytes=1000)
    assert by_bytes.rows < 50
    assert not by_bytes.complete
    by_rows = check(rows, limit_rows=49)
    assert (by_rows.rows, by_rows.complete) == (49, False)
    with pytest.raises(DataInvalid, match="row 0, /dialog"):
        check(rows, DatasetFormat.dialog, limit_bytes=1000)


def test_the_roles_that_no_format_knows_are_refused_by_name():
    for data_format, row, pointer in (
        (DatasetFormat.messages, messages(USER, {"role": "bot", "content": "4"}), "/messages/1/role"),
        (DatasetFormat.dialog, {"dialog": [USER, {"role": "bot", "content": "4"}]}, "/dialog/1/role"),
        (DatasetFormat.sharegpt, {"conversations": [{"from": "bot", "value": "4"}]}, "/conversations/0/from"),
    ):
        with pytest.raises(DataInvalid, match="found 'bot'") as caught:
            to_example(row, 3, data_format)
        assert (caught.value.row, caught.value.pointer) == (3, pointer)


def test_preference_rows_are_sent_to_preference_optimize():
    for row in (
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"conversations": [{"from": "human", "value": "2 + 2?"}], "chosen": {}, "rejected": {}},
        {"chosen": "4", "rejected": "5"},
    ):
        with pytest.raises(DataInvalid, match="preference_optimize") as caught:
            detect_format(row)
        assert caught.value.row == 0


def test_real_preference_rows_are_recognised():
    for row in shared_rows("dpo_en_demo.jsonl"):
        with pytest.raises(DataInvalid, match="preference_optimize"):
            detect_format(row)


@pytest.mark.parametrize("name", ["alpaca_en_demo.jsonl", "alpaca_zh_demo.jsonl"])
def test_real_alpaca_rows_become_a_question_and_an_answer(name: str):
    rows = shared_rows(name)
    assert check(rows[:1000]).format is DatasetFormat.alpaca
    for index, row in enumerate(rows):
        question, answer = conversation_of(row, index, DatasetFormat.alpaca).messages
        assert question["content"].startswith(row["instruction"])
        assert question["content"].endswith(row["input"] or row["instruction"])
        assert answer == {"role": "assistant", "content": row["output"]}

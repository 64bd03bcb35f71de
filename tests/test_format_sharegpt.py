"""ShareGPT rows: turns, function calls, observations, the columns `system` and `tools`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.datasets.models import Row
from apis.errors import DataInvalid
from apis.post_training.models import DatasetFormat
from post_training.data.formats import detect_format, to_example
from post_training.data.types import Conversation
from tests.shared_data import shared_rows

HUMAN = {"from": "human", "value": "Weather in Paris?"}
GPT = {"from": "gpt", "value": "It is 21 degrees."}
CALL = {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'}
RESULT = {"from": "observation", "value": '{"celsius": 21}'}
FUNCTION = {"name": "weather", "description": "Weather now", "parameters": {"type": "object", "properties": {}}}


def turns(*values: dict[str, Any], **columns: Any) -> Row:
    return {"conversations": list(values), **columns}


def read(row: Row, columns: dict[str, str] | None = None) -> Conversation:
    assert detect_format(row, columns) is DatasetFormat.sharegpt
    example = to_example(row, 4, DatasetFormat.sharegpt, columns)
    assert isinstance(example, Conversation)
    return example


def called(identifier: str, city: str = "Paris") -> dict[str, Any]:
    return {"type": "function", "id": identifier, "function": {"name": "weather", "arguments": {"city": city}}}


def test_turns_become_messages_and_calls_become_tool_calls():
    conversation = read(turns(HUMAN, CALL, RESULT, GPT, system="Be brief.", tools=json.dumps([FUNCTION])))
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "tool_calls": [called("call00000")]},
        {"role": "tool", "content": '{"celsius": 21}', "tool_call_id": "call00000"},
        {"role": "assistant", "content": "It is 21 degrees."},
    ]
    assert conversation.tools == [{"type": "function", "function": FUNCTION}]


def test_a_list_of_calls_is_answered_in_order():
    both = [{"name": "weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]
    # Arguments may be JSON text inside the JSON text.
    both[1]["arguments"] = json.dumps(both[1]["arguments"])
    conversation = read(turns(HUMAN, {**CALL, "value": json.dumps(both)}, RESULT, {**RESULT, "from": "tool"}, GPT))
    assert conversation.messages[1]["tool_calls"] == [called("call00000"), called("call00001", "Rome")]
    assert [message["tool_call_id"] for message in conversation.messages[2:4]] == ["call00000", "call00001"]


def test_other_names_of_roles_empty_columns_and_weights_are_read():
    row = turns({**HUMAN, "from": "user"}, {**GPT, "from": "assistant", "weight": 0}, HUMAN, GPT, system="", tools="")
    conversation = read(row)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant"]
    assert conversation.messages[1]["weight"] == 0
    assert conversation.tools is None
    assert read(turns({"from": "system", "value": "Be brief."}, HUMAN, GPT)).messages[0]["role"] == "system"
    assert read({"conversations": json.dumps([HUMAN, GPT])}) == read(turns(HUMAN, GPT))


def test_wrapped_tool_definitions_are_kept_as_they_are():
    wrapped = [{"type": "function", "function": FUNCTION}]
    assert read(turns(HUMAN, GPT, tools=wrapped)).tools == wrapped


BAD: list[tuple[Row, str, str]] = [
    (turns(HUMAN, {"from": "function", "value": "x"}), "/conversations/1/from", "found 'function'"),
    (turns(HUMAN, {"value": "x"}), "/conversations/1/from", "it is missing"),
    (turns({"role": "user", "content": "x"}), "/conversations/0", 'columns {"messages": "conversations"}'),
    (turns(HUMAN, {"from": "gpt", "value": 4}), "/conversations/1/value", "must be a string, found a number"),
    (turns(HUMAN, {"from": "gpt", "value": ""}), "/conversations/1/value", "nothing to learn"),
    (turns(HUMAN), "/conversations", "at least one 'assistant'"),
    (turns(), "/conversations", "an empty list"),
    (turns(HUMAN, {**CALL, "value": "weather(Paris)"}), "/conversations/1/value", "not valid JSON"),
    (turns(HUMAN, {**CALL, "value": "[]"}), "/conversations/1/value", "an empty list"),
    (turns(HUMAN, {**CALL, "value": "[7]"}), "/conversations/1/value", "found a number"),
    (turns(HUMAN, {**CALL, "value": '{"arguments": {}}'}), "/conversations/1/value/name", "found null"),
    (turns(HUMAN, {**CALL, "value": '{"name": "f", "arguments": [1]}'}), "/conversations/1/value/arguments",
     "found an array"),
    (turns({"from": "system", "value": "a"}, HUMAN, GPT, system="b"), "/system", "second system message"),
    (turns(HUMAN, GPT, system=4), "/system", "found a number"),
    (turns(HUMAN, GPT, tools=[{"parameters": {}}]), "/tools/0", '"function"'),
    (turns({**HUMAN, "weight": 1}, GPT), "/conversations/0/weight", "only assistant"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "pointer", "reason"), BAD)
def test_a_bad_row_is_named_by_number_and_pointer(row: Row, pointer: str, reason: str):
    with pytest.raises(DataInvalid) as caught:
        to_example(row, 900, DatasetFormat.sharegpt)
    assert (caught.value.row, caught.value.pointer) == (900, pointer)
    assert reason in caught.value.message


def test_real_tool_conversations_keep_every_turn_call_and_tool():
    rows = shared_rows("glaive_toolcall_en_demo.jsonl")
    calls = 0
    for row in rows:
        conversation = read(row)
        system = 1 if row.get("system") else 0
        assert len(conversation.messages) == len(row["conversations"]) + system
        for turn, message in zip(row["conversations"], conversation.messages[system:], strict=True):
            if turn["from"] == "function_call":
                made = json.loads(turn["value"])
                assert [call["function"] for call in message["tool_calls"]] == (
                    made if isinstance(made, list) else [made]
                )
                calls += len(message["tool_calls"])
            else:
                assert message["content"] == turn["value"]
        tools = json.loads(row["tools"]) if row["tools"] else []
        assert [tool["function"] for tool in conversation.tools or []] == tools
    assert calls > 80

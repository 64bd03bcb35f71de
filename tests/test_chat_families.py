"""The real templates of model families: text and ids as transformers has them, masks as built by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from apis.errors import DataInvalid
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import tokenize_dataset
from post_training.data.types import Conversation, Message
from tests.chat_families import GLM, REAL, Family, build, real
from tests.shared_data import shared_rows

SYSTEM = {"role": "system", "content": "Answer in one word, <b>please</b> & thanks."}
FIRST = {"role": "user", "content": "What is the capital of France? 茶 ☃"}
SECOND = {"role": "user", "content": "And of Switzerland?"}
ANSWERS = ["Paris, naturally: Zürich is elsewhere.", "Bern, not Zürich."]
ONE = [FIRST, {"role": "assistant", "content": ANSWERS[0]}]
TWO = [*ONE, SECOND, {"role": "assistant", "content": ANSWERS[1]}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now, in <°C> & more",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
TOOL_TALK = [
    FIRST,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 °C", "tool_call_id": "call00000"},
    {"role": "assistant", "content": ANSWERS[1]},
]
# What a family writes of an answer before its content, and what ends the last answer where that is another token.
LEADS = {
    "qwen3": "<think>\n\n</think>\n\n",
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
}
LAST_ENDS = {"phi3": "<|end|>\n<|endoftext|>", "phi3_5": "<|end|>\n<|endoftext|>", "glm4moe": ""}
# Their templates write an answer otherwise once messages follow, so its tokens there are not what a model would say.
ONE_ANSWER_ONLY = {"qwen3", "gptoss"}
# Its generation prompt opens a thought that no answer in its history has.
NEVER = {"deepseekv3"}
LEARNT = sorted(REAL.keys() - NEVER)


@dataclass(frozen=True)
class Model:
    family: Family
    ours: ChatTokenizer
    theirs: Any


@cache
def _built(family: Family) -> Model:
    folder = build(family, Path(mkdtemp()))
    return Model(family, ChatTokenizer.from_dir(folder, now=datetime.now()), AutoTokenizer.from_pretrained(folder))


def model(name: str) -> Model:
    return _built(real(name))


def talks(family: Family) -> list[list[Message]]:
    plain = [ONE, TWO, TWO[:3]]
    return [*plain, *([SYSTEM, *talk] for talk in plain if family.system)]


def mask_by_hand(theirs: Any, text: str, spans: list[tuple[int, int]]) -> list[float]:
    """1 for each token with a character inside a span, found token by token."""
    encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    return [
        float(any(begin < end_of_span and max(end, begin + 1) > start for start, end_of_span in spans))
        for begin, end in encoded["offset_mapping"]
    ]


def expected_spans(family: Family, text: str, answers: list[str], following: str) -> list[tuple[int, int]]:
    """Where each answer stands in the text, with the family's lead and end of turn."""
    spans = []
    for number, answer in enumerate(answers):
        last = number + 1 == len(answers)
        end_of_turn = LAST_ENDS.get(family.name, family.end_of_turn) if last else following
        whole = LEADS.get(family.name, "") + answer + end_of_turn
        assert text.count(whole) == 1, (whole, text)
        start = text.index(whole)
        spans.append((start, start + len(whole)))
    return spans


@pytest.mark.parametrize("name", sorted(REAL))
@pytest.mark.parametrize("generation", [False, True])
def test_text_and_ids_equal_transformers(name: str, generation: bool):
    found = model(name)
    for messages in talks(found.family):
        if generation:
            messages = messages[: -1 if messages[-1]["role"] == "assistant" else None]
        text = found.theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        ids = found.theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=generation)
        assert found.ours.render(messages, add_generation_prompt=generation) == text
        assert found.ours._encode(text).ids == ids


@pytest.mark.parametrize("name", LEARNT)
def test_the_mask_is_the_one_built_by_hand(name: str):
    found = model(name)
    for talk in [ONE, *([] if name in ONE_ANSWER_ONLY else [TWO])]:
        answers = ANSWERS[: len(talk) // 2]
        text = found.theirs.apply_chat_template(talk, tokenize=False)
        row = found.ours.encode_example(Conversation(0, talk))
        spans = expected_spans(found.family, text, answers, found.family.end_of_turn)
        expected = mask_by_hand(found.theirs, text, spans)
        if name == "glm4moe":  # nothing closes its last answer
            expected.append(1.0)
            assert row.tokens[-1] == found.theirs.eos_token_id
        assert row.weights.tolist() == expected
        assert 0 < row.supervised < len(row.tokens)


@pytest.mark.parametrize("name", LEARNT)
def test_the_last_supervised_token_of_each_answer_is_a_stop_token(name: str):
    found = model(name)
    talk = ONE if name in ONE_ANSWER_ONLY else TWO
    row = found.ours.encode_example(Conversation(0, talk))
    following = np.append(row.weights[1:], 0)
    ends = np.flatnonzero((row.weights == 1) & (following == 0))
    assert len(ends) == len(talk) // 2
    assert {int(token) for token in row.tokens[ends]} <= found.ours.stop_ids


@pytest.mark.parametrize("name", LEARNT)
def test_only_tokens_that_end_a_turn_stop_generation(name: str):
    found = model(name)
    eos = {found.family.eos, found.family.end_of_turn, *found.family.eos_tokens}
    assert found.ours.stop_ids == set(found.theirs.convert_tokens_to_ids(sorted(eos)))


@pytest.mark.parametrize("name", LEARNT)
def test_there_is_exactly_one_bos(name: str):
    found = model(name)
    ids = found.ours.encode_example(Conversation(0, ONE)).tokens.tolist()
    writes_bos = "bos_token" in found.family.template
    assert ids.count(found.theirs.bos_token_id) == (1 if writes_bos else 0)


@pytest.mark.parametrize("name", sorted(ONE_ANSWER_ONLY | NEVER))
def test_an_answer_that_the_template_changes_is_refused_with_both_renderings(name: str):
    with pytest.raises(DataInvalid, match=r"row 6, /messages/1: .*alone ….*, in the whole …") as caught:
        model(name).ours.encode_example(Conversation(6, TWO))
    assert (caught.value.row, caught.value.pointer) == (6, "/messages/1")


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507", "glm4moe"])
def test_tools_calls_and_results_equal_transformers_and_only_the_answers_carry_loss(name: str):
    found = model(name)
    text = found.theirs.apply_chat_template(TOOL_TALK, tools=[TOOL], tokenize=False)
    assert found.ours.render(TOOL_TALK, [TOOL]) == text
    row = found.ours.encode_example(Conversation(0, TOOL_TALK, [TOOL]))
    runs = [run["text"] for run in found.ours.segments(row, 10**9) if run["supervised"]]
    assert len(runs) == 2
    assert "get_weather" in runs[0]
    assert "Zürich" in runs[0]
    assert "21 °C" not in "".join(runs)
    assert runs[1].endswith(ANSWERS[1] + (found.family.eos if name == "glm4moe" else found.family.end_of_turn))
    if name == "glm4moe":
        assert runs[0].endswith("<|observation|>")


def test_real_tool_conversations_are_learnt_turn_by_turn():
    found = model("qwen2_5")
    rows = shared_rows("glaive_toolcall_en_demo.jsonl")
    data = tokenize_dataset(rows, found.ours, None, train_on_input=False, max_seq_len=10**6, on_overlength="error")
    assert (data.report["format"], data.report["rows"], data.report["dropped"]["count"]) == ("sharegpt", len(rows), 0)
    for row, source in zip(data.rows, rows, strict=True):
        runs = [run["text"] for run in found.ours.segments(row, 10**9) if run["supervised"]]
        turns = [turn for turn in source["conversations"] if turn["from"] in ("gpt", "function_call")]
        assert len(runs) == len(turns)
        for run, turn in zip(runs, turns, strict=True):
            assert run.endswith("<|im_end|>")
            if turn["from"] == "gpt":
                assert run == turn["value"] + "<|im_end|>"
            else:
                assert json.loads(turn["value"])["name"] in run
        text = found.ours.decode(row.tokens.tolist(), False)
        assert all(tool["name"] in text for tool in json.loads(source["tools"] or "[]"))


def test_a_thought_of_the_last_answer_is_learnt():
    found = model("qwen3")
    talk = [FIRST, {"role": "assistant", "content": ANSWERS[0], "reasoning_content": "France, so Paris."}]
    row = found.ours.encode_example(Conversation(0, talk))
    (run,) = [run["text"] for run in found.ours.segments(row, 10**9) if run["supervised"]]
    assert run == "<think>\nFrance, so Paris.\n</think>\n\n" + ANSWERS[0] + "<|im_end|>"


def test_a_message_of_a_role_that_the_template_leaves_out_is_refused():
    # Even where its short text stands elsewhere by chance.
    talk = [FIRST, ONE[1], {"role": "tool", "content": "a"}, SECOND, TWO[3]]
    with pytest.raises(DataInvalid, match=r"row 0: .* drops message 2, of role 'tool'"):
        model("phi3").ours.encode_example(Conversation(0, talk))


def calling(content: str | None, *cities: str) -> Message:
    function = CALL["function"]
    calls = [{**CALL, "function": {**function, "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": content or "", "tool_calls": calls}


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_call_that_the_template_leaves_out_is_refused_also_where_its_name_stands_elsewhere(tools: Any):
    """gpt-oss writes only the first call of a message."""
    ours = model("gptoss").ours
    one, two = [FIRST, calling(None, "Paris")], [FIRST, calling(None, "Paris", "Rome")]
    assert ours.encode_example(Conversation(0, one, tools)).supervised > 0
    with pytest.raises(DataInvalid, match=r"row 1: .* drops the call of 'get_weather' in message 1"):
        ours.encode_example(Conversation(1, two, tools))
    assert model("qwen2_5").ours.encode_example(Conversation(1, two, tools)).supervised > 0


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
@pytest.mark.parametrize("content", ["Look it up.", FIRST["content"]])
def test_text_beside_calls_that_the_template_leaves_out_is_refused_with_its_own_remedy(name: str, content: str):
    """Also where the same text stands elsewhere, here in the question."""
    with pytest.raises(DataInvalid, match=r"drops the text of message 1, which has calls: leave it out, or"):
        model(name).ours.encode_example(Conversation(0, [FIRST, calling(content, "Paris")], [TOOL]))


def test_a_template_that_leaves_calls_out_is_found_though_it_lists_the_tools(tmp_path: Path):
    listing = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{# tool_calls #}"
    family = Family("listing", listing + GLM, ("<|user|>", "<|assistant|>"), "", "<|user|>")
    tokenizer = ChatTokenizer.from_dir(build(family, tmp_path))
    assert tokenizer.encode_example(Conversation(0, ONE, [TOOL])).supervised > 0
    with pytest.raises(DataInvalid, match="drops the call of 'get_weather' in message 1: give it as content"):
        tokenizer.encode_example(Conversation(0, [FIRST, calling("Hm.", "Paris")], [TOOL]))


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2"])
def test_a_conversation_that_begins_with_the_assistant_is_refused_with_the_remedy(name: str, request: Any):
    ours = ChatTokenizer.from_dir(request.getfixturevalue(name)) if name == "smollm2" else model(name).ours
    talk = [{"role": "assistant", "content": "Hello."}, *ONE]
    with pytest.raises(DataInvalid, match=r"row 4.*begins with the assistant.* or give it weight 0"):
        ours.encode_example(Conversation(4, talk))
    kept = ours.encode_example(Conversation(4, [{**talk[0], "weight": 0}, *ONE]))
    runs = [run["text"] for run in ours.segments(kept, 10**9) if run["supervised"]]
    assert runs == [ANSWERS[0] + "<|im_end|>"]


def test_tools_that_the_template_never_writes_are_refused(tmp_path: Path):
    family = Family("silent", "{% if tools %}{% endif %}" + GLM, ("<|user|>", "<|assistant|>"), "", "")
    tokenizer = ChatTokenizer.from_dir(build(Family(**{**vars(family), "eos": "<|user|>"}), tmp_path))
    with pytest.raises(DataInvalid, match="drops the tool 'get_weather'"):
        tokenizer.encode_example(Conversation(0, ONE, [TOOL]))


def glm(folder: Path) -> ChatTokenizer:
    control = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    family = Family("glm", GLM, control, "<|user|>", "<|endoftext|>")
    return ChatTokenizer.from_dir(build(family, folder))


def test_the_mark_of_the_next_speaker_ends_an_answer_and_eos_the_last_one(tmp_path: Path):
    tokenizer = glm(tmp_path)
    row = tokenizer.encode_example(Conversation(0, TWO))
    runs = [run["text"] for run in tokenizer.segments(row, 10**9) if run["supervised"]]
    assert runs == [f"\n{ANSWERS[0]}<|user|>", f"\n{ANSWERS[1]}<|endoftext|>"]
    assert len(tokenizer.stop_ids) == 2
    muted = tokenizer.encode_example(Conversation(0, [*TWO[:3], {**TWO[3], "weight": 0}]))
    assert [run["text"] for run in tokenizer.segments(muted, 10**9) if run["supervised"]] == runs[:1]


def test_a_last_answer_without_an_end_gets_one_also_when_all_is_learnt(tmp_path: Path):
    tokenizer = glm(tmp_path)
    row = tokenizer.encode_example(Conversation(0, TWO), train_on_input=True)
    assert row.weights.tolist() == [0.0] + [1.0] * (len(row.tokens) - 1)
    assert tokenizer.decode(row.tokens.tolist(), False).endswith(f"{ANSWERS[1]}<|endoftext|>")
    open_question = tokenizer.encode_example(Conversation(0, TWO[:3]))
    assert tokenizer.decode(open_question.tokens.tolist(), False).endswith(SECOND["content"])


def test_the_real_models_template_masks_its_answers(smollm2: Path):
    ours, theirs = ChatTokenizer.from_dir(smollm2), AutoTokenizer.from_pretrained(smollm2)
    for talk in (ONE, TWO, [SYSTEM, *TWO]):
        text = theirs.apply_chat_template(talk, tokenize=False)
        row = ours.encode_example(Conversation(0, talk))
        assert row.tokens.tolist() == theirs.apply_chat_template(talk, return_dict=False)
        spans = []
        for message in talk:
            if message["role"] == "assistant":
                start = text.index(message["content"])
                spans.append((start, start + len(message["content"] + "<|im_end|>")))
        assert row.weights.tolist() == mask_by_hand(theirs, text, spans)
    assert json.loads((smollm2 / "config.json").read_bytes())["eos_token_id"] in ours.stop_ids

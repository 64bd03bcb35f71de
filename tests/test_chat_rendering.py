"""Chat rendering against transformers, and which tokens carry loss."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from apis.errors import DataInvalid, InvalidField, ModelInvalid
from post_training.data.chat import ChatTokenizer, truncate
from post_training.data.preflight import tokenize_dataset
from post_training.data.types import Conversation, Message, TokenizedRow
from tests.chat_families import FAMILIES, Family, build

BY_NAME = {family.name: family for family in FAMILIES}
SYSTEM = {"role": "system", "content": "Answer in one word, <b>please</b> & thanks."}
USER = {"role": "user", "content": "What is the capital of France? 茶 ☃"}
ANSWER = {"role": "assistant", "content": "Paris, naturally: Zürich is elsewhere."}
SHORT = {"role": "assistant", "content": "Paris"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now, in <°C> & more",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
TOOL_TALK = [
    USER,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 °C"},
    ANSWER,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family.name: build(family, tmp_path_factory.mktemp(family.name)) for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.from_dir(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


def conversations(family: Family) -> list[list[Message]]:
    plain = [[USER], [USER, ANSWER], [USER, ANSWER, USER], [USER, SHORT, USER, ANSWER]]
    return [*plain, *([SYSTEM, *talk] for talk in plain if family.system)]


def row(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(7, messages, tools)


def supervised_text(tokenizer: ChatTokenizer, encoded: TokenizedRow) -> list[str]:
    return [run["text"] for run in tokenizer.segments(encoded, 10**9) if run["supervised"]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("generation", [False, True])
def test_text_and_ids_equal_transformers(
    family: Family, generation: bool, tokenizers: dict[str, ChatTokenizer], references: dict[str, Any]
):
    ours, theirs = tokenizers[family.name], references[family.name]
    for messages in conversations(family):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        ids = theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=generation)
        assert ours.render(messages, add_generation_prompt=generation) == text
        encoded = ours.encode_prompt(messages) if generation else ours.encode_example(row(messages)).tokens.tolist()
        assert encoded == ids


@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_tools_and_tool_calls_equal_transformers(
    name: str, tokenizers: dict[str, ChatTokenizer], references: dict[str, Any]
):
    ours, theirs = tokenizers[name], references[name]
    for messages in (TOOL_TALK, [SYSTEM, *TOOL_TALK], TOOL_TALK[:3]):
        text = theirs.apply_chat_template(messages, tools=[TOOL], tokenize=False)
        assert ours.render(messages, [TOOL]) == text
        assert "get_weather" in text
        ids = theirs.apply_chat_template(messages, tools=[TOOL], return_dict=False, add_generation_prompt=True)
        assert ours.encode_prompt(messages, [TOOL]) == ids


def test_tool_arguments_as_json_text_render_as_an_object(tokenizers: dict[str, ChatTokenizer]):
    as_text = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [as_text]}]
    assert tokenizers["qwen"].render(talk, [TOOL]) == tokenizers["qwen"].render(TOOL_TALK[:2], [TOOL])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_the_answers_and_their_end_of_turn_carry_loss(family: Family, tokenizers: dict[str, ChatTokenizer]):
    tokenizer = tokenizers[family.name]
    answers = supervised_text(tokenizer, tokenizer.encode_example(row([USER, SHORT, USER, ANSWER])))
    assert len(answers) == 2
    # Phi-3 closes the whole with EOS, too.
    closing = family.eos if family.name == "phi3" else ""
    assert answers[0] == family.lead + SHORT["content"] + family.end_of_turn
    assert answers[1] == family.lead + ANSWER["content"] + family.end_of_turn + closing


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_answer_ends_in_a_stop_token(family: Family, tokenizers: dict[str, ChatTokenizer]):
    tokenizer = tokenizers[family.name]
    encoded = tokenizer.encode_example(row([USER, SHORT, USER, ANSWER]))
    ends = np.flatnonzero((encoded.weights[:-1] == 1) & (encoded.weights[1:] == 0)).tolist()
    ends += [len(encoded.tokens) - 1] if encoded.weights[-1] else []
    assert len(ends) == 2
    assert all(int(encoded.tokens[end]) in tokenizer.stop_ids for end in ends)


def test_tool_calls_carry_loss_and_tool_results_do_not(tokenizers: dict[str, ChatTokenizer]):
    encoded = tokenizers["qwen"].encode_example(row(TOOL_TALK, [TOOL]))
    assert supervised_text(tokenizers["qwen"], encoded) == [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>',
        ANSWER["content"] + "<|im_end|>",
    ]


def test_a_space_before_the_answer_is_the_prompts_and_one_in_it_the_answers(tmp_path: Path, folders: dict[str, Path]):
    # Byte-level post-processors trim spaces off the offsets, which moves a lone space into the answer.
    source = "{% for m in messages %}{% if m.role == 'assistant' %}A: {% endif %}{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}A: {% endif %}"
    tokenizer = ChatTokenizer.from_dir(_with_template(folders["chatml"], tmp_path, source))
    encoded = tokenizer.encode_example(row([USER, {"role": "assistant", "content": " fox"}]))
    assert supervised_text(tokenizer, encoded) == [" fox<|im_end|>"]
    indented = tokenizer.encode_example(row([USER, {"role": "assistant", "content": "  fox"}]))
    assert supervised_text(tokenizer, indented)[0].endswith("  fox<|im_end|>")


def test_a_header_that_swallows_the_answers_white_space_carries_no_loss(tokenizers: dict[str, ChatTokenizer]):
    encoded = tokenizers["phi3"].encode_example(row([USER, {"role": "assistant", "content": "\n fox"}]))
    assert supervised_text(tokenizers["phi3"], encoded) == ["fox<|end|><|endoftext|>"]


def test_a_token_in_which_prompt_and_answer_merge_carries_loss(tmp_path: Path, folders: dict[str, Path]):
    folder = _with_template(folders["chatml"], tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = ChatTokenizer.from_dir(folder)
    talk = [{"role": "user", "content": "The th"}, {"role": "assistant", "content": "e fox"}]
    encoded = tokenizer.encode_example(row(talk))
    assert [tokenizer.decode([int(token)], False) for token in encoded.tokens] == [
        *("The", " the", " fo", "x"),
        "<|im_end|>",
    ]
    assert encoded.weights.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_there_is_exactly_one_bos(family: Family, tokenizers: dict[str, ChatTokenizer], references: dict[str, Any]):
    tokenizer = tokenizers[family.name]
    bos = references[family.name].bos_token_id
    ids = tokenizer.encode_text("The dog")
    assert ids == references[family.name].encode("The dog")
    if bos is None:
        return
    assert ids.count(bos) == 1
    assert tokenizer.encode_text(f"{family.bos}The dog").count(bos) == 1
    if "bos_token" in family.template:
        assert tokenizer.encode_prompt([USER]).count(bos) == 1


def test_an_answer_of_weight_0_carries_no_loss(tokenizers: dict[str, ChatTokenizer]):
    tokenizer = tokenizers["chatml"]
    talk = [USER, {**SHORT, "weight": 0}, USER, {**ANSWER, "weight": 1}]
    weighted = tokenizer.encode_example(row(talk))
    assert supervised_text(tokenizer, weighted) == [ANSWER["content"] + "<|im_end|>"]
    plain = tokenizer.encode_example(row([USER, SHORT, USER, ANSWER]))
    assert weighted.tokens.tolist() == plain.tokens.tolist()
    assert tokenizer.encode_example(row(talk[:2])).supervised == 0


def test_a_weight_and_nulls_never_reach_the_template(tmp_path: Path, folders: dict[str, Path]):
    source = "{% for m in messages %}{{ m.weight is defined }} {{ m.name is defined }} {{ m.content }}{% endfor %}"
    tokenizer = ChatTokenizer.from_dir(_with_template(folders["chatml"], tmp_path, source))
    assert tokenizer.render([{**SHORT, "weight": 1, "name": None}]) == "False False Paris"


def test_train_on_input_gives_all_tokens_loss_but_the_first_and_messages_of_weight_0(
    tokenizers: dict[str, ChatTokenizer],
):
    tokenizer = tokenizers["llama3"]
    everything = tokenizer.encode_example(row([USER, SHORT, USER, ANSWER]), train_on_input=True)
    assert everything.weights.tolist() == [0.0] + [1.0] * (len(everything.tokens) - 1)
    muted = tokenizer.encode_example(row([USER, {**SHORT, "weight": 0}, USER, ANSWER]), train_on_input=True)
    unsupervised = [run["text"] for run in tokenizer.segments(muted, 10**9) if not run["supervised"]]
    assert unsupervised == ["<|begin_of_text|>", "Paris<|eot_id|>"]


def test_an_answer_that_changes_when_messages_follow_is_refused_unless_its_weight_is_0(
    tmp_path: Path, folders: dict[str, Path]
):
    # As Qwen3 does: an empty thought before the last answer only.
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = ChatTokenizer.from_dir(_with_template(folders["chatml"], tmp_path, source))
    with pytest.raises(DataInvalid) as caught:
        tokenizer.encode_example(row([USER, SHORT, USER, ANSWER]))
    assert (caught.value.row, caught.value.pointer) == (7, "/messages/1")
    assert "assistant\\n<think></think>Paris" in caught.value.message
    assert "give it weight 0" in caught.value.message
    encoded = tokenizer.encode_example(row([USER, {**SHORT, "weight": 0}, USER, ANSWER]))
    assert supervised_text(tokenizer, encoded) == ["<think></think>" + ANSWER["content"] + "<|im_end|>"]


def test_a_system_message_that_goes_missing_once_the_answer_is_there_is_refused(tokenizers: dict[str, ChatTokenizer]):
    # Training would see no system message where inference shows one.
    with pytest.raises(DataInvalid, match="put its text into the user message"):
        tokenizers["mistral-late-system"].encode_example(row([SYSTEM, USER, ANSWER]))


def test_a_conversation_the_template_refuses_names_the_row_and_its_reason(tokenizers: dict[str, ChatTokenizer]):
    for name, talk, reason in (
        ("gemma", [SYSTEM, USER, ANSWER], "System role not supported"),
        ("gemma", [USER, USER, ANSWER], "roles must alternate"),
        ("mistral", [ANSWER, USER], "must alternate"),
        ("llama3", [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}], "one tool call at a time"),
        ("gemma", [USER, {"role": "assistant", "tool_calls": [CALL]}], "drops tool_calls"),
    ):
        with pytest.raises(DataInvalid) as caught:
            tokenizers[name].encode_example(row(talk))
        assert caught.value.row == 7
        assert reason in caught.value.message
    with pytest.raises(DataInvalid, match="row 7: the model's chat template takes no tools"):
        tokenizers["chatml"].encode_example(row([USER, ANSWER], [TOOL]))
    with pytest.raises(InvalidField, match="System role not supported"):
        tokenizers["gemma"].encode_prompt([SYSTEM, USER])
    with pytest.raises(InvalidField, match="unpaired surrogate"):
        tokenizers["chatml"].encode_prompt([{"role": "user", "content": "\ud800"}])


def test_the_date_in_a_template_can_be_fixed(folders: dict[str, Path]):
    tokenizer = ChatTokenizer.from_dir(folders["llama3"], now=datetime(2024, 2, 29))
    assert "Today Date: 29 Feb 2024" in tokenizer.render([USER])


def test_a_template_cannot_reach_python(tmp_path: Path, folders: dict[str, Path]):
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set x = namespace() %}{% set x.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
    ):
        tokenizer = ChatTokenizer.from_dir(_with_template(folders["chatml"], tmp_path, source))
        with pytest.raises(InvalidField, match="template refuses"):
            tokenizer.render([USER])


def test_templates_are_found_where_models_keep_them(tmp_path: Path, folders: dict[str, Path], references: Any):
    folder = _with_template(folders["chatml"], tmp_path, None)
    assert not ChatTokenizer.from_dir(folder).has_template
    with pytest.raises(ModelInvalid, match=r"add chat_template\.jinja"):
        ChatTokenizer.from_dir(folder).render([USER])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    for tools, text in ((None, "plain"), ([TOOL], "with tools")):
        assert ChatTokenizer.from_dir(folder).render([USER], tools) == text
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template([USER], tools=tools, tokenize=False) == text
    (folder / "chat_template.jinja").write_text("{{ eos_token }} from a file")
    assert ChatTokenizer.from_dir(folder).render([USER]) == "<|im_end|> from a file"
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelInvalid, match="not valid jinja"):
        ChatTokenizer.from_dir(folder)


def test_a_broken_tokenizer_directory_is_named_without_its_path(tmp_path: Path, folders: dict[str, Path]):
    with pytest.raises(ModelInvalid, match=r"has no tokenizer\.json") as caught:
        ChatTokenizer.from_dir(tmp_path)
    assert str(tmp_path) not in caught.value.message
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelInvalid, match="cannot be read") as caught:
        ChatTokenizer.from_dir(tmp_path)
    assert str(tmp_path) not in caught.value.message


def test_stop_ids_come_from_the_configs_the_eos_token_and_the_template(tmp_path: Path, folders: dict[str, Path]):
    folder = _with_template(folders["gemma"], tmp_path, BY_NAME["gemma"].template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos, end_of_turn = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    assert ChatTokenizer.from_dir(folder).stop_ids == {eos, end_of_turn}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    assert ChatTokenizer.from_dir(folder).stop_ids == {eos, end_of_turn, 1, 2, 3}
    assert ChatTokenizer.from_dir(folder).vocab_size == len(tokenizer)


texts = st.text(st.sampled_from("abcdeThquick ,.?!{}\n\"'茶☃°ü0123"), min_size=1, max_size=30)


@st.composite
def talks(draw: st.DrawFn) -> tuple[Family, list[Message]]:
    family = draw(st.sampled_from(FAMILIES))
    pairs = draw(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
    talk: list[Message] = []
    for question, answer in pairs:
        talk += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return family, talk


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(talks(), st.integers(1, 200))
def test_supervised_tokens_are_the_answers_and_what_truncation_left_of_them(
    tokenizers: dict[str, ChatTokenizer], drawn: tuple[Family, list[Message]], max_seq_len: int
):
    family, talk = drawn
    tokenizer = tokenizers[family.name]
    answers = [message["content"] for message in talk if message["role"] == "assistant"]
    if family.trims:
        answers = [answer.strip() for answer in answers]
        assume(all(answers))
    # A line break at the start of an answer may merge with the header's, or belong to a token that swallows space.
    assume(not any(answer[0].isspace() if family.rstrip else answer[0] == "\n" for answer in answers))
    encoded = tokenizer.encode_example(row(talk))
    kept = encoded.tokens[encoded.weights == 1].tolist()
    expected = "".join(family.lead + answer + family.end_of_turn for answer in answers)
    text = tokenizer.decode(kept, skip_special_tokens=False)
    if family.name == "phi3":  # it closes the whole with EOS, too
        expected += family.eos
    assert text == expected
    short = truncate(encoded, max_seq_len)
    assert len(short.tokens) == min(max_seq_len, len(encoded.tokens))
    assert short.weights.tolist() == encoded.weights[:max_seq_len].tolist()


def _rows(*answers: str, prompt: str = "a") -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": answer} for answer in answers]


def test_a_data_set_is_tokenized_with_a_report_of_what_happened(tokenizers: dict[str, ChatTokenizer]):
    tokenizer = tokenizers["chatml"]
    header = len(tokenizer.encode_prompt([{"role": "user", "content": "a"}]))
    rows = [*_rows("b", "b b b b b b b b"), *_rows("b", prompt="c " * 200), *_rows("b")]
    dataset = tokenize_dataset(rows, tokenizer, None, train_on_input=False, max_seq_len=header + 4)
    assert [kept.row for kept in dataset.rows] == [0, 1, 3]
    assert [len(kept.tokens) for kept in dataset.rows] == [header + 3, header + 4, header + 3]
    sample = dataset.report.pop("sample")
    assert [run["supervised"] for run in sample] == [False, True, False]
    assert sample[1]["text"] == "b<|im_end|>"
    assert dataset.report == {
        "rows": 4,
        "format": "prompt_completion",
        "tokens": 3 * header + 10,
        "supervised_tokens": 2 + 4 + 2,
        "longest_row_tokens": dataset.report["longest_row_tokens"],
        "truncated": {"count": 2, "first_rows": [1, 2]},
        "dropped": {
            "count": 1,
            "first_rows": [2],
            "overlength": {"count": 0, "first_rows": []},
            "unsupervised": {"count": 1, "first_rows": [2]},
        },
        "control_tokens": {"count": 0, "first_rows": []},
    }
    assert dataset.report["longest_row_tokens"] > 200


def test_a_data_set_without_a_supervised_token_is_refused(tokenizers: dict[str, ChatTokenizer]):
    with pytest.raises(DataInvalid, match="no supervised token: none of the 2 rows"):
        tokenize_dataset(_rows("b", "c"), tokenizers["chatml"], None, train_on_input=False, max_seq_len=8)


def test_a_token_that_the_model_has_no_embedding_for_is_refused_with_its_row(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["chatml"], tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    rows = _rows("b", "b", "b")
    rows[2]["completion"] = "b <|extra|>"
    as_text = tokenize_dataset(rows, ChatTokenizer.from_dir(folder), None, False, 64)
    assert len(as_text.rows) == 3
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    grown = ChatTokenizer.from_dir(folder)
    with pytest.raises(DataInvalid, match=rf"row 2: .*'<\|extra\|>', number {size}, but the model knows {size} "):
        tokenize_dataset(rows, grown, None, False, 64)
    assert len(tokenize_dataset(rows[:2], grown, None, False, 64).rows) == 2
    with pytest.raises(InvalidField, match="resize its embeddings"):
        grown.encode_prompt([{"role": "user", "content": "<|extra|>"}])


@pytest.mark.parametrize(
    ("faults", "first"),
    [
        ({5: "\ud800", 300: None}, "row 5: the text holds an unpaired surrogate"),
        ({255: "\ud800", 256: None}, "row 255: the text holds an unpaired surrogate"),
        ({5: None, 300: "\ud800"}, "row 5, /completion"),
        ({256: None, 300: "\ud800"}, "row 256, /completion"),
    ],
)
def test_of_two_faulty_rows_the_first_is_named_whatever_its_fault(
    tokenizers: dict[str, ChatTokenizer], faults: dict[int, Any], first: str
):
    """Rows are rendered ahead of the tokenizer, which meets what is no text only later."""
    rows: list[dict[str, Any]] = _rows(*["b"] * 600)
    for number, answer in faults.items():
        rows[number]["completion"] = answer
    with pytest.raises(DataInvalid) as caught:
        tokenize_dataset(rows, tokenizers["chatml"], None, train_on_input=False, max_seq_len=64)
    assert first in caught.value.message
    assert caught.value.row == min(faults)


@cache
def _files(folder: Path) -> tuple[tuple[str, bytes], ...]:
    return tuple((path.name, path.read_bytes()) for path in folder.iterdir() if path.name != "chat_template.jinja")


def _with_template(folder: Path, copy: Path, template: str | None) -> Path:
    for name, content in _files(folder):
        (copy / name).write_bytes(content)
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    return copy

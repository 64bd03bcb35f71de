"""Chat templates in the shapes that model families use, each with a tiny tokenizer of that family's kind."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Order 4711 has not arrived yet. Please tell me where it is, or send my money back!",
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system tool weather in Zürich: 21 °C, snow ☃ and tea 茶\n\n",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
]

CHATML = """\
{% for message in messages %}\
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI.<|im_end|>\n' }}\
{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are Q.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
            or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message }}
{%- if tools is not none and tools %}
    {{- "\\n\\nYou may call these functions:" }}
    {%- for t in tools %}{{- "\\n\\n" + (t | tojson(indent=4)) }}{%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""

MISTRAL_LATE_SYSTEM = MISTRAL.replace("loop.first and", "loop.last and")

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

GEMMA3 = """\
{{ bos_token }}{% set given = messages %}{% set lead = '' %}\
{% if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] + '\n\n' %}{% set given = messages[1:] %}\
{% endif %}{% for message in given %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}\
{{ (lead if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

# Nothing ends an answer but the mark of whoever speaks next, and after the last answer nothing does.
GLM = """\
[GO]{% for message in messages %}{% if message.role == 'tool' %}<|observation|>{% else %}<|{{ message.role }}|>\
{% endif %}{{ '\n' + message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

PHI3 = """\
{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """One family: its template, control tokens, the token that ends an assistant's turn, and what it supports.

    Attributes:
        plain_tokens: added tokens that are no control tokens, such as `<think>`.
        eos_tokens: those that generation_config.json names.
    """

    name: str
    template: str
    control_tokens: tuple[str, ...]
    end_of_turn: str
    eos: str
    bos: str | None = None
    sentencepiece: bool = False
    system: bool = True
    tools: bool = False
    trims: bool = False
    rstrip: bool = False
    plain_tokens: tuple[str, ...] = ()
    eos_tokens: tuple[str, ...] = ()

    @property
    def lead(self) -> str:
        """What the template writes of an answer before its content."""
        return " " if self.name.startswith("mistral") else ""


FAMILIES = [
    Family("chatml", CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|im_end|>"),
    Family("qwen", QWEN, ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), "<|im_end|>", "<|im_end|>",
           tools=True),
    Family("llama3", LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
           "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>", tools=True, trims=True),
    Family("mistral", MISTRAL, ("<s>", "</s>"), "</s>", "</s>", "<s>", sentencepiece=True),
    Family("mistral-late-system", MISTRAL_LATE_SYSTEM, ("<s>", "</s>"), "</s>", "</s>", "<s>", sentencepiece=True,
           system=False),
    Family("gemma", GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<eos>", "<bos>",
           sentencepiece=True, system=False, trims=True),
    Family("gemma3", GEMMA3, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<eos>", "<bos>",
           sentencepiece=True, trims=True),
    Family("phi3", PHI3, ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>",
           "<|endoftext|>", "<s>", sentencepiece=True, rstrip=True),
]  # fmt: skip


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_PHI3_TOKENS = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_THOUGHT = ("<think>", "</think>", "<tool_call>", "</tool_call>")

REAL: dict[str, Family] = {
    family.name: family
    for family in [
        Family("llama3", "", _LLAMA3_TOKENS, "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>", trims=True),
        Family("llama3_1", "", _LLAMA3_TOKENS, "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>", tools=True, trims=True),
        Family("llama3_2", "", _LLAMA3_TOKENS, "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>", tools=True, trims=True),
        Family("qwen2_5", "", _CHATML_TOKENS, "<|im_end|>", "<|im_end|>", tools=True, plain_tokens=_THOUGHT[2:]),
        Family("qwen3", "", _CHATML_TOKENS, "<|im_end|>", "<|im_end|>", tools=True, plain_tokens=_THOUGHT),
        Family("qwen3_instruct_2507", "", _CHATML_TOKENS, "<|im_end|>", "<|im_end|>", tools=True,
               plain_tokens=_THOUGHT),
        Family("gemma", "", _GEMMA_TOKENS, "<end_of_turn>", "<eos>", "<bos>", sentencepiece=True, system=False,
               trims=True),
        Family("gemma3", "", _GEMMA_TOKENS, "<end_of_turn>", "<eos>", "<bos>", sentencepiece=True, trims=True),
        Family("phi3", "", _PHI3_TOKENS, "<|end|>", "<|endoftext|>", "<s>", sentencepiece=True, rstrip=True),
        Family("phi3_5", "", _PHI3_TOKENS, "<|end|>", "<|endoftext|>", "<s>", sentencepiece=True, rstrip=True),
        Family("glm4moe", "", ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>",
               "<|observation|>"), "<|user|>", "<|endoftext|>", tools=True, plain_tokens=_THOUGHT,
               eos_tokens=("<|endoftext|>", "<|user|>", "<|observation|>")),
        Family("gptoss", "", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>",
               "<|startoftext|>"), "<|return|>", "<|return|>", "<|startoftext|>", tools=True,
               eos_tokens=("<|return|>", "<|call|>")),
        Family("deepseekv3", "", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
               "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", plain_tokens=_THOUGHT[:2]),
    ]
}  # fmt: skip
"""Families whose real templates the wheel of trl carries; `real` puts the text in."""


def real(name: str) -> Family:
    """The family with its real template's text; skips the test where trl is not installed."""
    package = importlib.util.find_spec("trl")  # found, not imported
    if package is None or package.origin is None:
        pytest.skip("needs the templates in the wheel of trl: install 'postgrad[test]'")
    return replace(REAL[name], template=(Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text())


def build(family: Family, folder: Path) -> Path:
    """Train the family's tokenizer on a few sentences and save it, with the template, as a model directory."""
    tokenizer = _sentencepiece() if family.sentencepiece else _byte_level()
    # Phi-3's control tokens swallow the white space that follows them.
    control = [AddedToken(token, special=True, rstrip=family.rstrip) for token in family.control_tokens]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.plain_tokens])
    if family.bos:
        bos = tokenizer.token_to_id(family.bos)
        bos_first = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[(family.bos, bos)])
        byte_level = processors.ByteLevel(trim_offsets=True)
        tokenizer.post_processor = (
            bos_first if family.sentencepiece else processors.Sequence([byte_level, bos_first])  # pyright: ignore
        )
    names = {"eos_token": family.eos, "pad_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = family.template
    fast.save_pretrained(folder)
    if family.eos_tokens:
        ends = [tokenizer.token_to_id(token) for token in family.eos_tokens]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """BPE over text whose spaces are `▁`, unknown characters as bytes: what Llama 2, Mistral and Gemma have."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *(piece for piece, _ in learned)])}
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer

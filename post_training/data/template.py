"""A model's own chat template, rendered in jinja2's sandbox under the names that transformers gives templates."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from apis.errors import InvalidField, ModelInvalid
from post_training.data.types import Message

DEFAULT = "default"
TOOL_USE = "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Compiled templates of one model: a default one and, in some models, one for conversations with tools."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str], now: datetime | None = None) -> None:
        """`now` is the date that templates print; None: the date of each rendering."""
        self.sources = sources
        self._special_tokens = special_tokens
        environment = _environment(now)
        try:
            self._compiled = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ModelInvalid(f"the model's chat template is not valid jinja: {error.message}") from error

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> str:
        """The conversation as text. Null values and weights do not reach the template, JSON tool arguments are parsed.

        Raises:
            InvalidField: the template refuses the conversation, or would drop its tools or tool calls.
        """
        name = TOOL_USE if tools and TOOL_USE in self._compiled else DEFAULT
        if name not in self._compiled:
            raise InvalidField(f"the model has no chat template named 'default', only {sorted(self._compiled)}")
        self._check_tools(self.sources[name], messages, tools)
        try:
            return self._compiled[name].render(
                messages=[_template_message(message) for message in messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # Templates are programs: beside their own refusals, any fault of a small interpreter may come out.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidField(f"the model's chat template refuses it: {error}", param="messages") from error

    @staticmethod
    def _check_tools(source: str, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        if tools and not re.search(r"\btools\b", source):
            raise InvalidField("the model's chat template takes no tools; leave them out", param="tools")
        if "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            raise InvalidField("the model's chat template drops tool_calls; give them as content", param="messages")


def read_special_tokens(model_dir: Path) -> dict[str, str]:
    """Special tokens by name (`bos_token`, …). Raises ModelInvalid on broken JSON."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(model_dir / file)
        for name in _SPECIAL_TOKENS:
            token = content.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[name] = token
    return found


def read_template_sources(model_dir: Path) -> dict[str, str]:
    """Template texts by name; files come before tokenizer_config.json. Empty where the model has none."""
    found = {path.stem: path.read_text("utf-8") for path in (model_dir / "additional_chat_templates").glob("*.jinja")}
    main = model_dir / "chat_template.jinja"
    if main.is_file():
        return {**found, DEFAULT: main.read_text("utf-8")}
    configured = read_json(model_dir / "tokenizer_config.json").get("chat_template")
    if isinstance(configured, str):
        return {**found, DEFAULT: configured}
    if isinstance(configured, list):
        return {**{entry["name"]: entry["template"] for entry in configured}, **found}
    return {**(configured or {}), **found}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file. Raises ModelInvalid on anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelInvalid(f"the model's {path.name} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelInvalid(f"the model's {path.name} must hold a JSON object")
    return content


def _template_message(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if value is not None and key != "weight"}
    if "tool_calls" in kept:
        kept["tool_calls"] = [_with_parsed_arguments(call) for call in kept["tool_calls"]]
    return kept


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    # On the wire arguments are JSON text; templates write them with `tojson`, which would quote that a second time.
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; here it only opens a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PlainNamespace(Namespace):
    """A namespace that stores no underscore names, the way into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r}")


def _environment(now: datetime | None) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

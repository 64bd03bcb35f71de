"""docs/providers.md, out of the providers' own code: what each is, can do and may be told.

postgrad stack list-providers --markdown > docs/providers.md
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from apis.common import Api
from providers.registry import ALIASES
from providers.spec import ProviderSpec

_HEAD = """# Providers

Written by `make docs` from the code; a test holds this page to it. [writing-a-provider.md](writing-a-provider.md) says
how to add one. `postgrad stack list-providers` lists those of installed packages, too.
"""
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping"}
_ATTRIBUTE = re.compile(r"    (\w+(?:, \w+)*): (.*)")


def provider_page(specs: Sequence[ProviderSpec]) -> str:
    """The page, in Markdown. Imports every provider's configuration class."""
    apis = [api for api in Api if any(spec.api is api for spec in specs)]
    parts = [_HEAD, _overview(specs)]
    for api in apis:
        parts.append(f"## {api.value}\n")
        parts += [_section(spec) for spec in specs if spec.api is api]
    return "\n".join(parts)


def _overview(specs: Sequence[ProviderSpec]) -> str:
    rows = [(f"`{spec.api.value}`", f"`{spec.provider_type}`", _code_list(spec.capabilities)) for spec in specs]
    return _table(("API", "provider", "can"), rows)


def _section(spec: ProviderSpec) -> str:
    lines = [f"### {spec.provider_type}\n", f"{spec.description}.\n"]
    aliases = [name for (api, name), kind in ALIASES.items() if (api, kind) == (spec.api, spec.provider_type)]
    facts = {
        "Can": _code_list(spec.capabilities),
        "Models, by `model_type`": _code_list(spec.model_types),
        "Needs": _code_list(spec.pip_packages),
        "Needs a provider of": _code_list([api.value for api in spec.api_dependencies]),
        "Also called": _code_list(aliases),
    }
    lines += [f"* {name}: {value}" for name, value in facts.items() if value]
    config = _config_table(spec)
    return "\n".join([*lines, "", config])


def _config_table(spec: ProviderSpec) -> str:
    module, _, name = spec.config_class.rpartition(".")
    config: type[BaseModel] = getattr(importlib.import_module(module), name)
    # A field may come from a base, whose docstring says what it is.
    told: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        told |= _attributes(inspect.cleandoc(kind.__doc__ or ""))
    rows = [
        (
            f"`{field}`",
            _kind(info.annotation),
            _default(info),
            (told.get(field) or info.description or "").replace("|", "\\|"),
        )
        for field, info in config.model_fields.items()
    ]
    return _table(("config", "type", "default", "meaning"), rows)


def _attributes(doc: str) -> dict[str, str]:
    """What an `Attributes:` section says of each name; a line of several names says it of all."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in doc.partition("Attributes:\n")[2].splitlines():
        if match := _ATTRIBUTE.fullmatch(line):
            names = match.group(1).split(", ")
            found |= dict.fromkeys(names, match.group(2))
        else:
            found |= {name: f"{found[name]} {line.strip()}".rstrip() for name in names}
    return found


def _kind(annotation: Any) -> str:
    """A type in words; Python's own text for it differs between its versions."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _code_list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"

"""Environment variables in a run.yaml, in both syntaxes that Llama Stack has had.

    ${env.X}            the value of X; an error where X is unset or empty
    ${env.X:default}    the older form of the next line
    ${env.X:=default}   X, or `default` where X is unset or empty
    ${env.X:+value}     `value` where X is set and not empty, else nothing

Expressions nest (`${env.A:=${env.B:=c}}`) and mix with text (`http://${env.HOST:=localhost}:80`). A value that is one
expression and nothing else takes the type it reads as: true/false, integer, float; nothing becomes null. A number that
would be written otherwise (`007`, `1.10`, `1e5`) stays text, since it may be a version, an id or a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from apis.errors import EnvironmentUnset, RunConfigInvalid, StackError

DISABLED = "__disabled__"

_OPENING = "${env."
_HEAD = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+|-?[0-9](\.[0-9]+)?e[-+][0-9]+")


def parse_env_options(options: Iterable[str]) -> dict[str, str]:
    """Turn `K=V` strings of the command line into a mapping.

    Raises:
        StackError: one of them has no `=` or no name.
    """
    variables: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise StackError(f"--env takes NAME=VALUE, not {option!r}")
        variables[name.strip()] = value
    return variables


def substitute(value: Any, environ: Mapping[str, str], path: str = "") -> Any:
    """Return `value` (what a YAML document holds) with every expression replaced and `~` expanded.

    A list entry whose `provider_id` comes out as nothing or `__disabled__` is not looked into any further, so that the
    variables of a provider that is switched off need not be set; it becomes `{"provider_id": "__disabled__"}`.

    Args:
        path: dotted place of `value` in the document, for messages.

    Raises:
        EnvironmentUnset: a variable without a default is unset or empty.
        RunConfigInvalid: an expression that cannot be read.
    """
    if isinstance(value, Mapping):
        return {key: substitute(item, environ, _join(path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_list_entry(item, environ, _join(path, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return _string(value, environ, path)
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _list_entry(item: Any, environ: Mapping[str, str], path: str) -> Any:
    if isinstance(item, Mapping) and isinstance(item.get("provider_id"), str):
        provider_id = _string(item["provider_id"], environ, _join(path, "provider_id"))
        if provider_id in (None, "", DISABLED):
            return {"provider_id": DISABLED}
    return substitute(item, environ, path)


def _string(text: str, environ: Mapping[str, str], path: str) -> Any:
    if _OPENING not in text:
        return _expand_home(text, environ)
    result = _replace(text, environ, path)
    if result == "":
        return None
    whole = text.startswith(_OPENING) and _closing(text, 0, path) == len(text) - 1
    return _typed(result, environ) if whole else _expand_home(result, environ)


def _replace(text: str, environ: Mapping[str, str], path: str) -> str:
    start = text.find(_OPENING)
    if start < 0:
        return text
    end = _closing(text, start, path)
    value = _expression(text[start : end + 1], environ, path)
    return text[:start] + value + _replace(text[end + 1 :], environ, path)


def _closing(text: str, start: int, path: str) -> int:
    """Index of the brace that closes the expression opened at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text.startswith("${", index):
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    raise RunConfigInvalid(f"{path}: {text[start:]!r} lacks its closing brace")


def _expression(expression: str, environ: Mapping[str, str], path: str) -> str:
    head = _HEAD.match(expression)
    tail = "" if head is None else expression[head.end() : -1]
    if head is None or (tail and not tail.startswith(":")):
        raise RunConfigInvalid(
            f"{path}: {expression!r} is not ${{env.NAME}}, ${{env.NAME:=default}} or ${{env.NAME:+value}}"
        )
    name, value = head.group(1), environ.get(head.group(1), "")
    if tail.startswith(":+"):
        return _replace(tail[2:], environ, path) if value else ""
    if value:
        return value
    if not tail:
        raise EnvironmentUnset(
            f"{path} needs the environment variable {name}, which is unset or empty: set it, pass --env {name}=…, "
            f"or give it a default in the run.yaml with ${{env.{name}:=…}}",
            param=path,
        )
    return _replace(tail.removeprefix(":").removeprefix("="), environ, path)


def _typed(text: str, environ: Mapping[str, str]) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and str(float(text)) == text:
        return float(text)
    return _expand_home(text, environ)


def _expand_home(text: str, environ: Mapping[str, str]) -> str:
    if text != "~" and not text.startswith("~/"):
        return text
    return (environ.get("HOME") or os.path.expanduser("~")) + text[1:]

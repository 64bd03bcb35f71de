"""What a client calls the fields of the typed spec, so that faults name them as they were sent.

A dialect that puts a request into the spec says its words once; every fault found from then on is told in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Scope

Words = Mapping[str, str]
"""Dotted places in the spec, `*` for any one part, to the places that a client has for them. The longest that fits
counts, with all below it; where the client's place ends in a dot, what lies below has no place of its own there."""

_KEY = "dialect_words"
# An apostrophe within a word opens no quotation.
_QUOTED = re.compile(r"((?<!\w)'[^']*'(?!\w))")


def speak(scope: Scope, words: Words) -> None:
    """Have every later fault of this request told in `words`."""
    scope.setdefault("state", {})[_KEY] = words


def words_of(scope: Scope) -> Words:
    return scope.get("state", {}).get(_KEY, {})


def place_as_sent(place: Sequence[Any], words: Words) -> list[Any]:
    """A place in the spec, such as `("source", "uri")`, as the client knows it."""
    for spec in sorted(words, key=lambda name: name.count("."), reverse=True):
        parts = spec.split(".")
        if len(parts) > len(place) or not all(a in ("*", str(b)) for a, b in zip(parts, place, strict=False)):
            continue
        free = (b for a, b in zip(parts, place, strict=False) if a == "*")
        sent = [next(free) if part == "*" else part for part in words[spec].rstrip(".").split(".")]
        return sent if words[spec].endswith(".") else [*sent, *place[len(parts) :]]
    return list(place)


def param_as_sent(param: str | None, words: Words) -> str | None:
    return None if param is None else ".".join(map(str, place_as_sent(param.split("."), words)))


def text_as_sent(text: str, words: Words) -> str:
    """A message in which fields are called as the client calls them.

    Only what can be nothing but a field's name is looked for: with a dot, with an underscore, or in backticks. What is
    quoted is somebody's value and stays as it is.
    """
    parts = _QUOTED.split(text)
    parts[::2] = [_renamed(part, words) for part in parts[::2]]
    return "".join(parts)


def _renamed(text: str, words: Words) -> str:
    for spec in sorted(words, key=len, reverse=True):
        name, sent = spec.rpartition(".")[2], words[spec].rpartition(".")[2]
        if not sent:
            continue
        if "." in spec and "*" not in spec:
            text = re.sub(rf"(?<![\w.]){re.escape(spec)}(?!\w)", words[spec], text)
        text = text.replace(f"`{name}`", f"`{sent}`")
        if "_" in name and name != sent:
            text = re.sub(rf"(?<![\w.]){name}(?!\w)", sent, text)
    return text

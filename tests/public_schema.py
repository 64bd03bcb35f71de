"""The public schema as lines that read well in a diff: one for each operation, answer and field.

python -m tests.public_schema     writes tests/data/openapi.txt anew
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributions.openapi import operations
from distributions.resolver import plan
from distributions.run_config import load_run_config
from distributions.server import create_app
from distributions.stack import build_stack

SNAPSHOT = Path(__file__).parent / "data" / "openapi.txt"
TEMPLATE = "experimental-post-training"
_SHOWN = (
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
)


def document() -> dict[str, Any]:
    """The OpenAPI document of the template's server."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_run_config(TEMPLATE, {"POSTGRAD_HOME": f"{folder}/home"})
        stack = asyncio.run(build_stack(config, plan(config)))
        try:
            return create_app(stack).openapi()
        finally:
            stack.database.close()
            stack.lock.close()


def public_schema(found: dict[str, Any]) -> list[str]:
    """The lines of a document, in an order that does not depend on that of the routes."""
    lines = ["# Made by `python -m tests.public_schema`. A line that goes or changes may break a client."]
    for path, method, operation in sorted(operations(found), key=lambda item: item[:2]):
        lines += ["", f"{method.upper()} {path}" + (" (deprecated)" if operation.get("deprecated") else "")]
        lines += [f"    {line}" for line in _operation(operation)]
    for name, schema in sorted(found["components"]["schemas"].items()):
        lines += ["", f"schema {name}", *(f"    {line}" for line in _fields(schema))]
    return lines


def _operation(operation: dict[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", []):
        needed = "" if parameter.get("required") else ", optional"
        yield f"{parameter['in']} {parameter['name']}: {_type(parameter['schema'])}{needed}"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"body {kind}: {_type(content['schema'])}"
    errors = [status for status, answer in operation["responses"].items() if "$ref" in answer]
    for status, answer in sorted(operation["responses"].items()):
        if status not in errors:
            kinds = {kind: _type(content.get("schema", {})) for kind, content in answer.get("content", {}).items()}
            yield f"{status} " + (", ".join(f"{kind}: {what}" for kind, what in sorted(kinds.items())) or "nothing")
    yield "errors " + " ".join(sorted(errors))


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in sorted(schema.get("properties", {}).items()):
        yield f"{name}: {_type(field)}" + ("" if name in required else ", optional")
    if "properties" not in schema:
        yield _type(schema)
    if schema.get("additionalProperties") is False:
        yield "and no other field"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " | ".join(_type(part) for part in schema[several]) + _default(schema)
    if "const" in schema:
        return repr(schema["const"]) + _default(schema)
    if "enum" in schema:
        return "one of " + " ".join(map(str, schema["enum"])) + _default(schema)
    kind = schema.get("type", "anything")
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    elif kind == "object" and schema.get("properties"):
        kind = "{" + "; ".join(_fields(schema)) + "}"
    limits = "".join(f" {name}={schema[name]}" for name in _SHOWN if name in schema)
    return f"{kind}{limits}{' pattern' if 'pattern' in schema else ''}{_default(schema)}"


def _default(schema: dict[str, Any]) -> str:
    return f" = {schema['default']!r}" if schema.get("default") is not None else ""


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_schema(document())) + "\n", encoding="utf-8")
    print(f"{SNAPSHOT}: written")

"""A job request from command-line options: JSON first, then the single flags over it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from distributions.cli.local_rows import slug


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The JSON object that an option gives as text or as `@file`; {} for None.

    Raises:
        typer.BadParameter: no such file, no JSON, or no object.
    """
    if text is None:
        return {}
    if text.startswith("@"):
        text = _file_text(text[1:], option)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object, such as '{\"n_epochs\": 1}'", param_hint=option)
    return value


def _file_text(name: str, option: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise typer.BadParameter(f"cannot read {name!r}: {reason}", param_hint=option) from None


def set_fields(body: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Set dotted fields of `body`, making objects on the way; a None sets nothing."""
    for path, value in fields.items():
        if value is None:
            continue
        *parents, name = path.split(".")
        target = body
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            target = target[parent]
        target[name] = value


def fine_tune_fields(
    training_config: str | None,
    algorithm_config: str | None,
    options: Mapping[str, Any],
    rank: int | None,
    alpha: int | None,
) -> dict[str, Any]:
    """The fields of a fine-tuning request.

    Args:
        training_config, algorithm_config: as their options give them; see `json_object`.
        options: dotted fields, which go over the JSON; a None sets nothing.
    """
    fields = {"training_config": json_object(training_config, "--training-config")}
    algorithm = json_object(algorithm_config, "--algorithm-config")
    set_fields(algorithm, {"rank": rank, "alpha": alpha})
    if algorithm:
        fields["algorithm_config"] = {"type": "LoRA", **algorithm}
    set_fields(fields, options)
    return fields


def new_job_id(data: str | None) -> str:
    """An id to read and to sort by time: `<data>-<yyyymmdd>-<hhmmss>-<6 hex digits>`."""
    name = slug(Path(data).stem, 40) if data else "job"
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"

"""The name of a tokenised data set: a hash of everything that its tokens, weights and report follow from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import apis.post_training.models
from post_training.data.planning import max_seq_len
from post_training.data.template import read_template_sources
from post_training.jobs.spec import JobSpec

# What is read of a model's folder: tokenizer, special tokens, templates, tokens that end a text.
_MODEL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
_LIBRARIES = ("jinja2", "tokenizers", "numpy")
_NOW = re.compile(r"\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")
_NOW_ASKED_FOR = re.compile(r"\bstrftime_now\s+is\s+(not\s+)?defined\b")


def cache_key(spec: JobSpec, content: str) -> str:
    """Name the rows of a job's data set whose content has this digest (`RowReader.digest`); sha256, hexadecimal.

    Raises:
        ModelInvalid: a file of the model's tokenizer is damaged.
    """
    data, model_dir = spec.training_config.data_config, Path(spec.model.base_dir)
    assert data is not None  # no job is accepted without
    parts = {
        "content": content,
        "data_format": data.data_format,
        "columns": data.columns,
        "on_overlength": data.on_overlength,
        "train_on_input": bool(data.train_on_input),
        "max_seq_len": max_seq_len(spec),
        "model": _file_hashes(model_dir),
        "date": printed_dates(read_template_sources(model_dir).values(), spec.created_at),
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def printed_dates(templates: Iterable[str], now: datetime) -> list[str]:
    """What templates print of the date: the same wherever they print the same, empty where they print none."""
    found: list[str] = []
    for source in templates:
        formats = [single or double for single, double in _NOW.findall(source)]
        rest = _NOW_ASKED_FOR.sub("", _NOW.sub("", source))
        # Called in a way that is not understood here, it may print anything of the date.
        found += [now.isoformat()] if "strftime_now" in rest else [now.strftime(form) for form in formats]
    return found


@cache
def code_version() -> str:
    """Changes with the code that makes tokens of rows and with the libraries that it stands on."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(apis.post_training.models.__file__)]
    digest = hashlib.sha256(" ".join(f"{name} {version(name)}" for name in _LIBRARIES).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_hashes(model_dir: Path) -> dict[str, Any]:
    paths = [model_dir / name for name in _MODEL_FILES] + sorted(model_dir.glob("additional_chat_templates/*.jinja"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}

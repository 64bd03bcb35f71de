"""Tables and sections of docs/performance.md. A section lies between two markers and is written by one script."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import REPOSITORY, description

PERFORMANCE = REPOSITORY / "docs" / "performance.md"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [_row(header), _row(rule), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def series(name: str, values: Sequence[float]) -> str:
    """A named row of losses."""
    return f"{name:<34} " + " ".join(f"{value:.3f}" for value in values)


def publish(name: str, title: str, body: str, *, write: bool, file: Path = PERFORMANCE) -> None:
    """Print a section and, where `write`, put it into the file in place of the one of that name, else at its end."""
    text = f"## {title}\n\n" + "\n".join(description()) + f"\n\n{body.strip()}\n"
    print(text, flush=True)
    if write:
        write_section(file, name, text)
        print(f"written to {file.name}, section {name}", flush=True)


def write_section(file: Path, name: str, text: str) -> None:
    """Replace what lies between the section's markers, or append the section; nothing else of the file changes.

    Raises:
        ValueError: the file has one of the markers only.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    content = file.read_text(encoding="utf-8") if file.exists() else ""
    if (begin in content) != (end in content):
        raise ValueError(f"{file} has one of the markers of section {name!r} only; put the other back")
    if begin in content:
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        content = pattern.sub(lambda _: section, content, count=1)
    else:
        content = f"{content.rstrip()}\n\n{section}\n".lstrip()
    beside = file.with_suffix(".new")
    beside.write_text(content, encoding="utf-8")
    os.replace(beside, file)

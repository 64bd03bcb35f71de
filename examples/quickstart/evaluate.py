"""Exact match of a served model on the quickstart's evaluation messages.

python examples/quickstart/evaluate.py --url http://127.0.0.1:8321 --model MODEL_ID
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from apis.errors import PostgradError
from post_training.client import StackClient

DATA = Path(__file__).resolve().parent / "data"
MAX_TOKENS = 40
"""The longest right answer takes 21 on one line, and 32 spread over lines with indentation."""


@dataclass(frozen=True)
class Answer:
    """One message, what it should become, and what the model said."""

    message: str
    expected: str
    text: str

    @property
    def right(self) -> bool:
        return exact_match(self.expected, self.text)


@dataclass(frozen=True)
class Evaluation:
    model: str
    answers: list[Answer]
    seconds: float

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def percent(self) -> float:
        return 100 * self.right / len(self.answers)


def read_rows(path: Path) -> list[list[dict[str, str]]]:
    """The conversations of a data file, each as its messages: system, user, assistant."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def exact_match(expected: str, text: str) -> bool:
    """Whether `text` is JSON that says exactly what the JSON `expected` says; order and spaces are free."""
    try:
        return _canonical(text) == _canonical(expected)
    except ValueError:
        return False


def _canonical(text: str) -> str:
    # Compared as text, since Python holds 1 and true to be equal.
    return json.dumps(json.loads(text), sort_keys=True)


def evaluate(client: StackClient, model: str, rows: list[list[dict[str, str]]], console: Console) -> Evaluation:
    """Ask `model` each row's system and user message, greedily, and keep its answers.

    Raises:
        PostgradError: the server's, such as ModelNotFound.
    """
    started = time.perf_counter()
    progress = track(rows, description=model, console=console, transient=True, disable=not console.is_terminal)
    answers = list(_answers(client, model, progress))
    return Evaluation(model, answers, time.perf_counter() - started)


def _answers(client: StackClient, model: str, rows: Any) -> Iterator[Answer]:
    for *prompt, expected in rows:
        completion = client.inference.chat_completion(model, prompt, temperature=0, max_tokens=MAX_TOKENS)
        yield Answer(prompt[-1]["content"], expected["content"], completion.choices[0].message.content)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default=None, help="the stack's; default: $POSTGRAD_BASE_URL or http://127.0.0.1:8321")
    parser.add_argument("--model", required=True, help="id of a base model or a checkpoint")
    options = parser.parse_args()
    console = Console(highlight=False, force_terminal=sys.stdout.isatty())
    try:
        with StackClient(options.url) as client:
            result = evaluate(client, options.model, read_rows(DATA / "eval.jsonl"), console)
    except PostgradError as error:
        sys.exit(f"Error: {error.message}")
    for answer in result.answers:
        if not answer.right:
            print(f"{answer.message}{os.linesep}  expected {answer.expected}{os.linesep}  got      {answer.text!r}")
    print(f"{result.right} of {len(result.answers)} right ({result.percent:.0f} %) in {result.seconds:.0f} s")


if __name__ == "__main__":
    main()

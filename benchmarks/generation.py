"""Greedy generation, one stream: the served stack against transformers' `generate`, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.compare import ratio
from benchmarks.machine import REPOSITORY
from benchmarks.processes import plain_environment
from benchmarks.report import table
from benchmarks.stack import MODEL, Stack

QUESTIONS = (
    "Explain step by step how bread is made, from the grain to the loaf.",
    "Write a short story about a lighthouse keeper who finds a map.",
    "List the countries of South America and say one thing about each.",
)


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, the seconds it took and its text."""

    tokens: int
    seconds: float
    text: str

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def native_dtype() -> str:
    """What the stack's `dtype: auto` chooses on a CPU."""
    features = torch.cpu.get_capabilities()
    return "bf16" if features.get("avx512_bf16") or features.get("amx_bf16") else "fp32"


@contextmanager
def peer(model_dir: Path, dtype: str, threads: int) -> Iterator[Peer]:
    """transformers in a process of its own, loaded and waiting."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run_generate", str(model_dir), dtype, str(threads)],
        cwd=REPOSITORY,
        env={**os.environ, **plain_environment(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready", "transformers did not load the model"
        yield Peer(process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@dataclass(frozen=True)
class Peer:
    """The two ends of the process."""

    to: IO[str]
    answers: IO[str]

    def ask(self, question: str, max_tokens: int) -> Answer:
        order = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
        self.to.write(json.dumps(order) + "\n")
        self.to.flush()
        return Answer(**json.loads(self.answers.readline()))


def ask_stack(stack: Stack, question: str, max_tokens: int) -> Answer:
    """Over HTTP, as a user would."""
    began = time.perf_counter()
    parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
    found = stack.client.inference.chat_completion(MODEL, [{"role": "user", "content": question}], **parameters)
    seconds = time.perf_counter() - began
    assert found.usage is not None
    return Answer(found.usage.completion_tokens, seconds, found.choices[0].message.content or "")


def compare_generation(stack: Stack, model_dir: Path, threads: int, max_tokens: int, repeats: int) -> str:
    """A table of both, and the median of the ratios of answers to one question in one repetition."""
    dtype = native_dtype()
    with peer(model_dir, dtype, threads) as other:
        ask_stack(stack, QUESTIONS[0], 8)
        other.ask(QUESTIONS[0], 8)
        pairs = [
            (ask_stack(stack, question, max_tokens), other.ask(question, max_tokens))
            for _ in range(repeats)
            for question in QUESTIONS
        ]
    return _described(pairs, dtype, max_tokens)


def _described(pairs: list[tuple[Answer, Answer]], dtype: str, max_tokens: int) -> str:
    same = sum(ours.text == theirs.text for ours, theirs in pairs)
    gain = ratio([ours.rate for ours, _ in pairs], [theirs.rate for _, theirs in pairs])
    rows = [
        [name, *(f"{answer.rate:.1f}" for answer in answers)]
        for name, answers in (
            ("the stack, over HTTP", [ours for ours, _ in pairs[: len(QUESTIONS)]]),
            ("transformers.generate", [theirs for _, theirs in pairs[: len(QUESTIONS)]]),
        )
    ]
    header = ["tokens/s, the first repetition", *(f"question {number + 1}" for number in range(len(QUESTIONS)))]
    return (
        f"Generation, greedy, one stream, {dtype}, at most {max_tokens} tokens, prompt and tokenizer included: "
        f"**{gain} times** as fast as `transformers.generate`; {same} of {len(pairs)} answers are the same text.\n\n"
        + table(header, rows)
    )

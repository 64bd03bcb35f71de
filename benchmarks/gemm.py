"""The rates at which this machine multiplies matrices of the shapes that a LoRA step is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.flops import Linear, linears
from providers.torchtune.architecture import Architecture

HEAD_CHUNK = 512
"""Supervised positions whose logits exist at one time."""
SQUARE = 2048


@dataclass(frozen=True)
class Product:
    """A product that a step makes `times` times.

    Attributes:
        m, k, n: [m, k] times [k, n], in each of `groups` independent products.
        copies: so many right factors are used in turn, as the layers of a model do: one would stay in the caches.
    """

    name: str
    m: int
    k: int
    n: int
    times: float
    groups: int = 1
    copies: int = 1

    @property
    def flops(self) -> int:
        """Of one of its uses."""
        return 2 * self.m * self.k * self.n * self.groups


def products(a: Architecture, rank: int, lengths: Sequence[int], supervised: int) -> list[Product]:
    """All products of one step. Attention is counted in whole squares, as batched products compute it."""
    tokens = sum(lengths)
    found = [p for linear in linears(a) for p in _linear_products(linear, a.num_layers, rank, tokens)]
    rows = min(HEAD_CHUNK, supervised)
    chunks = supervised / rows
    found.append(Product("head, forward", rows, a.embed_dim, a.vocab_size, chunks))
    found.append(Product("head, backward", rows, a.vocab_size, a.embed_dim, chunks))
    return found + _attention_products(a, lengths)


def _linear_products(linear: Linear, layers: int, rank: int, tokens: int) -> list[Product]:
    thin = rank * len(linear.outputs)
    width, inputs = linear.width, linear.inputs
    # With several parts B is block-diagonal: only its blocks count, each as wide as one part.
    part = width // len(linear.outputs)
    parts = layers * len(linear.outputs)
    return [
        Product(f"{linear.name}, forward", tokens, inputs, width, layers, copies=layers),
        Product(f"{linear.name}, backward", tokens, width, inputs, layers, copies=layers),
        Product(f"{linear.name}, A forward", tokens, inputs, thin, layers, copies=layers),
        Product(f"{linear.name}, B forward", tokens, rank, part, parts, copies=layers),
        Product(f"{linear.name}, B backward", tokens, part, rank, parts, copies=layers),
        Product(f"{linear.name}, A backward", tokens, thin, inputs, layers, copies=layers),
        Product(f"{linear.name}, gradient of A", thin, tokens, inputs, layers, copies=layers),
        Product(f"{linear.name}, gradient of B", part, tokens, rank, parts, copies=layers),
    ]


def _attention_products(a: Architecture, lengths: Sequence[int]) -> list[Product]:
    """At the length L for which as many products of [L, L] as there are segments take what theirs take."""
    length = round((sum(n * n for n in lengths) / len(lengths)) ** 0.5)
    rows = length * a.num_heads // a.num_kv_heads
    times = 3 * a.num_layers * len(lengths)
    # Scores, and two of the backward products, make [rows, L]; values, and the two others, make [rows, head_dim].
    return [
        Product("attention, to scores", rows, a.head_dim, length, times, groups=a.num_kv_heads),
        Product("attention, from scores", rows, length, a.head_dim, times, groups=a.num_kv_heads),
    ]


def square() -> Product:
    """A large product that is bound by arithmetic alone."""
    return Product(f"square of {SQUARE}", SQUARE, SQUARE, SQUARE, 0)


def rate(product: Product, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the fastest of several timings that together take at least `seconds`."""
    run = _runner(product, dtype)
    run()
    best, spent = float("inf"), 0.0
    while spent < seconds:
        began = time.perf_counter()
        uses = run()
        took = time.perf_counter() - began
        best, spent = min(best, took / uses), spent + took
    return product.flops / best


def _runner(product: Product, dtype: torch.dtype) -> Callable[[], int]:
    """Multiplies with each right factor once and says how often that was."""
    left = _random(product.groups, product.m, product.k, dtype)
    rights = [_random(product.groups, product.k, product.n, dtype) for _ in range(product.copies)]
    out = torch.empty(product.groups, product.m, product.n, dtype=dtype)
    pairs = [(left, right, out) if product.groups > 1 else (left[0], right[0], out[0]) for right in rights]
    multiply = torch.bmm if product.groups > 1 else torch.mm

    def run() -> int:
        for a, b, c in pairs:
            multiply(a, b, out=c)
        return len(pairs)

    return run


def _random(groups: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(groups, rows, columns).to(dtype)

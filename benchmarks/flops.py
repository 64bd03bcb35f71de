"""How many floating-point operations a LoRA step needs, told from the model's architecture alone. No torch here.

A product of [m, k] and [k, n] is 2 m k n operations. Only products count; element-wise work is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from providers.torchtune.architecture import Architecture


@dataclass(frozen=True)
class Linear:
    """A frozen matrix, or several that read the same input and are multiplied as one.

    Attributes:
        outputs: of each part.
    """

    name: str
    inputs: int
    outputs: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.outputs)

    @property
    def parameters(self) -> int:
        return self.inputs * self.width

    def lora_parameters(self, rank: int) -> int:
        """Each part has factors of its own: A [rank, inputs] and B [output, rank]."""
        return rank * sum(self.inputs + output for output in self.outputs)


def linears(a: Architecture) -> list[Linear]:
    """The matrices of one layer."""
    heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return [
        Linear("q, k, v", a.embed_dim, (heads, kv, kv)),
        Linear("attention output", heads, (a.embed_dim,)),
        Linear("gate, up", a.embed_dim, (a.intermediate_dim, a.intermediate_dim)),
        Linear("down", a.intermediate_dim, (a.embed_dim,)),
    ]


@dataclass(frozen=True)
class StepFlops:
    """Operations of one optimizer step, forward and backward.

    Attributes:
        body: of the frozen matrices: 2 per parameter and token forward, 2 backward to the input. Their own gradient, 2
            more, is not needed.
        head: the same of the output layer, over supervised positions only.
        lora: 6 per adapter parameter and token: both factors are trained.
        attention: scores and values forward, four products backward, over the causal half.
    """

    tokens: int
    body: int
    head: int
    lora: int
    attention: int

    @property
    def total(self) -> int:
        return self.body + self.head + self.lora + self.attention

    @property
    def per_token(self) -> float:
        return self.total / self.tokens


def count(a: Architecture, rank: int, lengths: Sequence[int], supervised: int) -> StepFlops:
    """Of a step over segments of these lengths, LoRA on every linear layer but the output.

    In a causal segment of L tokens position t attends to t + 1 of them, so each of the six products of a head takes
    2 head_dim (1 + … + L) = head_dim L (L + 1) operations.
    """
    tokens = sum(lengths)
    parameters = sum(linear.parameters for linear in linears(a))
    lora = sum(linear.lora_parameters(rank) for linear in linears(a))
    squares = sum(length * (length + 1) for length in lengths)
    return StepFlops(
        tokens=tokens,
        body=4 * a.num_layers * parameters * tokens,
        head=4 * a.vocab_size * a.embed_dim * supervised,
        lora=6 * a.num_layers * lora * tokens,
        attention=6 * a.num_layers * a.num_heads * a.head_dim * squares,
    )

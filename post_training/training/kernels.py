"""Element-wise chains between matrix products, each compiled into one pass over memory.

PyTorch runs `(x.float() * r).to(bf16)` as three passes, each of which reads and writes the whole tensor. On a CPU that
costs more than the products around it. `torch.compile` makes one loop of such a chain.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


MODELS_OF_A_PROCESS = 64
"""A worker may run one job after another, each with a model of other widths, for which code is compiled again."""


class CompilingFailed(Exception):
    """There is a compiler, and it does not compile; the message says why."""


class Kernel(Generic[P, R]):
    """A function over tensors in two forms: as PyTorch operations, and compiled for any number of tokens.

    Both compute the same formula; they may differ in the last bit, so a job keeps the form it began with.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def form(self, compiled: bool) -> Callable[P, R]:
        return self._compiled if compiled else self._function

    @functools.cached_property
    def _compiled(self) -> Callable[P, R]:
        # One compilation per process and kernel, whatever models come and go. Which sizes are symbols is said by
        # `varying` on the first call.
        config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
        config.recompile_limit = max(config.recompile_limit, MODELS_OF_A_PROCESS)
        config.automatic_dynamic_shapes = False
        # Only what `varying` names is a symbol: a second model's code is not to depend on what the first one was.
        compiled: Callable[..., R] = torch.compile(self._function, fullgraph=True)

        def run(*args: Any) -> R:
            return compiled(*(_without_gradient(each) for each in args))

        return cast(Callable[P, R], run)


def _without_gradient(value: Any) -> Any:
    # Callers have gradients of their own, and code for tensors that autograd tracks would be compiled again.
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def varying(tensor: Tensor, *dimensions: int) -> Tensor:
    """Tell the compiler that these dimensions change from call to call, so that one code serves all sizes from 2.

    To be used in a first call, whose sizes are typical: the compiler decides by them how to split loops over threads.
    """
    for dimension in dimensions:
        torch._dynamo.mark_dynamic(tensor, dimension)  # pyright: ignore[reportPrivateImportUsage]
    return tensor


@contextmanager
def compiling() -> Iterator[None]:
    """Around first calls of compiled kernels. Raises CompilingFailed."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        logger.exception("element-wise operations cannot be compiled")
        raise CompilingFailed(f"compiling failed with {type(error).__name__}; see the log") from error


@functools.cache
def can_compile() -> str | None:
    """Why element-wise chains cannot be compiled on this machine, or None where they can."""
    if torch.cuda.is_available():
        return None  # Triton comes with PyTorch
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "no C++ compiler was found (install g++ or clang)"
    return None

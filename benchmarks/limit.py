"""How fast this machine could train at most, and which part of that we reach.

    python -m benchmarks.limit                                      measures ours too
    python -m benchmarks.limit --dtype bf16 --rate 900 --batch 4    ours is given, in tokens/s

Two limits are given. The plain one divides the fastest product that was measured by the operations of a token. The
other adds up the time of each product at the rate of its own shape: thin products, those of LoRA above all, are slower.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.cases import OURS, Order, Plan, Settings
from benchmarks.flops import StepFlops, count
from benchmarks.gemm import Product, products, rate, square
from benchmarks.processes import measure, prepare
from benchmarks.report import publish, table
from benchmarks.workspace import Workspace, real_model_dir
from post_training.data.batching import steps
from post_training.jobs.devices import usable_cores
from post_training.training.model import TORCH_DTYPES
from providers.torchtune.architecture import Architecture
from providers.torchtune.families import describe


@dataclass(frozen=True)
class Limit:
    """Of one dtype and one number of rows a step.

    Attributes:
        rates: FLOP/s by product, the fastest that was measured.
        reached: our tokens/s.
    """

    dtype: str
    flops: StepFlops
    rates: dict[Product, float]
    reached: float

    @property
    def peak(self) -> float:
        return max(self.rates.values())

    @property
    def plain(self) -> float:
        """Tokens/s if everything ran at the peak."""
        return self.peak / self.flops.per_token

    @property
    def by_shape(self) -> float:
        """Tokens/s if every product ran at its own rate."""
        return self.step_tokens / self.seconds

    @property
    def step_tokens(self) -> int:
        return next(product.m for product in self.rates if product.name == "q, k, v, forward")

    @property
    def seconds(self) -> float:
        """Of one step, each product at its own rate."""
        return sum(product.times * product.flops / rate for product, rate in self.rates.items())


def measured_rates(found: Sequence[Product], dtype: str, seconds: float) -> dict[Product, float]:
    return {product: rate(product, TORCH_DTYPES[dtype], seconds) for product in found}


def plan_of(workspace: Workspace, settings: Settings) -> Plan:
    """Rows in file order."""
    lengths = [len(row.tokens) for row in workspace.rows]
    return steps(lengths, order=range(len(lengths)), batch_size=settings.batch, max_steps=settings.steps).tolist()


def mean_step(workspace: Workspace, plan: Plan) -> tuple[list[int], int]:
    """Segment lengths and supervised tokens of the step of `plan` that comes nearest to the mean number of tokens."""
    sizes = [sum(len(workspace.rows[index].tokens) for index in step) for step in plan]
    mean = sum(sizes) / len(sizes)
    nearest = min(range(len(plan)), key=lambda index: abs(sizes[index] - mean))
    rows = [workspace.rows[index] for index in plan[nearest]]
    return [len(row.tokens) for row in rows], sum(row.supervised for row in rows)


def whole_count(a: Architecture, rank: int, workspace: Workspace, plan: Plan) -> StepFlops:
    """Of all steps of the plan together."""
    rows = [workspace.rows[index] for step in plan for index in step]
    return count(a, rank, [len(row.tokens) for row in rows], sum(row.supervised for row in rows))


def find_limit(order: Order, given: float | None, seconds: float) -> Limit:
    """Measure products, then ours unless it is given, then products again."""
    workspace = Workspace.open(order.workspace)
    assert order.plan is not None
    a, rank = describe(workspace.model_dir), order.settings.rank
    wanted = [square(), *products(a, rank, *mean_step(workspace, order.plan))]
    before = measured_rates(wanted, order.dtype, seconds)
    reached = measure(order).rate(order.settings.skip) if given is None else given
    after = measured_rates(wanted, order.dtype, seconds)
    rates = {product: max(before[product], after[product]) for product in wanted}
    return Limit(order.dtype, whole_count(a, rank, workspace, order.plan), rates, reached)


def body(limits: Sequence[Limit], described: str, threads: int) -> str:
    """The section without its heading."""
    how = (
        f"{described}, in file order, {threads} threads. Operations of a token: 4 per parameter of the frozen matrices "
        "(2 forward, 2 backward to the input), 4 per parameter of the output layer and supervised token, 6 per "
        "parameter of the adapters, and six products of attention over the causal half. Plain limit: the fastest "
        "product measured, divided by that. Limit by shape: each product at its own rate, attention in whole squares."
    )
    return "\n\n".join([how, _limits(limits), *(_rates(limit) for limit in limits)])


def _limits(limits: Sequence[Limit]) -> str:
    header = [
        "dtype",
        "tokens a step",
        "GFLOP/token",
        "peak GFLOP/s",
        "plain limit",
        "limit by shape",
        "ours",
        "of plain",
    ]
    return table([*header, "of by shape"], [_line(limit) for limit in limits])


def _line(limit: Limit) -> list[str]:
    f = limit.flops
    parts = [f"{part / f.tokens / 1e9:.3f}" for part in (f.body, f.head, f.lora, f.attention)]
    return [
        limit.dtype,
        f"{limit.step_tokens}",
        f"{f.per_token / 1e9:.3f} = {' + '.join(parts)}",
        f"{limit.peak / 1e9:.0f}",
        f"{limit.plain:.0f}",
        f"{limit.by_shape:.0f}",
        f"{limit.reached:.0f}",
        f"{limit.reached / limit.plain:.0%}",
        f"{limit.reached / limit.by_shape:.0%}",
    ]


def _rates(limit: Limit) -> str:
    rows = [
        [p.name, f"{p.m} x {p.k} x {p.n}", f"{r / 1e9:.0f}", f"{p.times * p.flops / r / limit.seconds:.1%}"]
        for p, r in limit.rates.items()
    ]
    heading = f"Products, {limit.dtype}, a step of {limit.step_tokens} tokens:"
    return f"{heading}\n\n" + table(["product", "m x k x n", "GFLOP/s", "share of the time"], rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--batch", default="4,11", help="rows a step, with commas between")
    parser.add_argument("--rate", type=float, help="our tokens/s; default: measured here")
    parser.add_argument("--kernels", default="compiled", help="our form that is measured")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.3, help="to measure each product, twice")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Limit]:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    model_dir = options.model or real_model_dir()
    case = replace(OURS[0], options={"kernels": options.kernels})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = ["--rank", str(options.rank), "--longest", str(options.longest), "--rows", str(options.rows)]
        prepare(folder, model_dir, words)
        workspace = Workspace.open(folder)
        limits = []
        for batch in map(int, options.batch.split(",")):
            settings = Settings(rank=options.rank, batch=batch, steps=options.steps)
            plan = plan_of(workspace, settings)
            for dtype in options.dtype.split(","):
                order = Order(folder, folder / f"{dtype}-{batch}", case, settings, dtype, options.threads, plan)
                limits.append(find_limit(order, options.rate, options.seconds))
        described = json.loads((folder / "rows.json").read_text())["described"]
    text = body(limits, f"{model_dir.name}, LoRA of rank {options.rank}, {described}", options.threads)
    publish("limit", "The machine's limit", text, write=options.write)
    return limits


if __name__ == "__main__":
    main()

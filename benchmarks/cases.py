"""What is trained, by whom and with which settings: the contract between the script and the processes it measures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Tool = Literal["ours", "torchtune", "trl"]
Plan = list[list[int]]
"""The row numbers of each step, in order."""


@dataclass(frozen=True)
class Settings:
    """The same for every tool.

    Attributes:
        batch: rows that a peer computes at a time; for packed cases packs.
        accumulation: so many of those make a step. Ours takes a step's rows as its own limits allow.
        longest: tokens of the longest row that is taken, and of a pack.
        warmup: steps over which the rate climbs linearly, the first one with lr / warmup.
        steps, packed_steps: optimizer steps of a padded and of a packed case.
        skip: first steps that no rate counts: compiling, first touch of memory.
    """

    rank: int = 16
    alpha: float = 32
    lr: float = 3e-4
    warmup: int = 5
    batch: int = 4
    accumulation: int = 1
    longest: int = 512
    steps: int = 20
    packed_steps: int = 12
    skip: int = 4
    seed: int = 3
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: of the tool. Peers: `compile`; TRL: `autocast`, `attention`, `grouped`; ours: `kernels`, a form of
            ModelConfig.
    """

    name: str
    tool: Tool
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp32")


PEERS = (
    Case("torchtune-padded", "torchtune"),
    Case("torchtune-padded-compiled", "torchtune", options={"compile": True}),
    Case("torchtune-packed", "torchtune", packed=True),
    Case("torchtune-packed-compiled", "torchtune", packed=True, options={"compile": True}),
    Case("trl-padded", "trl"),
    Case("trl-padded-compiled", "trl", options={"compile": True}),
    Case("trl-padded-autocast", "trl", options={"autocast": True}, dtypes=("bf16",)),
    Case("trl-padded-eager", "trl", options={"attention": "eager"}),
    Case("trl-grouped", "trl", options={"grouped": True}),
    Case("trl-packed", "trl", packed=True),
    Case("trl-packed-compiled", "trl", packed=True, options={"compile": True}),
)
OURS = (
    Case("ours", "ours", options={"kernels": "compiled"}),
    Case("ours-fused", "ours", options={"kernels": "fused"}),
    Case("ours-plain", "ours", options={"kernels": "plain"}),
)
CASES = {case.name: case for case in (*PEERS, *OURS)}


@dataclass(frozen=True)
class Order:
    """What a measured process is told.

    Attributes:
        workspace: the folder that `benchmarks.workspace` made.
        plan: for ours, the rows of each step; peers order rows themselves.
        out: where the process writes `result.json` and its adapter.
    """

    workspace: Path
    out: Path
    case: Case
    settings: Settings
    dtype: str
    threads: int
    plan: Plan | None = None

    @property
    def steps(self) -> int:
        if self.plan is not None:
            return len(self.plan)
        return self.settings.packed_steps if self.case.packed else self.settings.steps

    def save(self, path: Path) -> None:
        fields = asdict(self) | {"workspace": str(self.workspace), "out": str(self.out)}
        path.write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Order:
        fields = json.loads(path.read_text())
        case = Case(**fields["case"] | {"dtypes": tuple(fields["case"]["dtypes"])})
        paths = {"workspace": Path(fields["workspace"]), "out": Path(fields["out"])}
        return cls(**fields | paths | {"case": case, "settings": Settings(**fields["settings"])})


@dataclass(frozen=True)
class Result:
    """What a measured process did.

    Attributes:
        losses: mean over the supervised tokens of each step, in nats, before its update.
        ends: seconds from the beginning of training to the end of each step.
        plan: the rows of each step as the tool's own data loader gave them; None where they are no whole rows of ours.
        tokens, supervised: of each step, without padding.
        peak_rss: bytes, of the whole process until the last step.
        setup: seconds from the first import to the beginning of training.
        padded_tokens: positions computed in each step, padding included.
    """

    losses: list[float]
    ends: list[float]
    plan: Plan | None
    tokens: list[int]
    supervised: list[int]
    padded_tokens: list[int]
    peak_rss: int
    setup: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Result:
        return cls(**json.loads(path.read_text()))

    def seconds(self, skip: int) -> float:
        """Wall time of the steps after the first `skip`, at least one of which is left out."""
        return self.ends[-1] - self.ends[skip - 1]

    def rate(self, skip: int, *, supervised: bool = False) -> float:
        """Tokens per second without padding, over the steps after the first `skip`."""
        counted = self.supervised if supervised else self.tokens
        return sum(counted[skip:]) / self.seconds(skip)

    def step_seconds(self, skip: int) -> float:
        """Mean time of the steps after the first `skip`."""
        return self.seconds(skip) / (len(self.ends) - skip)

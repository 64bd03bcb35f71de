"""Training speed and memory of ours, torchtune's recipe and TRL, in one run: same rows, same adapter, same schedule.

    python -m benchmarks.training                                                        everything, hours
    python -m benchmarks.training --only ours,torchtune-padded --dtype bf16 --repeats 2  some
    python -m benchmarks.training --list                                                 the names of all cases

Each case runs in a process of its own, one at a time, in turn A B C A B C. Peers order rows as they do; ours then
trains on the very rows of each of their steps, so that losses can be compared step by step. A ratio is the median over
repetitions of the ratio of the two runs of one repetition; where losses disagree it is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.cases import CASES, OURS, Case, Order, Plan, Settings
from benchmarks.processes import RunFailed, measure, own_environment, prepare, run_module
from benchmarks.report import publish
from benchmarks.training_report import Runs, body
from benchmarks.workspace import ROWS, real_model_dir
from post_training.data.batching import steps
from post_training.jobs.devices import usable_cores


@dataclass
class Session:
    """One run of this script: what was asked for and what has come of it."""

    workspace: Path
    settings: Settings
    threads: int
    runs: Runs = field(default_factory=Runs)

    def repetition(self, number: int, cases: Sequence[Case], dtypes: Sequence[str]) -> None:
        """Each case once in each dtype: peers first, then ours on the rows of each of them."""
        peers = [case for case in cases if case.tool != "ours"]
        ours = [case for case in cases if case.tool == "ours"]
        for dtype in dtypes:
            for case in peers:
                if dtype in case.dtypes:
                    self._run(number, case, dtype, None)
            for index, (plan_name, plan) in enumerate(self._plans(number, dtype).items()):
                # Our slower forms are compared with our own; one order of rows is enough for that.
                for case in ours if index == 0 else ours[:1]:
                    named = replace(case, name=f"{case.name} on rows of {plan_name}")
                    self._run(number, named, dtype, plan)

    def _plans(self, number: int, dtype: str) -> dict[str, Plan]:
        """Each distinct order of rows that peers took, by the first of them; without peers, file order."""
        found: dict[str, Plan] = {}
        for case, result in self.runs.of(number, dtype).items():
            if result.plan is not None and result.plan not in found.values():
                found[case] = result.plan
        return found or {"file order": self._file_order()}

    def _file_order(self) -> Plan:
        rows = json.loads((self.workspace / ROWS).read_text())["rows"]
        lengths = [len(row["tokens"]) for row in rows]
        s = self.settings
        return steps(
            lengths, order=range(len(lengths)), batch_size=s.batch * s.accumulation, max_steps=s.steps
        ).tolist()

    def _run(self, number: int, case: Case, dtype: str, plan: Plan | None) -> None:
        folder = self.workspace / f"{number}-{dtype}-{case.name.replace(' ', '_')}"
        order = Order(self.workspace, folder, case, self.settings, dtype, self.threads, plan)
        try:
            result = measure(order)
        except RunFailed as error:
            self.runs.fail(case.name, dtype, str(error))
            print(f"{case.name} {dtype}: {error}", file=sys.stderr, flush=True)
            return
        self.runs.add(number, case.name, dtype, result, folder)
        skip = self.settings.skip
        print(
            f"{number} {dtype} {case.name}: {result.rate(skip):.0f} tokens/s, {result.step_seconds(skip):.2f} s/step, "
            f"{result.peak_rss / 2**30:.2f} GiB, first step after {result.setup + result.ends[0]:.1f} s",
            flush=True,
        )

    def judge_held_out(self) -> None:
        """The losses on held-out rows of every adapter of the first repetition."""
        folders = self.runs.folders(0)
        if not folders:
            return
        out = self.workspace / "held_out.json"
        arguments = [str(self.workspace), str(self.settings.rank), str(self.settings.alpha), str(out)]
        environment = own_environment(self.threads)
        run_module("benchmarks.held_out", *arguments, *map(str, folders.values()), environment=environment)
        losses = json.loads(out.read_text())
        self.runs.held_out = {key: losses[str(folder)] for key, folder in folders.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of cases, with commas between; `ours` is run on the rows of each other")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rows", type=int, default=400, help="of the data set, the last 32 of them held out")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: SmolLM2-135M-Instruct")
    parser.add_argument("--keep", type=Path, help="keep all files of the run in this folder")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    parser.add_argument("--section", default="training", help="the section's name there")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Raises SystemExit where nothing would be left to measure."""
    settings = Settings(**{name: getattr(options, name) for name in asdict(Settings())})
    if not 1 <= settings.skip < min(settings.steps, settings.packed_steps):
        raise SystemExit("--skip must be at least 1 and less than --steps and --packed-steps")
    return settings


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Raises SystemExit where a name is unknown."""
    names = options.only.split(",") if options.only else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"unknown case {', '.join(unknown)}; --list names all")
    return [CASES[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> Session:
    options = parse(arguments)
    if options.list:
        print("\n".join(CASES))
        sys.exit(0)
    settings, cases = settings_of(options), cases_of(options)
    model_dir = options.model or real_model_dir()
    with tempfile.TemporaryDirectory() as temporary:
        session = Session(options.keep or Path(temporary), settings, options.threads)
        given = {"rank": settings.rank, "alpha": settings.alpha, "longest": settings.longest, "seed": settings.seed}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        prepare(session.workspace, model_dir, [*words, "--rows", str(options.rows)])
        for number in range(options.repeats):
            session.repetition(number, cases, options.dtype.split(","))
        session.judge_held_out()
        described = json.loads((session.workspace / ROWS).read_text())["described"]
    what = f"{model_dir.name}, {described}"
    text = body(session.runs, settings, what, options.threads, [case.name for case in OURS])
    publish(options.section, _title(options, settings), text, write=options.write)
    return session


def _title(options: argparse.Namespace, settings: Settings) -> str:
    if options.section == "training":
        return "Training"
    return f"Training, rank {settings.rank}, {settings.batch * settings.accumulation} rows or packs a step"


if __name__ == "__main__":
    main()

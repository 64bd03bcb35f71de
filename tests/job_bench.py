"""Jobs whose attempts run in the test's own process: a real store, real leases, a tiny model, and faults at will."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import torch

from apis.post_training.models import JobStatus, LoraFinetuningConfig, RunnableAlgorithm, TrainingConfig
from post_training.checkpoints import verify
from post_training.checkpoints.layout import RESERVE, checkpoints_root
from post_training.checkpoints.space import FreeBytes, free_bytes
from post_training.checkpoints.verification import VerifyReport
from post_training.jobs.database import Database
from post_training.jobs.devices import slots_of
from post_training.jobs.leases import Claim, Leases
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, WorkerSettings
from post_training.jobs.store import JobStore
from post_training.jobs.tables import JobRow
from post_training.worker import main
from post_training.worker.lease import Lease

PROVIDER = "torchtune"
WORDS = ["red", "brown", "quick", "lazy", "old", "slow", "town", "sea", "tree", "books"]


At = Callable[[str, int | None], None]


class Killed(BaseException):
    """The worker ends here, whatever it was doing: nothing in it catches this."""


def rows(count: int) -> list[dict[str, Any]]:
    """Conversations of unequal length."""
    return [
        {"prompt": f"Say {WORDS[n % 10]} {n}", "completion": f"The {' '.join(WORDS[: 1 + n * 7 % 10])} hen."}
        for n in range(count)
    ]


class VerifierHere:
    """A `Verifier` without the seconds that a process of its own takes to import everything.

    Attributes:
        looks: how often it is asked whether it is done before it is: from step to step, while training goes on.
    """

    looks: ClassVar[int] = 0
    started = False

    def __init__(self, base_dir: Path, model_module: str, lora_config: dict[str, Any], *, full: bool = False) -> None:
        self._request = {"base_dir": base_dir, "model_module": model_module, "lora": lora_config, "full": full}

    def prepare(self) -> None: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...

    def fits_beside_training(self) -> bool:
        return True

    def begin(self, checkpoint_dir: Path, threads: int, **_: Any) -> Future[VerifyReport]:
        return _Late(self.looks, lambda: verify.verify({**self._request, "checkpoint_dir": checkpoint_dir}))


class _Late(Future[VerifyReport]):
    """Done when it was asked so often."""

    def __init__(self, looks: int, work: Callable[[], VerifyReport]) -> None:
        super().__init__()
        self._looks, self._work = looks, work

    def done(self) -> bool:
        if not super().done() and self._looks <= 0:
            with torch.random.fork_rng():
                try:
                    self.set_result(self._work())
                except Exception as error:
                    self.set_exception(error)
        self._looks -= 1
        return super().done()


@dataclass
class Bench:
    """A state folder with a store and a base model.

    Args:
        base: the directory of the base model.
        model_module: whose `load_model` the workers use.
    """

    home: Path
    base: Path
    model_module: str = "tests.random_llama"
    export: tuple[Any, ...] = ("adapter",)
    seed: int = 7
    store: JobStore = field(init=False)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        database = Database(f"sqlite:///{self.home / 'postgrad.db'}")
        database.migrate()
        self.store = JobStore(database)
        self.leases = Leases(database)

    def submit(
        self,
        job_uuid: str,
        data: list[dict[str, Any]],
        validation: list[dict[str, Any]] | None = None,
        data_config: dict[str, Any] | None = None,
        algorithm: RunnableAlgorithm | None = None,
        **training: Any,
    ) -> JobSpec:
        """Submit a job in fp32; `training` as in a request."""
        data_config = {"dataset_id": "data", "batch_size": 2, "max_seq_len": 96, **(data_config or {})}
        config = {"dtype": "fp32", "n_epochs": 2, **training, "data_config": data_config}
        config["optimizer_config"] = {"lr": 3e-4, **config.get("optimizer_config", {})}
        spec = JobSpec(
            job_uuid=job_uuid,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            provider_id=PROVIDER,
            model=ModelRef(identifier="tiny", base_identifier="tiny", base_dir=str(self.base)),
            training_config=TrainingConfig.model_validate(config),
            algorithm_config=algorithm or LoraFinetuningConfig(rank=4, alpha=8),
            dataset=_inline("data", data),
            validation=None if validation is None else _inline("held-out", validation),
            seed=self.seed,
            worker=WorkerSettings(
                model_module=self.model_module, device="cpu", threads=1, export=self.export, micro_batch_tokens=128
            ),
        )
        self.store.submit(spec, job_uuid, max_queued=100)
        return spec

    def claim(self) -> Claim:
        """Take the oldest waiting job."""
        claim = self.leases.claim("here", slots_of(["cpu"]), [PROVIDER])
        assert claim is not None
        return claim

    def attempt(self, at: At | None = None, free: FreeBytes = free_bytes) -> str:
        """Claim the oldest job and run an attempt as a worker's `main` does, then what a scheduler does after it.

        Args:
            at: see FaultyLease; it may raise Killed.

        Returns:
            the job's status after it.

        Raises:
            LeaseLost: as the attempt did.
        """
        claim = self.claim()
        with sigterm_kept():
            try:
                with FaultyLease(self.store, claim, at or _nothing) as lease:
                    main.attempt(lease, self.home, "cpu", free)
            except Killed:
                assert self.leases.lost(claim.job_uuid, claim.owner, "its worker was killed", max_attempts=1000)
        return self.store.get(claim.job_uuid).status

    def run(self, spec: JobSpec, attempts: int = 1) -> Outcome:
        """Undisturbed attempts until the job ends, at most so many; then what came of it."""
        for _ in range(attempts):
            if JobStatus(self.store.get(spec.job_uuid).status).terminal:
                break
            self.attempt()
        return self.outcome(spec.job_uuid)

    def root(self, job_uuid: str) -> Path:
        return checkpoints_root(self.home, job_uuid)

    def folders(self, job_uuid: str) -> list[str]:
        """What lies in the job's checkpoint folder, by name, but for the room that a running worker holds."""
        root = self.root(job_uuid)
        return sorted(path.name for path in root.iterdir() if path.name != RESERVE) if root.is_dir() else []

    def steps(self, job_uuid: str) -> list[int]:
        """The steps that the store has a checkpoint of."""
        return sorted(self.store.recorded_steps(job_uuid))

    def log(self, job_uuid: str) -> str:
        return "\n".join(event.message for event in self.store.events(job_uuid, 0))

    def outcome(self, job_uuid: str) -> Outcome:
        job = self.store.get(job_uuid)
        rows = self.store.checkpoints(job_uuid)
        folders = [self.home / row.path for row in rows]
        return Outcome(
            status=job.status,
            error=job.error["code"] if job.error else None,
            steps=[row.step for row in rows],
            identifiers=[str(row.identifier).replace(job_uuid, "JOB") for row in rows],
            metrics=[row.metrics for row in rows],
            adapters=[_sha256(f / "adapter" / "adapter_model.safetensors") for f in folders],
            states=[_sha256(f / "training_state" / "state.safetensors") for f in folders],
            series=self._series(job_uuid),
            progress=_counts(job),
        )

    def _series(self, job_uuid: str) -> list[dict[str, Any]]:
        """The latest numbers of each step, without those that are times or memory."""
        latest = {event.step: event.data or {} for event in self.store.events(job_uuid, 0, 100_000) if event.step}
        left_out = ("seconds", "tokens_per_second", "memory_bytes")
        return [{k: v for k, v in latest[step].items() if k not in left_out} for step in sorted(latest)]


@dataclass
class Outcome:
    """All of a job's end that must not depend on how often it was interrupted; files by their hashes."""

    status: str
    error: str | None
    steps: list[int]
    identifiers: list[str]
    metrics: list[dict[str, Any] | None]
    adapters: list[str]
    states: list[str]
    series: list[dict[str, Any]]
    progress: dict[str, Any]


class FaultyLease(Lease):
    """A lease at which something happens.

    Args:
        at: called with the name of each thing the worker does through its lease (`update`, `record_checkpoint`,
            `announce`, `should_stop`, …) and, where it is about a step, with that; before it is done.
    """

    def __init__(self, store: JobStore, claim: Claim, at: At) -> None:
        super().__init__(store, claim.job_uuid, claim.owner)
        self._at = at

    def should_stop(self) -> bool:
        self._at("should_stop", None)
        return super().should_stop()

    def confirm(self) -> None:
        self._at("confirm", None)
        super().confirm()

    def update(self, *, step: int | None = None, **fields: Any) -> None:
        self._at("update", step)
        super().update(step=step, **fields)

    def record_checkpoint(self, make_row: Any) -> None:
        self._at("record_checkpoint", make_row().step)
        super().record_checkpoint(make_row)

    def announce(self, step: int, identifier: str, verification: Any, register: Any) -> None:
        self._at("announce", step)
        super().announce(step, identifier, verification, register)

    def forget_checkpoints(self, steps: Any) -> None:
        self._at("forget_checkpoints", None)
        super().forget_checkpoints(steps)

    def finish(self, *arguments: Any, **options: Any) -> None:
        self._at("finish", None)
        super().finish(*arguments, **options)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """A lease takes over SIGTERM; give it back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _nothing(_what: str, _step: int | None) -> None:
    pass


def _inline(name: str, data: list[dict[str, Any]]) -> DatasetRef:
    return DatasetRef(dataset_id=name, source={"type": "rows", "rows": data}, policy={})


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _counts(job: JobRow) -> dict[str, Any]:
    names = ("step", "total_steps", "epoch", "loss", "lr", "tokens_seen", "supervised_tokens_seen", "skipped_steps")
    return {name: (job.progress or {}).get(name) for name in names}

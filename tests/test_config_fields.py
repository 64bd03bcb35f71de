"""Every field of a job's configuration acts, or is refused by its name.

Each field is changed alone, in a request that a real service takes and a real attempt runs; something recorded must
differ. A field that is added to the wire without a line here fails the first test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from apis.datasets.models import RegisterDatasetRequest
from apis.errors import InvalidField, PostgradError
from apis.post_training.models import (
    LoraFinetuningConfig,
    QATFinetuningConfig,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.folders import write_record
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.layout import checkpoints_root
from post_training.jobs.devices import slots_of
from post_training.jobs.launchers.local import LocalLauncher
from post_training.jobs.scheduler import Scheduler, SchedulerSettings
from post_training.worker import announcing
from providers.localfs.config import LocalFSConfig
from providers.localfs.provider import LocalFiles
from providers.spec import ProviderDeps
from providers.torchtune.config import TorchtunePostTrainingConfig
from providers.torchtune.provider import get_provider_impl
from tests.job_bench import PROVIDER, Bench, Killed, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TRAINING, DATA, OPTIMIZER = "training_config.", "training_config.data_config.", "training_config.optimizer_config."
EFFICIENCY, LORA, QAT = "training_config.efficiency_config.", "algorithm_config.", "algorithm_config(QAT)."

BASE: dict[str, Any] = {
    "model": "tiny",
    "training_config": {
        "n_epochs": 1,
        "dtype": "fp32",
        "seed": 7,
        "data_config": {"dataset_id": "data", "batch_size": 2, "shuffle": False, "max_seq_len": 96},
        "optimizer_config": {"lr": 1e-2, "weight_decay": 0.1},
    },
    "algorithm_config": {"type": "LoRA", "rank": 4, "alpha": 8},
}
VALIDATED = {DATA + "validation_dataset_id": "held-out"}


@dataclass(frozen=True)
class Acts:
    """A field whose value changes what a job records.

    Attributes:
        value: what it is changed to.
        changes: the parts of `Record` that must differ; others may.
        beside: settings that both jobs have.
        same: parts that must not differ.
    """

    value: Any
    changes: tuple[str, ...]
    beside: dict[str, Any] = field(default_factory=dict)
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A value that is refused before anything runs, in the name of the field (or of `param`)."""

    value: Any
    message: str
    param: str | None = None
    beside: dict[str, Any] = field(default_factory=dict)


NO_QAT = "QAT is not offered on any device"
CASES: dict[str, Acts | Refused] = {
    TRAINING + "n_epochs": Acts(2, ("plan", "rates")),
    TRAINING + "max_steps_per_epoch": Acts(2, ("plan", "rates")),
    TRAINING + "gradient_accumulation_steps": Acts(2, ("plan", "adapter")),
    TRAINING + "max_validation_steps": Acts(1, ("validation",), VALIDATED, same=("adapter",)),
    TRAINING + "dtype": Acts("bf16", ("adapter", "resources")),
    TRAINING + "max_grad_norm": Acts(0.01, ("adapter",), {OPTIMIZER + "optimizer_type": "sgd"}, same=("plan",)),
    TRAINING + "seed": Acts(8, ("adapter", "report"), same=("plan",)),
    TRAINING + "save_every_n_steps": Acts(2, ("saves",), same=("adapter",)),
    TRAINING + "save_total_limit": Acts(3, ("kept",), {TRAINING + "save_every_n_steps": 1}, same=("adapter", "saves")),
    TRAINING + "max_attempts": Acts(1, ("after_a_lost_worker",)),
    TRAINING + "device": Refused("cuda", "no cuda device is configured"),
    TRAINING + "early_stopping_patience": Acts(
        1,
        ("plan",),
        {**VALIDATED, TRAINING + "n_epochs": 4, TRAINING + "max_steps_per_epoch": 1, OPTIMIZER + "lr": 0.3},
    ),
    DATA + "dataset_id": Acts("held-out", ("plan", "adapter", "report")),
    DATA + "batch_size": Acts(3, ("plan", "adapter")),
    DATA + "shuffle": Acts(True, ("plan", "adapter")),
    DATA + "data_format": Acts("text", ("report", "adapter"), {DATA + "dataset_id": "both"}),
    DATA + "columns": Acts({"completion": "shout"}, ("report", "adapter"), {DATA + "dataset_id": "both"}),
    DATA + "validation_dataset_id": Acts("held-out", ("validation", "report"), same=("adapter",)),
    DATA + "validation_split": Acts(0.3, ("plan", "validation", "report")),
    DATA + "packed": Acts(True, ("plan", "adapter")),
    DATA + "train_on_input": Acts(True, ("plan", "adapter", "report")),
    DATA + "max_seq_len": Acts(30, ("plan", "report")),
    DATA + "on_overlength": Acts("drop", ("plan", "report"), {DATA + "max_seq_len": 36}),
    OPTIMIZER + "optimizer_type": Acts("adam", ("adapter",), same=("plan", "rates")),
    OPTIMIZER + "lr": Acts(2e-2, ("rates", "adapter")),
    OPTIMIZER + "weight_decay": Acts(0.3, ("adapter",), same=("rates",)),
    OPTIMIZER + "num_warmup_steps": Acts(3, ("rates", "adapter", "report")),
    OPTIMIZER + "lr_schedule": Acts("linear", ("rates", "adapter")),
    OPTIMIZER + "min_lr_ratio": Acts(0.5, ("rates", "adapter")),
    OPTIMIZER + "betas": Acts([0.5, 0.9], ("adapter",), same=("rates",)),
    OPTIMIZER + "eps": Acts(1e-2, ("adapter",), same=("rates",)),
    OPTIMIZER + "momentum": Acts(0.9, ("adapter",), {OPTIMIZER + "optimizer_type": "sgd"}, same=("rates",)),
    EFFICIENCY + "enable_activation_checkpointing": Acts(True, ("saved_for_backward",), same=("adapter", "rates")),
    EFFICIENCY + "enable_activation_offloading": Refused(True, "activations are in main memory already"),
    EFFICIENCY + "memory_efficient_fsdp_wrap": Refused(True, "no FSDP on a single device"),
    EFFICIENCY + "fsdp_cpu_offload": Refused(True, "no FSDP on a single device"),
    LORA + "type": Refused("QAT", NO_QAT, beside={}),
    LORA + "lora_attn_modules": Acts(["q_proj"], ("adapter", "layers", "report")),
    LORA + "apply_lora_to_mlp": Acts(False, ("adapter", "layers", "report")),
    LORA + "apply_lora_to_output": Acts(True, ("adapter", "layers", "report")),
    LORA + "rank": Acts(2, ("adapter", "report")),
    LORA + "alpha": Acts(16, ("adapter",)),
    LORA + "use_dora": Acts(True, ("adapter", "layers", "report")),
    LORA + "quantize_base": Acts(True, ("adapter", "verified"), same=("layers", "plan")),
    LORA + "use_rslora": Acts(True, ("adapter", "settings")),
    LORA + "lora_dropout": Acts(0.3, ("adapter", "settings"), same=("plan",)),
    QAT + "type": Refused("QAT", NO_QAT, LORA + "type"),
    QAT + "quantizer_name": Refused("other", NO_QAT, LORA + "type"),
    QAT + "group_size": Refused(64, NO_QAT, LORA + "type"),
}


def fields_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The full name of every field in which a value can stand, nested configurations resolved."""
    for name, info in model.model_fields.items():
        inner: list[Any] = [a for a in (info.annotation, *get_args(info.annotation)) if _is_config(a)]
        if inner:
            yield from fields_of(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def test_every_field_of_the_wire_has_a_line_here() -> None:
    roots = ((TrainingConfig, TRAINING), (LoraFinetuningConfig, LORA), (QATFinetuningConfig, QAT))
    assert {name for model, prefix in roots for name in fields_of(model, prefix)} == set(CASES)


# -- a service and its jobs -------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What a job leaves behind, as one field might change it."""

    status: str
    adapter: str
    layers: list[str]
    settings: dict[str, Any]
    plan: list[tuple[int, int, int]]
    rates: list[float]
    validation: list[Any]
    report: dict[str, Any]
    resources: dict[str, Any]
    saves: list[str]
    kept: int
    saved_for_backward: int
    verified: list[str]


class Service(Bench):
    """The torchtune provider's own service over a store, and attempts of its jobs in this process."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, save_tiny_llama(home / "models" / "tiny", context=128))
        database = self.store.database
        datasets = DatasetCatalog(database, home)
        datasets.attach_sources([LocalFiles("localfs", LocalFSConfig(), [])])
        scheduler = Scheduler(
            self.store,
            LocalLauncher(database.url, home),
            lambda job_uuid: checkpoints_root(home, job_uuid).parent,
            lambda _: None,
            SchedulerSettings(slots=slots_of(["cpu"])),
        )
        models = ModelCatalog(database, home)
        write_record(self.base, "tiny")
        deps = ProviderDeps(PROVIDER, home, database, models, datasets, scheduler, {})
        config = TorchtunePostTrainingConfig(threads=1, micro_batch_tokens=128)
        self.service = asyncio.run(get_provider_impl(config, deps))
        self._seen: dict[str, Record] = {}
        for name, data in DATASETS.items():
            request = {"dataset_id": name, "source": {"type": "rows", "rows": data}}
            asyncio.run(datasets.register_dataset(RegisterDatasetRequest.model_validate(request)))

    def accept(self, settings: dict[str, Any]) -> str:
        """Send BASE with other settings; returns the job's id. Raises what the service refuses it with."""
        body = with_settings({**BASE, "job_uuid": f"job-{len(self.store.summaries())}"}, settings)
        asyncio.run(self.service.supervised_fine_tune(SupervisedFineTuneRequest.model_validate(body)))
        return body["job_uuid"]

    def record(self, settings: dict[str, Any]) -> Record:
        """Run a job to its end, once for the same settings."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self._seen:
            self._seen[key] = self._run(self.accept(settings))
        return self._seen[key]

    def after_a_lost_worker(self, settings: dict[str, Any]) -> str:
        """The state of a job whose first attempt is killed at its second step, as the scheduler leaves it."""
        job_uuid = self.accept(settings)

        def kill(what: str, step: int | None) -> None:
            if what == "update" and step == 2:
                raise Killed

        lost: Any = self.leases.lost
        stack = self.service._scheduler.settings.max_attempts
        self.leases.lost = lambda *about, **_: lost(*about, max_attempts=stack) or True  # a bench tries again for ever
        try:
            status = self.attempt(kill)
        finally:
            self.leases.lost = lost
        if status == "scheduled":
            self.attempt()
        assert self.store.get(job_uuid).status in ("completed", "failed")
        return status

    def _run(self, job_uuid: str) -> Record:
        kept, held = 0, 0

        def count(_what: str, _step: int | None) -> None:
            nonlocal kept
            kept = max(kept, len(self.steps(job_uuid)))

        def pack(tensor: Tensor) -> Tensor:
            nonlocal held
            held += tensor.numel() * tensor.element_size()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.attempt(count)
        outcome, job = self.outcome(job_uuid), self.store.get(job_uuid)
        assert outcome.status == "completed", job.error
        newest = self.store.checkpoints(job_uuid)[-1]
        adapter = self.home / newest.path / "adapter"
        config = json.loads((adapter / "adapter_config.json").read_text())
        return Record(
            status=outcome.status,
            adapter=outcome.adapters[-1],
            layers=_keys(adapter / "adapter_model.safetensors"),
            settings=config,
            plan=[(step["epoch"], step["tokens"], step["supervised_tokens"]) for step in outcome.series],
            rates=[step["lr"] for step in outcome.series],
            validation=[(metrics or {}).get("validation_loss") for metrics in outcome.metrics],
            report=job.report or {},
            resources={name: (job.resources or {})[name] for name in ("device", "dtype", "threads")},
            saves=[line.split(" in ")[0] for line in self.log(job_uuid).splitlines() if line.startswith("saved step ")],
            kept=kept,
            saved_for_backward=held,
            verified=sorted(name for name, value in (newest.verification or {}).items() if value is not None),
        )


SHOUTED = [{**row, "shout": row["completion"].upper(), "text": row["prompt"]} for row in rows(10)]
DATASETS = {"data": rows(10), "held-out": rows(17)[10:], "both": SHOUTED}


def with_settings(body: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """`body` with values at dotted names."""
    changed = deepcopy(body)
    for name, value in settings.items():
        *folders, leaf = name.split(".")
        reduce(lambda inner, folder: inner.setdefault(folder, {}), folders, changed)[leaf] = value
    return changed


def _keys(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return sorted(opened.keys())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield Service(tmp_path_factory.mktemp("home"))
    torch.set_num_threads(threads)


ACTING = {name: case for name, case in CASES.items() if isinstance(case, Acts)}
REFUSED = {name: case for name, case in CASES.items() if isinstance(case, Refused)}


@pytest.mark.parametrize("name", ACTING)
def test_changing_a_field_alone_changes_what_is_recorded(service: Service, name: str) -> None:
    case = ACTING[name]
    if case.changes == ("after_a_lost_worker",):
        states = [service.after_a_lost_worker(settings) for settings in (case.beside, {name: case.value})]
        assert states == ["scheduled", "failed"]
        return
    before, after = (asdict(service.record(settings)) for settings in (case.beside, case.beside | {name: case.value}))
    for part in case.changes:
        assert before[part] != after[part], part
    for part in case.same:
        assert before[part] == after[part], part


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_act_is_refused_by_name_before_anything_runs(service: Service, name: str) -> None:
    case = REFUSED[name]
    settings = {name: case.value}
    if case.message == NO_QAT:
        qat: dict[str, Any] = {"type": "QAT", "quantizer_name": "int8", "group_size": 32}
        settings = {"algorithm_config": qat | {name.rpartition(".")[2]: case.value}}
    jobs = len(service.store.summaries())
    with pytest.raises(PostgradError, match=case.message) as refusal:
        service.accept(settings)
    assert isinstance(refusal.value, InvalidField)
    assert refusal.value.http_status == 400
    assert refusal.value.param == (case.param or name)
    assert len(service.store.summaries()) == jobs


@pytest.mark.parametrize("part", ["training_config", "data_config", "optimizer_config", "efficiency_config", "LoRA"])
def test_a_field_that_is_not_known_is_refused(part: str) -> None:
    where = {"training_config": TRAINING, "data_config": DATA, "optimizer_config": OPTIMIZER}
    prefix = where.get(part, EFFICIENCY if part == "efficiency_config" else LORA)
    with pytest.raises(ValidationError) as refused:
        SupervisedFineTuneRequest.model_validate(with_settings({**BASE, "job_uuid": "j"}, {prefix + "not_a_field": 1}))
    assert refused.value.errors()[0]["loc"][-1] == "not_a_field"


def test_recomputing_activations_saves_most_of_their_memory(service: Service) -> None:
    name = EFFICIENCY + "enable_activation_checkpointing"
    plain, recomputed = service.record({}), service.record({name: True})
    assert recomputed.saved_for_backward < 0.5 * plain.saved_for_backward


def test_bf16_halves_what_the_backward_pass_needs(service: Service) -> None:
    plain, halved = service.record({}), service.record({TRAINING + "dtype": "bf16"})
    assert halved.saved_for_backward < 0.75 * plain.saved_for_backward


def test_the_same_request_gives_the_same_bytes(service: Service) -> None:
    first = service.record({})
    again = service._run(service.accept({}))
    assert asdict(again) | {"report": None} == asdict(first) | {"report": None}

"""The card beside a trained model: the facts of its run, the same bytes however often the job was interrupted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM

from post_training.catalog.exporting import export_gguf, export_merged
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints.layout import check_files
from post_training.checkpoints.model_card import Run, render_card
from post_training.job_views import checkpoint_of
from post_training.jobs.spec import JobSpec
from post_training.jobs.tables import CheckpointRow
from post_training.worker import announcing
from tests.job_bench import Bench, Killed, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

JOB = "carded"
FORMS = ("adapter", "merged")


@dataclass
class Finished:
    bench: Bench
    spec: JobSpec
    rows: list[CheckpointRow]
    report: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Of the last checkpoint."""
        return self.bench.home / self.rows[-1].path

    def card(self, form: str) -> str:
        return (self.folder / form / "README.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def _verification_in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcing, "Verifier", VerifierHere)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", context=128)


def submitted(home: Path, base: Path) -> tuple[Bench, JobSpec]:
    bench = Bench(home, base, export=FORMS)
    spec = bench.submit(
        JOB, rows(5), rows(2), optimizer_config={"optimizer_type": "adamw", "lr": 0.002}, save_every_n_steps=1
    )
    return bench, spec


def finished(bench: Bench, spec: JobSpec) -> Finished:
    outcome = bench.run(spec, attempts=3)
    assert outcome.status == "completed", outcome.error
    return Finished(bench, spec, list(bench.store.checkpoints(JOB)), bench.store.get(JOB).report or {})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Finished:
    """A job of two epochs of three steps."""
    return finished(*submitted(tmp_path_factory.mktemp("calm"), base))


def cells(card: str) -> dict[str, str]:
    """The tables' rows."""
    found = re.findall(r"^\| (\S[^|]*) \| `(.*)` \|$", card, re.MULTILINE)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def test_the_hub_reads_the_front_matter_of_both_forms(job: Finished):
    for form, library in (("adapter", "peft"), ("merged", "transformers")):
        data = ModelCard(job.card(form)).data.to_dict()
        assert data["base_model"] == "tiny"
        assert data["library_name"] == library
        assert data["pipeline_tag"] == "text-generation"
        assert {"lora", "sft"} <= set(data["tags"])


@pytest.mark.parametrize("form", FORMS)
def test_the_card_states_the_facts_of_the_run(job: Finished, form: str):
    card = job.card(form)
    found, metrics = cells(card), job.rows[-1].metrics
    assert metrics is not None
    assert f"\n# {job.rows[-1].identifier}\n" in card
    expected = {
        "job": JOB,
        "base model": "tiny",
        "epochs": "2 of 2",
        "optimizer steps": "6",
        "train loss": repr(metrics["train_loss"]),
        "validation loss": repr(metrics["validation_loss"]),
        "data set": "data",
        "rows": "5",
        "validation data set": "held-out",
        "validation rows": "2",
        "supervised tokens": str(job.report["dataset"]["supervised_tokens"]),
        "truncated": "0",
        "seed": "7",
        "rank": "4",
        "alpha": "8",
        "optimizer_config.lr": "0.002",
        "optimizer_config.optimizer_type": "adamw",
        "dtype": "fp32",
        "data_config.batch_size": "2",
        "torch": version("torch"),
        "peft": version("peft"),
    }
    assert {name: found.get(name) for name in expected} == expected


def test_the_card_tells_what_the_merge_lost_and_the_artifacts_say_the_same(job: Finished):
    verification = checkpoint_of(job.rows[-1]).verification
    assert verification is not None
    assert verification["adapter_error"] < 1e-5
    assert verification["change"] > 1e-4
    assert verification["merge"]["dtype"] == "fp32"
    assert verification["merge"]["relative_loss"] == 0
    modules = verification["merge"]["modules"]
    assert modules == 2 * 7
    for form in FORMS:
        text = " ".join(job.card(form).split())
        assert f"saved as fp32. It changed {modules} weights; saving took 0 of the change" in text


def test_no_row_no_path_and_no_time_is_in_a_card(job: Finished, base: Path):
    texts = [text for row in rows(5) for text in row.values()]
    times = [str(job.spec.created_at.year), "tokens_per_second", "seconds"]
    for form in FORMS:
        card = job.card(form)
        for secret in [*texts, *times, str(job.bench.home), str(base), str(base.parent)]:
            assert secret not in card, secret


def test_the_cards_are_in_the_manifest(job: Finished):
    assert {"adapter/README.md", "merged/README.md"} <= check_files(job.folder).files.keys()


def test_an_interrupted_job_writes_the_same_bytes(job: Finished, tmp_path: Path, base: Path):
    bench, spec = submitted(tmp_path, base)

    def kill(name: str, step: int | None) -> None:
        if name == "update" and step == 5:
            raise Killed

    bench.attempt(kill)
    inside = [bench.root(JOB) / name for name in bench.folders(JOB) if name not in ("3", "6")]
    assert inside
    assert [path for folder in inside for path in folder.rglob("README.md")] == []
    resumed = finished(bench, spec)
    assert [resumed.card(form) for form in FORMS] == [job.card(form) for form in FORMS]


def test_an_export_on_demand_has_the_checkpoints_card(job: Finished):
    models = ModelCatalog(job.bench.store.database, job.bench.home)
    identifier = str(job.rows[-1].identifier)
    exported = export_merged(models, identifier)
    assert (exported / "README.md").read_text() == job.card("merged")
    smaller = (export_merged(models, identifier, "bf16") / "README.md").read_text()
    assert cells(smaller) == cells(job.card("merged"))
    lost = re.search(r"saved as bf16\. It\s+changed 14 weights; saving took (\S+) of the change", smaller)
    assert lost is not None
    assert float(lost[1]) > 0


def test_a_gguf_file_says_of_itself_what_the_card_says(job: Finished):
    models = ModelCatalog(job.bench.store.database, job.bench.home)
    file = export_gguf(models, str(job.rows[-1].identifier))
    described = GGUFReader(file).fields["general.description"].contents()
    assert f"# {job.rows[-1].identifier}\n" in described
    assert cells(described) == cells(job.card("adapter"))
    assert "llama-server" in described
    assert "---" not in described.partition("#")[0]  # what the hub reads of a folder has no place in it


@pytest.mark.parametrize("form", FORMS)
def test_the_way_to_load_it_that_the_card_shows_works(job: Finished, base: Path, form: str):
    (code,) = re.findall(r"```python\n(.*?)```", job.card(form), re.DOTALL)
    code = code.replace('"tiny"', repr(str(base))).replace('"path/to/this/folder"', repr(str(job.folder / form)))
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = torch.tensor([names["tokenizer"]("A stack of books")["input_ids"]])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        untrained = plain(tokens).logits
        expected = PeftModel.from_pretrained(plain, str(job.folder / "adapter"))(tokens).logits
        found = names["model"](tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - untrained).abs().max() > 1e-3


def test_the_card_is_this_houses_own(job: Finished):
    for form in FORMS:
        assert "More Information Needed" not in job.card(form)  # what PEFT's own template is full of
    assert "never load it there" in job.card("adapter")
    assert "do not load it on top of them" in job.card("merged")


def test_a_hostile_name_stays_within_its_cell(job: Finished):
    spec = job.spec.model_copy(deep=True)
    data = spec.training_config.data_config
    assert data is not None
    data.columns = {"prompt": "a`|\n# Heading\r| b"}
    card = render_card("adapter", Run(spec, "m-sft-j-0", 1, 0, {"epoch": 0, "train_loss": 1.5}))
    assert "\n# Heading" not in card
    assert cells(card)["data_config.columns.prompt"] == r"a'\| # Heading \| b"


def test_a_run_that_goes_on_from_a_checkpoint_names_it(job: Finished):
    spec = job.spec.model_copy(deep=True)
    assert "trained on from" not in cells(job.card("adapter"))
    spec.model.identifier = "tiny-sft-first-0"
    card = render_card("merged", Run(spec, "x", 1, 0, {"train_loss": 1.5}))
    assert cells(card)["trained on from"] == "tiny-sft-first-0"
    assert ModelCard(card).data.to_dict()["base_model"] == "tiny"

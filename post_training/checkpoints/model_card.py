"""The card of a trained model: what it is, which run made it, how to load it. Facts of the run and nothing else.

README.md beside the weights, or the description inside a GGUF file.

No row of the data and no path of the server is in it, and no time, so that a resumed job writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from post_training.checkpoints.verification import BF16_BOUND, FP32_BOUND
from post_training.jobs.spec import JobSpec

MODEL_CARD = "README.md"
Form = Literal["adapter", "merged", "gguf"]

_LIBRARIES: dict[Form, str] = {"adapter": "peft", "merged": "transformers"}
# How a run is kept and where it waits; nothing of it is in the weights.
_NOT_IN_THE_WEIGHTS = {"save_every_n_steps", "save_total_limit", "max_attempts", "device", "data_config", "seed"}
_COUNTS = ("rows", "tokens", "supervised_tokens", "longest_row_tokens", "truncated", "dropped")
_SETTINGS = ("max_seq_len", "warmup_steps", "trainable_parameters")

_LOAD_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

The base is `{name}` itself. On a merged model the adapter would act a second time: never load it there.
"""
_LOAD_MERGED = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

The adapter is part of these weights: do not load it on top of them.
"""
_LOAD_GGUF = """\
```
llama-server --jinja -m path/to/this/file.gguf
```

The adapter is part of these weights: do not load it on top of them.
"""
_LOAD: dict[Form, str] = {"adapter": _LOAD_ADAPTER, "merged": _LOAD_MERGED, "gguf": _LOAD_GGUF}


@dataclass(frozen=True)
class Run:
    """What a card tells of.

    Attributes:
        epoch: from 0, the one that has just ended.
        metrics: of that epoch.
        report: what the job says of its data and settings; counts and settings are taken, its sample is not.
        merge: what the merge measured, as `export.MergeReport`; None where there was none.
    """

    spec: JobSpec
    identifier: str
    step: int
    epoch: int
    metrics: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)
    merge: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def write_card(directory: Path, form: Form, run: Run) -> None:
    """Write README.md into an `adapter` or `merged` folder. Raises OSError, with ENOSPC where the disk is full."""
    (directory / MODEL_CARD).write_text(render_card(form, run), encoding="utf-8")


def render_card(form: Form, run: Run) -> str:
    """The card as Markdown; that of a folder begins with the YAML that the Hugging Face hub reads."""
    base = run.spec.model.base_identifier
    parts = (
        *([] if form == "gguf" else [_front_matter(form, base, run.spec.trains_all)]),
        f"# {run.identifier}\n",
        f"{_ALL_TRAINED if run.spec.trains_all else _WHAT[form]} of `{base}`, made by Postgrad.\n",
        f"## Load\n\n{_LOAD[form].format(base=json.dumps(base, ensure_ascii=False), name=base)}",
        f"## Run\n\n{_table(_run_facts(run))}",
        f"## Data\n\n{_table(_data_facts(run))}",
        f"## Settings\n\n{_table(_setting_facts(run))}",
        f"## Verification\n\n{_verification(run)}",
        f"## Versions\n\n{_table(sorted(run.versions.items()))}",
    )
    return "\n".join(parts)


_ALL_TRAINED = "A whole model, of which every weight was trained on from those"
_WHAT: dict[Form, str] = {
    "adapter": "A LoRA adapter (PEFT)",
    "merged": "A whole model: a LoRA adapter merged into the weights",
    "gguf": "A whole model for llama.cpp: a LoRA adapter merged into the weights",
}


def _front_matter(form: Form, base: str, trains_all: bool) -> str:
    facts = {
        "base_model": base,
        "base_model_relation": "adapter" if form == "adapter" else "finetune",
        "library_name": _LIBRARIES[form],
        "pipeline_tag": "text-generation",
        "tags": [*(() if trains_all else ("lora",)), "sft", "postgrad"],
    }
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---\n"


def _run_facts(run: Run) -> Iterator[tuple[str, Any]]:
    spec = run.spec
    yield "job", spec.job_uuid
    yield "base model", spec.model.base_identifier
    if spec.model.identifier != spec.model.base_identifier:
        yield "trained on from", spec.model.identifier
    if spec.session is None:
        yield "epochs", f"{run.epoch + 1} of {spec.n_epochs}"
    yield "optimizer steps", run.step
    for name, value in run.metrics.items():
        if name != "epoch" and value is not None:
            yield name.replace("_", " "), value


def _data_facts(run: Run) -> Iterator[tuple[str, Any]]:
    if run.spec.dataset is None:
        yield "data", "rows that a client sent, step by step"
        return
    yield "data set", run.spec.dataset.dataset_id
    yield from _counts(run.report.get("dataset"), "")
    if run.spec.validation is not None:
        yield "validation data set", run.spec.validation.dataset_id
    yield from _counts(run.report.get("validation_dataset"), "validation ")


def _counts(report: Any, prefix: str) -> Iterator[tuple[str, int]]:
    for name in _COUNTS:
        value = report.get(name) if isinstance(report, Mapping) else None
        value = value.get("count") if isinstance(value, Mapping) else value
        if isinstance(value, int):
            yield prefix + name.replace("_", " "), value


def _setting_facts(run: Run) -> Iterator[tuple[str, Any]]:
    spec = run.spec
    yield "seed", spec.seed
    for name in _SETTINGS:
        if isinstance(run.report.get(name), int):
            yield name, run.report[name]
    yield from _flat("", spec.algorithm_config.model_dump(mode="json", exclude_none=True))
    yield from _flat("", spec.training_config.model_dump(mode="json", exclude_none=True, exclude=_NOT_IN_THE_WEIGHTS))
    data = spec.training_config.data_config
    if data is not None:
        left_out = {"dataset_id", "validation_dataset_id"}
        yield from _flat("data_config.", data.model_dump(mode="json", exclude_none=True, exclude=left_out))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _verification(run: Run) -> str:
    what = "the whole model in fp32" if run.spec.trains_all else "base + adapter, and an fp32 merge"
    lines = [
        "A checkpoint becomes a model only after a separate process has loaded it through PEFT and transformers and "
        "compared its logits, in fp32, with those of the trainer. The numbers measured are in the checkpoint's "
        "`verification` in the job's artifacts; allowed is, as relative Frobenius norm of the difference:\n",
        f"- {what}: {FP32_BOUND:g}, and the same most likely tokens",
        "- different from the base alone",
    ]
    if run.merge is not None and run.merge["dtype"] == "bf16":
        lines.append(f"- merge saved in bf16: {BF16_BOUND:g}")
    if run.merge is not None:
        loss = f"{run.merge['relative_loss']:.3g}"
        lines.append(
            f"\nThe merge was made in fp32 and saved as {run.merge['dtype']}. It "
            f"changed {run.merge['modules']} weights; saving took {loss} of the change (relative Frobenius)."
        )
    return "\n".join(lines) + "\n"


def _table(rows: Any) -> str:
    return "".join(["| | |\n|---|---|\n", *(f"| {name} | {_cell(value)} |\n" for name, value in rows)])


def _cell(value: Any) -> str:
    """A value as code, on one line and within its cell, whatever it holds."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ").replace("\r", " ") + "`"

"""The same job, said in every dialect, is the same job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from apis.post_training import PreflightRequest, SupervisedFineTuneRequest
from distributions.dialects.llama_stack_alpha_bodies import AlphaFineTune, AlphaSupervisedFineTuneRequest
from distributions.dialects.llama_stack_v1 import body_translations

ALPHA: TypeAdapter[Any] = TypeAdapter(AlphaFineTune)
KINDS: dict[str, dict[str, bool]] = {"lora": {}, "qlora": {"quantize_base": True}, "dora": {"use_dora": True}}
EFFICIENCY = ("enable_activation_checkpointing", "memory_efficient_fsdp_wrap", "fsdp_cpu_offload")
Job = dict[str, Any]

rates = st.floats(1e-6, 1e-2)
jobs = st.fixed_dictionaries(
    {
        "job_uuid": st.sampled_from(["1234", "org/job", "a.b:c@d-e_f"]),
        "model": st.sampled_from(["m", "meta-llama/Llama-3.2-3B-Instruct"]),
        "dataset_id": st.sampled_from(["d", "org/d"]),
        "validation": st.sampled_from([None, "v", "org/v"]),
        "n_epochs": st.integers(1, 10),
        "steps": st.integers(0, 100),
        "batch_size": st.integers(1, 64),
        "shuffle": st.booleans(),
        "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
        "lr": rates,
        "fall": st.floats(0, 1),
        "weight_decay": st.floats(0, 1),
        "efficiency": st.tuples(st.booleans(), st.booleans(), st.booleans()),
        "kind": st.sampled_from(list(KINDS)),
        "rank": st.integers(1, 256),
        "alpha": st.integers(1, 512),
        "modules": st.lists(st.sampled_from(["q_proj", "k_proj", "v_proj", "output_proj"]), unique=True, min_size=1),
        "mlp": st.booleans(),
        "output": st.booleans(),
    }
)


def adapter(job: Job) -> Job:
    return {
        "lora_attn_modules": job["modules"],
        "apply_lora_to_mlp": job["mlp"],
        "apply_lora_to_output": job["output"],
        "rank": job["rank"],
        "alpha": job["alpha"],
    }


def oldest(job: Job) -> Job:
    """As 0.0.53 to 0.0.61 say it."""
    return {
        "job_uuid": job["job_uuid"],
        "model": job["model"],
        "dataset_id": job["dataset_id"],
        "validation_dataset_id": job["validation"] or "",
        "algorithm": job["kind"],
        "algorithm_config": adapter(job),
        "optimizer_config": {
            "optimizer_type": job["optimizer"],
            "lr": job["lr"],
            "lr_min": job["lr"] * job["fall"],
            "weight_decay": job["weight_decay"],
        },
        "training_config": {
            "n_epochs": job["n_epochs"],
            "n_iters": job["steps"],
            "batch_size": job["batch_size"],
            "shuffle": job["shuffle"],
            **dict(zip(EFFICIENCY, job["efficiency"], strict=True)),
        },
        "hyperparam_search_config": {},
        "logger_config": {},
    }


def newer(job: Job) -> Job:
    """As every client from 0.0.62 on says it."""
    minimum = job["lr"] * job["fall"]
    falls = {"min_lr_ratio": minimum / job["lr"]} if minimum else {}
    optimizer = {"optimizer_type": job["optimizer"], "lr": job["lr"], "weight_decay": job["weight_decay"]}
    return {
        "job_uuid": job["job_uuid"],
        "model": job["model"],
        "training_config": {
            "n_epochs": job["n_epochs"],
            "max_steps_per_epoch": job["steps"],
            "gradient_accumulation_steps": 1,
            "data_config": {
                "dataset_id": job["dataset_id"],
                "batch_size": job["batch_size"],
                "shuffle": job["shuffle"],
                "validation_dataset_id": job["validation"],
            },
            "optimizer_config": optimizer | falls,
            "efficiency_config": dict(zip(EFFICIENCY, job["efficiency"], strict=True)),
        },
        "algorithm_config": {"type": "LoRA", **adapter(job), **KINDS[job["kind"]]},
        "hyperparam_search_config": {},
        "logger_config": {},
        "checkpoint_dir": "null",
    }


def command_line(job: Job) -> Job:
    """Configs as JSON in strings, and no directory as null."""
    body = newer(job)
    texts = {name: json.dumps(body[name]) for name in ("training_config", "algorithm_config")}
    return {**body, **texts, "checkpoint_dir": None}


def without_what_may_be_left_out(job: Job) -> Job:
    """Neither empty configs nor the adapter's type."""
    left_out = ("hyperparam_search_config", "logger_config", "checkpoint_dir")
    body = {name: value for name, value in newer(job).items() if name not in left_out}
    return {**body, "algorithm_config": {k: v for k, v in body["algorithm_config"].items() if k != "type"}}


DIALECTS: list[tuple[str, Callable[[Job], Job]]] = [
    ("alpha", oldest),
    *((version, said) for version in ("alpha", "v1", "v1alpha") for said in (newer, command_line)),
    ("v1", without_what_may_be_left_out),
    ("v1alpha", without_what_may_be_left_out),
]


def understood(version: str, body: Job) -> SupervisedFineTuneRequest:
    translated = body_translations()[f"/{version}/post-training/supervised-fine-tune"](body)
    if version != "alpha":
        return SupervisedFineTuneRequest.model_validate(translated)
    request = ALPHA.validate_python(translated)
    return request.spec() if isinstance(request, AlphaSupervisedFineTuneRequest) else request


@given(jobs)
def test_a_job_said_in_every_dialect_is_one_spec(job: Job):
    first, *others = [understood(version, said(job)).model_dump() for version, said in DIALECTS]
    assert first["training_config"]["data_config"]["dataset_id"] == job["dataset_id"]
    assert all(other == first for other in others)


@given(jobs)
def test_a_preflight_is_translated_as_the_job_is(job: Job):
    body = body_translations()["/v1/post-training/preflight"](command_line(job))
    checked = PreflightRequest.model_validate(body).as_job(job["job_uuid"])
    assert checked.model_dump() == understood("v1", newer(job)).model_dump()

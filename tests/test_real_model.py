"""SmolLM2-135M-Instruct through every floor: logits, the real client, the artifacts, the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from llama_stack_client import LlamaStackClient
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from post_training.catalog.importing import import_model
from post_training.checkpoints.state import load_training_state, masters_of
from post_training.data.chat import ChatTokenizer
from post_training.training.model import LoraSettings, ModelConfig, Segments
from providers.torchtune import shim
from providers.torchtune.model import load_model
from tests.served_stack import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "smollm2"
CODES = {
    "the blue house": "4711",
    "the old mill": "2093",
    "the harbour": "8850",
    "the school": "1364",
    "the bakery": "5527",
    "the library": "9016",
}
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 8,
    "alpha": 16,
}
TRAINING = {
    "n_epochs": 1,
    "max_steps_per_epoch": 0,
    "gradient_accumulation_steps": 1,
    "dtype": "fp32",
    "optimizer_config": {"optimizer_type": "adamw", "lr": 2e-3, "weight_decay": 0.0, "num_warmup_steps": 2},
    "data_config": {
        "dataset_id": "repeated",
        "batch_size": 6,
        "shuffle": False,
        "data_format": "instruct",
        "validation_dataset_id": "codes",
    },
}
RUN_YAML = """
version: 2
image_name: real-model
apis: [post_training, datasetio, inference]
providers:
  inference:
  - {provider_id: transformers, provider_type: 'inline::transformers', config: {dtype: fp32}}
  datasetio:
  - {provider_id: localfs, provider_type: 'inline::localfs', config: {}}
  post_training:
  - provider_id: torchtune
    provider_type: inline::torchtune
    config: {export: [adapter, merged]}
"""


def question(place: str) -> str:
    return f"What is the code of {place}?"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    home = tmp_path_factory.mktemp("real") / "home"
    import_model(str(smollm2), MODEL, home)
    return home


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    run_yaml = home.parent / "run.yaml"
    run_yaml.write_text(RUN_YAML)
    with served(home, stack=str(run_yaml)) as (made, _):
        yield made


@pytest.fixture(scope="module")
def client(url: str) -> LlamaStackClient:
    return LlamaStackClient(base_url=url)


@pytest.fixture(scope="module")
def job(client: LlamaStackClient) -> Any:
    """The status of a finished job, submitted and polled by the real client."""
    rows = [
        {"chat_completion_input": json.dumps([{"role": "user", "content": question(p)}]), "expected_answer": code}
        for p, code in CODES.items()
    ]
    # An epoch of the second set is twenty passes over the first, with one checkpoint at its end.
    for dataset_id, content in (("codes", rows), ("repeated", rows * 20)):
        client.datasets.register(
            purpose="post-training/messages", source=cast(Any, {"type": "rows", "rows": content}), dataset_id=dataset_id
        )
    submitted = client.post_training.supervised_fine_tune(
        job_uuid="codes-1",
        model=MODEL,
        algorithm_config=cast(Any, LORA),
        training_config=cast(Any, TRAINING),
        hyperparam_search_config={},
        logger_config={},
    )
    assert submitted.job_uuid == "codes-1"
    deadline = time.monotonic() + 400
    while (status := client.post_training.job.status(job_uuid="codes-1")).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, status
        assert status.status in ("scheduled", "in_progress")
        time.sleep(0.5)
    return status


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def flat(ids: Tensor) -> Segments:
    return Segments(ids, torch.arange(len(ids)), (len(ids),))


def test_torchtunes_forward_and_ours_equal_transformers_logits(smollm2: Path):
    text = "Postgrad trains small models. " * 8
    ids = torch.tensor(ChatTokenizer.from_dir(smollm2).encode_text(text))
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ours = load_model(ModelConfig(smollm2, dtype="fp32"))
    config = reference.config
    theirs = shim.llama3_2(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        embed_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        max_seq_len=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_base=config.rope_parameters["rope_theta"],
        scale_factor=1,
    )
    weights = load_file(smollm2 / "model.safetensors")
    converted = shim.hf_to_tune(weights, config.num_attention_heads, config.num_key_value_heads, config.hidden_size)
    theirs.load_state_dict({name: tensor.float() for name, tensor in converted.items()})
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
        assert relative(ours.output(ours.hidden_states(flat(ids))), expected) < 1e-5
        assert relative(theirs.float()(ids[None])[0], expected) < 1e-3


def test_the_real_client_sees_the_job_through(job: Any, client: LlamaStackClient):
    assert job.status == "completed", job
    assert [listed.job_uuid for listed in client.post_training.job.list()] == ["codes-1"]
    artifacts = client.post_training.job.artifacts(job_uuid="codes-1")
    (checkpoint,) = cast(list[dict[str, Any]], artifacts.checkpoints)
    assert checkpoint["identifier"] == "smollm2-sft-codes-1-0"
    assert checkpoint["post_training_job_id"] == "codes-1"
    assert checkpoint["training_metrics"]["validation_loss"] < 0.5
    client.post_training.job.cancel(job_uuid="codes-1")
    assert client.post_training.job.status(job_uuid="codes-1").status == "completed"


def test_the_real_command_line_lists_shows_and_submits(job: Any, url: str, tmp_path: Path):
    def run(*arguments: str) -> str:
        program = str(Path(sys.executable).parent / "llama-stack-client")
        # Its config file, if there is one, would replace the endpoint.
        env = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "200", "NO_COLOR": "1"}
        command = [program, "--endpoint", url, "post_training", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert "codes-1" in run("list")
    assert "status='completed'" in run("status", "--job-uuid", "codes-1")
    assert "smollm2-sft-codes-1-0" in run("artifacts", "--job-uuid", "codes-1")
    submitted = run(
        "supervised_fine_tune", "--job-uuid", "by-cli", "--model", MODEL,
        "--algorithm-config", json.dumps(LORA),
        "--training-config", json.dumps({"n_epochs": 50, "data_config": {"dataset_id": "repeated"}}),
    )  # fmt: skip
    assert "by-cli" in submitted
    run("cancel", "--job-uuid", "by-cli")
    for _ in range(200):
        if "cancelled" in run("status", "--job-uuid", "by-cli"):
            return
        time.sleep(0.2)
    raise AssertionError(run("status", "--job-uuid", "by-cli"))


def test_the_tuned_model_answers_right_and_the_base_does_not(job: Any, url: str):
    right = {}
    for model in ("smollm2", "smollm2-sft-codes-1-0"):
        answers = {place: _ask(url, model, question(place)) for place in CODES}
        right[model] = sum(answers[place] == code for place, code in CODES.items())
    assert right["smollm2"] == 0
    assert right["smollm2-sft-codes-1-0"] == len(CODES)


def _ask(url: str, model: str, text: str) -> str:
    body = {"model": model, "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_plain_peft_and_the_merged_model_give_the_trainers_logits(job: Any, home: Path, smollm2: Path):
    folder = home / job.checkpoints[0]["path"]
    messages = [{"role": "user", "content": question("the mill")}]
    ids = torch.tensor(ChatTokenizer.from_dir(smollm2).encode_prompt(messages))
    lora = LoraSettings(8, 16, ("q_proj", "v_proj", "output_proj"), mlp=True)
    trainer = load_model(ModelConfig(smollm2, lora, dtype="fp32"))
    masters = masters_of(load_training_state(folder / "training_state")[0])
    with torch.no_grad():
        for name, parameter in trainer.adapter_parameters().items():
            parameter.copy_(masters[name])
        expected = trainer.output(trainer.hidden_states(flat(ids)))
        base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        untrained = base(ids[None]).logits[0]
        adapted = PeftModel.from_pretrained(base, folder / "adapter")(ids[None]).logits[0]
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged")(ids[None]).logits[0]
    assert relative(adapted, expected) < 1e-5
    assert relative(merged, expected) < 1e-5
    assert torch.equal(adapted.argmax(-1), expected.argmax(-1))
    assert torch.equal(merged.argmax(-1), expected.argmax(-1))
    assert relative(untrained, expected) > 1e-2

"""A stack with two trainers: which one a job goes to, what its status says, and jobs of the second to their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from apis.errors import BadRequest, JobNotFound, NotSupported
from apis.post_training.models import JobStatus
from post_training.catalog.importing import import_model
from post_training.client import StackClient
from tests.served_stack import served
from tests.test_jobs_end_to_end import rows
from tests.tiny_llama import save_tiny_llama

RUN_YAML = """
version: 2
image_name: two
apis: [post_training, datasetio, inference]
providers:
  datasetio: [{provider_id: localfs, provider_type: 'inline::localfs'}]
  inference: [{provider_id: transformers, provider_type: 'inline::transformers', config: {dtype: fp32}}]
  post_training:
  - {provider_id: tune, provider_type: 'inline::torchtune-cpu'}
  - {provider_id: face, provider_type: 'inline::huggingface-gpu', config: {device: cpu, checkpoint_format: huggingface}}
"""


def save_tiny_gpt2(folder: Path) -> Path:
    """A random GPT-2, which torchtune does not have, with the tiny Llama's tokenizer."""
    save_tiny_llama(folder, context=256)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = GPT2Config(
        vocab_size=512,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    import_model(str(save_tiny_llama(folder / "tiny", context=256)), "tiny", folder / "home")
    import_model(str(save_tiny_gpt2(folder / "gpt2")), "gpt2", folder / "home")
    return folder / "home"


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[StackClient]:
    run_yaml = home.parent / "run.yaml"
    run_yaml.write_text(RUN_YAML)
    with served(home, stack=str(run_yaml)) as (url, _), StackClient(url) as made:
        made.datasets.register({"type": "rows", "rows": rows(12)}, dataset_id="words")
        yield made


def request(job_uuid: str, model: str = "tiny", **fields: Any) -> dict[str, Any]:
    data = {"dataset_id": "words", "batch_size": 4}
    training = {"n_epochs": 1, "dtype": "fp32", "data_config": data, **fields.pop("training", {})}
    return {"job_uuid": job_uuid, "model": model, "training_config": training, **fields}


def submitted(client: StackClient, job_uuid: str, model: str = "tiny", **fields: Any) -> str | None:
    """The provider that a submit goes to; the job is cancelled."""
    client.post_training.supervised_fine_tune(**request(job_uuid, model, **fields))
    found = client.post_training.status(job_uuid).provider_id
    client.post_training.cancel(job_uuid)
    return found


def test_the_first_provider_that_supports_model_and_algorithm_trains_and_the_status_says_which(client: StackClient):
    assert submitted(client, "plain") == "tune"
    assert submitted(client, "other-model", "gpt2") == "face"
    own_name = {"type": "LoRA", "lora_attn_modules": ["up_proj"], "apply_lora_to_mlp": False}
    assert submitted(client, "other-layers", algorithm_config=own_name) == "face"
    assert submitted(client, "all-weights", algorithm_config={"type": "Full"}) == "face"
    assert submitted(client, "quantized", algorithm_config={"type": "LoRA", "quantize_base": True}) == "tune"


def test_a_request_names_its_provider(client: StackClient):
    assert submitted(client, "named", provider_id="face") == "face"
    assert submitted(client, "named-first", provider_id="tune") == "tune"
    with pytest.raises(BadRequest, match=r"no post_training provider 'none' here; there are tune, face") as refusal:
        submitted(client, "nobody", provider_id="none")
    assert refusal.value.param == "provider_id"
    with pytest.raises(BadRequest, match="no builder for model_type 'gpt2'"):
        submitted(client, "cannot", "gpt2", provider_id="tune")


def test_the_same_request_again_is_the_same_job_and_another_provider_another_request(client: StackClient):
    body = request("again", provider_id="face")
    client.post_training.supervised_fine_tune(**body)
    client.post_training.supervised_fine_tune(**body)
    with pytest.raises(BadRequest, match="again"):
        client.post_training.supervised_fine_tune(**{**body, "provider_id": "tune"})
    client.post_training.cancel("again")


def test_what_no_provider_takes_is_refused_by_the_one_that_came_furthest(client: StackClient):
    with pytest.raises(BadRequest, match="QAT") as refusal:
        submitted(client, "qat", algorithm_config={"type": "QAT", "quantizer_name": "x", "group_size": 8})
    assert refusal.value.param == "algorithm_config.type"
    with pytest.raises(BadRequest, match=r"c_attn: name k_proj, v_proj") as refusal:
        submitted(client, "half", "gpt2", algorithm_config={"type": "LoRA", "lora_attn_modules": ["q_proj"]})
    assert refusal.value.param == "algorithm_config.lora_attn_modules"
    with pytest.raises(BadRequest, match="batch_size"):
        submitted(client, "neither", training={"data_config": {"dataset_id": "words", "batch_size": 0}})
    with pytest.raises(NotSupported):
        client.post_training.preference_optimize(job_uuid="dpo", finetuned_model="tiny")
    with pytest.raises(JobNotFound):
        client.post_training.status("qat")


def test_a_preflight_goes_where_the_job_would(client: StackClient):
    body = request("ignored", "gpt2")
    del body["job_uuid"]
    report = client.post_training.preflight(**body)
    assert report.dataset.rows == 12
    with pytest.raises(BadRequest, match="gpt2"):
        client.post_training.preflight(**body, provider_id="tune")


def test_a_session_is_opened_by_the_provider_it_names(client: StackClient):
    def submit(**config: Any) -> httpx.Response:
        return httpx.post(f"{client.base_url}/submit_job", json={"config": config})

    for config, provider in (({"model": "tiny"}, "tune"), ({"model": "gpt2"}, "face")):
        job_id = submit(**config).json()["job_id"]
        assert client.post_training.status(job_id).provider_id == provider
        client.post_training.cancel(job_id)
    refused = submit(model="tiny", provider_id="none")
    assert refused.status_code == 400
    assert "tune, face" in refused.text


@pytest.mark.parametrize(("model", "options"), [("gpt2", {}), ("tiny", {"use_dora": True, "use_rslora": True})])
def test_a_job_of_the_second_provider_completes_with_a_verified_adapter_that_is_served(
    client: StackClient, home: Path, model: str, options: dict[str, Any]
):
    job, algorithm = f"whole-{model}", {"type": "LoRA", "rank": 4, "alpha": 8, **options}
    training = {"optimizer_config": {"lr": 1e-2}}
    client.post_training.supervised_fine_tune(
        **request(job, model, provider_id="face", algorithm_config=algorithm, training=training)
    )
    status = client.post_training.wait(job, poll_seconds=0.2, timeout=200)
    assert status.status is JobStatus.completed, status.error
    assert status.provider_id == "face"
    (checkpoint,) = status.checkpoints
    assert checkpoint.verification is not None
    assert checkpoint.verification["adapter_error"] < 1e-5
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained(home.parent / model, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, home / checkpoint.path / "adapter")(ids).logits
    assert float((after - before).norm() / before.norm()) > 1e-3
    assert chat(client, checkpoint.identifier) == 200


def test_a_job_that_trains_every_weight_leaves_a_whole_model_that_is_served_and_trained_on(
    client: StackClient, home: Path
):
    client.post_training.supervised_fine_tune(**request("full", algorithm_config={"type": "Full"}))
    status = client.post_training.wait("full", poll_seconds=0.2, timeout=200)
    assert status.status is JobStatus.completed, status.error
    (checkpoint,) = status.checkpoints
    assert checkpoint.verification is not None
    assert checkpoint.verification["adapter_error"] is None
    assert checkpoint.verification["merged_error"] < 1e-5
    assert checkpoint.verification["change"] > 1e-4
    assert status.report is not None
    weights = load_file(home / checkpoint.path / "merged" / "model.safetensors")
    assert status.report["trainable_parameters"] == sum(tensor.numel() for tensor in weights.values())
    base = load_file(home.parent / "tiny" / "model.safetensors")
    assert all(not torch.equal(tensor, weights[name]) for name, tensor in base.items())
    assert not (home / checkpoint.path / "adapter").exists()
    assert "of which every weight was trained" in (home / checkpoint.path / "merged" / "README.md").read_text()
    assert chat(client, checkpoint.identifier) == 200

    lora = {"type": "LoRA", "rank": 2, "alpha": 4}
    client.post_training.supervised_fine_tune(**request("onwards", checkpoint.identifier, algorithm_config=lora))
    onwards = client.post_training.wait("onwards", poll_seconds=0.2, timeout=200)
    assert onwards.status is JobStatus.completed, onwards.error
    assert onwards.provider_id == "tune"
    adapter, full = onwards.checkpoints[0].identifier, {"type": "Full"}
    with pytest.raises(BadRequest, match="is an adapter") as refusal:
        submitted(client, "of-an-adapter", adapter, algorithm_config=full, provider_id="face")
    assert refusal.value.param == "algorithm_config.type"


def chat(client: StackClient, model: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "Say red 1"}], "max_tokens": 4}
    return httpx.post(f"{client.base_url}/v1/chat/completions", json=body, timeout=120).status_code

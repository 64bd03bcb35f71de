"""What the huggingface provider's server side makes of a request: layers by name, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from apis.post_training.models import LoraFinetuningConfig, SupervisedFineTuneRequest
from post_training.catalog.models import ResolvedModel
from providers.huggingface.adapter_options import adapter_config, settings_of_adapter
from providers.huggingface.config import HuggingfacePostTrainingConfig
from providers.huggingface.families import MODEL_TYPES, describe
from providers.huggingface.provider import RequestChecks, lora_lr
from tests.test_huggingface_model import OTHERS, make_other
from tests.torchtune_models import make_model

ALL = ("q_proj", "k_proj", "v_proj", "output_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for case in ("llama", "llama_tied", "phi3", *OTHERS):
        made[case] = tmp_path_factory.mktemp(case)
        make_other(made[case], case) if case in OTHERS else make_model(made[case], case)
    return made


def targets(folder: Path, *modules: str, mlp: bool = False, output: bool = False) -> tuple[str, ...]:
    return describe(folder).layers.targets(modules, mlp=mlp, output=output)


def check(folder: Path, merged: bool = False, adapter: Path | None = None, **fields: Any) -> LoraFinetuningConfig:
    request = SupervisedFineTuneRequest(job_uuid="j", **fields)
    found = RequestChecks(exports_merged=merged).check(request, ResolvedModel("m", "m", folder, adapter, None))
    assert isinstance(found, LoraFinetuningConfig)
    return found


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("llama", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("gpt2", "attn.c_proj c_attn c_fc mlp.c_proj"),
        ("gpt_neox", "dense dense_4h_to_h dense_h_to_4h query_key_value"),
        ("phi3", "down_proj gate_up_proj o_proj qkv_proj"),
        ("bloom", "dense dense_4h_to_h dense_h_to_4h query_key_value"),
    ],
)
def test_the_wires_names_mean_each_architectures_own_layers(folders, case, expected):
    assert targets(folders[case], *ALL, mlp=True) == tuple(expected.split())


def test_one_attention_layer_can_be_named_alone_and_the_output_layer_too(folders):
    assert targets(folders["llama"], "output_proj") == ("o_proj",)
    assert targets(folders["gpt2"], "output_proj") == ("attn.c_proj",)
    assert targets(folders["llama"], output=True) == ("lm_head",)


def test_a_models_own_names_are_taken_as_they_are(folders):
    assert targets(folders["mamba"], "in_proj", "x_proj") == ("in_proj", "x_proj")
    assert targets(folders["llama"], "layers.1.mlp.up_proj") == ("layers.1.mlp.up_proj",)


@pytest.mark.parametrize(
    ("case", "options", "field", "message"),
    [
        ("mamba", {}, "lora_attn_modules", r"no layer that is q_proj; its layers are called .*in_proj"),
        ("llama", {"lora_attn_modules": ["c_attn"]}, "lora_attn_modules", r"no layer is called 'c_attn'.*q_proj"),
        ("gpt2", {"lora_attn_modules": ["q_proj"]}, "lora_attn_modules", r"in one matrix, c_attn: name k_proj, v_proj"),
        ("mixtral", {"apply_lora_to_mlp": True}, "apply_lora_to_mlp", "mixture of experts"),
        ("llama_tied", {"apply_lora_to_output": True}, "apply_lora_to_output", "tied"),
        ("llama", {"quantize_base": True}, "quantize_base", "not offered by this provider"),
        (
            "llama",
            {"lora_attn_modules": [], "apply_lora_to_mlp": False},
            "lora_attn_modules",
            "no layer gets an adapter",
        ),
    ],
)
def test_an_option_that_the_model_cannot_honour_is_refused_by_field(folders, case, options, field, message):
    with pytest.raises(InvalidField, match=message) as refusal:
        check(folders[case], algorithm_config={"type": "LoRA", **options})
    assert refusal.value.param == f"algorithm_config.{field}"


def test_a_mixture_of_experts_is_adapted_without_them_where_the_request_does_not_say(folders):
    assert check(folders["mixtral"]).apply_lora_to_mlp is False
    assert check(folders["llama"]).apply_lora_to_mlp is True


def test_context_and_width_are_read_under_each_architectures_names(folders):
    facts = describe(folders["gpt2"])
    assert (facts.width, facts.context_length, facts.transposed) == (32, 128, True)
    data = {"dataset_id": "d", "max_seq_len": 129}
    with pytest.raises(InvalidField, match="beyond the context of 'm', 128"):
        check(folders["gpt2"], training_config={"data_config": data})
    assert lora_lr(ResolvedModel("m", "m", folders["gpt2"], None, None)) == 1e-3


def test_a_merged_model_is_refused_where_weights_lie_the_other_way(folders):
    with pytest.raises(InvalidField, match=r"gpt2 holds its weights as \[in, out\]"):
        check(folders["gpt2"], merged=True)
    check(folders["gpt2"])
    check(folders["llama"], merged=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "nowhere"}, UnsupportedModel, "no causal language model of model_type 'nowhere'"),
        ({"model_type": "nowhere", "auto_map": {}}, UnsupportedModel, "code that comes with a model is never run"),
        ({"model_type": None}, ModelInvalid, "no model_type"),
        ({"quantization_config": {"quant_method": "x"}}, UnsupportedModel, "quantized"),
    ],
)
def test_a_model_that_transformers_cannot_train_is_refused(folders, tmp_path, change, error, message):
    for file in folders["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=message):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama", {"rank": 4, "alpha": 8, "use_dora": True}),
        ("gpt2", {"lora_attn_modules": ["output_proj"], "use_rslora": True}),
        ("phi3", {"lora_dropout": 0.25}),
        ("mamba", {"lora_attn_modules": ["in_proj"], "apply_lora_to_mlp": False}),
        ("llama", {"lora_attn_modules": ["layers.1.mlp.up_proj"], "apply_lora_to_mlp": False}),
    ],
)
def test_an_adapters_settings_are_read_back_from_it(folders, tmp_path, case, options):
    facts, asked = describe(folders[case]), LoraFinetuningConfig(**options)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(facts, asked)))
    found = settings_of_adapter(tmp_path, facts)
    assert adapter_config(facts, found) == adapter_config(facts, asked)
    assert check(folders[case], adapter=tmp_path) == found
    with pytest.raises(InvalidField, match=f"rank is {asked.rank}, the request asks for 7"):
        check(folders[case], adapter=tmp_path, algorithm_config={"type": "LoRA", "rank": 7})


def test_every_model_type_is_one_of_transformers_own():
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= MODEL_TYPES


@pytest.mark.parametrize(
    ("given", "forms"),
    [
        ({"checkpoint_format": "huggingface", "distributed_backend": None, "device": "cpu"}, ("adapter",)),
        ({"checkpoint_format": "full_state"}, ("adapter", "merged")),
        ({"export": ["merged"]}, ("adapter", "merged")),
    ],
)
def test_the_config_of_llama_stacks_own_run_yaml_is_taken(given, forms):
    assert HuggingfacePostTrainingConfig.model_validate(given).forms == forms


def test_describing_a_model_needs_no_torch(folders):
    script = (
        "import sys; from pathlib import Path; from providers.huggingface.families import describe; "
        "import providers.huggingface.provider; "
        f"describe(Path({str(folders['llama'])!r})); "
        "print([m for m in ('torch', 'transformers', 'peft', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

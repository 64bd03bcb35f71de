"""What the torchtune provider refuses, by name, from config.json and the weights' headers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from apis.post_training.models import LoraFinetuningConfig, TrainingConfig
from post_training.data.planning import max_seq_len
from post_training.jobs.spec import JobSpec, ModelRef, WorkerSettings
from providers.torchtune.adapter_config import AdapterShape, adapter_config, check_adapter
from providers.torchtune.architecture import RopeScaling
from providers.torchtune.families import check_max_seq_len, describe
from providers.torchtune.lora_options import check_lora
from tests.torchtune_models import CONTEXT, MODELS, UNTIED, make_model

ELSEWHERE = "use a provider for Hugging Face models that computes it"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {case: tmp_path_factory.mktemp(case) for case in MODELS}
    for case, path in paths.items():
        make_model(path, case)
    return paths


@pytest.fixture
def changed(originals: dict[str, Path], tmp_path: Path):
    """A function giving a copy of a model with keys of its config.json set, or taken out where the value is `...`."""

    def change(case: str, **values: Any) -> Path:
        config = json.loads((originals[case] / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes((originals[case] / "model.safetensors").read_bytes())
        return tmp_path

    return change


@pytest.mark.parametrize("case", MODELS)
def test_the_facts_are_those_of_transformers_config(originals, case):
    a = describe(originals[case])
    config = transformers.AutoConfig.from_pretrained(originals[case])
    assert a.family == config.model_type
    assert (a.vocab_size, a.num_layers, a.num_heads) == (96, 2, 4)
    assert (a.embed_dim, a.intermediate_dim, a.norm_eps) == (32, 48, 1e-5)
    assert a.num_kv_heads == config.num_key_value_heads
    assert a.head_dim == (16 if case == "gemma" else 8)
    assert a.rope_base == config.rope_parameters["rope_theta"]
    assert a.tied == config.tie_word_embeddings == (case not in UNTIED)
    assert (a.context_length, a.sliding_window) == (CONTEXT, None)
    assert (a.rope_scaling is None) == (case != "llama3_scaled")


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_settings_of_older_files_are_read_as_well(changed, originals, kind_key):
    scaling = {
        kind_key: "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = changed("llama3_scaled", rope_parameters=..., rope_theta=500.0, rope_scaling=scaling)
    assert describe(old) == describe(originals["llama3_scaled"])
    assert describe(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_absent_keys_mean_what_transformers_classes_say(changed, case):
    path = changed(case, rms_norm_eps=..., max_position_embeddings=..., rope_parameters=..., hidden_act=...)
    a, reference = describe(path), transformers.AutoConfig.from_pretrained(path)
    assert (a.norm_eps, a.context_length) == (reference.rms_norm_eps, reference.max_position_embeddings)
    assert a.rope_base == reference.rope_parameters["rope_theta"]


@pytest.mark.parametrize("case", MODELS)
def test_rows_are_cut_within_the_context_also_where_the_config_does_not_tell_it(changed, case):
    """Or a job would fail in the middle, on its first row that is longer than the provider takes."""
    path = changed(case, max_position_embeddings=...)
    model = ModelRef.model_construct(base_dir=str(path))
    worker = WorkerSettings(model_module="m", default_max_seq_len=2**20)
    spec = JobSpec.model_construct(training_config=TrainingConfig(), model=model, worker=worker)
    longest = max_seq_len(spec)
    check_max_seq_len(describe(path), longest)
    assert longest >= 2048


def test_gemma_without_a_tied_key_is_tied_as_in_transformers(changed):
    assert describe(changed("gemma", tie_word_embeddings=...)).tied


MIXED_ROPE = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}

REFUSALS = {
    "gemma2": ("gemma", {"model_type": "gemma2"}, "swaps Gemma 2's feed-forward norms"),
    "gemma3": ("gemma", {"model_type": "gemma3_text"}, "has no Gemma 3"),
    "qwen3": ("qwen2", {"model_type": "qwen3"}, "has no Qwen3"),
    "smollm3": ("llama", {"model_type": "smollm3"}, "NoPE"),
    "mixtral": ("mistral", {"model_type": "mixtral"}, "mixture of experts"),
    "unknown model type": ("llama", {"model_type": "olmo2"}, "no builder for model_type 'olmo2'"),
    "no-position layers": ("llama", {"no_rope_layers": [1, 0]}, "NoPE"),
    "linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling is 'linear'"),
    "dynamic rope": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling is 'dynamic'"),
    "yarn rope": ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling is 'yarn'"),
    "long rope": ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling is 'longrope'"),
    "llama3 rope elsewhere": ("qwen2", {"rope_scaling": {"rope_type": "llama3"}}, "RoPE scaling is 'llama3'"),
    "rope per layer type": ("llama", {"rope_parameters": MIXED_ROPE}, "RoPE settings differ between layers"),
    "partial rotation": ("phi3", {"rope_parameters": ..., "partial_rotary_factor": 0.75}, "a part (0.75) of each head"),
    "attention bias": ("llama", {"attention_bias": True}, "no attention_bias for llama"),
    "mlp bias": ("llama", {"mlp_bias": True}, "no mlp_bias for llama"),
    "bidirectional": ("gemma", {"use_bidirectional_attention": True}, "no use_bidirectional_attention for gemma"),
    "head size": ("llama", {"head_dim": 16}, "head_dim 16 is not hidden_size / heads = 8"),
    "uneven heads": ("gemma", {"num_attention_heads": 3, "num_key_value_heads": 1}, "32 is no multiple of its 3 heads"),
    "activation": ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "gemma with the exact gelu": ("gemma", {"hidden_act": "gelu"}, "computes 'gelu_pytorch_tanh' for gemma"),
    "experts": ("llama", {"num_local_experts": 8}, "mixture of experts (num_local_experts)"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized (quantization_config)"),
    "untied gemma": ("gemma", {"tie_word_embeddings": False}, "always ties Gemma's output layer"),
    "tied phi3": ("phi3", {"tie_word_embeddings": True}, "never ties Phi-3's output layer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_torchtune_would_compute_wrongly_is_refused_by_name(changed, name):
    case, values, reason = REFUSALS[name]
    with pytest.raises(UnsupportedModel) as refusal:
        describe(changed(case, **values))
    assert reason in refusal.value.message
    assert ELSEWHERE in refusal.value.message


WINDOWS = {
    "mistral": ("mistral", {"sliding_window": 16}),
    "phi3": ("phi3", {"sliding_window": 16}),
    "qwen2 by layer number": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": ...},
    ),
    "qwen2 by layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_an_active_window_shorter_than_the_rows_is_refused(changed, name):
    case, values = WINDOWS[name]
    path = changed(case, **values)
    assert describe(path, 16).sliding_window == 16
    with pytest.raises(UnsupportedModel, match="set max_seq_len to at most 16, or use a provider"):
        describe(path, 17)


INACTIVE = {
    "qwen2 switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    "qwen2 null": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "qwen2 beyond the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": ...},
    ),
    "mistral null": ("mistral", {"sliding_window": None}),
    "llama does not read it": ("llama", {"sliding_window": 16}),
}


@pytest.mark.parametrize("name", INACTIVE)
def test_a_window_that_no_layer_uses_is_no_obstacle(changed, name):
    case, values = INACTIVE[name]
    assert describe(changed(case, **values), 4096).sliding_window is None


def test_a_mistral_without_the_key_has_its_class_window_of_4096(changed):
    path = changed("mistral", sliding_window=..., max_position_embeddings=32768)
    assert describe(path, 4096).sliding_window == 4096
    with pytest.raises(UnsupportedModel, match="sliding window of 4096 tokens"):
        describe(path, 4097)


def test_rows_beyond_the_context_are_refused_by_field(originals):
    architecture = describe(originals["llama"])
    check_max_seq_len(architecture, CONTEXT)
    with pytest.raises(InvalidField, match="context is 128 tokens") as refusal:
        check_max_seq_len(architecture, CONTEXT + 1)
    assert refusal.value.param == "training_config.data_config.max_seq_len"


@pytest.mark.parametrize("content", [None, "{", "[]", "\ufffe"])
def test_a_missing_or_damaged_config_is_named(originals, tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes((originals["llama"] / "model.safetensors").read_bytes())
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-16-le"))
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": ...}, "no model_type"),
        ({"hidden_size": ...}, "hidden_size must be a positive integer, not None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, not '2'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, not -1"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a positive number"),
    ],
)
def test_a_wrong_value_in_the_config_is_named(changed, values, message):
    with pytest.raises(ModelInvalid, match=message):
        describe(changed("llama", **values))


def _weights(path: Path) -> dict[str, Any]:
    return load_file(path / "model.safetensors")


def test_missing_weights_are_named(changed):
    path = changed("llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"has neither model\.safetensors nor"):
        describe(path)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [("pytorch_model.bin", "save_pretrained"), ("consolidated.00.pth", "get its Hugging Face form")],
)
def test_pickled_weights_are_refused_with_the_remedy(changed, file, remedy):
    path = changed("llama")
    (path / "model.safetensors").rename(path / file)
    with pytest.raises(ModelInvalid, match=remedy):
        describe(path)


def test_a_missing_shard_is_named(originals, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(originals["llama"]).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    describe(tmp_path)
    shard = sorted(tmp_path.glob("model-00002-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelInvalid, match=f"{shard.name}.*is missing"):
        describe(tmp_path)


def test_an_index_cannot_name_a_file_elsewhere(changed, tmp_path):
    path = changed("llama")
    (path / "model.safetensors").rename(path / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelInvalid, match="no safetensors file beside it"):
        describe(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_that_is_cut_short_is_named(changed, keep):
    path = changed("llama")
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(ModelInvalid, match=r"model\.safetensors .*download it again"):
        describe(path)


def test_the_first_missing_unexpected_and_misshaped_tensor_are_named(changed):
    path = changed("llama")
    weights = _weights(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**weights, name: weights[name][:-1].clone()}, path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=rf"{name} has shape \[15, 32\], config.json calls for \[16, 32\]"):
        describe(path)
    save_file({**weights, "model.layers.0.self_attn.q_norm.weight": weights[name].clone()}, path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=r"hold model.layers.0.self_attn.q_norm.weight"):
        describe(path)
    del weights[name]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=f"lack {name}"):
        describe(path)


def test_integer_weights_are_refused_as_quantized(changed):
    path = changed("llama")
    weights = _weights(path)
    weights["lm_head.weight"] = weights["lm_head.weight"].char()
    save_file(weights, path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight is stored as I8"):
        describe(path)


def test_an_old_constant_table_among_the_weights_is_ignored(changed):
    path = changed("llama")
    weights = _weights(path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.norm.weight"][:4].clone()
    save_file(weights, path / "model.safetensors")
    assert describe(path).family == "llama"


@pytest.mark.parametrize(
    ("case", "options", "field"),
    [
        ("llama", {"use_dora": True, "quantize_base": True}, "use_dora"),
        ("phi3", {"use_dora": True, "lora_attn_modules": ["q_proj", "k_proj"]}, "use_dora"),
        ("llama", {"lora_attn_modules": [], "apply_lora_to_mlp": False}, "lora_attn_modules"),
        ("llama_tied", {"apply_lora_to_output": True}, "apply_lora_to_output"),
        ("gemma", {"apply_lora_to_output": True}, "apply_lora_to_output"),
    ],
)
def test_lora_options_that_cannot_act_are_refused_by_field(originals, case, options, field):
    architecture = describe(originals[case])
    with pytest.raises(InvalidField, match=field) as refusal:
        check_lora(architecture, LoraFinetuningConfig(**options))
    assert refusal.value.param == f"algorithm_config.{field}"


def test_lora_options_that_can_act_pass(originals):
    check_lora(describe(originals["llama"]), LoraFinetuningConfig(apply_lora_to_output=True))
    check_lora(describe(originals["gemma"]), LoraFinetuningConfig(lora_attn_modules=[]))
    check_lora(describe(originals["llama"]), LoraFinetuningConfig(use_dora=True, lora_attn_modules=["q_proj"]))
    check_lora(describe(originals["phi3"]), LoraFinetuningConfig(use_dora=True))
    check_lora(describe(originals["phi3"]), LoraFinetuningConfig(use_dora=True, lora_attn_modules=["output_proj"]))
    check_lora(describe(originals["gemma"]), LoraFinetuningConfig(quantize_base=True, use_rslora=True))


def test_an_adapter_can_be_checked_against_a_request_before_any_worker_starts(originals, tmp_path):
    architecture = describe(originals["llama"])
    request = LoraFinetuningConfig(rank=8, alpha=16)
    shape = AdapterShape.of_request(request)
    with pytest.raises(ModelInvalid, match=r"adapter_model\.safetensors"):
        check_adapter(tmp_path, architecture, shape)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(architecture, shape)))
    check_adapter(tmp_path, architecture, shape)
    with pytest.raises(InvalidField, match="rank is 8, the request asks for 4"):
        check_adapter(tmp_path, architecture, AdapterShape.of_request(LoraFinetuningConfig(rank=4, alpha=16)))


def test_a_base_whose_weights_do_not_come_out_even_in_nf4_is_refused_by_name(tmp_path):
    make_model(tmp_path, "llama", hidden_size=40, intermediate_size=48)
    with pytest.raises(InvalidField, match="the 20 x 40 weights of k_proj do not come out even") as refusal:
        check_lora(describe(tmp_path), LoraFinetuningConfig(quantize_base=True))
    assert refusal.value.param == "algorithm_config.quantize_base"


def test_describing_a_model_needs_no_torch(originals):
    script = (
        "import sys; from pathlib import Path; from providers.torchtune.families import describe; "
        "import providers.torchtune.adapter_config, providers.torchtune.lora_options; "
        f"describe(Path({str(originals['llama'])!r})); "
        "print([m for m in ('torch', 'transformers', 'torchtune', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

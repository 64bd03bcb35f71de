"""The torchtune provider's models against transformers and PEFT, with tiny random models of every family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from post_training.training.model import LoraSettings, ModelConfig, Segments, TrainableModel
from providers.torchtune.model import TorchtuneModel, load_model
from tests.torchtune_models import CONTEXT, MODELS, UNTIED, make_model, random_tokens, relative_error

# PEFT 0.21 asks transformers 5.24 under the older of two names; it is not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTHS = (17, 1, 40, 9)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, transformers.PreTrainedModel]]:
    made = {}
    for case in MODELS:
        path = tmp_path_factory.mktemp(case)
        made[case] = (path, make_model(path, case))
    return made


def flat(lengths: tuple[int, ...], seed: int = 0) -> Segments:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Segments(random_tokens(sum(lengths), seed), positions, lengths)


def logits_of(model: TorchtuneModel, segments: Segments) -> torch.Tensor:
    with torch.no_grad():
        return model.output(model.hidden_states(segments))


def transformers_logits(model: Any, segments: Segments) -> torch.Tensor:
    """Each segment run through transformers (or PEFT) by itself, concatenated: [T, V]."""
    with torch.no_grad():
        pieces = segments.tokens.split(segments.lengths)
        return torch.cat([model(input_ids=piece[None]).logits[0] for piece in pieces])


def fp32(path: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(base_dir=path, dtype="fp32", **settings)


def fill_adapter(model: TorchtuneModel, seed: int = 3) -> dict[str, torch.Tensor]:
    """Set every adapter parameter to noise, so that B is not zero, and return the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.adapter_parameters().values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return {name: parameter.detach() for name, parameter in model.adapter_parameters().items()}


def save_adapter(model: TorchtuneModel, path: Path) -> Path:
    tensors, config = model.peft_adapter({name: p.detach() for name, p in model.adapter_parameters().items()})
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def peft_logits(base: Path, adapter: Path, segments: Segments) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return transformers_logits(peft.PeftModel.from_pretrained(model, adapter).eval(), segments)


@pytest.mark.parametrize("case", MODELS)
def test_every_family_gives_the_logits_of_transformers(models, case):
    path, reference = models[case]
    segments = flat((CONTEXT,))
    ours = logits_of(load_model(fp32(path)), segments)
    assert relative_error(ours, transformers_logits(reference, segments)) < 1e-5


@pytest.mark.parametrize("case", MODELS)
def test_a_flat_stream_gives_what_each_sequence_gives_alone(models, case):
    path, reference = models[case]
    segments = flat(LENGTHS)
    ours = logits_of(load_model(fp32(path)), segments)
    assert relative_error(ours, transformers_logits(reference, segments)) < 1e-5


@pytest.mark.parametrize("case", MODELS)
def test_a_trained_adapter_gives_the_same_logits_in_plain_peft(models, case, tmp_path):
    path, reference = models[case]
    model = load_model(fp32(path, lora=LoraSettings(rank=4, alpha=6)))
    fill_adapter(model)
    segments = flat(LENGTHS)
    ours = logits_of(model, segments)
    assert relative_error(ours, peft_logits(path, save_adapter(model, tmp_path), segments)) < 1e-5
    assert relative_error(ours, transformers_logits(reference, segments)) > 0.05


@pytest.mark.parametrize("case", UNTIED)
def test_an_adapter_on_the_output_layer_gives_the_same_logits_in_plain_peft(models, case, tmp_path):
    path, _ = models[case]
    model = load_model(fp32(path, lora=LoraSettings(rank=4, alpha=8, attn_modules=("q_proj",), mlp=False, output=True)))
    fill_adapter(model)
    assert sum(name.startswith("output.") for name in model.adapter_parameters()) == 2
    segments = flat(LENGTHS)
    assert relative_error(logits_of(model, segments), peft_logits(path, save_adapter(model, tmp_path), segments)) < 1e-5


@pytest.mark.parametrize("case", ["llama", "phi3"])
@pytest.mark.parametrize(("attn", "mlp"), [(("k_proj",), False), (("v_proj", "q_proj"), False), ((), True)])
def test_any_choice_of_layers_exports_exactly(models, case, attn, mlp, tmp_path):
    path, _ = models[case]
    settings = LoraSettings(rank=3, alpha=4.5, attn_modules=attn, mlp=mlp)
    model = load_model(fp32(path, lora=settings))
    fill_adapter(model)
    adapter = save_adapter(model, tmp_path)
    segments = flat(LENGTHS)
    ours = logits_of(model, segments)
    assert relative_error(ours, peft_logits(path, adapter, segments)) < 1e-5
    again = load_model(fp32(path, lora=settings, adapter_dir=adapter))
    assert torch.equal(logits_of(again, segments), ours)


@pytest.mark.parametrize("case", ["llama", "gemma", "qwen2_tied", "phi3"])
def test_an_exported_adapter_loads_back_bit_for_bit(models, case, tmp_path):
    path, _ = models[case]
    model = load_model(fp32(path))
    saved = fill_adapter(model)
    again = load_model(fp32(path, adapter_dir=save_adapter(model, tmp_path)))
    loaded = again.adapter_parameters()
    assert list(loaded) == list(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("case", ["llama", "llama_tied", "phi3"])
def test_exporting_leaves_the_model_as_it_was(models, case):
    path, _ = models[case]
    model = load_model(fp32(path))
    fill_adapter(model)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    logits = logits_of(model, flat(LENGTHS))
    tensors, _ = model.peft_adapter({name: p.detach() for name, p in model.adapter_parameters().items()})
    for tensor in tensors.values():
        tensor.zero_()  # a merge or an alias would reach the live model through these
    after = model.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(logits_of(model, flat(LENGTHS)), logits)


def test_a_merge_in_plain_peft_holds_the_adapter_once(models, tmp_path):
    path, _ = models["llama"]
    model = load_model(fp32(path))
    fill_adapter(model)
    adapter = save_adapter(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()  # pyright: ignore[reportCallIssue]
    segments = flat(LENGTHS)
    assert relative_error(logits_of(model, segments), transformers_logits(merged, segments)) < 1e-5


def test_gradients_reach_the_adapter_and_nothing_else(models):
    path, _ = models["qwen2"]
    loaded = load_model(fp32(path, lora=LoraSettings(rank=2, alpha=4, output=True)))
    fill_adapter(loaded)
    model: TrainableModel = loaded
    model.output(model.hidden_states(flat(LENGTHS))).square().sum().backward()
    adapter = model.adapter_parameters()
    assert {name for name, p in model.module.named_parameters() if p.requires_grad} == set(adapter)
    for name, parameter in model.module.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (name in adapter), name


def test_gradients_equal_those_of_peft(models, tmp_path):
    path, _ = models["llama"]
    model = load_model(fp32(path))
    fill_adapter(model)
    adapter = save_adapter(model, tmp_path)
    segments = flat((24,))
    model.output(model.hidden_states(segments)).square().mean().backward()
    gradients = {name: p.grad for name, p in model.adapter_parameters().items() if p.grad is not None}
    as_peft, _ = model.peft_adapter(gradients)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reference = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    reference(input_ids=segments.tokens[None]).logits.square().mean().backward()
    expected = {name.replace(".default", ""): p.grad for name, p in reference.named_parameters() if p.requires_grad}
    assert set(as_peft) == set(expected)
    for name, gradient in expected.items():
        assert gradient is not None
        assert relative_error(as_peft[name], gradient) < 1e-4, name


def test_checkpointed_activations_give_the_same_gradients(models):
    path, _ = models["gemma"]
    gradients = []
    for checkpointing in (False, True):
        model = load_model(fp32(path, activation_checkpointing=checkpointing))
        fill_adapter(model)
        first = model.output(model.hidden_states(flat(LENGTHS))).square().mean()
        # A second forward pass before the first backward: the recomputation must use the first one's segments.
        second = model.output(model.hidden_states(flat((31, 2), seed=1))).square().mean()
        (first + 2 * second).backward()
        gradients.append({name: p.grad for name, p in model.adapter_parameters().items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_checkpointed_activations_are_recomputed(models):
    path, _ = models["llama"]
    calls = 0

    def count(*_args: Any) -> None:
        nonlocal calls
        calls += 1

    model = load_model(fp32(path, activation_checkpointing=True, kernels="plain"))
    model.module.get_submodule("layers.0.mlp").register_forward_pre_hook(count)
    model.output(model.hidden_states(flat((5,)))).sum().backward()
    assert calls == 2


def test_fresh_adapters_change_nothing_and_depend_on_the_seed_alone(models):
    path, _ = models["llama"]
    torch.manual_seed(1)
    first = load_model(fp32(path, seed=7)).adapter_parameters()
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    second = load_model(fp32(path, seed=7)).adapter_parameters()
    assert torch.equal(torch.random.get_rng_state(), state)
    other = load_model(fp32(path, seed=8)).adapter_parameters()
    a = "layers.0.attn.q_proj.lora_a.weight"
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first[a], other[a])
    assert all(not p.any() for name, p in first.items() if name.endswith("lora_b.weight"))
    # Kaiming uniform with a = sqrt(5) is uniform within 1 / sqrt(inputs).
    bound = 32**-0.5
    assert 0.9 * bound < float(first[a].detach().abs().max()) <= bound


def test_bf16_keeps_positions_in_fp32_and_stays_near_fp32(models):
    for case in ("llama", "qwen2", "gemma", "phi3"):
        path, reference = models[case]
        model = load_model(ModelConfig(base_dir=path, dtype="bf16"))
        assert {b.dtype for b in model.module.buffers()} == {torch.float32}
        precise = {n for n, p in model.module.named_parameters() if p.dtype == torch.float32}
        scales = {n for n, _ in model.module.named_parameters() if n.endswith(".scale")}
        assert precise == scales | model.adapter_parameters().keys()
        segments = flat(LENGTHS)
        hidden = model.hidden_states(segments)
        assert hidden.dtype == torch.bfloat16
        assert relative_error(logits_of(model, segments), transformers_logits(reference, segments)) < 3e-2


def test_nothing_is_left_without_storage(models):
    for case in MODELS:
        module = load_model(fp32(models[case][0])).module
        assert not [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]


def test_a_sharded_model_loads(models, tmp_path):
    path, reference = models["mistral"]
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    segments = flat((12,))
    assert torch.equal(logits_of(load_model(fp32(tmp_path)), segments), logits_of(load_model(fp32(path)), segments))


def test_a_tied_model_may_store_its_output_layer_if_it_is_the_embedding(tmp_path):
    make_model(tmp_path, "qwen2_tied")
    weights = load_file(tmp_path / "model.safetensors")
    expected = logits_of(load_model(fp32(tmp_path)), flat((9,)))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(load_model(fp32(tmp_path)), flat((9,))), expected)
    weights["lm_head.weight"] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        load_model(fp32(tmp_path))


def test_an_output_adapter_on_a_tied_model_is_refused(models):
    with pytest.raises(InvalidField, match="tied") as refusal:
        load_model(fp32(models["llama_tied"][0], lora=LoraSettings(output=True)))
    assert refusal.value.param == "algorithm_config.apply_lora_to_output"


def test_no_layer_to_adapt_is_refused(models):
    with pytest.raises(InvalidField, match="no layer gets an adapter"):
        load_model(fp32(models["llama"][0], lora=LoraSettings(attn_modules=(), mlp=False)))


def test_a_segment_beyond_context_or_window_is_refused(models, tmp_path):
    model = load_model(fp32(models["llama"][0]))
    with pytest.raises(InvalidField, match=f"context is {CONTEXT} tokens"):
        model.hidden_states(flat((3, CONTEXT + 1)))
    reference = make_model(tmp_path, "mistral", sliding_window=16)
    windowed = load_model(fp32(tmp_path))
    within = flat((16, 5))
    assert relative_error(logits_of(windowed, within), transformers_logits(reference, within)) < 1e-5
    with pytest.raises(UnsupportedModel, match="sliding window of 16 tokens"):
        windowed.hidden_states(flat((17,)))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (LoraSettings(rank=8), "rank"),
        (LoraSettings(alpha=16), "alpha"),
        (LoraSettings(mlp=False), "lora_attn_modules"),
    ],
)
def test_an_adapter_is_only_continued_with_its_own_settings(models, tmp_path, settings, field):
    path, _ = models["llama"]
    adapter = save_adapter(load_model(fp32(path)), tmp_path)
    with pytest.raises(InvalidField, match=field) as refusal:
        load_model(fp32(path, lora=settings, adapter_dir=adapter))
    assert refusal.value.param == f"algorithm_config.{field}"


@pytest.mark.parametrize(("key", "value"), [("use_rslora", True), ("use_dora", True), ("modules_to_save", ["lm_head"])])
def test_an_adapter_of_another_kind_is_not_continued(models, tmp_path, key, value):
    path, _ = models["llama"]
    adapter = save_adapter(load_model(fp32(path)), tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(InvalidField, match=key):
        load_model(fp32(path, adapter_dir=adapter))


def _rewrite(adapter: Path, change: str) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(2, 2)
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors[name][0, -1] = 1.0
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "lacks base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"),
        ("extra", "holds base_model.model.lm_head.lora_A.weight"),
        ("shape", "does not have the shape of 3 blocks"),
        ("mixed", "qkv_proj.lora_B.weight mixes the parts"),
    ],
)
def test_a_damaged_adapter_is_refused_by_tensor(models, tmp_path, change, message):
    path, _ = models["phi3"]
    adapter = save_adapter(load_model(fp32(path)), tmp_path)
    _rewrite(adapter, change)
    with pytest.raises(ModelInvalid, match=message):
        load_model(fp32(path, adapter_dir=adapter))


def test_the_adapter_config_is_complete_for_peft(models, tmp_path):
    path, _ = models["phi3"]
    adapter = save_adapter(load_model(fp32(path, lora=LoraSettings(rank=4, alpha=8))), tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert "base_model_name_or_path" in config
    assert config["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    read = peft.LoraConfig.from_pretrained(str(adapter))
    assert isinstance(read, peft.LoraConfig)
    assert (read.r, read.lora_alpha, read.task_type, read.bias) == (4, 8, "CAUSAL_LM", "none")
    assert read.rank_pattern == {"qkv_proj": 12, "gate_up_proj": 8}
    assert read.alpha_pattern == {"qkv_proj": 24, "gate_up_proj": 16}
    unknown = set(config) - set(read.to_dict())
    assert not unknown


def test_importing_torchtune_is_silent_and_raises_no_warning():
    script = "import providers.torchtune.shim as s, torchtune.training; print(s.LoRALinear.__module__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torchtune.modules.peft.lora\n", "")

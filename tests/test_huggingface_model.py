"""The huggingface provider's models against transformers and PEFT alone, with tiny random models of many kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from post_training.data.batching import flatten
from post_training.data.types import TokenizedRow
from post_training.training.model import LoraSettings, ModelConfig
from post_training.training.optim import OptimSettings
from post_training.training.trainer import Trainer
from providers.huggingface.model import HuggingfaceModel, load_model
from tests.test_cross_provider import rows
from tests.test_torchtune_model import flat, transformers_logits
from tests.torchtune_models import CONTEXT, MODELS, VOCAB, make_model, randomize, relative_error

LENGTHS = (17, 1, 40, 9)
_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA_LIKE = _SMALL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_GPT = _SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}),
    "qwen3": ("Qwen3", _LLAMA_LIKE | {"head_dim": 8}),
    "gemma2": ("Gemma2", _LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0}),
    "smollm3": ("SmolLM3", _LLAMA_LIKE | {"no_rope_layers": [1, 0]}),
    "mistral_window": ("Mistral", _LLAMA_LIKE | {"sliding_window": 16}),
    "cohere": ("Cohere", _LLAMA_LIKE | {"logit_scale": 0.25}),
    "bloom": ("Bloom", _SMALL | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mamba": ("Mamba", _SMALL | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "mixtral": ("Mixtral", _LLAMA_LIKE | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}
ALONE = ("gemma2", "bloom", "mamba")
"""Those whose segments do not run in one pass."""
LAYERS: dict[str, tuple[str, ...]] = {"mamba": ("in_proj", "x_proj")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for case in (*MODELS, *OTHERS):
        path = tmp_path_factory.mktemp(case)
        made[case] = (path, make_model(path, case) if case in MODELS else make_other(path, case))
    return made


def make_other(path: Path, case: str) -> Any:
    prefix, settings = OTHERS[case]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, 0)
    model.save_pretrained(path)
    return model


def settings_for(case: str, **more: Any) -> LoraSettings:
    layers = {"attn_modules": LAYERS[case], "mlp": False} if case in LAYERS else {}
    without_mlp = {"mlp": False} if case == "mixtral" else {}
    return LoraSettings(**{"rank": 4, "alpha": 6, **layers, **without_mlp, **more})


def load(path: Path, case: str = "llama", *, lora: LoraSettings | None = None, **more: Any) -> HuggingfaceModel:
    return load_model(ModelConfig(base_dir=path, lora=lora or settings_for(case), dtype="fp32", **more))


def logits(model: HuggingfaceModel, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    with torch.no_grad():
        return model.output(model.hidden_states(flat(lengths)))


def fill(model: HuggingfaceModel) -> None:
    """Noise in every adapter parameter, so that B is not zero and rows' lengths are not the base's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.adapter_parameters().items():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.05 if "magnitude" in name else 0.3))


def save(model: HuggingfaceModel, folder: Path) -> Path:
    tensors, config = model.peft_adapter({n: p.detach() for n, p in model.adapter_parameters().items()})
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def in_peft(path: Path, adapter: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(adapter)).eval()


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("case", [*MODELS, *OTHERS])
def test_a_flat_stream_gives_what_transformers_gives_for_each_sequence_alone(models, case, kernels):
    path, reference = models[case]
    model = load(path, case, kernels=kernels)
    assert relative_error(logits(model), transformers_logits(reference, flat(LENGTHS))) < 1e-5
    assert model.computation.kernels == kernels


@pytest.mark.parametrize("case", [*MODELS, *OTHERS])
def test_rows_run_in_one_pass_unless_the_model_has_another_kind_of_attention_or_state(models, case):
    path, _ = models[case]
    remarks = load(path, case).computation.remarks
    assert bool(remarks) == (case in ALONE), remarks
    assert all(remark.startswith("each row runs by itself: ") for remark in remarks)


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox", "gemma2", "phi3", "mamba", "mixtral", "qwen3"])
@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"dora": True}])
def test_an_exported_adapter_computes_in_plain_peft_what_it_computed_here(models, case, kind, tmp_path):
    path, reference = models[case]
    model = load(path, case, lora=settings_for(case, **kind))
    fill(model)
    ours = logits(model)
    assert relative_error(ours, transformers_logits(in_peft(path, save(model, tmp_path)), flat(LENGTHS))) < 1e-5
    assert relative_error(ours, transformers_logits(reference, flat(LENGTHS))) > 1e-3


@pytest.mark.parametrize("kind", [{}, {"dora": True}])
def test_an_exported_adapter_goes_on_as_it_was(models, kind, tmp_path):
    path, _ = models["qwen3"]
    model = load(path, lora=settings_for("qwen3", **kind))
    fill(model)
    again = load(path, lora=settings_for("qwen3", **kind), adapter_dir=save(model, tmp_path))
    found, expected = again.adapter_parameters(), model.adapter_parameters()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mamba"])
def test_a_fresh_adapter_changes_nothing_and_only_adapters_are_trained(models, case):
    path, reference = models[case]
    model = load(path, case, lora=settings_for(case, dora=True))
    assert relative_error(logits(model), transformers_logits(reference, flat(LENGTHS))) < 1e-5
    trained = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert trained == set(model.adapter_parameters())


def test_the_base_has_no_dropout_while_training_and_adapters_have_theirs(models):
    path, _ = models["gpt2"]
    model = load(path, lora=settings_for("gpt2"))
    fill(model)
    still = logits(model)
    model.module.train()
    assert torch.equal(logits(model), still)
    dropping = load(path, lora=settings_for("gpt2", dropout=0.5))
    fill(dropping)
    assert torch.equal(logits(dropping), still)
    dropping.module.train()
    assert not torch.equal(logits(dropping), still)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_activation_checkpointing_gives_the_same_gradients(models, case):
    path, _ = models[case]
    found = []
    for checkpointing in (False, True):
        model = load(path, case, activation_checkpointing=checkpointing)
        fill(model)
        model.module.train()
        model.output(model.hidden_states(flat(LENGTHS))).square().mean().backward()
        found.append({name: p.grad for name, p in model.adapter_parameters().items() if p.grad is not None})
    plain, recomputed = found
    assert plain
    assert plain.keys() == recomputed.keys()
    assert all(torch.allclose(plain[name], recomputed[name], rtol=1e-5, atol=1e-8) for name in plain)


def test_the_loss_takes_the_output_layer_by_itself_only_where_the_model_does_nothing_else_with_it(models):
    heads = {case: load(models[case][0], case).head_weight() for case in ("llama", "qwen2_tied", "gemma2", "cohere")}
    assert {case for case, head in heads.items() if head is not None} == {"llama", "qwen2_tied"}
    assert load(models["llama"][0], kernels="plain").head_weight() is None


def test_rows_longer_than_a_window_are_still_what_transformers_computes(models):
    path, reference = models["mistral_window"]
    model = load(path)
    for lengths in ((16, 9), (17, 9), (60, 3)):
        assert relative_error(logits(model, lengths), transformers_logits(reference, flat(lengths))) < 1e-5


def test_a_row_beyond_the_context_is_refused(models):
    with pytest.raises(InvalidField, match=f"context is {CONTEXT}"):
        load(models["gpt2"][0]).hidden_states(flat((CONTEXT + 1,)))


def test_a_model_whose_files_do_not_fit_its_config_is_refused_by_tensor(models, tmp_path):
    path, _ = models["llama"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    strange = {**weights, "model.layers.1.self_attn.q_norm.weight": weights[name].clone()}
    save_file(strange, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"hold model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(tmp_path)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises((UnsupportedModel, ModelInvalid), match=r"lack model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(tmp_path)


def test_an_adapter_with_a_tensor_missing_or_too_many_is_refused(models, tmp_path):
    path, _ = models["llama"]
    adapter = save(load(path), tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = min(tensors)
    save_file(
        {**tensors, name.replace("layers.0", "layers.9"): tensors[name].clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ModelInvalid, match=r"holds .*layers\.9"):
        load(path, adapter_dir=adapter)
    save_file({key: value for key, value in tensors.items() if key != name}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelInvalid, match="lacks"):
        load(path, adapter_dir=adapter)


@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "gpt2"])
def test_training_every_weight_is_transformers_own_training(models, case):
    path, _ = models[case]
    data = rows(12)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1)
    model = load_model(ModelConfig(base_dir=path, full=True, dtype="fp32"))
    trainer = Trainer(model, OptimSettings(4, lr=1e-3, weight_decay=0.1, schedule="constant"))
    for step in range(4):
        batch = data[3 * step : 3 * step + 3]
        ours = trainer.train_step([flatten(batch[:1]), flatten(batch[1:])])
        assert ours.loss == pytest.approx(_hand_step(reference, optimizer, batch), rel=1e-5)
    found = model.whole_model(trainer.masters.snapshot())
    expected = dict(reference.named_parameters())
    assert found.keys() >= expected.keys()
    for name, parameter in expected.items():
        assert relative_error(found[name], parameter.detach()) < 1e-4, name


def _hand_step(model: Any, optimizer: torch.optim.Optimizer, batch: list[TokenizedRow]) -> float:
    """Mean over supervised tokens, each row by itself, clipped at 1."""
    losses, count = torch.tensor(0.0), 0
    for row in batch:
        tokens = torch.from_numpy(row.tokens.astype("int64"))
        labels = torch.where(torch.from_numpy(row.weights) > 0, tokens, -100)
        logits = model(input_ids=tokens[None]).logits[0]
        losses = losses + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels >= 0).sum())
    loss = losses / count
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())

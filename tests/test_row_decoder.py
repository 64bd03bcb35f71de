"""The row decoder against transformers and PEFT used plainly: the same logits, the same tokens, the same memory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from providers.inference.config import TransformersInferenceConfig
from providers.inference.engine import Engine
from providers.inference.generation import Sampler, generate_tokens
from providers.inference.row_decoder import RowDecoder, share_projections
from providers.inference.wire import GenerateRequest, ModelFiles, Sampling
from tests.tiny_llama import save_random_adapter, save_tiny_llama
from tests.torchtune_models import CONTEXT, MODELS, make_model, random_tokens, randomize, relative_error

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (case, {}) for case in MODELS},
    "llama_with_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_odd_heads": ("llama", {"head_dim": 24}),
    "mistral_window": ("mistral", {"sliding_window": 16}),
    "phi3_window": ("phi3", {"sliding_window": 16}),
    "phi3_partial_rotary": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "llama_dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 32},
    ),
}
ALL_LINEAR = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "other": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def tiny(tmp_path: Path, case: str, dtype: torch.dtype = torch.float32) -> Any:
    family, overrides = CASES[case]
    make_model(tmp_path / "tiny", family, **overrides)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=dtype).eval()
    share_projections(model)
    return model


def decoder_of(model: Any) -> RowDecoder:
    decoder = RowDecoder.of(model)
    assert decoder is not None
    return decoder


def logits_along(model: Any, tokens: list[int], prompt: int, decoder: RowDecoder | None) -> Tensor:
    """[len(tokens) - prompt + 1, V]: after the prompt, and after each further token."""
    seen: list[Tensor] = []
    rest = iter([*tokens[prompt:], 0])

    def forced(logits: Tensor) -> int:
        seen.append(logits.clone())
        return next(rest)

    steps = len(tokens) - prompt + 1
    assert len(list(islice(generate_tokens(model, tokens[:prompt], forced, lambda: False, decoder), steps))) == steps
    return torch.stack(seen)


def greedy(model: Any, prompt: list[int], count: int, decoder: RowDecoder | None) -> list[int]:
    choose = Sampler(Sampling(temperature=0))
    return list(islice(generate_tokens(model, prompt, choose, lambda: False, decoder), count))


def by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_the_logits_of_its_own_forward_pass(case: str, tmp_path: Path):
    model, tokens = tiny(tmp_path, case), random_tokens(70).tolist()
    plain, fast = (logits_along(model, tokens, 20, decoder) for decoder in (None, decoder_of(model)))
    assert relative_error(fast, plain) <= 1e-5
    # Read without any cache, too: both could go wrong in the same cache.
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([tokens])).logits[0, 19:]
    if case != "llama_dynamic_rope":  # whose frequencies depend on how many tokens are read at once
        assert relative_error(fast, whole) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_every_family_generates_the_tokens_of_transformers_up_to_the_end_of_its_context(case: str, tmp_path: Path):
    # Dynamic RoPE depends on the longest text so far: each of the two goes through the same.
    decoder, plain = decoder_of(model := tiny(tmp_path, case)), tiny(tmp_path, case)
    for length, count in ((1, 20), (40, 30), (CONTEXT - 20, 20)):
        prompt = random_tokens(length, seed=length).tolist()
        assert greedy(model, prompt, count, decoder) == by_transformers(plain, prompt, count)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma", "phi3"])
def test_bf16_gives_the_logits_of_transformers_but_for_a_rounding(case: str, tmp_path: Path):
    model, tokens = tiny(tmp_path, case, torch.bfloat16), random_tokens(40).tolist()
    plain, fast = (logits_along(model, tokens, 20, decoder) for decoder in (None, decoder_of(model)))
    assert fast.dtype == torch.bfloat16
    assert relative_error(fast, plain) <= 2**-7


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "some_modules": {"target_modules": "o_proj|.*down_proj"},
    "output": {"target_modules": ".*(o_proj|lm_head)"},
    "embedding": {"target_modules": ".*(o_proj|embed_tokens)"},
    "ranks": {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"down_proj": 3}},
}


def put_adapter(model: PreTrainedModel, seed: int = 0, **options: Any) -> Any:
    modules = ALL_LINEAR.get(model.config.model_type, ALL_LINEAR["other"])
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": modules, "lora_dropout": 0.1} | options)
    peft = get_peft_model(model, config).eval()
    own = nn.ParameterDict({name.replace(".", "/"): p for name, p in peft.named_parameters() if "lora_" in name})
    magnitudes = {name: p.detach().clone() for name, p in own.items() if "magnitude" in name}
    randomize(own, seed)
    with torch.no_grad():
        for name, length in magnitudes.items():
            own[name].copy_(
                length * (1 + 0.1 * torch.rand(length.shape, generator=torch.Generator().manual_seed(seed)))
            )
    return peft


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (case, options)
        for case in ("llama", "llama_with_biases", "qwen2", "gemma", "phi3")
        for options in ADAPTERS
        if case != "gemma" or options not in ("output", "embedding")  # tied: PEFT warns of either
    ],
)
def test_an_adapter_gives_the_logits_of_peft(case: str, options: str, tmp_path: Path):
    model, tokens = tiny(tmp_path, case), random_tokens(30).tolist()
    without = logits_along(model, tokens, 10, None)
    peft = put_adapter(model, **ADAPTERS[options])
    plain, fast = (logits_along(model, tokens, 10, decoder) for decoder in (None, decoder_of(model)))
    assert relative_error(plain, without) > 1e-2
    assert relative_error(fast, plain) <= 1e-5
    with peft.disable_adapter():
        assert relative_error(logits_along(model, tokens, 10, decoder_of(model)), without) <= 1e-5


def test_an_adapter_on_a_bf16_base_is_computed_in_its_own_precision(tmp_path: Path):
    model, tokens = tiny(tmp_path, "qwen2", torch.bfloat16), random_tokens(30).tolist()
    put_adapter(model)
    plain, fast = (logits_along(model, tokens, 10, decoder) for decoder in (None, decoder_of(model)))
    assert relative_error(fast, plain) <= 2**-7


def test_a_cache_that_grows_keeps_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, tokens = tiny(tmp_path, "llama"), random_tokens(60).tolist()
    roomy = logits_along(model, tokens, 3, decoder_of(model))
    monkeypatch.setattr("providers.inference.kv_cache.ROOM", 1)
    decoder = decoder_of(model)
    assert torch.equal(logits_along(model, tokens, 3, decoder), roomy)
    cache = model(input_ids=torch.tensor([tokens[:3]]), use_cache=True).cache
    with torch.inference_mode():
        rows = decoder.take_over(cache)
        capacities = []
        for token in tokens[3:]:
            decoder.step(token, rows)
            capacities.append(rows.capacity)
    assert sorted(set(capacities)) == [4, 8, 16, 32, 64]


def test_tokens_are_drawn_as_without_it(tmp_path: Path):
    model, prompt = tiny(tmp_path, "llama"), random_tokens(10).tolist()
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=5)
    plain, fast = (
        list(islice(generate_tokens(model, prompt, Sampler(sampling), lambda: False, decoder), 60))
        for decoder in (None, decoder_of(model))
    )
    assert fast == plain
    assert len(set(fast)) > 10


@pytest.mark.parametrize(
    ("prefix", "settings"),
    [
        ("Qwen3", {"head_dim": 8}),
        ("Gemma2", {"head_dim": 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
)
def test_a_model_that_it_does_not_know_is_left_to_transformers(prefix: str, settings: dict[str, Any]):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{prefix}Config")(**sizes, **heads, **settings)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    share_projections(model)
    assert RowDecoder.of(model) is None
    prompt = random_tokens(10).tolist()
    assert greedy(model, prompt, 10, None) == by_transformers(model, prompt, 10)


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["input_layernorm"]}, {"lora_bias": True}],
    ids=str,
)
def test_an_adapter_that_it_does_not_know_is_left_to_peft(options: dict[str, Any], tmp_path: Path):
    model = tiny(tmp_path, "llama_with_biases")
    put_adapter(model, **options)
    assert RowDecoder.of(model) is None


def test_a_model_whose_projections_lie_apart_or_with_other_attention_is_left_to_transformers(tmp_path: Path):
    make_model(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert RowDecoder.of(model) is None
    share_projections(model)
    assert RowDecoder.of(model) is not None
    model.set_attn_implementation("eager")
    assert RowDecoder.of(model) is None


def memory(*tensors: Tensor) -> int:
    """Bytes of the distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_sharing_moves_the_weights_and_takes_no_more_memory(tmp_path: Path):
    plain = make_model(tmp_path, "qwen2")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    share_projections(model)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert memory(*model.parameters()) == sum(parameter.nbytes for parameter in plain.parameters())


def test_adapters_on_one_base_hold_its_weights_once_and_a_dropped_one_leaves_nothing(tmp_path: Path):
    base = save_tiny_llama(tmp_path / "base")
    files = [
        ModelFiles(
            identifier="tiny", weights_dir=base, adapter_dir=save_random_adapter(base, tmp_path / str(seed), seed=seed)
        )
        for seed in (1, 2)
    ]
    config = {"device": "cpu", "dtype": "fp32", "threads": 1, "max_adapters_per_model": 1}
    engine = Engine(TransformersInferenceConfig.model_validate(config))
    for one in (*files, files[0].model_copy(update={"adapter_dir": None})):
        sampling = Sampling(temperature=0, max_tokens=3)
        list(engine.generate(GenerateRequest(model=one, sampling=sampling, prompt="The"), lambda: False))
    (loaded,) = engine._models.values()
    assert list(loaded._decoders) == ["adapter2", None]
    weights = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
    for decoder in loaded._decoders.values():
        assert decoder is not None
        products = [p for layer in decoder._layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        assert {p._weight.untyped_storage().data_ptr() for p in [*products, decoder._head]} <= weights


PROMPTS = (
    "<|im_start|>user\nName the planets of the solar system in order.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a lighthouse keeper with an old dog. " * 12,
    "def",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_model_generates_the_tokens_of_transformers(smollm2: Path, dtype: torch.dtype):
    if dtype == torch.bfloat16 and not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("bf16 is not computed natively here: products by other routines may round differently")
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).eval()
    share_projections(model)
    decoder, tokenizer = decoder_of(model), Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for prompt in (tokenizer.encode(text).ids for text in PROMPTS):
        assert greedy(model, prompt, 16, decoder) == by_transformers(model, prompt, 16)

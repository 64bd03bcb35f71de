"""What the inference engine computes, against transformers and PEFT used plainly."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from apis.errors import DataInvalid, InvalidField, ModelInvalid, ModelNotFound, PostgradError, Unavailable
from providers.inference.config import TransformersInferenceConfig
from providers.inference.engine import Engine
from providers.inference.generation import Detokenizer, Sampler, StopStrings, generate_tokens, stream_text
from providers.inference.wire import Done, GenerateRequest, ModelFiles, Sampling, WireError
from tests.tiny_llama import CONTEXT, save_random_adapter, save_tiny_llama

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PROMPT = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = ({"role": "user", "content": "Hello there"},)
GREEDY = Sampling(temperature=0, max_tokens=40)


@dataclass(frozen=True)
class Tiny:
    base: Path
    adapters: tuple[Path, Path]

    def files(self, adapter: int | None = None) -> ModelFiles:
        folder = None if adapter is None else self.adapters[adapter]
        return ModelFiles(identifier="tiny", weights_dir=self.base, adapter_dir=folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    base = save_tiny_llama(root / "base")
    return Tiny(
        base, (save_random_adapter(base, root / "one", seed=1), save_random_adapter(base, root / "two", seed=2))
    )


def make_engine(**config: object) -> Engine:
    return Engine(TransformersInferenceConfig.model_validate({"device": "cpu", "dtype": "fp32", "threads": 1} | config))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def ask(engine: Engine, files: ModelFiles, sampling: Sampling = GREEDY) -> tuple[str, Done]:
    request = GenerateRequest(model=files, sampling=sampling, messages=MESSAGES)
    *pieces, done = engine.generate(request, lambda: False)
    assert isinstance(done, Done)
    return "".join(str(piece) for piece in pieces), done


def plain_ids(base: Path, adapter: Path | None = None, tokens: int = 40) -> list[int]:
    """What transformers, and PEFT for an adapter, generate greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    prompt = torch.tensor([Tokenizer.from_file(str(base / "tokenizer.json")).encode(PROMPT).ids])
    whole = model.eval().generate(input_ids=prompt, max_new_tokens=tokens, do_sample=False)
    return whole[0, prompt.shape[1] :].tolist()


def text_of(base: Path, ids: list[int]) -> str:
    """The ids as text, without the bytes of an unfinished character at the end."""
    return Tokenizer.from_file(str(base / "tokenizer.json")).decode(ids).rstrip("\ufffd")


def test_greedy_text_is_that_of_transformers_generate(engine: Engine, tiny: Tiny):
    text, done = ask(engine, tiny.files())
    ids = plain_ids(tiny.base)
    assert len(ids) == 40
    assert text == text_of(tiny.base, ids)
    prompt_tokens = len(Tokenizer.from_file(str(tiny.base / "tokenizer.json")).encode(PROMPT).ids)
    assert done == Done(finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=40)


def test_a_plain_prompt_gives_what_its_rendered_messages_give(engine: Engine, tiny: Tiny):
    request = GenerateRequest(model=tiny.files(), sampling=GREEDY, prompt=PROMPT)
    *pieces, done = engine.generate(request, lambda: False)
    assert ("".join(map(str, pieces)), done) == ask(engine, tiny.files())


def test_adapters_on_one_base_answer_as_plain_peft_and_leave_the_base_as_it_was(tiny: Tiny):
    engine = make_engine()
    before = ask(engine, tiny.files())[0]
    for number in (0, 1, 0):
        expected = text_of(tiny.base, plain_ids(tiny.base, tiny.adapters[number]))
        assert expected != before
        assert ask(engine, tiny.files(number))[0] == expected
        assert ask(engine, tiny.files())[0] == before
    assert len(engine._models) == 1


def test_adapters_beyond_the_limit_are_dropped_and_loaded_again(tiny: Tiny):
    engine = make_engine(max_adapters_per_model=1)
    first = ask(engine, tiny.files(0))[0]
    second = ask(engine, tiny.files(1))[0]
    (model,) = engine._models.values()
    assert len(model._adapters) == 1
    assert (ask(engine, tiny.files(0))[0], ask(engine, tiny.files(1))[0]) == (first, second)
    assert first != second


def test_an_adapter_replaced_in_its_folder_is_read_anew(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.adapters[0], folder)
    files = tiny.files().model_copy(update={"adapter_dir": folder})
    engine = make_engine()
    assert ask(engine, files) == ask(engine, tiny.files(0))
    shutil.rmtree(folder)
    shutil.copytree(tiny.adapters[1], folder)
    assert ask(engine, files) == ask(engine, tiny.files(1))


def test_an_adapter_with_weights_that_have_no_place_is_refused_and_the_base_stays_right(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.adapters[0], folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {key.replace("q_proj", "z_proj"): value for key, value in weights.items()}, folder / "adapter_model.safetensors"
    )
    engine = make_engine()
    with pytest.raises(ModelInvalid, match=r"does not fit its base model, for example at .*(q|z)_proj"):
        ask(engine, tiny.files().model_copy(update={"adapter_dir": folder}))
    assert ask(engine, tiny.files())[0] == text_of(tiny.base, plain_ids(tiny.base))


def test_an_adapter_of_other_shapes_is_refused(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "adapter"
    shutil.copytree(tiny.adapters[0], folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {key: torch.cat([value, value], dim=0) for key, value in weights.items()}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(ModelInvalid, match="'tiny' does not fit its base model"):
        ask(make_engine(), tiny.files().model_copy(update={"adapter_dir": folder}))


def test_a_model_whose_template_is_missing_stays_loaded(tmp_path: Path):
    files = ModelFiles(identifier="plain", weights_dir=save_tiny_llama(tmp_path, chat_template=None))
    engine = make_engine()
    list(engine.generate(GenerateRequest(model=files, sampling=GREEDY, prompt="The"), lambda: False))
    (loaded,) = engine._models.values()
    with pytest.raises(ModelInvalid, match="no chat template"):
        ask(engine, files)
    assert list(engine._models.values()) == [loaded]


def test_a_base_that_lacks_a_weight_is_refused(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "base"
    shutil.copytree(tiny.base, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"lacks 1 weights, for example model\.layers\.1\.mlp\.up_proj\.weight"):
        ask(make_engine(), ModelFiles(identifier="holed", weights_dir=folder))


def test_pickled_weights_are_never_loaded(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "base"
    shutil.copytree(tiny.base, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"'pickled' has no \*\.safetensors"):
        ask(make_engine(), ModelFiles(identifier="pickled", weights_dir=folder))


def test_no_more_bases_are_held_than_allowed_and_the_least_recent_goes(tiny: Tiny, tmp_path: Path):
    engine = make_engine(max_loaded_models=2)
    others = [
        ModelFiles(identifier=f"other{seed}", weights_dir=save_tiny_llama(tmp_path / str(seed), seed=seed))
        for seed in (2, 3)
    ]
    for files in (tiny.files(), others[0], tiny.files(), others[1]):
        ask(engine, files)
    assert [key[0] for key in engine._models] == [tiny.base, others[1].weights_dir]


def test_generation_stops_at_a_stop_token_which_is_no_part_of_the_text(tiny: Tiny, tmp_path: Path):
    ids = plain_ids(tiny.base)
    stop = next(i for i in range(5, 40) if ids[i] not in ids[:i])
    folder = tmp_path / "base"
    shutil.copytree(tiny.base, folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, ids[stop]]}))
    text, done = ask(make_engine(), ModelFiles(identifier="stopping", weights_dir=folder))
    assert text == text_of(tiny.base, ids[:stop])
    assert (done.finish_reason, done.completion_tokens) == ("stop", stop + 1)


def test_a_stop_string_ends_the_text_right_before_it(engine: Engine, tiny: Tiny):
    whole = ask(engine, tiny.files())[0]
    stop = whole[10:16]
    text, done = ask(engine, tiny.files(), GREEDY.model_copy(update={"stop": ("never there", stop)}))
    assert text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert done.completion_tokens < 40


def test_the_same_seed_gives_the_same_text_and_another_seed_another(engine: Engine, tiny: Tiny):
    def sampled(seed: int | None) -> str:
        return ask(engine, tiny.files(), Sampling(temperature=1, top_p=0.9, seed=seed, max_tokens=20))[0]

    assert sampled(7) == sampled(7) != sampled(8)
    assert sampled(None) != sampled(None)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine: Engine, tiny: Tiny):
    messages = ({"role": "user", "content": "é" * 2 * CONTEXT},)
    request = GenerateRequest(model=tiny.files(), sampling=GREEDY, messages=messages)
    with pytest.raises(
        InvalidField, match=rf"the prompt has \d{{4,}} tokens; 'tiny' takes at most {CONTEXT}"
    ) as caught:
        list(engine.generate(request, lambda: False))
    assert caught.value.param == "messages"


def test_generation_ends_where_the_context_does_and_has_a_default_length(tiny: Tiny):
    engine = make_engine(max_context_tokens=64, default_max_tokens=5)
    _, done = ask(engine, tiny.files(), Sampling(temperature=0, max_tokens=1000))
    assert done.prompt_tokens + done.completion_tokens == 64
    assert done.finish_reason == "length"
    assert ask(engine, tiny.files(), Sampling(temperature=0))[1].completion_tokens == 5


def test_a_long_prompt_read_in_chunks_gives_the_logits_of_reading_it_whole(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    model = AutoModelForCausalLM.from_pretrained(tiny.base, dtype=torch.float32).eval()
    prompt = torch.randint(3, 390, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    monkeypatch.setattr("providers.inference.generation.PREFILL_CHUNK", 16)
    seen: list[torch.Tensor] = []
    next(generate_tokens(model, prompt, lambda logits: (seen.append(logits), 0)[1], lambda: False))
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(seen[0], whole, rtol=1e-4, atol=1e-4)


def test_a_cancelled_generation_ends_without_an_end(engine: Engine, tiny: Tiny):
    request = GenerateRequest(model=tiny.files(), sampling=Sampling(temperature=0, max_tokens=4000), messages=MESSAGES)
    began = time.monotonic()
    events = list(engine.generate(request, lambda: time.monotonic() > began + 0.3))
    assert events
    assert not any(isinstance(event, Done) for event in events)


def test_bf16_is_computed_in_bf16(tiny: Tiny):
    engine = make_engine(dtype="bf16")
    ask(engine, tiny.files(0))
    (model,) = engine._models.values()
    assert {tensor.dtype for name, tensor in model.model.named_parameters() if "lora" not in name} == {torch.bfloat16}


def test_a_missing_cuda_device_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        make_engine(device="cuda")


def test_weights_that_are_not_finite_are_said(tiny: Tiny, tmp_path: Path):
    folder = tmp_path / "base"
    shutil.copytree(tiny.base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelInvalid, match="not finite"):
        ask(make_engine(), ModelFiles(identifier="broken", weights_dir=folder))


def test_top_p_draws_from_the_fewest_tokens_that_reach_it_in_proportion():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    sampler = Sampler(Sampling(top_p=0.75, seed=0))
    counts = Counter(sampler(logits) for _ in range(4000))
    assert set(counts) == {1, 3}
    # 0.5 / 0.8 of the draws; four standard deviations are 0.031.
    assert counts[1] / 4000 == pytest.approx(0.625, abs=0.031)
    assert {Sampler(Sampling(top_p=0, seed=seed))(logits) for seed in range(50)} == {1}


def test_top_k_draws_from_the_likeliest_tokens_in_proportion_and_all_that_equal_the_last():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    sampler = Sampler(Sampling(top_k=2, seed=0))
    counts = Counter(sampler(logits) for _ in range(4000))
    assert set(counts) == {1, 3}
    assert counts[1] / 4000 == pytest.approx(0.625, abs=0.031)
    assert {Sampler(Sampling(top_k=1, seed=seed))(logits) for seed in range(50)} == {1}
    tied = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert {Sampler(Sampling(top_k=2, seed=seed))(tied) for seed in range(50)} == {0, 2, 3}
    assert Sampler(Sampling(top_k=9, seed=1))(logits) == Sampler(Sampling(seed=1))(logits)
    # top_p counts what top_k has left.
    assert {Sampler(Sampling(top_k=2, top_p=0.6, seed=seed))(logits) for seed in range(50)} == {1}


def test_temperature_scales_the_logits():
    logits = torch.tensor([0.0, 1.0])
    sampler = Sampler(Sampling(temperature=0.5, seed=0))
    share = sum(sampler(logits) for _ in range(4000)) / 4000
    assert share == pytest.approx(1 / (1 + math.exp(-2)), abs=0.021)
    for tiny in (1e-40, 5e-324):  # the smallest that a float holds, which fp32 does not
        assert Sampler(Sampling(temperature=tiny, seed=0))(logits) == 1


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.base / "tokenizer.json"))


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=40))
def test_text_in_pieces_is_the_text_whole_and_never_half_a_character(tokenizer: Tokenizer, text: str):
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids))
    pieces = [detokenizer.feed(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_the_bytes_of_an_unfinished_character_at_the_end_are_left_out(tokenizer: Tokenizer):
    ids = tokenizer.encode("a🙂").ids
    assert len(ids) == 5
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids))
    assert [detokenizer.feed(token) for token in ids[:4]] == ["a", "", "", ""]
    assert detokenizer.flush() == ""


def cut_at_first(text: str, stops: list[str]) -> str:
    """Reads letter by letter and cuts as soon as the text ends in a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("ab.", max_size=4), max_size=8),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_the_same_however_the_text_is_split(pieces: list[str], stops: list[str]):
    matcher, given_out = StopStrings(tuple(stops)), ""
    for piece in pieces:
        given_out += matcher.feed(piece)
        if matcher.found:
            break
    else:
        given_out += matcher.flush()
    assert given_out == cut_at_first("".join(pieces), stops)
    assert matcher.found == any(stop in "".join(pieces) for stop in stops)


def test_text_held_back_for_a_stop_string_is_given_out_when_a_stop_token_ends_it():
    words = {1: "one S", 2: "TO", 9: ""}
    events = stream_text(
        iter([1, 2, 9, 1]),
        decode=lambda ids: "".join(words[i] for i in ids),
        stop_ids={9},
        stops=StopStrings(("STOP",)),
        limit=10,
        prompt_tokens=3,
    )
    assert list(events) == ["one ", "STO", Done(finish_reason="stop", prompt_tokens=3, completion_tokens=3)]


def test_errors_cross_to_the_server_as_the_same_class():
    for error in (ModelNotFound("no such model", param="model"), DataInvalid("bad", row=3), PostgradError("broken")):
        again = WireError.model_validate_json(WireError.of(error).model_dump_json()).to_exception()
        assert (type(again), again.message, again.param) == (type(error), error.message, error.param)

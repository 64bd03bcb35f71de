"""GGUF files in llama.cpp: the tokens, the logits and the text of transformers; the unknown is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import torch
from gguf import GGUFReader, TokenType
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from apis.errors import InvalidField, ModelInvalid, NotSupported, UnsupportedModel
from distributions.cli.main import app
from post_training.catalog import exporting
from post_training.catalog.exporting import export_gguf
from post_training.catalog.importing import import_model
from post_training.catalog.models import ModelCatalog
from post_training.checkpoints import gguf_tokenizer
from post_training.checkpoints.export import merge
from post_training.checkpoints.gguf_architecture import llama3_rope_factors
from post_training.checkpoints.gguf_export import GgufDtype, write_gguf
from post_training.checkpoints.gguf_tokenizer import merge_scores, read_vocabulary
from post_training.jobs.database import Database
from tests.llama_cpp_server import llama_cpp
from tests.tiny_llama import CHATML, CORPUS, SPECIALS, save_random_adapter, save_tiny_llama
from tests.torchtune_models import make_model

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

BOUNDS: dict[GgufDtype, float] = {"bf16": 1.9e-2, "q8_0": 3.5e-2}
"""Relative Frobenius error of llama.cpp's logits against transformers in fp32, as measured for SmolLM2-135M with the
files of llama.cpp's own converter."""
F32_BOUND = 1e-5
"""Of an f32 file, computed in fp32 throughout; with llama.cpp's defaults 5.4e-4 was measured."""
GELU_BOUND = 5.4e-4
"""llama.cpp looks GELU up in a table of f16 numbers."""

TRICKY = [
    "",
    " ",
    "   leading and   inner spaces ",
    "\n\n\ttabs\r\nand lines\n \n",
    "0 12 345 6789 1234567 3.14 1,000",
    "naïve café Füße 日本語 नमस्ते Ελλάδα 🚀👩‍👩‍👧 \u200d",
    "I'll, you'RE, we've 'twas 's",
    "a_b-c(d)[e]{f}<g>;;; ==> !!! #%&",
    "<|im_start|>user\nHi <|im_end|> <|endoftext|>x",
    "<|im_start <|im_end| >",
    "The quick brown fox jumps over the lazy dog",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


KINDS: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (BYTES, False),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]), False),
    "llama-bpe": (_split(LLAMA3), True),
    "qwen2": (_split(LLAMA3.replace("{1,3}", "")), False),
}


def byte_level(kind: str = "gpt-2") -> Tokenizer:
    """A small byte-level BPE with the steps that published tokenizers of this kind have."""
    steps, ignore_merges = KINDS[kind]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = steps, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=440, special_tokens=SPECIALS, initial_alphabet=BYTES.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "I'll say 12 345 and 6789 !!!"], trainer)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | settings))


def model_with(folder: Path, tokenizer: Tokenizer, case: str = "llama", spare: int = 0, **config: Any) -> Path:
    """A tiny random model whose embedding has `spare` rows more than the tokenizer has tokens."""
    make_model(folder, case, vocab_size=tokenizer.get_vocab_size() + spare, **config)
    save_tokenizer(folder, tokenizer)
    return folder


def gguf_of(folder: Path, dtype: GgufDtype = "f32") -> Path:
    file = folder.parent / f"{folder.name}-{dtype}.gguf"
    write_gguf(folder, file, "a name", dtype)
    return file


def edit(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def logits(model: Any, prompts: list[list[int]]) -> Tensor:
    """Logits [N, V] of the token after each prompt, by transformers in fp32."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in prompts])


def logit_error(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error of logits [N, V] that are known up to a constant per row: log-probabilities."""
    error = found - expected
    return float((error - error.mean(dim=-1, keepdim=True)).norm() / expected.norm())


# -- the real model --------------------------------------------------------------------------------------------------

PROMPTS = [
    "The capital of France is Paris, and the capital of Germany is",
    "def add(a, b):\n    return",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was a",
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """SmolLM2 with an adapter merged in that changes every output, in fp32."""
    folder = tmp_path_factory.mktemp("tuned")
    merge(smollm2, save_random_adapter(smollm2, folder / "adapter", seed=1), folder / "merged")
    return folder / "merged"


@dataclass
class Reference:
    """What transformers makes of the prompts in fp32."""

    prompts: list[list[int]]
    logits: Tensor
    texts: list[str]


@pytest.fixture(scope="module")
def reference(tuned: Path) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    texts = [greedy_text(model, tokenizer, ids, NEW_TOKENS) for ids in prompts]
    return Reference(prompts, logits(model, prompts), texts)


@pytest.mark.model
def test_a_tuned_smollm2_in_llama_cpp_says_what_it_says_in_transformers(
    tuned: Path, reference: Reference, smollm2: Path
):
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    with llama_cpp(gguf_of(tuned)) as served:
        for text in [*PROMPTS, *TRICKY]:
            assert served.tokens(text) == tokenizer(text)["input_ids"], text
        found = torch.stack([served.log_probabilities(ids, 49152) for ids in reference.prompts])
        said = [served.greedy(ids, NEW_TOKENS) for ids in reference.prompts]
        messages = [{"role": "user", "content": "Hi there"}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert served.chat_prompt(messages) == rendered
    assert logit_error(found, reference.logits) < F32_BOUND
    assert said == reference.texts
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert logit_error(logits(base, reference.prompts), reference.logits) > 0.05


@pytest.mark.model
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_smaller_number_format_stays_within_its_bound(tuned: Path, reference: Reference, dtype: GgufDtype):
    file = gguf_of(tuned, dtype)
    with llama_cpp(file) as served:
        found = torch.stack([served.log_probabilities(ids, 49152) for ids in reference.prompts])
    assert 10 * F32_BOUND < logit_error(found, reference.logits) < BOUNDS[dtype]
    whole = sum(path.stat().st_size for path in tuned.glob("*.safetensors"))
    assert file.stat().st_size < {"bf16": 0.52, "q8_0": 0.28}[dtype] * whole


def greedy_text(model: Any, tokenizer: Any, ids: list[int], count: int) -> str:
    with torch.no_grad():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)


# -- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {}),
        ("llama_tied", {}),
        ("llama3_scaled", {}),
        ("llama", {"head_dim": 24}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {}),
        ("qwen2_tied", {}),
        ("gemma", {"head_dim": 32}),
    ],
)
def test_every_known_architecture_gives_transformers_logits_in_llama_cpp(tmp_path: Path, case: str, config: dict):
    folder = model_with(tmp_path / "model", byte_level(), case, **config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (length,), generator=generator).tolist() for length in (1, 7, 60)]
    with llama_cpp(gguf_of(folder), context=128) as served:
        found = torch.stack([served.log_probabilities(ids, vocab) for ids in prompts])
    assert logit_error(found, logits(model, prompts)) < (GELU_BOUND if case == "gemma" else F32_BOUND)


def test_llama3s_rope_factors_are_transformers_own():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(plain / llama3_rope_factors(64, rope), scaled, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        ("phi3", {}, "model_type 'phi3'; known are gemma, llama, mistral, qwen2"),
        ("llama", {"attention_bias": True}, "attention_bias in a llama model"),
        ("llama", {"hidden_act": "gelu"}, "the activation 'gelu' in a llama model"),
        ("gemma", {"hidden_act": "silu"}, "the activation 'silu' in a gemma model"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaling 'linear'"),
    ],
)
def test_an_architecture_or_option_that_is_not_known_is_refused_by_name(
    tmp_path: Path, case: str, config: dict, message: str
):
    folder = model_with(tmp_path / "model", byte_level(), case, **config)
    with pytest.raises(UnsupportedModel, match=message) as refusal:
        gguf_of(folder)
    assert refusal.value.http_status == 400
    assert list(tmp_path.glob("*.gguf")) == []


def test_an_untied_model_without_its_output_layer_is_refused(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level())
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]  # llama.cpp would take the embedding in its place
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"no tensor lm_head\.weight"):
        gguf_of(folder)


def test_a_tensor_that_has_no_place_is_refused(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level())
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.sinks"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"the tensor model\.layers\.0\.self_attn\.sinks"):
        gguf_of(folder)


def test_numbers_that_the_format_cannot_hold_are_refused(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelInvalid, match=r"token_embd\.weight holds values beyond f16's range"):
        gguf_of(folder, "f16")
    weights["model.embed_tokens.weight"][0, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelInvalid, match="NaN or infinite"):
        gguf_of(folder)


# -- what the file holds ---------------------------------------------------------------------------------------------


def field(reader: GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    assert found is not None, key
    return found.contents()


def test_the_file_says_what_the_model_is_and_leaves_out_a_tied_output_layer(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level(), "llama_tied", spare=5, max_position_embeddings=100)
    reader = GGUFReader(gguf_of(folder))
    assert field(reader, "general.architecture") == "llama"
    assert field(reader, "general.name") == "a name"
    assert field(reader, "llama.context_length") == 100
    assert field(reader, "llama.rope.freq_base") == 100_000.0
    assert field(reader, "tokenizer.chat_template") == CHATML
    names = {tensor.name for tensor in reader.tensors}
    assert "token_embd.weight" in names
    assert "output.weight" not in names
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(types) == byte_level().get_vocab_size() + 5
    assert types[-5:] == [TokenType.UNUSED] * 5
    assert types[:4] == [TokenType.CONTROL] * 3 + [TokenType.NORMAL]


def test_a_window_becomes_the_context_since_llama_cpp_would_ignore_it(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level(), "mistral", sliding_window=48)
    assert field(GGUFReader(gguf_of(folder)), "llama.context_length") == 48


def test_matrices_have_the_format_asked_for_and_vectors_fp32(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level(), intermediate_size=40)
    weights = load_file(folder / "model.safetensors")
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf_of(folder, "q8_0")).tensors}
    assert stored["blk.0.attn_v.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert stored["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    # 40 numbers a row are no multiple of a block's 32
    assert stored["blk.0.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.F16
    expected = weights["model.layers.0.self_attn.v_proj.weight"].numpy()
    value = stored["blk.0.attn_v.weight"]
    found = gguf.dequantize(value.data, value.tensor_type)
    # half a step of a block: its largest number over 127
    assert abs(found - expected).max() <= 0.51 * abs(expected).max() / 127


def test_equal_models_give_equal_files(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level())
    first = gguf_of(folder).read_bytes()
    assert gguf_of(folder).read_bytes() == first


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_tokenizes_as_each_kind_of_byte_level_tokenizer_does(tmp_path: Path, kind: str):
    tokenizer = byte_level(kind)
    folder = model_with(tmp_path / "model", tokenizer, spare=3)
    assert read_vocabulary(folder, tokenizer.get_vocab_size()).pre == kind
    with llama_cpp(gguf_of(folder)) as served:
        for text in [*TRICKY, *CORPUS]:
            assert served.tokens(text) == tokenizer.encode(text).ids, text


def test_a_bos_and_an_eos_are_added_where_the_tokenizer_adds_them(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    folder = model_with(tmp_path / "model", tokenizer)
    save_tokenizer(folder, tokenizer, bos_token={"content": "<|im_start|>"})
    with llama_cpp(gguf_of(folder)) as served:
        ids = served.tokens("A stack")
        assert ids == tokenizer.encode("A stack").ids
        assert (ids[0], ids[-1]) == (1, 2)
        assert served.tokens("A stack", special=False) == ids[1:-1]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, as Llama 2's."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def fast_tokenizer(pieces: Any, *, prefix: bool = True) -> Tokenizer:
    """What Hugging Face makes of a SentencePiece model: every way to make a piece is a merge, the best piece first."""
    vocab = {pieces.id_to_piece(n): n for n in range(pieces.get_piece_size())}
    ways = [(w[:cut], w[cut:]) for w in vocab for cut in range(1, len(w)) if w[:cut] in vocab and w[cut:] in vocab]
    merges = sorted(ways, key=lambda pair: -pieces.get_score(vocab["".join(pair)]))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("prefix", [True, False])
def test_llama_cpp_tokenizes_as_a_tokenizer_from_sentencepiece_does(tmp_path: Path, pieces: Any, prefix: bool):
    tokenizer = fast_tokenizer(pieces, prefix=prefix)
    folder = model_with(tmp_path / "model", tokenizer, "gemma", head_dim=32)
    save_tokenizer(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with llama_cpp(gguf_of(folder)) as served:
        for text in [*TRICKY[1:], *CORPUS, "one</s> two</s>three"]:
            assert served.tokens(text) == tokenizer.encode(text).ids, text
        if prefix:
            assert served.tokens(CORPUS[0]) == [1, *pieces.encode(CORPUS[0])]


def test_merges_that_are_not_sentencepieces_are_refused():
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    complete = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    assert merge_scores(vocab, complete, 7) == [-3, -3, -3, 0, -1, -2, -3]
    with pytest.raises(UnsupportedModel, match="not every way to make 'abc'"):
        merge_scores(vocab, complete[:3], 7)
    with pytest.raises(UnsupportedModel, match="are scattered"):
        merge_scores(vocab, [("a", "bc"), ("a", "b"), ("ab", "c"), ("b", "c")], 7)


def _normalizer(kind: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(normalizer={"type": kind})


def _strip(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["rstrip"] = True


def _prefix_space(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def _ignore_merges(content: dict[str, Any]) -> None:
    content["model"]["ignore_merges"] = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_normalizer("NFC"), "with the normalizer NFC"),
        (_normalizer("Lowercase"), "with the normalizer Lowercase"),
        (_strip, r"whose token '<\|endoftext\|>' has rstrip"),
        (_prefix_space, 'with the pre_tokenizer {"type": "ByteLevel", "add_prefix_space": true'),
        (_ignore_merges, "of the kind gpt-2 with ignore_merges True"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_not_follow_is_refused_by_name(tmp_path: Path, change: Any, message: str):
    folder = model_with(tmp_path / "model", byte_level())
    edit(folder, "tokenizer.json", change)
    with pytest.raises(UnsupportedModel, match=message):
        gguf_of(folder)


def test_a_tokenizer_that_is_no_bpe_or_adds_other_tokens_is_refused(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level())
    save_tokenizer(folder, Tokenizer(models.WordLevel({"a": 0, "<|im_end|>": 1}, unk_token="a")))
    with pytest.raises(UnsupportedModel, match="of type WordLevel"):
        gguf_of(folder)
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    save_tokenizer(folder, tokenizer)  # no bos_token is named
    with pytest.raises(UnsupportedModel, match="more than a bos and an eos"):
        gguf_of(folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path: Path):
    folder = model_with(tmp_path / "model", byte_level(), spare=-1)
    with pytest.raises(ModelInvalid, match="they do not fit"):
        gguf_of(folder)


@pytest.mark.model
def test_a_published_tokenizer_is_known_by_what_it_makes_of_the_probe(smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_tokenizer, "_PRE_TOKENIZERS", {})
    assert read_vocabulary(smollm2, 49152).pre == "smollm"
    monkeypatch.setattr(gguf_tokenizer, "_KNOWN_HASHES", {})
    with pytest.raises(UnsupportedModel, match="pre_tokenizer"):
        read_vocabulary(smollm2, 49152)


# -- from the catalog and the command line ---------------------------------------------------------------------------


@pytest.fixture
def catalog(tmp_path: Path) -> ModelCatalog:
    home = tmp_path / "home"
    home.mkdir()
    database = Database(f"sqlite:///{home / 'postgrad.db'}")
    database.migrate()
    return ModelCatalog(database, home)


@pytest.fixture
def trained(catalog: ModelCatalog, tmp_path: Path) -> ModelCatalog:
    """A catalog with the base `tiny` and its checkpoint `tiny-sft-j-0`."""
    from tests.test_model_catalog import checkpoint

    import_model(str(save_tiny_llama(tmp_path / "tiny", context=256)), None, catalog.home, catalog.database)
    checkpoint(catalog, "tiny", "j", completed=True)
    model = catalog.resolve("tiny-sft-j-0")
    assert model.adapter_dir is not None
    save_random_adapter(model.base_dir, model.adapter_dir, seed=2)
    return catalog


def test_a_checkpoint_is_merged_and_written_once_and_llama_cpp_computes_base_and_adapter(trained: ModelCatalog):
    model = trained.resolve("tiny-sft-j-0")
    file = export_gguf(trained, "tiny-sft-j-0")
    assert file == trained.home / "exports" / "tiny-sft-j-0-f32.gguf"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    stamp = file.stat().st_mtime_ns
    assert export_gguf(trained, "tiny-sft-0") == file
    assert file.stat().st_mtime_ns == stamp
    base = AutoModelForCausalLM.from_pretrained(model.base_dir, dtype=torch.float32)
    prompts = [[5, 100, 7, 300], [9, 9, 9]]
    plain = logits(base, prompts)
    expected = logits(PeftModel.from_pretrained(base, str(model.adapter_dir)), prompts)
    with llama_cpp(file, context=256) as served:
        found = torch.stack([served.log_probabilities(ids, plain.shape[1]) for ids in prompts])
    assert logit_error(found, expected) < F32_BOUND
    assert logit_error(plain, expected) > 0.05


def test_a_file_that_is_there_or_has_no_folder_is_not_written(trained: ModelCatalog, tmp_path: Path):
    (tmp_path / "there.gguf").write_text("mine")
    for to, message in ((tmp_path / "there.gguf", "is there already"), (tmp_path / "no" / "x.gguf", "no folder")):
        with pytest.raises(InvalidField, match=message):
            export_gguf(trained, "tiny", to=to)
    assert (tmp_path / "there.gguf").read_text() == "mine"


def test_a_refusal_crosses_the_process_and_leaves_nothing_behind(trained: ModelCatalog):
    tokenizer = trained.resolve("tiny").base_dir / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(UnsupportedModel, match="with the normalizer Lowercase"):
        export_gguf(trained, "tiny-sft-j-0")
    assert list((trained.home / "exports").iterdir()) == []


def test_without_the_gguf_package_the_export_says_how_to_get_it(trained: ModelCatalog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporting, "find_spec", lambda _: None)
    with pytest.raises(NotSupported, match="pip install 'gguf"):
        export_gguf(trained, "tiny")


def test_the_command_writes_a_base_model_where_it_is_told(
    trained: ModelCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("POSTGRAD_HOME", str(trained.home))
    target = tmp_path / "tiny.gguf"
    done = CliRunner().invoke(app, ["models", "export", "tiny", "--gguf", "--dtype", "q8_0", "--to", str(target)])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{target}\n"
    assert field(GGUFReader(target), "general.name") == "tiny"
    assert field(GGUFReader(target), "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --merged or --gguf"),
        (["--merged", "--gguf"], "give --merged or --gguf"),
        (["--merged", "--dtype", "q8_0"], "--dtype q8_0 goes with --gguf"),
        (["--merged", "--to", "x"], "--to goes with --gguf"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(arguments: list[str], message: str):
    done = CliRunner().invoke(app, ["models", "export", "tiny", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())

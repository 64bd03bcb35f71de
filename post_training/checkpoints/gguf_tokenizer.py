"""A Hugging Face tokenizer as llama.cpp knows it, or a refusal: a tokenizer that is nearly right trains silently wrong.

Two kinds are known. Byte-level BPE ("gpt2" to llama.cpp), where a name stands for the regular expressions that cut
text before merging; and BPE with byte fallback that came from SentencePiece ("llama"), where scores stand for merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType
from tokenizers import Tokenizer

from apis.errors import ModelInvalid, UnsupportedModel
from post_training.catalog.model_files import read_json
from post_training.data.template import DEFAULT, read_special_tokens, read_template_sources

_TOKENIZER = "tokenizer.json"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_GPT2 = {**_BYTE_LEVEL, "use_regex": True}
_PLAIN_BYTES = {**_BYTE_LEVEL, "use_regex": False}

_PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([_GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, _GPT2], False),
    "llama-bpe": ([{**_SPLIT, "pattern": {"Regex": _CONTRACTIONS + "\\p{N}{1,3}" + _REST}}, _PLAIN_BYTES], True),
    "qwen2": ([{**_SPLIT, "pattern": {"Regex": _CONTRACTIONS + "\\p{N}" + _REST}}, _PLAIN_BYTES], False),
}
"""The steps before merging and `ignore_merges`, by llama.cpp's name for them (ggml-org/llama.cpp, llama-vocab.cpp)."""

_KNOWN_HASHES = {
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
}
"""llama.cpp's name by the digest of what a published tokenizer makes of `_PROBE` (its convert_hf_to_gguf_update.py)."""

_PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
_SPACE = "▁"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_SPECIALS = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp reads of a tokenizer.

    Attributes:
        model: `gpt2` or `llama`.
        pre: name of the steps before merging.
        tokens: text by id; a number for each row of the embedding, types as `gguf.TokenType`.
        merges: pairs as `left right`, first merged first; of gpt2.
        scores: highest merged first; of llama.
        special: ids of `bos`, `eos`, `unk`, `pad`, where the model has them.
        begins, ends: whether every text gets a bos in front, an eos behind.
        space_prefix: whether a space goes in front of every text.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[TokenType]
    special: dict[str, int]
    begins: bool
    ends: bool
    chat_template: str | None
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        for name, number in self.special.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.begins)
        writer.add_add_eos_token(self.ends)
        writer.add_add_space_prefix(self.space_prefix)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(model_dir: Path, vocab_size: int) -> Vocabulary:
    """Read the tokenizer of the model in `model_dir`.

    Args:
        vocab_size: rows of the embedding; ids that the tokenizer lacks are written as unused.

    Raises:
        UnsupportedModel: naming what of the tokenizer llama.cpp is not known to do the same way.
        ModelInvalid: tokenizer.json is missing or damaged, or has more tokens than the embedding has rows.
    """
    content = read_json(model_dir / _TOKENIZER)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unsupported(f"of type {model.get('type')}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _unsupported(f"with {option}")
    added = content.get("added_tokens") or []
    for token in added:
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise _unsupported(f"whose token {token['content']!r} has {option}")
    tokens, types = _tokens(model["vocab"], added, vocab_size)
    special = _special_ids(model_dir, tokenizer)
    begins, ends = _frame(tokenizer, special)
    kind = _sentencepiece(content, types) if model.get("byte_fallback") else _byte_level(content, tokenizer)
    template = read_template_sources(model_dir).get(DEFAULT)
    return Vocabulary(
        tokens=tokens, types=types, special=special, begins=begins, ends=ends, chat_template=template, **kind
    )


def _tokens(
    vocab: dict[str, int], added: Sequence[dict[str, Any]], vocab_size: int
) -> tuple[list[str], list[TokenType]]:
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    listed = [(text, index, TokenType.NORMAL) for text, index in vocab.items()]
    listed += [(t["content"], t["id"], TokenType.CONTROL if t["special"] else TokenType.USER_DEFINED) for t in added]
    for text, index, kind in listed:
        if index >= vocab_size:
            raise ModelInvalid(f"{_TOKENIZER} has token {index}, the embedding only {vocab_size} rows: they do not fit")
        tokens[index], types[index] = text, kind
    return tokens, types


def _special_ids(model_dir: Path, tokenizer: Tokenizer) -> dict[str, int]:
    named = read_special_tokens(model_dir)
    found = {name: tokenizer.token_to_id(named[f"{name}_token"]) for name in _SPECIALS if f"{name}_token" in named}
    return {name: number for name, number in found.items() if number is not None}


def _frame(tokenizer: Tokenizer, special: dict[str, int]) -> tuple[bool, bool]:
    """Whether texts get a bos and an eos, seen by what the tokenizer does."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=wanted).ids for wanted in (False, True))
    for begins in (False, True):
        for ends in (False, True):
            front = [special.get("bos")] if begins else []
            if [*front, *bare, *([special.get("eos")] if ends else [])] == whole:
                return begins, ends
    raise _unsupported("that adds more than a bos and an eos token to a text")


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


def _byte_level(content: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    normalizer = content.get("normalizer")
    pre = _pre_tokenizer(content, tokenizer)
    # Qwen's tokenizers say NFC, which llama.cpp leaves out: text that is not NFC already differs there, as it does for
    # every GGUF of Qwen.
    if normalizer is not None and (normalizer.get("type") != "NFC" or pre not in ("qwen2", "deepseek-r1-qwen")):
        raise _unsupported(f"with the normalizer {normalizer.get('type')}")
    return {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in _merges(content)]}


def _pre_tokenizer(content: dict[str, Any], tokenizer: Tokenizer) -> str:
    """llama.cpp's name for the steps before merging: that of a published tokenizer, or of one with the same steps."""
    known = _KNOWN_HASHES.get(sha256(str(tokenizer.encode(_PROBE).ids).encode()).hexdigest())
    if known is not None:
        return known
    steps, ignores = _steps(content.get("pre_tokenizer")), bool(content["model"].get("ignore_merges"))
    for name, (expected, ignore_merges) in _PRE_TOKENIZERS.items():
        if _same_steps(steps, expected):
            if ignores != ignore_merges:
                raise _unsupported(f"of the kind {name} with ignore_merges {ignores}")
            return name
    raise _unsupported(f"with the pre_tokenizer {json.dumps(content.get('pre_tokenizer'), ensure_ascii=False)}")


def _steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    if node is None:
        return []
    inner = node.get("pretokenizers") or node.get("normalizers")
    return inner if node.get("type") == "Sequence" and inner else [node]


def _same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """`trim_offsets` only moves offsets, so a step may say more than is asked of it."""
    return len(found) == len(expected) and all(
        all(step.get(key) == value for key, value in wanted.items())
        for step, wanted in zip(found, expected, strict=True)
    )


def _merges(content: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"])
    return [(left, right) for left, right in pairs]


# -- SentencePiece's BPE -----------------------------------------------------------------------------------------------


def _sentencepiece(content: dict[str, Any], types: list[TokenType]) -> dict[str, Any]:
    normalizers, steps = _steps(content.get("normalizer")), _steps(content.get("pre_tokenizer"))
    prefix = _same_steps(normalizers, [_PREPEND, _REPLACE])
    if not prefix and not _same_steps(normalizers, [_REPLACE]):
        raise _unsupported(f"with the normalizer {json.dumps(content.get('normalizer'), ensure_ascii=False)}")
    if steps and not _same_steps(steps, [_GEMMA_SPLIT]):
        raise _unsupported(f"with the pre_tokenizer {json.dumps(content.get('pre_tokenizer'), ensure_ascii=False)}")
    for token in content.get("added_tokens") or []:
        if token.get("normalized") or (not token["special"] and {" ", _SPACE} & set(token["content"])):
            raise _unsupported(f"whose token {token['content']!r} is matched after spaces were replaced")
    vocab = content["model"]["vocab"]
    for byte in range(256):
        text = f"<0x{byte:02X}>"
        if text not in vocab:
            raise _unsupported(f"with byte fallback but without the token {text}")
        types[vocab[text]] = TokenType.BYTE
    unknown = content["model"].get("unk_token")
    if unknown in vocab:
        types[vocab[unknown]] = TokenType.UNKNOWN
    scores = merge_scores(vocab, _merges(content), len(types))
    return {"model": "llama", "pre": "default", "scores": scores, "space_prefix": prefix}


def merge_scores(vocab: dict[str, int], merges: list[tuple[str, str]], size: int) -> list[float]:
    """Scores by id [size] under which joining the best-scored neighbours gives what `merges` give.

    llama.cpp joins any two neighbours whose whole is in the vocabulary, the best-scored whole first. That is the same
    only where the merges list every way to split each whole, and those of one whole next to each other.

    Raises:
        UnsupportedModel: they do not.
    """
    wholes = [whole for whole, _ in groupby(left + right for left, right in merges)]
    listed = set(merges)
    if len(set(wholes)) != len(wholes):
        raise _unsupported("whose merges are not those of a SentencePiece model (ways to make a token are scattered)")
    for whole in vocab:
        splits = ((whole[:cut], whole[cut:]) for cut in range(1, len(whole)))
        if any(left in vocab and right in vocab and (left, right) not in listed for left, right in splits):
            raise _unsupported(f"whose merges are not those of a SentencePiece model (not every way to make {whole!r})")
    scores = [-float(len(wholes))] * size
    for rank, whole in enumerate(wholes):
        scores[vocab[whole]] = -float(rank)
    return scores


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"GGUF export does not know a tokenizer {what}; export the merged model (--merged) and convert it with "
        "llama.cpp's own tool"
    )

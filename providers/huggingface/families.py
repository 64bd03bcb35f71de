"""Which models this provider takes, told from `config.json` and the weight files' headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apis.errors import ModelInvalid, UnsupportedModel
from post_training.catalog import model_sizes
from post_training.catalog.model_files import CONFIG_FILE, read_json, tensor_headers
from providers.huggingface.targets import Layers

# transformers' own causal language models over text, as of 5.24; their code comes with it and none is fetched.
_TYPES = """
afmoe apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cpmant ctrl cwm dbrx deepseek_v2
deepseek_v3 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba
flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense
hunyuan_v1_moe internlm3 jais2 jamba jetmoe lfm2 lfm2_moe llama longcat_flash mamba mamba2 mimo_v2_flash minicpm3
minimax minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo
olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2
"""
MODEL_TYPES = frozenset(_TYPES.split())
_TRANSPOSED = frozenset({"gpt2", "openai-gpt"})
_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Facts:
    """What a request is held against.

    Attributes:
        width: of a hidden state.
        context_length: tokens; None where the model has no limit.
        transposed: whether linear layers hold their weights as [in, out] (transformers' `Conv1D`).
    """

    model_type: str
    width: int
    context_length: int | None
    transposed: bool
    layers: Layers


def describe(model_dir: Path) -> Facts:
    """Read what the model in `model_dir` is.

    Raises:
        UnsupportedModel: transformers has no causal language model of its type, or its weights are quantized.
        ModelInvalid: config.json or weights are missing or damaged.
    """
    config = read_json(model_dir / CONFIG_FILE)
    model_type = _checked_type(config)
    headers = tensor_headers(model_dir)
    tied = not any(name.endswith(_HEADS) for name in headers) or config.get("tie_word_embeddings") is True
    return Facts(
        model_type,
        model_sizes.width(config),
        model_sizes.context_length(config),
        model_type in _TRANSPOSED,
        Layers(headers, tied),
    )


def _checked_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelInvalid("config.json has no model_type; get the model's own config.json")
    if model_type not in MODEL_TYPES:
        remote = " and code that comes with a model is never run" if "auto_map" in config else ""
        raise UnsupportedModel(
            f"transformers has no causal language model of model_type {model_type!r} that is trained here{remote}; "
            "choose another model"
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            "the model's weights are quantized (quantization_config), which cannot be trained against here; "
            "get the model as it was before"
        )
    return model_type

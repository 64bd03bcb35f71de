"""How a Hugging Face model is laid out in a GGUF file, for the architectures whose layout is known here.

Field and tensor names are those of the GGUF specification (ggml-org/ggml, docs/gguf.md) as the `gguf` package has
them. What llama.cpp would compute otherwise than transformers is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from apis.errors import ModelInvalid, UnsupportedModel
from post_training.catalog.model_files import CONFIG_FILE, TensorHeader, read_json, tensor_headers

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "gemma": gguf.MODEL_ARCH.GEMMA,
}
_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh"}
_BIASES = ("attention_bias", "mlp_bias")
_ROPE_FACTORS = "rope_freqs.weight"
_NOT_WEIGHTS = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Layout:
    """Where the parts of one model go.

    Attributes:
        model_type: Hugging Face's name of the architecture.
        tensors: header of each tensor that is written, by Hugging Face's name, in the order of writing.
        names: its name in the GGUF file.
    """

    model_type: str
    config: PretrainedConfig
    tensors: dict[str, TensorHeader]
    names: dict[str, str]

    @property
    def architecture(self) -> gguf.MODEL_ARCH:
        return _ARCHITECTURES[self.model_type]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer has tokens."""
        return self.tensors["model.embed_tokens.weight"].shape[0]

    @property
    def head_dim(self) -> int:
        own = getattr(self.config, "head_dim", None)
        return own or self.config.hidden_size // self.config.num_attention_heads

    @property
    def context_length(self) -> int:
        """Tokens. llama.cpp has no window in these architectures, so a model with one is exact up to its length."""
        window = getattr(self.config, "sliding_window", None)
        longest = self.config.max_position_embeddings
        return min(longest, window) if window else longest

    def convert(self, name: str, weight: Tensor) -> Tensor:
        """A weight [out, in] or [n] as llama.cpp computes with it, fp32."""
        if self.architecture == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            heads = self.config.num_attention_heads if is_query else self.config.num_key_value_heads
            return _interleaved(weight, heads)
        if self.model_type == "gemma" and name.endswith("norm.weight"):
            return weight + 1  # Gemma's norm scales by 1 + weight, llama.cpp's by the weight
        return weight

    def extra_tensors(self) -> dict[str, Tensor]:
        """Tensors that the file has and the Hugging Face model computes from its configuration."""
        rope = self.config.rope_parameters
        if rope["rope_type"] != "llama3":
            return {}
        return {_ROPE_FACTORS: llama3_rope_factors(self.head_dim, rope)}

    def write_fields(self, writer: gguf.GGUFWriter) -> None:
        """Set the architecture's own metadata."""
        config = self.config
        writer.add_vocab_size(self.vocab_size)
        writer.add_context_length(self.context_length)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def read_layout(model_dir: Path) -> Layout:
    """Read what the model in `model_dir` is.

    Raises:
        UnsupportedModel: its architecture, or an option of it, is none whose layout is known; named in the message.
        ModelInvalid: config.json or the weights are missing, damaged, quantized or do not fit together.
    """
    stored = read_json(model_dir / CONFIG_FILE)
    model_type = stored.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise _unsupported(f"model_type {model_type!r}; known are {', '.join(sorted(_ARCHITECTURES))}")
    if "quantization_config" in stored:
        raise ModelInvalid("the model is quantized: export the original, unquantized model")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    _refuse_options(model_type, config)
    tensors = _written(tensor_headers(model_dir), bool(config.tie_word_embeddings))
    return Layout(model_type, config, tensors, _names(_ARCHITECTURES[model_type], config, tensors))


def llama3_rope_factors(head_dim: int, rope: dict[str, Any]) -> Tensor:
    """What each of the head_dim / 2 rotary frequencies is divided by in Llama 3.1 and later; [head_dim / 2] fp32.

    Long wavelengths are stretched by `factor`, short ones stay, those between are interpolated (as transformers'
    `_compute_llama3_parameters` has it).
    """
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).to(torch.float32)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves (x1…, y1…), as transformers rotates them, to llama.cpp's pairs (x1, y1, …)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _refuse_options(model_type: str, config: PretrainedConfig) -> None:
    activation = getattr(config, "hidden_act", None)
    if activation not in (_ACTIVATIONS.get(model_type, "silu"), "swish" if model_type != "gemma" else None):
        raise _unsupported(f"the activation {activation!r} in a {model_type} model")
    for option in _BIASES:
        if getattr(config, option, False):
            raise _unsupported(f"{option} in a {model_type} model")
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "llama3"):
        raise _unsupported(f"RoPE scaling {rope['rope_type']!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(f"partial_rotary_factor {rope['partial_rotary_factor']}")


def _written(headers: dict[str, TensorHeader], tied: bool) -> dict[str, TensorHeader]:
    """Without what is computed, and without the output layer where it is the embedding: llama.cpp ties them itself."""
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        if name not in headers:
            raise ModelInvalid(f"the model has no tensor {name}: get the whole model again")
    left_out = ("lm_head.weight",) if tied else ()
    return {n: header for n, header in headers.items() if n not in left_out and not n.endswith(_NOT_WEIGHTS)}


def _names(architecture: gguf.MODEL_ARCH, config: PretrainedConfig, tensors: dict[str, TensorHeader]) -> dict[str, str]:
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    names = {}
    for name in tensors:
        found = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise _unsupported(f"the tensor {name}")
        names[name] = found
    return names


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"GGUF export does not know {what}; export the merged model (--merged) and convert it with llama.cpp's own tool"
    )

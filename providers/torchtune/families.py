"""Which Hugging Face models torchtune 0.6.1 computes rightly, told from `config.json` alone. No torch here.

torchtune's loader never reads a model's RoPE, window or activation settings, so it would run many models and compute
them wrongly without a word. Here every such model is refused by name. Defaults for absent keys are those of the
transformers configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from apis.errors import InvalidField, ModelInvalid, UnsupportedModel
from post_training.catalog.model_files import CONFIG_FILE, read_json
from providers.torchtune.architecture import Architecture, Family, RopeScaling
from providers.torchtune.weights import check_weights

MAX_SEQ_LEN_FIELD = "training_config.data_config.max_seq_len"

_KNOWN_WRONG = {
    "gemma2": "torchtune 0.6.1 swaps Gemma 2's feed-forward norms",
    "gemma3": "torchtune 0.6.1 has no Gemma 3",
    "gemma3_text": "torchtune 0.6.1 has no Gemma 3",
    "qwen3": "torchtune 0.6.1 has no Qwen3 (normalised queries and keys)",
    "qwen3_moe": "torchtune 0.6.1 has no mixture of experts",
    "qwen2_moe": "torchtune 0.6.1 has no mixture of experts",
    "mixtral": "torchtune 0.6.1 has no mixture of experts",
    "phimoe": "torchtune 0.6.1 has no mixture of experts",
    "smollm3": "it has layers without positions (NoPE), which torchtune 0.6.1 would rotate",
}
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVATIONS: dict[Family, tuple[str, ...]] = {
    "llama": ("silu", "swish"),
    "mistral": ("silu", "swish"),
    "qwen2": ("silu", "swish"),
    "gemma": ("gelu_pytorch_tanh",),
    "phi3": ("silu", "swish"),
}
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "gemma": {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
}


def describe(model_dir: Path, max_seq_len: int | None = None) -> Architecture:
    """Read what the model in `model_dir` is, and refuse it unless torchtune 0.6.1 computes it rightly.

    Args:
        model_dir: a Hugging Face model directory.
        max_seq_len: tokens, the longest row of the job, held against an active sliding window; None: not checked.

    Raises:
        UnsupportedModel: naming what torchtune lacks or computes wrongly.
        ModelInvalid: config.json or weights are missing, damaged or do not fit together.
    """
    config = _Config.read(model_dir)
    _refuse_what_torchtune_lacks(config)
    architecture = _architecture(config)
    _refuse_shapes(architecture)
    check_weights(model_dir, architecture)
    if max_seq_len is not None:
        check_window(architecture, max_seq_len)
    return architecture


def check_max_seq_len(architecture: Architecture, max_seq_len: int) -> None:
    """Refuse rows longer than the model's context or than an active sliding window.

    Raises:
        InvalidField: longer than the context.
        UnsupportedModel: longer than the window, which torchtune would ignore.
    """
    if max_seq_len > architecture.context_length:
        raise InvalidField(
            f"max_seq_len is {max_seq_len}, but the model's context is {architecture.context_length} tokens; "
            "choose at most that",
            param=MAX_SEQ_LEN_FIELD,
        )
    check_window(architecture, max_seq_len)


def check_window(architecture: Architecture, max_seq_len: int) -> None:
    """Refuse rows longer than an active sliding window; rows never exceed the context.

    Raises:
        UnsupportedModel: with the longest `max_seq_len` that works.
    """
    window = architecture.sliding_window
    if window is not None and min(max_seq_len, architecture.context_length) > window:
        raise _unsupported(
            f"its sliding window of {window} tokens is shorter than max_seq_len {max_seq_len} and torchtune 0.6.1 "
            f"would ignore it; set max_seq_len to at most {window}, or",
        )


def _unsupported(reason: str) -> UnsupportedModel:
    joint = " " if reason.endswith(", or") else "; "
    return UnsupportedModel(
        f"torchtune cannot train this model: {reason}{joint}use a provider for Hugging Face models that computes it"
    )


class _Config:
    """config.json with the family's defaults under it and checked types."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        self.values = values
        self.family: Family = family

    @classmethod
    def read(cls, model_dir: Path) -> _Config:
        values = read_json(model_dir / CONFIG_FILE)
        model_type = values.get("model_type")
        for family in get_args(Family):
            if model_type == family:
                return cls(values, family)
        if not isinstance(model_type, str):
            raise ModelInvalid("config.json has no model_type; get the model's own config.json")
        reason = _KNOWN_WRONG.get(model_type, f"torchtune 0.6.1 has no builder for model_type {model_type!r}")
        raise _unsupported(reason)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, _DEFAULTS[self.family].get(key, default))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelInvalid(f"config.json: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str) -> float:
        return _positive(self.get(key), key)

    def heads_of_dim(self) -> int:
        """head_dim, by default embed_dim / heads."""
        return self.integer("head_dim", max(1, self.integer("hidden_size") // self.integer("num_attention_heads")))


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelInvalid(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _refuse_what_torchtune_lacks(config: _Config) -> None:
    if config.get("quantization_config") is not None:
        raise _unsupported("its weights are quantized (quantization_config)")
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise _unsupported(f"it is a mixture of experts ({key})")
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if config.get(key):
            raise _unsupported(f"torchtune 0.6.1 has no {key} for {config.family}")
    # SmolLM3's way of switching positions off; the key also turns up in look-alikes labelled "llama".
    if config.get("no_rope_layer_interval") or not all(config.get("no_rope_layers") or [1]):
        raise _unsupported("it has layers without positions (NoPE), which torchtune 0.6.1 would rotate")
    _refuse_activation(config)


def _refuse_activation(config: _Config) -> None:
    activation = config.get("hidden_act", "silu")
    allowed = _ACTIVATIONS[config.family]
    if activation not in allowed:
        raise _unsupported(
            f"its hidden_act is {activation!r} and torchtune 0.6.1 computes {allowed[0]!r} for {config.family}"
        )


def _refuse_shapes(architecture: Architecture) -> None:
    a = architecture
    if a.num_heads % a.num_kv_heads:
        raise ModelInvalid(f"config.json: {a.num_heads} heads cannot share {a.num_kv_heads} key-value heads evenly")
    if a.head_dim % 2:
        raise ModelInvalid(f"config.json: head_dim {a.head_dim} is odd, which rotary positions do not allow")
    if a.embed_dim % a.num_heads:
        raise _unsupported(f"its hidden_size {a.embed_dim} is no multiple of its {a.num_heads} heads")
    if a.family != "gemma" and a.head_dim * a.num_heads != a.embed_dim:
        raise _unsupported(f"its head_dim {a.head_dim} is not hidden_size / heads = {a.embed_dim // a.num_heads}")
    if a.family == "gemma" and not a.tied:
        raise _unsupported("torchtune 0.6.1 always ties Gemma's output layer to the embedding, this one is untied")
    if a.family == "phi3" and a.tied:
        raise _unsupported("torchtune 0.6.1 never ties Phi-3's output layer to the embedding, this one is tied")


def _architecture(config: _Config) -> Architecture:
    base, scaling = _rope(config)
    heads = config.integer("num_attention_heads")
    return Architecture(
        family=config.family,
        vocab_size=config.integer("vocab_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.heads_of_dim(),
        embed_dim=config.integer("hidden_size"),
        intermediate_dim=config.integer("intermediate_size"),
        norm_eps=config.number("rms_norm_eps"),
        rope_base=base,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", False)),
        context_length=config.integer("max_position_embeddings"),
        sliding_window=_sliding_window(config),
    )


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling` at the top.
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ModelInvalid("config.json: the RoPE settings are not an object; get the model's own config.json")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise _unsupported("its RoPE settings differ between layers")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _unsupported(f"only a part ({partial}) of each head is rotated (partial_rotary_factor)")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    base = 10_000.0 if theta is None else _positive(theta, "rope_theta")
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    if kind == "default":
        return base, None
    if kind == "llama3" and config.family == "llama":
        return base, _llama3_scaling(parameters)
    raise _unsupported(f"its RoPE scaling is {kind!r}, which torchtune 0.6.1 ignores for {config.family}")


def _llama3_scaling(parameters: Mapping[str, Any]) -> RopeScaling:
    def value(key: str) -> float:
        return _positive(parameters.get(key), key)

    return RopeScaling(
        factor=value("factor"),
        low_freq_factor=value("low_freq_factor"),
        high_freq_factor=value("high_freq_factor"),
        original_context=int(value("original_max_position_embeddings")),
    )


def _sliding_window(config: _Config) -> int | None:
    window = config.get("sliding_window")
    if config.family == "qwen2":
        return _qwen2_window(config)
    if config.family not in ("mistral", "phi3") or window is None:
        return None
    return config.integer("sliding_window")


def _qwen2_window(config: _Config) -> int | None:
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if layer_types is None:
        active = config.integer("num_hidden_layers") > config.get("max_window_layers", 28)
    else:
        active = "sliding_attention" in layer_types
    # An explicit null switches the window off; an absent key means the class's default.
    if not active or ("sliding_window" in config.values and config.values["sliding_window"] is None):
        return None
    return config.integer("sliding_window", 4096)

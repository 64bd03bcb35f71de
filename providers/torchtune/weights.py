"""The stored weights of a model held against its architecture, by the files' headers: cheap, and without torch."""

from __future__ import annotations

from pathlib import Path

from apis.errors import ModelInvalid, UnsupportedModel
from post_training.catalog.model_files import TensorHeader, tensor_headers
from providers.torchtune.architecture import Architecture

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_FLOAT_TYPES = ("F32", "BF16", "F16")
# Old Llama exports store a constant table that no loader uses.
_UNUSED = "rotary_emb.inv_freq"

Shape = tuple[int, ...]


def check_weights(model_dir: Path, architecture: Architecture) -> dict[str, TensorHeader]:
    """Hold names, shapes and types of all stored tensors against the architecture.

    Returns:
        header by Hugging Face name, of the tensors the model uses and of a tied model's own `lm_head.weight`.

    Raises:
        ModelInvalid: naming the first missing, unexpected or mis-shaped tensor or a damaged file.
        UnsupportedModel: a weight is not in a floating-point type.
    """
    expected = expected_shapes(architecture)
    # A tied model may store its output layer as well; loading holds it equal to the embedding.
    optional = {LM_HEAD: expected[EMBEDDING]} if architecture.tied else {}
    found = {name: header for name, header in tensor_headers(model_dir).items() if not name.endswith(_UNUSED)}
    for name in expected:
        if name not in found:
            raise ModelInvalid(f"the weights lack {name}, which config.json calls for; get the whole model")
    for name, header in found.items():
        _check_tensor(name, header, (expected | optional).get(name))
    return found


def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Shape by Hugging Face name of every weight that a model of this architecture has, in layer order."""
    a = architecture
    shapes: dict[str, Shape] = {EMBEDDING: (a.vocab_size, a.embed_dim)}
    for layer in range(a.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(a).items()}
    shapes["model.norm.weight"] = (a.embed_dim,)
    if not a.tied:
        shapes[LM_HEAD] = (a.vocab_size, a.embed_dim)
    return shapes


def _layer_shapes(a: Architecture) -> dict[str, Shape]:
    q, kv, dim, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.embed_dim, a.intermediate_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    if a.fused:
        shapes |= {"self_attn.qkv_proj.weight": (q + 2 * kv, dim), "mlp.gate_up_proj.weight": (2 * inner, dim)}
    else:
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        shapes |= {f"self_attn.{name}.weight": (n, dim) for name, n in rows.items()}
        shapes |= {f"mlp.{name}.weight": (inner, dim) for name in ("gate_proj", "up_proj")}
        if a.family == "qwen2":
            shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    return shapes | {"self_attn.o_proj.weight": (dim, q), "mlp.down_proj.weight": (dim, inner)}


def _check_tensor(name: str, header: TensorHeader, expected: Shape | None) -> None:
    if expected is None:
        raise ModelInvalid(f"the weights hold {name}, which a model of this config.json does not have")
    if header.shape != expected:
        raise ModelInvalid(f"{name} has shape {list(header.shape)}, config.json calls for {list(expected)}")
    if header.dtype not in _FLOAT_TYPES:
        raise UnsupportedModel(
            f"{name} is stored as {header.dtype}, not as F32, BF16 or F16: the weights are quantized; "
            "use the unquantized model, or a provider for Hugging Face models that computes it"
        )

"""Which of a model's layers get an adapter, told from the names in its weight files. No torch here.

The wire has names for the parts of a layer that every model has; architectures call them otherwise. A name that is none
of the wire's is taken for the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from apis.errors import InvalidField
from post_training.catalog.model_files import TensorHeader

ATTENTION = ("q_proj", "k_proj", "v_proj", "output_proj")
"""The wire's names of attention's layers."""

_NAMES = {
    "q_proj": ("q_proj", "query", "q_lin", "wq", "q"),
    "k_proj": ("k_proj", "key", "k_lin", "wk", "k"),
    "v_proj": ("v_proj", "value", "v_lin", "wv", "v"),
    "output_proj": ("o_proj", "out_proj", "dense", "c_proj", "wo", "out_lin", "o"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "W_pack"),
    "output": ("lm_head", "embed_out"),
}
_ATTENTION_ROLES = (*ATTENTION, "qkv")
_ATTENTION_PARTS = ("attn", "attention")
_MLP_PARTS = ("mlp", "ffn", "feed_forward", "feedforward")
_MLP_NAMES = ("fc1", "fc2")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_FIELD = "lora_attn_modules"
_SHOWN = 12


class Layers:
    """The layers of a model that can have an adapter: weights of two dimensions inside its blocks, and the output's.

    Args:
        headers: what the weight files hold, by tensor name.
        tied: whether the output layer is the embedding.

    Attributes:
        roles: `q_proj`, …, `qkv`, `mlp`, `output` or None by the path of each, such as
            `model.layers.0.self_attn.q_proj`, in the files' order.
        experts: whether the model is a mixture of experts. Theirs are no layers in transformers, but one tensor.
    """

    def __init__(self, headers: Mapping[str, TensorHeader], tied: bool) -> None:
        weights = [n.removesuffix(".weight") for n, h in headers.items() if n.endswith(".weight") and len(h.shape) == 2]
        found = {path: _role(path) for path in weights if _can_adapt(path)}
        self.roles = {path: role for path, role in found.items() if not (tied and role == "output")}
        self.experts = any(".experts." in name for name in headers)

    def targets(self, modules: Iterable[str], *, mlp: bool, output: bool) -> tuple[str, ...]:
        """PEFT's `target_modules`, sorted: ends of paths that mean exactly the layers asked for.

        Args:
            modules: the wire's names of attention's layers, or the model's own names of any layers.

        Raises:
            InvalidField: naming what the model does not have, and what it has.
        """
        chosen = {pattern for name in modules for pattern in self._named(name, tuple(modules))}
        if mlp:
            chosen |= self._mlp()
        if output:
            chosen |= self._output()
        if not chosen:
            raise _fault(_FIELD, "no layer gets an adapter; name an attention module or set apply_lora_to_mlp")
        return tuple(sorted(chosen))

    def patterns(self, role: str) -> set[str]:
        """The shortest ends of paths that mean all layers of a role and no other."""
        return {self._pattern(path) for path, found in self.roles.items() if found == role}

    def _named(self, name: str, asked: tuple[str, ...]) -> set[str]:
        if name not in ATTENTION:
            return self._verbatim(name)
        if found := self.patterns(name):
            return found
        if whole := self.patterns("qkv") if name != "output_proj" else set():
            missing = [part for part in ATTENTION[:3] if part not in asked]
            if missing:
                raise _fault(
                    _FIELD,
                    f"this model holds q_proj, k_proj, v_proj in one matrix, {', '.join(sorted(whole))}: name "
                    f"{', '.join(missing)} too, or none of them",
                )
            return whole
        raise _fault(_FIELD, f"this model has no layer that is {name}; {self._have}")

    def _verbatim(self, name: str) -> set[str]:
        if not any(path == name or path.endswith(f".{name}") for path in self.roles):
            raise _fault(
                _FIELD, f"no layer is called {name!r}: the wire's names are {', '.join(ATTENTION)}; {self._have}"
            )
        return {name}

    def _mlp(self) -> set[str]:
        if self.experts:
            raise _fault(
                "apply_lora_to_mlp",
                "this model's feed-forward part is a mixture of experts, which cannot be adapted; set it to false",
            )
        if found := self.patterns("mlp"):
            return found
        raise _fault("apply_lora_to_mlp", f"this model has no feed-forward layers of its own; {self._have}")

    def _output(self) -> set[str]:
        if found := self.patterns("output"):
            return found
        # A merge would change the embedding as well.
        raise _fault(
            "apply_lora_to_output", "this model's output layer is its embedding (tied), which cannot be adapted alone"
        )

    def _pattern(self, path: str) -> str:
        """The end of `path`: its last name where all layers of that name have one role, else back to the layer."""
        leaf = path.rpartition(".")[2]
        return leaf if len(self._roles_by_leaf[leaf]) == 1 and not self.experts else _inside(path)

    @cached_property
    def _roles_by_leaf(self) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for path, role in self.roles.items():
            found.setdefault(path.rpartition(".")[2], set()).add(role)
        return found

    @property
    def _have(self) -> str:
        names = sorted({_inside(path) for path in self.roles})
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"its layers are called {', '.join(names[:_SHOWN])}{more}"


def _can_adapt(path: str) -> bool:
    """A layer of a block, or the output layer; embeddings and experts are none."""
    leaf = path.rpartition(".")[2]
    in_block = any(part.isdigit() for part in path.split("."))
    return leaf in _NAMES["output"] or (in_block and ".experts." not in path and leaf not in _ROUTERS)


def _role(path: str) -> str | None:
    *parents, leaf = _inside(path).split(".")
    if leaf in _NAMES["output"]:
        return "output"
    if any(part in parent.lower() for parent in parents for part in _ATTENTION_PARTS):
        return next((role for role in _ATTENTION_ROLES if leaf in _NAMES[role]), None)
    is_mlp = leaf in _MLP_NAMES or any(part in parent.lower() for parent in parents for part in _MLP_PARTS)
    return "mlp" if is_mlp else None


def _inside(path: str) -> str:
    """The part of a path behind the number of its block: `self_attn.q_proj`."""
    parts = path.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else path


def _fault(name: str, message: str) -> InvalidField:
    return InvalidField(f"{name}: {message}", param=f"algorithm_config.{name}")

"""The one door to torchtune: everything else here imports torchtune's parts from this module.

torchtune 0.6.1 imports two factory functions that torchao 0.16 removed. Only its quantization recipes call them, so
stand-ins that refuse by name let the rest import. (torchao below 0.16 would not need this, but PEFT needs 0.16.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from apis.errors import NotSupported

_REMOVED = ("int4_weight_only", "int8_dynamic_activation_int4_weight")

_HARMLESS = {
    # torchao ships kernels for other devices and Python versions in one wheel and reports each that does not load.
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
}


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


@contextmanager
def _quiet_import() -> Iterator[None]:
    filters = {name: _Without(text) for name, text in _HARMLESS.items()}
    for name, each in filters.items():
        logging.getLogger(name).addFilter(each)
    try:
        yield
    finally:
        for name, each in filters.items():
            logging.getLogger(name).removeFilter(each)


def _gone(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotSupported(f"torchao.quantization.{name} was removed in torchao 0.16; torchtune cannot quantize here")

    return refuse


with _quiet_import():
    import torchao.quantization
    from torchao.dtypes.nf4tensor import to_nf4

    for _name in _REMOVED:
        if not hasattr(torchao.quantization, _name):
            setattr(torchao.quantization, _name, _gone(_name))

    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.gemma._component_builders import gemma
    from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
    from torchtune.models.llama3_2._component_builders import llama3_2
    from torchtune.models.phi3._component_builders import phi3
    from torchtune.models.phi3._convert_weights import phi3_hf_to_tune
    from torchtune.models.phi3._position_embeddings import Phi3RotaryPositionalEmbeddings
    from torchtune.models.qwen2._component_builders import qwen2
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
    from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
    from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder
    from torchtune.modules.peft import LoRALinear

__all__ = [
    "Llama3ScaledRoPE",
    "LoRALinear",
    "Phi3RotaryPositionalEmbeddings",
    "Qwen2RotaryPositionalEmbeddings",
    "RotaryPositionalEmbeddings",
    "TransformerDecoder",
    "gemma",
    "hf_to_tune",
    "llama3_2",
    "phi3",
    "phi3_hf_to_tune",
    "qwen2",
    "qwen2_hf_to_tune",
    "to_nf4",
]

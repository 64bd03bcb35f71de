"""Models in memory: a base, its tokenizer, and the adapters asked for so far."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from apis.errors import ModelInvalid
from post_training.data.chat import ChatTokenizer
from providers.inference.adapters import Adapters
from providers.inference.row_decoder import RowDecoder, share_projections
from providers.inference.wire import ModelFiles

Stamp = tuple[object, ...]
_log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()


def stamp(folder: Path) -> Stamp:
    """Changes when the files of a model do: a path can come to hold another model. Empty where there are no weights."""
    files = sorted((*folder.glob("*.json"), *folder.glob("*.safetensors")))
    if not any(file.suffix == ".safetensors" for file in files):
        return ()
    return (folder, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


class LoadedModel:
    """One base and whatever is switched on it."""

    def __init__(self, files: ModelFiles, device: torch.device, dtype: torch.dtype, max_adapters: int) -> None:
        """Load the base.

        Raises:
            ModelInvalid: files are missing, damaged, or of an architecture that needs code of its own.
        """
        self.tokenizer = ChatTokenizer.from_dir(files.weights_dir)
        self.model = _load_base(files, device, dtype)
        share_projections(self.model)
        self._adapters = Adapters(self.model, max_adapters)
        self._decoders: dict[str | None, RowDecoder | None] = {}

    @property
    def context(self) -> int | None:
        """Most tokens the model was made for, if it says."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def active(self, files: ModelFiles) -> AbstractContextManager[None]:
        """While entered, `model` computes as `files` says: with its adapter, or as the very base.

        Raises:
            ModelInvalid: the adapter's files are missing or do not fit the base.
        """
        if files.adapter_dir is not None:
            self._adapters.switch_to(files.adapter_dir, stamp(files.adapter_dir), files.identifier)
            return nullcontext()
        return self._adapters.off()

    def decoder(self) -> RowDecoder | None:
        """What computes a token after the prompt with what is active now; None: nothing is faster than `model`."""
        active = self._adapters.active
        self._decoders = {name: made for name, made in self._decoders.items() if name in {None, *self._adapters.names}}
        if active not in self._decoders:
            self._decoders[active] = RowDecoder.of(self.model)
        return self._decoders[active]


def _load_base(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            files.weights_dir,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        _log.exception("loading %s", files.identifier)
        raise ModelInvalid(
            f"the files of model {files.identifier!r} cannot be loaded ({type(error).__name__}); see the server's log"
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelInvalid(f"model {files.identifier!r} lacks {len(missing)} weights, for example {missing[0]}")
    return model.to(device).eval()

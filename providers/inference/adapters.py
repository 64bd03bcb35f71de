"""LoRA adapters on one base, through PEFT: loaded by name, one on at a time."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftConfig, PeftModelForCausalLM
from transformers import PreTrainedModel

from apis.errors import ModelInvalid

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_log = logging.getLogger(__name__)


class Adapters:
    """Puts PEFT's layers into the modules of `model`, which then computes with whichever adapter is on."""

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        self._model, self._limit = model, limit
        self._peft: PeftModelForCausalLM | None = None
        self._names: OrderedDict[object, str] = OrderedDict()
        self._loads = 0
        self.active: str | None = None
        """PEFT's name of the adapter that is on; names are not used twice."""

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> set[str]:
        """PEFT's names of the adapters held."""
        return set(self._names.values())

    def switch_to(self, folder: Path, key: object, identifier: str) -> None:
        """Turn on the adapter in `folder`, loading it where `key` is new; the least recently used makes room.

        Raises:
            ModelInvalid: its files are missing or do not fit. The model must not be used after that.
        """
        if key not in self._names:
            self._names[key] = self._load(folder, identifier)
        self._names.move_to_end(key)
        assert self._peft is not None
        self.active = self._names[key]
        self._peft.set_adapter(self.active, inference_mode=True)
        while len(self._names) > self._limit:
            self._peft.delete_adapter(self._names.popitem(last=False)[1])

    @contextmanager
    def off(self) -> Iterator[None]:
        """While entered, the model is the base and nothing else."""
        if self._peft is None:
            yield
            return
        before, self.active = self.active, None
        try:
            with self._peft.disable_adapter():
                yield
        finally:
            self.active = before

    def _load(self, folder: Path, identifier: str) -> str:
        config = _read_config(folder, identifier)
        self._loads += 1
        name = f"adapter{self._loads}"
        try:
            if self._peft is None:
                self._peft = PeftModelForCausalLM(self._model, config, adapter_name=name)
            loaded = self._peft.load_adapter(
                folder, name, torch_device=str(self._model.device), use_safetensors=True, local_files_only=True
            )
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            _log.exception("loading the adapter of %s", identifier)
            raise ModelInvalid(f"the adapter of {identifier!r} does not fit its base model") from error
        # PEFT passes over weights it cannot place, which would serve the base under the checkpoint's name.
        if strays := [*loaded.missing_keys, *loaded.unexpected_keys]:
            raise ModelInvalid(f"the adapter of {identifier!r} does not fit its base model, for example at {strays[0]}")
        self._peft.eval()
        return name


def _read_config(folder: Path, identifier: str) -> PeftConfig:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelInvalid(f"the adapter of {identifier!r} has no {ADAPTER_WEIGHTS}: it was removed or never finished")
    try:
        config = PeftConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelInvalid(f"the adapter_config.json of {identifier!r} cannot be read") from error
    if config.peft_type != "LORA":
        raise ModelInvalid(f"the adapter of {identifier!r} is of type {config.peft_type}; only LoRA is served")
    config.inference_mode = True
    return config

"""What the worker computes with: loaded models, the rules of a request, one generation at a time."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from apis.errors import InvalidField, ModelInvalid, Unavailable
from post_training.data.chat import ChatTokenizer
from providers.inference.config import TransformersInferenceConfig
from providers.inference.generation import Sampler, StopStrings, generate_tokens, stream_text
from providers.inference.loading import LoadedModel, Stamp, stamp
from providers.inference.wire import Done, GenerateRequest, ModelFiles

_log = logging.getLogger(__name__)


class Engine:
    """Holds at most `max_loaded_models` bases; the least recently used makes room."""

    def __init__(self, config: TransformersInferenceConfig) -> None:
        self._config = config
        self._device = _device(config.device)
        self._dtype = _dtype(config.dtype, self._device)
        self._models: OrderedDict[Stamp, LoadedModel] = OrderedDict()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        _log.info("inference on %s in %s", self._device, self._dtype)

    def generate(self, request: GenerateRequest, cancelled: Callable[[], bool]) -> Iterator[str | Done]:
        """Text as it comes, then how it ended; nothing more once `cancelled`.

        Raises:
            InvalidField: the prompt is too long, or the model's template cannot render the request.
            ModelInvalid: the model's files cannot be used.
            Unavailable: the model does not fit into memory.
        """
        if cancelled():
            return
        with self._loaded(request.model) as loaded:
            prompt = _prompt_tokens(loaded.tokenizer, request)
            yield from stream_text(
                generate_tokens(loaded.model, prompt, Sampler(request.sampling), cancelled, loaded.decoder()),
                decode=loaded.tokenizer.decode,
                stop_ids=loaded.tokenizer.stop_ids,
                stops=StopStrings(request.sampling.stop),
                limit=self._token_limit(request, len(prompt), loaded.context),
                prompt_tokens=len(prompt),
            )

    def _token_limit(self, request: GenerateRequest, prompt_tokens: int, context: int | None) -> int:
        """How many tokens may be generated: as many as asked for, or the default, and never past the context."""
        limit = request.sampling.max_tokens or self._config.default_max_tokens
        contexts = [n for n in (context, self._config.max_context_tokens) if n is not None]
        if not contexts:
            return limit
        if prompt_tokens >= min(contexts):
            raise InvalidField(
                f"the prompt has {prompt_tokens} tokens; {request.model.identifier!r} takes at most {min(contexts)}, "
                "the answer's included: shorten it",
                param=_prompt_field(request),
            )
        return min(limit, min(contexts) - prompt_tokens)

    @contextmanager
    def _loaded(self, files: ModelFiles) -> Iterator[LoadedModel]:
        key = stamp(files.weights_dir)
        if not key:
            raise ModelInvalid(f"model {files.identifier!r} has no *.safetensors: it was removed or never complete")
        try:
            if key not in self._models:
                self._make_room()
                self._models[key] = LoadedModel(files, self._device, self._dtype, self._config.max_adapters_per_model)
            self._models.move_to_end(key)
            loaded = self._models[key]
            with self._activated(key, files):
                yield loaded
        except torch.OutOfMemoryError as error:
            self._models.clear()
            self._free()
            raise Unavailable(f"{files.identifier!r} and this request do not fit into the device's memory") from error

    def _activated(self, key: Stamp, files: ModelFiles) -> AbstractContextManager[None]:
        try:
            return self._models[key].active(files)
        except ModelInvalid:
            # An adapter that failed half-way may have left its layers in the base.
            del self._models[key]
            raise

    def _make_room(self) -> None:
        while len(self._models) >= self._config.max_loaded_models:
            self._models.popitem(last=False)
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _prompt_field(request: GenerateRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def _prompt_tokens(tokenizer: ChatTokenizer, request: GenerateRequest) -> list[int]:
    if request.prompt is not None:
        tokens = tokenizer.encode_text(request.prompt)
    else:
        tokens = tokenizer.encode_prompt(list(request.messages or ()), list(request.tools) or None)
    if not tokens:
        raise InvalidField("the prompt is empty: give the model something to go on from", param=_prompt_field(request))
    return tokens


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise Unavailable("inference is configured for CUDA, but there is no CUDA device: set `device: auto` or `cpu`")
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bf16" else torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        features = torch.cpu.get_capabilities()
        native = bool(features.get("avx512_bf16") or features.get("amx_bf16"))
    return torch.bfloat16 if native else torch.float32

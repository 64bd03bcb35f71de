"""llama.cpp itself, in this process: loads a GGUF file and answers over its own HTTP routes on a loopback port."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

# A compiled module whose names no type checker sees.
xllamacpp: Any = importlib.import_module("xllamacpp")


class LlamaCpp:
    def __init__(self, url: str) -> None:
        self._url = url

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text, special tokens in it parsed. `special`: with the bos and eos that the model asks for."""
        body = {"content": text, "add_special": special, "parse_special": True}
        return self._post("tokenize", body)["tokens"]

    def log_probabilities(self, tokens: list[int], vocab_size: int) -> Tensor:
        """[V] fp32, of the token after `tokens`, before any sampling."""
        # The answer leaves them out where it ends in an end-of-turn token or half a character, so another one is drawn.
        drawn = self.tokens("a", special=False)[0]
        body = {"prompt": tokens, "n_predict": 1, "n_probs": vocab_size, "cache_prompt": False}
        answer = self._post("completion", {**body, "logit_bias": [[drawn, 1000]]})
        found = answer["completion_probabilities"][0]["top_logprobs"]
        values = torch.full((vocab_size,), float("nan"))
        for entry in found:
            values[entry["id"]] = entry["logprob"]
        return values

    def greedy(self, prompt: list[int], count: int) -> str:
        """The text that follows, each token the most likely one."""
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "top_k": 1, "cache_prompt": False}
        return self._post("completion", body)["content"]

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the file's own chat template renders it."""
        return self._post("apply-template", {"messages": messages})["prompt"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self._url}/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def llama_cpp(file: Path, context: int = 512) -> Iterator[LlamaCpp]:
    """Serve a GGUF file with attention and its cache in fp32, so that the file's own numbers decide.

    By default llama.cpp rounds both to f16, which alone moves the logits by some 5e-4.
    """
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.port = context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup, params.verbosity, params.use_jinja = False, 0, True
    server = xllamacpp.Server(params)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server

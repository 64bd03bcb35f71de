"""One generation: choose tokens, turn them into text as they come, stop where asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from apis.errors import ModelInvalid
from providers.inference.row_decoder import RowDecoder
from providers.inference.wire import Done, Sampling

PREFILL_CHUNK = 2048
REPLACEMENT = "\ufffd"
Decode = Callable[[list[int]], str]
Read = Callable[[list[int]], Tensor]


class Sampler:
    """Chooses the next token: the likeliest at temperature 0, else drawn from the nucleus with its own generator."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature, self._top_p, self._top_k = sampling.temperature, sampling.top_p, sampling.top_k
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """The id drawn from logits [V].

        Top-k sampling (Fan et al., 2018): the top_k most likely tokens, and all that are as likely as the last of them.
        Then nucleus sampling (Holtzman et al., 2020): the fewest tokens whose probabilities sum to at least top_p.

        Raises:
            ModelInvalid: the logits are not numbers.
        """
        logits = logits.float().cpu()
        largest, likeliest = logits.max(dim=-1)
        if not torch.isfinite(largest):
            raise ModelInvalid("the model computes values that are not finite: its weights are damaged, or need fp32")
        if self._temperature == 0:
            return int(likeliest)
        # The largest first subtracted: a tiny temperature must not overflow, nor one beyond fp32 make 0 / 0.
        scaled = (logits - largest) / max(self._temperature, torch.finfo(torch.float32).tiny)
        if self._top_k is not None and self._top_k < scaled.numel():
            scaled = scaled.masked_fill(scaled < scaled.topk(self._top_k).values[-1], -torch.inf)
        probabilities = torch.softmax(scaled, dim=-1)
        if self._top_p < 1:
            return self._draw_from_nucleus(probabilities)
        return self._draw(probabilities)

    def _draw_from_nucleus(self, probabilities: Tensor) -> int:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        outside = ordered.cumsum(0) - ordered >= self._top_p
        outside[0] = False
        return int(ids[self._draw(ordered.masked_fill(outside, 0))])

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))


def generate_tokens(
    model: PreTrainedModel,
    prompt: list[int],
    choose: Callable[[Tensor], int],
    cancelled: Callable[[], bool],
    decoder: RowDecoder | None = None,
) -> Iterator[int]:
    """Tokens after `prompt`, without end until `cancelled`.

    `model` reads the prompt, in chunks where it is long, and then each token, unless there is a `decoder` of it.
    """
    read, unread = _reader(model, decoder), prompt
    while not cancelled():
        with torch.inference_mode():
            chunk, unread = unread[:PREFILL_CHUNK], unread[PREFILL_CHUNK:]
            logits = read(chunk)
        if not unread:
            token = choose(logits)
            yield token
            unread = [token]


def _reader(model: PreTrainedModel, decoder: RowDecoder | None) -> Read:
    """Reads tokens that follow those it has read and gives the logits [V] of what follows the last."""
    # Where a model can, it computes the logits of the last position only.
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache, rows = None, None

    def read(tokens: list[int]) -> Tensor:
        nonlocal cache, rows
        if decoder is not None and cache is not None and len(tokens) == 1:
            if rows is None:
                rows = decoder.take_over(cache)
            return decoder.step(tokens[0], rows)
        result = model(input_ids=torch.tensor([tokens], device=model.device), cache=cache, use_cache=True, **options)
        cache = result.cache
        return result.logits[0, -1]

    return read


class Detokenizer:
    """Tokens to text, piece by piece, whose concatenation is the text of all tokens.

    A character's bytes may be spread over tokens, so text is held back while its end is not a whole character. Only a
    window of tokens is decoded each time: the last ones given out, since a decoder may treat the first token of a text
    in its own way, and those held back.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._window.append(token)
        text = self._held()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window, self._given = self._window[self._given :], len(self._window) - self._given
        return text

    def flush(self) -> str:
        """What is left at the end, without the bytes of an unfinished character."""
        return self._held().rstrip(REPLACEMENT)

    def _held(self) -> str:
        before = self._decode(self._window[: self._given])
        return self._decode(self._window)[len(before) :]


class StopStrings:
    """Lets text pass up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that can be given out; once `found` is set there is no more."""
        text = self._held + text
        # The one that ends first wins, so that it never matters how the text was split.
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._held, self.found = "", True
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no stop string came of it."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def stream_text(
    tokens: Iterator[int],
    *,
    decode: Decode,
    stop_ids: Collection[int],
    stops: StopStrings,
    limit: int,
    prompt_tokens: int,
) -> Iterator[str | Done]:
    """At most `limit` tokens as text, then how it ended; no end is told if `tokens` ends before (a cancel)."""
    text = Detokenizer(decode)
    for count, token in enumerate(tokens, start=1):
        ended = token in stop_ids
        piece = "" if ended else stops.feed(text.feed(token))
        last = ended or stops.found or count == limit
        if last and not stops.found:
            piece += stops.feed(text.flush()) + stops.flush()
        if piece:
            yield piece
        if last:
            reason = "stop" if ended or stops.found else "length"
            yield Done(finish_reason=reason, prompt_tokens=prompt_tokens, completion_tokens=count)
            return

"""`client.inference`, which the clients from 0.0.61 to 0.2.23 have.

Runs in that client's virtual environment.
"""

from __future__ import annotations

from typing import Any

from flow import equal
from plain import TEXT_TOKENS, Way
from sdk import Jobs


class Inference(Jobs):
    """How the clients up to 0.2.23 ask a model."""

    sampling: dict[str, Any] = {"strategy": {"type": "greedy"}, "max_tokens": TEXT_TOKENS}

    def ways(self) -> list[Way]:
        return [Way("chat", "sdk", self.chat, self.chat_stream, self.completion, self.completion_stream)]

    def chat(self, model: str, text: str) -> str:
        answer = self.client.inference.chat_completion(
            model_id=model, messages=[{"role": "user", "content": text}], sampling_params=self.sampling
        )
        equal(answer.completion_message.role, "assistant", "the role of the answer")
        _check_stop(answer.completion_message.stop_reason)
        return answer.completion_message.content

    def chat_stream(self, model: str, text: str) -> list[str]:
        messages = [{"role": "user", "content": text}]
        chunks = list(
            self.client.inference.chat_completion(
                model_id=model, messages=messages, sampling_params=self.sampling, stream=True
            )
        )
        kinds = [chunk.event.event_type for chunk in chunks]
        equal((kinds[0], kinds[-1]), ("start", "complete"), "the first and last event")
        equal(set(kinds[1:-1]) <= {"progress"}, True, "whether all events between are progress")
        _check_stop(chunks[-1].event.stop_reason)
        return [self.piece(chunk.event.delta) for chunk in chunks]

    def piece(self, delta: Any) -> str:
        equal(delta.type, "text", "the type of a delta")
        return delta.text

    def completion(self, model: str, text: str) -> str:
        answer = self.client.inference.completion(model_id=model, content=text, sampling_params=self.sampling)
        _check_stop(answer.stop_reason)
        return answer.content

    def completion_stream(self, model: str, text: str) -> list[str]:
        chunks = list(
            self.client.inference.completion(model_id=model, content=text, sampling_params=self.sampling, stream=True)
        )
        _check_stop(chunks[-1].stop_reason)
        return [chunk.delta for chunk in chunks]


def _check_stop(reason: Any) -> None:
    equal(reason in ("end_of_turn", "out_of_tokens"), True, f"whether {reason!r} is why an answer may end")

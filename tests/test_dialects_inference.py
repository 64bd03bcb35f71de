"""Chat and completion in every generation's shapes, over a real model: each says what OpenAI's routes say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from distributions.dialects.llama_stack_inference import ChatCompletionBody, CompletionBody
from tests.dialect_server import BASE, DialectServer, dialects
from tests.tiny_llama import CONTEXT

__all__ = ["dialects"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HELLO = [{"role": "user", "content": "Hello there"}]
PREFIXES = ["/v1", "/alpha"]
GREEDY: dict[str, dict[str, Any]] = {
    "/v1": {"strategy": {"type": "greedy"}, "max_tokens": 12, "repetition_penalty": 1.0},
    "/alpha": {"strategy": "greedy", "max_tokens": 12},
}


def openai_answer(server: DialectServer, **fields: Any) -> dict[str, Any]:
    body = {"model": BASE, "messages": HELLO, "temperature": 0, "max_tokens": 12} | fields
    return server.http.post("/v1/chat/completions", json=body).json()


def events(text: str) -> list[dict[str, Any]]:
    """The stream's events, each read as JSON as the clients do."""
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_chat_says_what_openais_route_says(dialects: DialectServer, prefix: str):
    expected = openai_answer(dialects)
    body = {"model_id": BASE, "messages": HELLO, "sampling_params": GREEDY[prefix]}
    answer = dialects.http.post(f"{prefix}/inference/chat-completion", json=body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["completion_message"] == {
        "role": "assistant",
        "content": expected["choices"][0]["message"]["content"],
        "stop_reason": "out_of_tokens",
        "tool_calls": [],
    }
    counts = {metric["metric"]: metric["value"] for metric in answer.json()["metrics"]}
    assert counts == expected["usage"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_streamed_chat_starts_progresses_and_completes(dialects: DialectServer, prefix: str):
    body = {"model_id": BASE, "messages": HELLO, "sampling_params": GREEDY[prefix], "stream": True}
    answer = dialects.http.post(f"{prefix}/inference/chat-completion", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = [event["event"] for event in events(answer.text)]
    assert [event["event_type"] for event in told] == ["start", *["progress"] * (len(told) - 2), "complete"]
    deltas = [event["delta"] for event in told]
    if prefix == "/v1":
        assert {delta["type"] for delta in deltas} == {"text"}
        deltas = [delta["text"] for delta in deltas]
    assert "".join(deltas) == openai_answer(dialects)["choices"][0]["message"]["content"]
    assert [event["stop_reason"] for event in told] == [None] * (len(told) - 1) + ["out_of_tokens"]


def test_a_chat_that_ends_by_itself_is_the_end_of_a_turn(dialects: DialectServer):
    whole = openai_answer(dialects)["choices"][0]["message"]["content"]
    sampling = GREEDY["/v1"] | {"stop": [whole[4:7]]}
    body = {"model_id": BASE, "messages": HELLO, "sampling_params": sampling}
    message = dialects.http.post("/v1/inference/chat-completion", json=body).json()["completion_message"]
    assert (message["stop_reason"], message["content"]) == ("end_of_turn", whole[: whole.index(whole[4:7])])
    told = events(dialects.http.post("/v1/inference/chat-completion", json=body | {"stream": True}).text)
    assert told[-1]["event"]["stop_reason"] == "end_of_turn"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_completion_says_what_openais_route_says_whole_and_streamed(dialects: DialectServer, prefix: str):
    spoken = {"model": BASE, "prompt": "The quick", "temperature": 0, "max_tokens": 12}
    expected = dialects.http.post("/v1/completions", json=spoken).json()["choices"][0]["text"]
    body = {"model_id": BASE, "content": "The quick", "sampling_params": GREEDY[prefix]}
    answer = dialects.http.post(f"{prefix}/inference/completion", json=body).json()
    assert (answer["content"], answer["stop_reason"]) == (expected, "out_of_tokens")
    *pieces, last = events(dialects.http.post(f"{prefix}/inference/completion", json=body | {"stream": True}).text)
    assert "".join(piece["delta"] for piece in pieces) == expected
    assert (last["delta"], last["stop_reason"]) == ("", "out_of_tokens")
    assert last["metrics"] == answer["metrics"]


def test_without_sampling_params_the_answer_is_the_most_likely_one(dialects: DialectServer):
    answers = {
        dialects.http.post(
            "/v1/inference/chat-completion",
            json={"model_id": BASE, "messages": HELLO, "sampling_params": sampling},
        ).json()["completion_message"]["content"][:20]
        for sampling in (None, {}, {"max_tokens": 0}, GREEDY["/v1"] | {"max_tokens": 40})
    }
    assert len(answers) == 1


def test_an_answers_message_can_be_sent_back_as_it_came(dialects: DialectServer):
    body = {"model_id": BASE, "messages": HELLO, "sampling_params": GREEDY["/v1"]}
    message = dialects.http.post("/v1/inference/chat-completion", json=body).json()["completion_message"]
    more = [*HELLO, message, {"role": "user", "content": [{"type": "text", "text": "And "}, "now?"]}]
    answer = dialects.http.post("/v1/inference/chat-completion", json=body | {"messages": more}).json()
    plain = [*HELLO, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And now?"}]
    expected = openai_answer(dialects, messages=plain)["choices"][0]["message"]["content"]
    assert answer["completion_message"]["content"] == expected


@pytest.mark.parametrize(
    ("sampling", "spec"),
    [
        ({"strategy": {"type": "greedy"}}, {"temperature": 0.0}),
        (
            {"strategy": {"type": "top_p", "temperature": 0.7, "top_p": 0.9}, "max_tokens": 5},
            {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5},
        ),
        ({"strategy": {"type": "top_p"}}, {"temperature": 1.0, "top_p": 0.95}),
        ({"strategy": {"type": "top_k", "top_k": 3}}, {"temperature": 1.0, "top_k": 3}),
        # 0.0.61 and 0.0.63: a name, and the numbers beside it; 0 stands for "not set".
        ({"strategy": "greedy", "temperature": 0.0, "top_p": 0.95, "top_k": 0}, {"temperature": 0.0}),
        (
            {"strategy": "top_p", "temperature": 0.7, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1},
            {"temperature": 0.7, "top_p": 0.9},
        ),
        ({"strategy": "top_k", "top_k": 4, "temperature": 0.5}, {"temperature": 0.5, "top_k": 4}),
        # Upstream took the likeliest token where the temperature was not above 0.
        ({"strategy": "top_p", "temperature": 0.0, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"strategy": "top_k", "temperature": 0.0, "top_k": 4}, {"temperature": 0.0, "top_k": 4}),
        ({"strategy": {"type": "top_p", "temperature": 0.0}}, {"temperature": 0.0, "top_p": 0.95}),
        ({"strategy": {"type": "top_k", "temperature": 0, "top_k": 2}}, {"temperature": 0.0, "top_k": 2}),
        ({"strategy": "top_p", "temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_p": 0.0}),
        ({"strategy": {"type": "greedy"}, "stop": ["a"]}, {"temperature": 0.0, "stop": ["a"]}),
    ],
)
def test_each_strategy_is_the_same_sampling(sampling: dict[str, Any], spec: dict[str, Any]):
    request = CompletionBody.model_validate({"model_id": "m", "content": "a", "sampling_params": sampling}).spec()
    defaults = {"top_p": 1.0, "top_k": None, "max_tokens": None, "stop": None}
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop")
    assert {name: getattr(request, name) for name in names} == defaults | spec


def test_tools_and_their_calls_are_openais(dialects: DialectServer):
    body = {
        "model_id": "m",
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": "",
                "stop_reason": "end_of_message",
                "tool_calls": [{"call_id": "c1", "tool_name": "look_up", "arguments": {"word": "a"}}],
            },
            {"role": "ipython", "call_id": "c1", "tool_name": "look_up", "content": "found"},
        ],
        "tools": [
            {
                "tool_name": "look_up",
                "description": "Looks up",
                "parameters": {
                    "word": {"param_type": "str", "description": "the word"},
                    "limit": {"param_type": "int", "required": False, "default": 3},
                },
            }
        ],
        "tool_config": {"tool_choice": "none", "system_message_behavior": "append"},
    }
    spec = ChatCompletionBody.model_validate(body).spec()
    assert spec.tools is not None
    assert spec.tools[0].function.model_dump(exclude_none=True) == {
        "name": "look_up",
        "description": "Looks up",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "the word"},
                "limit": {"type": "integer", "default": 3},
            },
            "required": ["word"],
        },
    }
    call = spec.messages[1].tool_calls
    assert call is not None
    assert (call[0].id, call[0].function.name, json.loads(call[0].function.arguments)) == (
        "c1",
        "look_up",
        {"word": "a"},
    )
    assert (spec.messages[2].role, spec.messages[2].tool_call_id, spec.messages[2].name) == ("tool", "c1", "look_up")
    assert spec.tool_choice == "none"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logprobs": {"top_k": 1}}, "logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_prompt_format": "json"}, "tool_prompt_format"),
        ({"tool_config": {"system_message_behavior": "replace"}}, "system_message_behavior"),
        ({"sampling_params": {"strategy": {"type": "greedy"}, "repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"sampling_params": {"strategy": "greedy", "temperature": 0.7}}, "temperature"),
        ({"sampling_params": {"strategy": "top_k", "top_k": 3, "top_p": 0.5}}, "top_p"),
        ({"sampling_params": {"strategy": {"type": "top_k", "top_k": 0}}}, "top_k"),
        ({"sampling_params": {"strategy": {"type": "beam"}}}, "strategy"),
        ({"sampling_params": {"strategy": "beam"}}, "strategy"),
        ({"sampling_params": {"strategy": {"type": "greedy"}, "best_of": 2}}, "best_of"),
        ({"messages": [{"role": "user", "content": "a", "context": "b"}]}, "context"),
        ({"messages": [{"role": "user", "content": {"type": "image", "image": {"data": ""}}}]}, "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": ["a", None]}]}, "content"),
        ({"messages": [{"role": "user", "content": [5, True]}]}, "content"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "role"),
        ({"guided": 1}, "guided"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_it(dialects: DialectServer, fields: dict[str, Any], named: str):
    answer = dialects.http.post("/v1/inference/chat-completion", json={"model_id": BASE, "messages": HELLO} | fields)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    error = answer.json()["error"]
    assert named in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("stream", [False, True])
def test_faults_that_the_provider_finds_name_the_fields_of_the_request(dialects: DialectServer, stream: bool):
    long = {"model_id": BASE, "content": "é" * 2 * CONTEXT, "stream": stream}
    unknown = {"model_id": "no/such", "content": "a", "stream": stream}
    for body, status, param in ((long, 400, "content"), (unknown, 404, "model_id")):
        answer = dialects.http.post("/v1/inference/completion", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_what_only_the_spec_refuses_is_told_as_a_fault_of_the_body():
    stops = {"strategy": {"type": "greedy"}, "stop": ["x"] * 17}
    with pytest.raises(RequestValidationError) as caught:
        CompletionBody.model_validate({"model_id": "m", "content": "a", "sampling_params": stops}).spec()
    assert caught.value.errors()[0]["loc"][:2] == ("body", "stop")
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"model_id": "m", "content": [["a"]]})


LLAMA = {"user-agent": "LlamaStackClient/Python 0.2.7"}


@pytest.mark.parametrize("prefix", ["/v1", "/v1/openai/v1"])
@pytest.mark.parametrize(
    ("tail", "asked"), [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "The quick"})]
)
def test_a_stream_ends_in_done_but_for_clients_that_read_every_event_as_json(
    dialects: DialectServer, prefix: str, tail: str, asked: dict[str, Any]
):
    body = {"model": BASE, "temperature": 0, "max_tokens": 4, "stream": True} | asked
    plain = dialects.http.post(f"{prefix}/{tail}", json=body).text
    assert plain.endswith("\n\ndata: [DONE]\n\n")
    for agent in (LLAMA["user-agent"], f"Async{LLAMA['user-agent']}"):
        answer = dialects.http.post(f"{prefix}/{tail}", json=body, headers={"user-agent": agent})
        reasons = [choice["finish_reason"] for event in events(answer.text) for choice in event["choices"]]
        assert reasons[-1] == "length"
        assert len(events(answer.text)) == plain.count("data: ") - 1

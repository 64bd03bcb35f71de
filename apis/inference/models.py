"""Chat completions and completions in OpenAI's shape.

A field is here if it acts, or if clients send it with a value that asks for nothing (`n: 1`, `logprobs: false`). Any
other value of such a field is refused by name, and so is a field that is not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from apis.common import RequestModel, ResponseModel

FinishReason = Literal["stop", "length"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
MAX_STOPS = 16
MAX_PROMPTS = 128
_MOST_REPEATED = 100


def only(*accepted: object, why: str) -> AfterValidator:
    """A validator that lets null and `accepted` pass, and says `why` nothing else does."""

    def check(value: object) -> object:
        if value is None or value in accepted:
            return value
        said = repr(value)
        raise ValueError(f"{said if len(said) <= _MOST_REPEATED else 'this value'} is not supported: {why}")

    return AfterValidator(check)


_NO_LOGPROBS = "log probabilities are not returned"
_NO_PENALTY = "penalties are not applied, only 0 is accepted"
_TOOLS_AS_TEXT = "the model sees the tools and decides for itself"


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class FunctionCall(RequestModel):
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One message. Content given as text parts is their concatenation.

    An answer's message can be sent back as it came: its fields that hold nothing are accepted.
    """

    role: Role
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, only([], why="annotations are not read")] = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        return "".join(_text_of(part, index) for index, part in enumerate(value))

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role} needs `content`")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of role assistant has `tool_calls`")
        return self


def _text_of(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise ValueError(f"content part {index} has type {kind!r}: only parts of type 'text' can be read")
    return TextPart.model_validate(part).text


class FunctionDefinition(RequestModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema")
    strict: Annotated[bool | None, only(False, why="arguments are not held to their schema")] = None


class ToolDefinition(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class StreamOptions(RequestModel):
    include_usage: bool | None = False
    include_obfuscation: Annotated[bool | None, only(False, why="chunks are not padded")] = None


class ResponseFormat(RequestModel):
    type: Annotated[str, only("text", why="only 'text' is")] = "text"


StopString = Annotated[str, StringConstraints(min_length=1)]


class GenerationRequest(RequestModel):
    """What both kinds of request share."""

    model: str = Field(min_length=1, description="Id of a base model, a checkpoint or an alias")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens to generate; generation also ends where the model's context does. "
        "null: the provider's default (512)",
    )
    temperature: float | None = Field(default=1.0, ge=0, le=2, description="0: always the most likely token; null: 1")
    top_p: float | None = Field(
        1.0, ge=0, le=1, description="Sample from the fewest tokens whose probabilities reach this sum; null: 1"
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Sample from the so many most likely tokens, before `top_p`; null: from all"
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**63 - 1, description="The same seed and request give the same answer"
    )
    stop: Annotated[
        Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, only(1, why="send the request again for another answer")] = 1
    presence_penalty: Annotated[float | None, only(0, why=_NO_PENALTY)] = None
    frequency_penalty: Annotated[float | None, only(0, why=_NO_PENALTY)] = None
    logit_bias: Annotated[dict[str, float] | None, only({}, why="logits are not biased")] = None
    user: str | None = Field(default=None, description="A label; changes nothing")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(GenerationRequest):
    """`tools` are shown to the model through its own chat template; whatever it answers comes back as `content`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens")
    tools: list[ToolDefinition] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, only("auto", "none", why=_TOOLS_AS_TEXT)] = Field(
        default=None, description="none: the model does not see the tools"
    )
    parallel_tool_calls: Annotated[bool | None, only(True, why=_TOOLS_AS_TEXT)] = None
    response_format: ResponseFormat | None = None
    logprobs: Annotated[bool | None, only(False, why=_NO_LOGPROBS)] = None
    top_logprobs: Annotated[int | None, only(0, why=_NO_LOGPROBS)] = None
    modalities: Annotated[list[str] | None, only(["text"], why="answers are text")] = None
    store: Annotated[bool | None, only(False, why="answers are not stored")] = None
    metadata: dict[str, str] | None = Field(default=None, description="Labels; change nothing")
    service_tier: Annotated[str | None, only("auto", "default", why="there is one tier")] = None
    functions: Annotated[list[Any] | None, only([], why="send `tools`")] = None
    function_call: Annotated[Any, only("auto", "none", why="send `tool_choice`")] = None
    reasoning_effort: Annotated[str | None, only("none", why="models here are not asked to reason")] = None
    audio: Annotated[Any, only(why="answers are text")] = None
    verbosity: Annotated[str | None, only(why="say in the prompt how long an answer shall be")] = None
    prediction: Annotated[Any, only(why="predicted text is not used")] = None
    web_search_options: Annotated[Any, only(why="nothing is searched for")] = None
    safety_identifier: str | None = Field(default=None, description="A label; changes nothing")
    prompt_cache_key: str | None = Field(default=None, description="A label; changes nothing")
    prompt_cache_options: Annotated[Any, only(why="prompts are not cached")] = None
    prompt_cache_retention: Annotated[str | None, only(why="prompts are not cached")] = None
    moderation: Annotated[Any, only(why="answers are not moderated")] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise ValueError(f"`max_completion_tokens` is {newer} and `max_tokens` is {older}: give one of them")
        return self


def _prompts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and any(isinstance(item, int | list) for item in value):
        raise ValueError("token ids are not accepted, since each model has its own: send text")
    return value


class CompletionRequest(GenerationRequest):
    """Each prompt is answered by one choice, whose `index` is the prompt's."""

    prompt: Annotated[list[str], BeforeValidator(_prompts), Field(min_length=1, max_length=MAX_PROMPTS)]
    best_of: Annotated[int | None, only(1, why="one answer is made for each prompt")] = None
    echo: Annotated[bool | None, only(False, why="the prompt is not repeated")] = None
    logprobs: Annotated[int | None, only(why=_NO_LOGPROBS)] = None
    suffix: Annotated[str | None, only("", why="text is only generated at the end")] = None
    guided_choice: Annotated[list[str] | None, only([], why="answers are not restricted")] = None
    prompt_logprobs: Annotated[int | None, only(0, why=_NO_LOGPROBS)] = None


class _WithoutNulls(ResponseModel):
    """Leaves out what is null, where OpenAI's clients expect an absent key."""

    @model_serializer(mode="wrap")
    def _drop_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class Usage(ResponseModel):
    """Tokens read and generated; the stop token that ended the answer counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(ResponseModel):
    index: int = 0
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: None = None


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(_WithoutNulls):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(ResponseModel):
    index: int = 0
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatCompletionChunk(_WithoutNulls):
    """A piece of an answer. With `include_usage` the last one has no choices, but the usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class CompletionChoice(ResponseModel):
    """`finish_reason` is null in every chunk of a stream but a choice's last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Completion(_WithoutNulls):
    """A whole completion, or a piece of one in a stream: OpenAI gives both the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None

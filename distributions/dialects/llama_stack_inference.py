"""Llama Stack's own words for inference, as clients up to 0.2.23 send them, put into the typed spec.

A field is here if it acts, or if clients send it with a value that asks for nothing. Any other value is refused by
name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails

from apis.common import RequestModel
from apis.inference.models import ChatCompletionRequest, CompletionRequest, only
from distributions.dialects.validation import validated
from distributions.dialects.words import Words

# What Llama Stack's servers took where a request left them out.
DEFAULT_TOP_P = 0.95
_UNUSED = {"temperature": (None, 0), "top_p": (None, 0, 1, DEFAULT_TOP_P), "top_k": (None, 0)}
_TEMPLATE_DECIDES = "the model's own chat template says how tools are shown"
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def _text(value: object) -> object:
    """Content is a text, a text item, or a list of either; what is listed is one text in parts."""
    if not isinstance(value, list):
        return _item(value)
    parts = [_item(part) for part in value]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("what content lists are texts or text items")
    return "".join(map(str, parts))


def _item(value: object) -> object:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("content is a text, a text item or one list of them")
        return value
    if value.get("type") != "text" or not isinstance(value.get("text"), str) or len(value) != 2:
        raise ValueError('only text is read: a content item is {"type": "text", "text": …}')
    return value["text"]


_ITEM = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_PART = {"anyOf": [{"type": "string"}, _ITEM]}
Content = Annotated[
    str,
    BeforeValidator(_text),
    WithJsonSchema({"anyOf": [*_PART["anyOf"], {"type": "array", "items": _PART}]}),
]
StopReason = Literal["end_of_turn", "end_of_message", "out_of_tokens"]


class GreedyStrategy(RequestModel):
    type: Literal["greedy"] = "greedy"


class TopPStrategy(RequestModel):
    type: Literal["top_p"]
    temperature: float | None = Field(default=None, ge=0, le=2, description="0: greedy; null: 1")
    top_p: float | None = Field(default=DEFAULT_TOP_P, ge=0, le=1, description="null: 0.95")


class TopKStrategy(RequestModel):
    type: Literal["top_k"]
    temperature: float | None = Field(default=None, ge=0, le=2, description="0: greedy; null: 1")
    top_k: int = Field(ge=1)


Strategy = Annotated[GreedyStrategy | TopPStrategy | TopKStrategy, Field(discriminator="type")]
_FIELDS = {"greedy": (), "top_p": ("temperature", "top_p"), "top_k": ("temperature", "top_k")}
_NUMBERS = ("temperature", "top_p", "top_k")


class SamplingParams(RequestModel):
    """`strategy` is an object or, with clients up to 0.0.63, a name with its numbers beside it."""

    _by_name: bool = False

    strategy: Strategy = GreedyStrategy()
    max_tokens: int | None = Field(default=None, ge=0, description="null or 0: the provider's default")
    repetition_penalty: Annotated[float | None, only(1, why="repetitions are not penalised")] = None
    stop: list[str] | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _name_to_object(cls, value: object, make: ModelWrapValidatorHandler[Self]) -> Self:
        name = _named_strategy(value)
        if not isinstance(value, dict) or name is None:
            return make(_with_unknown_name(value))
        try:
            made = make(cls._with_object(value, name))
        except ValidationError as error:
            raise _beside_the_name(error, name) from None
        made._by_name = True
        return made

    @staticmethod
    def _with_object(value: dict[str, Any], name: str) -> dict[str, Any]:
        """Raises ValidationError for a number without effect on the strategy."""
        kept = {key: item for key, item in value.items() if key not in _UNUSED}
        strategy: dict[str, Any] = {"type": name}
        for field, without_effect in _UNUSED.items():
            given = value.get(field)
            if field in _FIELDS[name]:
                # Their `top_k` was 0 where it was not set; a temperature of 0 meant the likeliest token.
                unset = given is None or (field == "top_k" and given == 0)
                strategy |= {} if unset else {field: given}
            elif given not in without_effect:
                said = f"has no effect on strategy {name!r}: leave it out, or choose another"
                raise ValidationError.from_exception_data(
                    "sampling_params", [_line("value_error", (field,), given, {"error": ValueError(said)})]
                )
        return {**kept, "strategy": strategy}

    def words(self) -> Words:
        """Where each field of `spec()` stands here."""
        numbers = "" if self._by_name else "strategy."
        places = {"max_tokens": "max_tokens", "stop": "stop", **{name: f"{numbers}{name}" for name in _NUMBERS}}
        return {name: f"sampling_params.{place}" for name, place in places.items()}

    def spec(self) -> dict[str, Any]:
        """The fields of `apis.inference.GenerationRequest` that say the same."""
        chosen: dict[str, Any] = {"max_tokens": self.max_tokens or None, "stop": self.stop or None}
        match self.strategy:
            case TopPStrategy(temperature=temperature, top_p=top_p):
                return chosen | {
                    "temperature": 1.0 if temperature is None else temperature,
                    "top_p": DEFAULT_TOP_P if top_p is None else top_p,
                }
            case TopKStrategy(temperature=temperature, top_k=top_k):
                return chosen | {"temperature": 1.0 if temperature is None else temperature, "top_k": top_k}
        return chosen | {"temperature": 0.0}


def _named_strategy(value: object) -> str | None:
    """The strategy that is named, if only by leaving it out."""
    if not isinstance(value, dict):
        return None
    name = "greedy" if value.get("strategy") is None else value["strategy"]
    return name if isinstance(name, str) and name in _FIELDS else None


def _with_unknown_name(value: object) -> object:
    """Put a name that is none where its fault is told with those that there are."""
    if not isinstance(value, dict) or not isinstance(value.get("strategy"), str):
        return value
    return {**value, "strategy": {"type": value["strategy"]}}


def _beside_the_name(error: ValidationError, name: str) -> ValidationError:
    """The same faults; those of the strategy's numbers where they were sent, beside its name."""
    made = ("strategy", name)
    lines = [
        _line(
            fault["type"],
            fault["loc"][2:] if fault["loc"][:2] == made else fault["loc"],
            fault["input"],
            fault.get("ctx", {}),
        )
        for fault in error.errors()
    ]
    return ValidationError.from_exception_data(error.title, lines)


def _line(kind: str, place: tuple[int | str, ...], given: object, context: dict[str, Any]) -> InitErrorDetails:
    return InitErrorDetails(type=kind, loc=place, input=given, ctx=context)


class ToolCall(RequestModel):
    call_id: str
    tool_name: str = Field(min_length=1)
    arguments: str | dict[str, Any]
    arguments_json: str | None = Field(default=None, description="The same as `arguments`, which goes before")

    def spec(self) -> dict[str, Any]:
        written = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        return {"id": self.call_id, "function": {"name": self.tool_name, "arguments": written}}


class Message(RequestModel):
    """One message. An answer's message can be sent back as it came; its `stop_reason` changes nothing."""

    role: Literal["system", "user", "assistant", "tool", "ipython"]
    content: Content
    context: Annotated[Content | None, only("", why="put it into `content`")] = None
    stop_reason: StopReason | None = None
    tool_calls: list[ToolCall] | None = None
    call_id: str | None = Field(default=None, description="Of the call that a message of role tool answers")
    tool_name: str | None = None

    def spec(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "tool" if self.role == "ipython" else self.role,
            "content": self.content,
            "tool_calls": [call.spec() for call in self.tool_calls or []] or None,
            "tool_call_id": self.call_id,
            "name": self.tool_name,
        }
        return {key: value for key, value in message.items() if value is not None}


class ToolParameter(RequestModel):
    param_type: str
    description: str | None = None
    required: bool | None = True
    default: Any = None

    def schema_of_value(self) -> dict[str, Any]:
        said = {"type": _TYPES.get(self.param_type, self.param_type), "description": self.description}
        if self.default is not None:
            said["default"] = self.default
        return {key: value for key, value in said.items() if value is not None}


class ToolDefinition(RequestModel):
    tool_name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, ToolParameter] | None = None

    def spec(self) -> dict[str, Any]:
        parameters = self.parameters or {}
        schema = {
            "type": "object",
            "properties": {name: parameter.schema_of_value() for name, parameter in parameters.items()},
            "required": [name for name, parameter in parameters.items() if parameter.required],
        }
        return {"function": {"name": self.tool_name, "description": self.description, "parameters": schema}}


ToolChoice = Annotated[str | None, only("auto", "none", why="the model sees the tools and decides for itself")]
PromptFormat = Annotated[str | None, only(why=_TEMPLATE_DECIDES)]


class ToolConfig(RequestModel):
    tool_choice: ToolChoice = None
    tool_prompt_format: PromptFormat = None
    system_message_behavior: Annotated[str | None, only("append", why="there is no other system prompt")] = None


_WORDS = {
    "model": "model_id",
    "stream_options": "stream",
    "prompt": "content.",
    "messages.*.tool_call_id": "messages.*.call_id",
    "messages.*.name": "messages.*.tool_name",
    "messages.*.tool_calls.*.id": "messages.*.tool_calls.*.call_id",
    "messages.*.tool_calls.*.function.name": "messages.*.tool_calls.*.tool_name",
    "messages.*.tool_calls.*.function.arguments": "messages.*.tool_calls.*.arguments",
    "messages.*.tool_calls.*.function": "messages.*.tool_calls.*",
    "tools.*.function.name": "tools.*.tool_name",
    "tools.*.function": "tools.*",
}


class _GenerationRequest(RequestModel):
    model_id: str = Field(min_length=1, description="Id of a base model, a checkpoint or an alias")
    sampling_params: SamplingParams | None = Field(default=None, description="null: greedy")
    response_format: Annotated[dict[str, Any] | None, only(why="answers are not held to a schema")] = None
    logprobs: Annotated[dict[str, Any] | None, only(why="log probabilities are not returned")] = None
    stream: bool | None = False

    def words(self) -> Words:
        """What the fields of `spec()` are called here."""
        return _WORDS | dict((self.sampling_params or SamplingParams()).words())

    def shared(self) -> dict[str, Any]:
        fields = {"model": self.model_id, **(self.sampling_params or SamplingParams()).spec()}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields


class ChatCompletionBody(_GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice = None
    tool_prompt_format: PromptFormat = None
    tool_config: ToolConfig | None = None

    def spec(self) -> ChatCompletionRequest:
        """The same request in the typed spec. Raises RequestValidationError."""
        choices = [self.tool_choice, self.tool_config.tool_choice if self.tool_config else None]
        return validated(
            ChatCompletionRequest,
            {
                **self.shared(),
                "messages": [message.spec() for message in self.messages],
                "tools": [tool.spec() for tool in self.tools or []] or None,
                "tool_choice": "none" if "none" in choices else None,
            },
        )


class CompletionBody(_GenerationRequest):
    content: Content = Field(description="What the model goes on from")

    def spec(self) -> CompletionRequest:
        """The same request in the typed spec. Raises RequestValidationError."""
        return validated(CompletionRequest, {**self.shared(), "prompt": [self.content]})

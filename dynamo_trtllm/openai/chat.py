"""`POST /v1/chat/completions`: the request as we honour it. What it means for an engine is in `frontend/preprocess`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from dynamo_trtllm.openai.sampling import NO_OPS, SamplingFields
from dynamo_trtllm.openai.wire import Wire, invalid, kind_of, unsupported

Effort: TypeAlias = Literal["low", "medium", "high"]


def _text(value: Any) -> Any:
    """Content is a string or a list of text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        invalid(f"must be a string or a list of text parts, not {kind_of(value)}")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            unsupported(f"holds a part of type {kind!r} at index {index}; only text is supported")
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            invalid(f'must hold parts of the form {{"type": "text", "text": "…"}}; the one at index {index} is not')
        texts.append(text)
    return "\n".join(texts)


Text = Annotated[str, BeforeValidator(_text)]


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: Text
    name: str | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: Text
    name: str | None = None


class CalledFunction(Wire):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class AssistantToolCall(Wire):
    no_ops: ClassVar = {"index": tuple(range(128))}  # clients send back what they read in a stream

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Wire):
    no_ops: ClassVar = {"annotations": ([],)}
    refused: ClassVar = frozenset({"refusal", "audio", "function_call"})

    role: Literal["assistant"]
    content: Text = ""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # how other servers spell it
    tool_calls: list[AssistantToolCall] = Field(default_factory=list)

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if "content" not in self.model_fields_set and not self.tool_calls:
            invalid("is required when there are no tool_calls", field="content")
        return self


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Text
    tool_call_id: str = Field(min_length=1)
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Wire):
    no_ops: ClassVar = {"strict": (False,)}

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class FunctionTool(Wire):
    type: Literal["function"]
    function: Function


def _text_format(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("json_object", "json_schema"):
        unsupported(f"of type {value['type']!r} is not supported; only 'text' is")
    return value


class ResponseFormat(Wire):
    type: Literal["text"]


def _tool_choice(value: Any) -> Any:
    if value == "required" or isinstance(value, dict):
        unsupported("is supported as 'auto' or 'none' only")
    return value


class ChatRequest(SamplingFields):
    """A chat completion request; valid for any model."""

    no_ops: ClassVar = NO_OPS | {"parallel_tool_calls": (True,), "modalities": (["text"],), "verbosity": ("medium",)}
    refused: ClassVar = frozenset({"audio", "prediction", "functions", "function_call", "web_search_options", "echo"})

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["auto", "none"], BeforeValidator(_tool_choice)] = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    reasoning_effort: Effort | None = None
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_text_format)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        self.check_stream_options()
        if self.top_logprobs and not self.logprobs:
            invalid("is only allowed with logprobs set to true", field="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            invalid("differs from max_completion_tokens; send one of them", field="max_tokens")
        names = [tool.function.name for tool in self.tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                invalid(f"names the function {name!r} twice", field="tools")
        self._check_effort()
        return self

    def _check_effort(self) -> None:
        both = self.chat_template_args.keys() & self.chat_template_kwargs.keys()
        for name in sorted(both):
            if self.chat_template_args[name] != self.chat_template_kwargs[name]:
                invalid(f"and chat_template_kwargs give {name!r} two values", field="chat_template_args")
        effort = self.template_args.get("reasoning_effort")
        if effort is not None and effort not in ("low", "medium", "high"):
            invalid("reasoning_effort must be 'low', 'medium' or 'high'", field="chat_template_args")
        if effort is not None and self.reasoning_effort not in (None, effort):
            invalid("differs from the reasoning_effort of chat_template_args; send one of them", "reasoning_effort")

    @property
    def template_args(self) -> dict[str, Any]:
        return self.chat_template_args | self.chat_template_kwargs

    @property
    def output_tokens(self) -> int | None:
        """The most tokens to generate; None: as many as the context allows."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

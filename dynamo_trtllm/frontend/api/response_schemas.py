"""Define the JSON objects of all responses: for type checks, and as schemas for `/openapi.json`.

Tests validate responses against the schemas.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, TypeAlias

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from dynamo_trtllm.frontend.api.nvext import Count, NvExtAnswer, Stats
from dynamo_trtllm.frontend.api.request_model import REF, without_pydantic_extras
from dynamo_trtllm.protocol.messages import ModelDeploymentCard
from dynamo_trtllm.protocol.sanitize import shorten

OWNER = "dynamo_trtllm"
# An error message may quote a request of several megabytes.
MAX_MESSAGE_CHARACTERS = 1000

Schema: TypeAlias = dict[str, Any]
Time = Annotated[int, Field(ge=0, description="Seconds since the epoch.")]
Octet = Annotated[int, Field(ge=0, le=255)]
ErrorType: TypeAlias = Literal[
    "invalid_request_error", "rate_limit_error", "service_unavailable_error", "server_error"
]
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
Readiness: TypeAlias = Literal["ready", "not_ready"]
Reasoning = Annotated[
    str, Field(description="The model's reasoning. An extension of OpenAI's API.")
]
SameReasoning = Annotated[
    str, Field(description="The same text as reasoning_content, under vLLM's name.")
]
TokenIdList = Annotated[
    list[Count], Field(description="Present if the request has return_token_ids.")
]
# The configuration of objects that have further fields, which are not listed here.
_OPEN: Final = ConfigDict(extra="allow")


class ErrorDetail(TypedDict):
    message: Annotated[str, Field(description="What is wrong and what to change.")]
    type: ErrorType
    param: Annotated[str | None, Field(description="The field that is wrong, if any.")]
    code: Annotated[str, Field(description="Stable error code; docs/api.md lists all.")]


class ErrorObject(TypedDict):
    """The body of every error response."""

    error: ErrorDetail


MessagesErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "overloaded_error",
    "timeout_error",
    "api_error",
]


class UnsupportedDetails(TypedDict):
    """What Anthropic's clients read of an error, to send the request in another form."""

    error_code: str
    unsupported: list[str]


class MessagesErrorDetail(TypedDict):
    type: MessagesErrorType
    message: Annotated[str, Field(description="What is wrong and what to change.")]
    param: Annotated[str | None, Field(description="The field that is wrong, if any.")]
    code: Annotated[str, Field(description="Stable error code; docs/api.md lists all.")]
    details: NotRequired[UnsupportedDetails]


class MessagesErrorObject(TypedDict):
    """The body of an error of `/v1/messages`, and an event that ends its stream."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: Time
    owned_by: str
    # the name is vLLM's
    max_model_len: Annotated[int, Field(ge=0, description="Prompt and output tokens together.")]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class ReadyObject(TypedDict):
    model: str
    status: Readiness
    message: NotRequired[str]


class FrontendReady(TypedDict):
    status: Literal["ready", "loading", "not_ready"]
    reason: str


class LiveObject(TypedDict):
    status: Literal["live"]


class PairObject(TypedDict):
    """One pair of workers. Ids are hexadecimal, as in NATS subjects."""

    model: str
    prefill: Annotated[
        str | None, Field(description="null: the instance serves aggregated requests.")
    ]
    decode: str
    state: Annotated[
        str, Field(json_schema_extra={"enum": ["untried", "working", "failing", "quarantined"]})
    ]
    reason: str
    age_s: Annotated[float | None, Field(description="Seconds since the last outcome.")]


class RejectedRecord(TypedDict):
    key: Annotated[str, Field(description="Escaped and shortened.")]
    reason: str


class ReadinessReport(TypedDict):
    """The parts of /health beside the instances.

    Each list has at most as many entries as the query's `limit`.
    """

    num_pairs: Count
    num_quarantined: Annotated[
        Count, Field(description="Pairs that get no requests, because they have failed.")
    ]
    pairs: Annotated[
        list[PairObject],
        Field(
            description="State of KV transfer, from requests and probes; quarantined pairs first."
        ),
    ]
    mismatched: Annotated[
        list[str], Field(description="Instances that match no instance of the other role, and why.")
    ]
    rejected_records: Annotated[
        list[RejectedRecord], Field(description="Rejected etcd records and the reasons.")
    ]
    discovery_problem: Annotated[
        str,
        Field(description="Why workers and shares may be out of date; empty if they are not."),
    ]


class InstanceTransport(TypedDict):
    nats_tcp: str


class InstanceObject(TypedDict):
    component: str
    endpoint: str
    namespace: str
    instance_id: Count  # a number, as in Dynamo's /health
    id: Annotated[
        str, Field(description="instance_id in hexadecimal, as in logs, headers and pairs.")
    ]
    role: str
    model: str
    engine: str
    transport: InstanceTransport
    prefill_share: NotRequired[
        Annotated[
            float,
            Field(description="How much of a prefill worker's work this elastic worker takes."),
        ]
    ]
    decode_share: NotRequired[
        Annotated[
            float,
            Field(description="How much of a decode worker's work this elastic worker takes."),
        ]
    ]
    shares_since: NotRequired[
        Annotated[
            str | None,
            Field(description="When its shares changed last; null: not since it registered."),
        ]
    ]


class HealthObject(ReadinessReport):
    """Health of the deployment. The frontend itself is healthy if it responds."""

    status: Literal["healthy", "not_ready"]
    endpoints: list[str]
    num_instances: Annotated[dict[str, Count], Field(description="Number of instances by role.")]
    instances: list[InstanceObject]
    message: NotRequired[str]


class CachedTokens(TypedDict):
    cached_tokens: Count


class ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class TokenCounts(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class UsageObject(TokenCounts):
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class Completion(TypedDict):
    id: str
    created: Time
    model: str
    dynamo_trtllm: NotRequired[Stats]
    nvext: NotRequired[NvExtAnswer]


class FunctionCall(TypedDict):
    name: str
    arguments: Annotated[str, Field(description="JSON as generated by the model.")]


class ToolCallObject(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDeltaObject(TypedDict):
    """A part of a call. The first one has its id, type and name."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Octet] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


class ChatMessageObject(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[Reasoning]
    reasoning: NotRequired[SameReasoning]
    tool_calls: NotRequired[list[ToolCallObject]]


class PromptToken(TypedDict):
    logprob: float
    rank: Count | None  # 1: the likeliest token; null: it is not among the alternatives
    decoded_token: str


# For each token of the prompt, the token and its alternatives by token id. null: the first token of
# the prompt, which has no probability.
PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]


class ChatChoice(TypedDict):
    index: Count
    message: ChatMessageObject
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[TokenIdList]
    finish_reason: Finish


class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    prompt_token_ids: NotRequired[TokenIdList]
    prompt_logprobs: NotRequired[PromptLogprobs]
    choices: list[ChatChoice]
    usage: UsageObject


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: Reasoning
    reasoning: SameReasoning
    tool_calls: list[ToolCallDeltaObject]


class ChatChunkChoice(TypedDict):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[TokenIdList]
    finish_reason: Finish | None


class ChatCompletionChunk(Completion):
    """One event of a stream. An Error may take its place. The last event is [DONE]."""

    object: Literal["chat.completion.chunk"]
    prompt_token_ids: NotRequired[TokenIdList]
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | TokenCounts | None]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(TypedDict):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[TokenIdList]
    token_ids: NotRequired[TokenIdList]
    finish_reason: Annotated[
        Literal["stop", "length"] | None, Field(description="null in a stream until the end.")
    ]


class TextCompletion(Completion):
    """A complete response, which always has usage, or one event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[UsageObject | TokenCounts | None]


@with_config(_OPEN)
class ResponseObject(TypedDict):
    """OpenAI's Response object. It repeats the request's fields."""

    id: str
    object: Literal["response"]
    created_at: Time
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[dict[str, Any]]
    error: NotRequired[dict[str, Any] | None]
    incomplete_details: NotRequired[dict[str, Any] | None]
    usage: NotRequired[dict[str, Any] | None]
    dynamo_trtllm: NotRequired[Stats]
    nvext: NotRequired[NvExtAnswer]


@with_config(_OPEN)
class ResponseEvent(TypedDict):
    """One numbered event of a stream. The last event contains the finished response."""

    type: str
    sequence_number: Count


class ResponseItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TokenizationObject(TypedDict):
    """The response of `/tokenize`, as vLLM has it."""

    count: Count
    max_model_len: Annotated[int, Field(ge=0, description="Prompt and output tokens together.")]
    tokens: list[Count]
    token_strs: Annotated[
        list[str] | None, Field(description="Tokens as the vocabulary writes them, on request.")
    ]


class DetokenizationObject(TypedDict):
    prompt: str


class VersionObject(TypedDict):
    version: str


class InputTokensObject(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class MessageUsage(TypedDict):
    input_tokens: Annotated[Count, Field(description="Without tokens read from the cache.")]
    output_tokens: Annotated[Count, Field(description="With the tokens of the reasoning.")]
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Annotated[Count, Field(description="Always 0.")]


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlockObject(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlockObject(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str, Field(description="Empty: nothing is signed.")]


class ToolUseBlockObject(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageObject(TypedDict):
    """Anthropic's Message object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlockObject | ThinkingBlockObject | ToolUseBlockObject]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    dynamo_trtllm: NotRequired[Stats]
    nvext: NotRequired[NvExtAnswer]


@with_config(_OPEN)
class MessageEvent(TypedDict):
    """One event of a stream of `/v1/messages`. The last one is `message_stop`, or an error."""

    type: str


class MessageTokensObject(TypedDict):
    input_tokens: Count


_ROOTS: Final = (
    ErrorObject,
    MessagesErrorObject,
    MessageObject,
    MessageEvent,
    MessageTokensObject,
    ModelList,
    ReadyObject,
    FrontendReady,
    LiveObject,
    HealthObject,
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    ResponseObject,
    ResponseEvent,
    ResponseItems,
    ResponseDeleted,
    TokenizationObject,
    DetokenizationObject,
    VersionObject,
    InputTokensObject,
)


def response_schemas() -> dict[str, Schema]:
    """Return the JSON Schemas of all objects.

    Each has the name of its class without "Object".
    """
    _, together = TypeAdapter.json_schemas(
        [(root.__name__, "validation", TypeAdapter(root)) for root in _ROOTS], ref_template=REF
    )
    return {
        name.removesuffix("Object"): _closed(schema)
        for name, schema in without_pydantic_extras(together["$defs"]).items()
    }


def _closed(value: Any) -> Any:
    """Return a schema that allows no other fields, and that refers to names without "Object"."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return value | {"$ref": value["$ref"].removesuffix("Object")}
    closed = {key: _closed(inner) for key, inner in value.items()}
    return {"additionalProperties": False} | closed if "properties" in value else closed


def error_body(
    message: str, *, type: ErrorType, param: str | None = None, code: str
) -> ErrorObject:
    return {
        "error": {
            "message": shorten(message, MAX_MESSAGE_CHARACTERS),
            "type": type,
            "param": param,
            "code": code,
        }
    }


def messages_error_body(
    message: str, *, type: MessagesErrorType, param: str | None, code: str, request_id: str
) -> MessagesErrorObject:
    text = shorten(message, MAX_MESSAGE_CHARACTERS)
    error: MessagesErrorDetail = {"type": type, "message": text, "param": param, "code": code}
    return {"type": "error", "error": error, "request_id": request_id}


def model_object(card: ModelDeploymentCard, created: int) -> ModelObject:
    """Return the `/v1/models` entry of a model. `created` is in seconds since the epoch."""
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": card.context_length,
    }


class ResponseMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The fields with which every object of a response begins.

    `created`: seconds since the epoch.
    """

    id: str
    model: str
    created: int
    request_id: str = ""  # for errors
    # The name of the API key to which a stored response belongs. "": this server has no API keys.
    owner: str = ""

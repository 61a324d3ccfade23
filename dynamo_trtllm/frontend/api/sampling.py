"""Define the request fields that endpoints share: sampling, stop conditions, output options and
structured output.

All generating endpoints have `SamplingFields`; chat and text completions have `CompletionFields`,
whose names are those of OpenAI, vLLM and Dynamo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

import orjson
from pydantic import BeforeValidator, Field, model_validator

from dynamo_trtllm.frontend.api import rejected_fields
from dynamo_trtllm.frontend.api.request_model import (
    MAX_LABEL,
    Id,
    Label,
    List,
    RequestModel,
    check_object,
    check_size,
    invalid,
    kind_of,
    quoted,
    single_value,
)
from dynamo_trtllm.frontend.api.schemas import MAX_SCHEMA_BYTES, Schema, schema_text
from dynamo_trtllm.protocol.messages import GenerateRequest, OutputFormat, Sampling, token_ids
from dynamo_trtllm.protocol.number_types import (
    MAX_DP_RANKS,
    MAX_INT64,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SLO_S,
)

MAX_STOPS = 16  # OpenAI allows 4, and clients of other servers send more
MAX_STOP_CHARS = 1000  # per stop string
MAX_STOP_TOKENS = 64
MAX_BIASED = 1024  # tokens of `logit_bias`
MAX_CHOICES = 128  # per request, over all its prompts
MAX_METADATA = 16  # entries
MAX_METADATA_KEY = 64  # characters
SEED_LIMIT = MAX_INT64 + 1
ANY_OBJECT: Final = "{}"  # the schema that engines take for "any object"
MAX_WORDS: Final = 1024  # texts of a `choice`
# The characters that have a meaning in a regular expression.
_METACHARACTERS: Final = re.compile(r"[][\\.^$*+?{}()|]")
_ID_DIGITS = 10  # digits of the largest token id

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


def _bias(value: Any) -> Any:
    """Return `logit_bias` with integer token ids. JSON object keys are strings."""
    if not isinstance(value, dict):
        invalid(f"must be an object of token ids and numbers, not {kind_of(value)}")
    if len(value) > MAX_BIASED:
        invalid(f"may name {MAX_BIASED} tokens at most, not {len(value)}")
    biases = {}
    for key, bias in value.items():
        # The length is checked before `int`, which takes long for a long text.
        is_number = len(key) <= _ID_DIGITS and key.isascii() and key.isdigit()
        if not is_number or int(key) >= 1 << 32:
            invalid(f"must have token ids as keys; {quoted(key)} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            invalid(
                f"must have numbers from -100 to 100 as values, not {quoted(bias)} for token {key}"
            )
        biases[int(key)] = float(bias)
    return biases


def _stops(value: Any) -> Any:
    """Return the stop strings as a list. `value` is a string or a list of strings."""
    if value == "":
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        invalid(f"must be a string or a list of strings, not {kind_of(value)}")
    if len(stops) > MAX_STOPS:
        invalid(f"may hold {MAX_STOPS} strings at most, not {len(stops)}")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        invalid(f"may hold strings of {MAX_STOP_CHARS} characters at most")
    if "" in stops:
        invalid("may not hold an empty string")
    return stops


def _max_tokens(value: Any) -> Any:
    """Return None for -1, with which clients of llama.cpp ask for all tokens of the context."""
    return None if value == -1 else value


MaxTokens: TypeAlias = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(_max_tokens, json_schema_input_type=Annotated[int, Field(ge=-1)] | None),
]
BiasSent: TypeAlias = Annotated[
    dict[
        Annotated[str, Field(pattern=rf"^[0-9]{{1,{_ID_DIGITS}}}$", max_length=_ID_DIGITS)],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=MAX_BIASED),
]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[List[Stop], Field(max_length=MAX_STOPS)]


def _metadata(value: Any) -> Any:
    if isinstance(value, dict):
        value = {key: entry for key, entry in value.items() if entry is not None}
    return check_object(value, most=MAX_METADATA, key_chars=MAX_METADATA_KEY, value_chars=MAX_LABEL)


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=MAX_METADATA_KEY)], Label],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_metadata),
]


class StreamOptions(RequestModel):
    no_ops: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # every event has the usage so far

    @model_validator(mode="after")
    def _has_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            invalid(
                "is only allowed with include_usage set to true", field="continuous_usage_stats"
            )
        return self


_NO_STREAM_OPTIONS = StreamOptions()
_NO_SAMPLING = Sampling(max_tokens=0)
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
SloMilliseconds = Annotated[float, Field(gt=0, le=1000 * MAX_SLO_S)]
DpRank = Annotated[int, Field(ge=0, lt=MAX_DP_RANKS)]


class AgentHints(RequestModel):
    """The `nvext.agent_hints` object of NVIDIA Dynamo."""

    hints: ClassVar = frozenset({"osl"})

    priority: Priority | None = None  # higher values first, unlike the field of the request


class ConversationParams(RequestModel):
    """The `conversation_params` object of TensorRT-LLM's server."""

    conversation_id: str = Field(min_length=1, max_length=256)


class NvExt(RequestModel):
    """The `nvext` object of NVIDIA's servers."""

    unsupported: ClassVar = rejected_fields.OF_NVEXT

    ignore_eos: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    agent_hints: AgentHints | None = None
    # Fields that the client wants in `nvext` of the response.
    extra_fields: List[Literal["worker_id", "timing"]] = Field(default_factory=list, max_length=16)
    dp_rank: DpRank | None = None
    prefill_dp_rank: DpRank | None = None
    # With `--router-mode slo`, the frontend chooses a path that is predicted to keep these limits.
    slo_ttft_ms: SloMilliseconds | None = None
    slo_itl_ms: SloMilliseconds | None = None


class SamplingFields(RequestModel):
    """The fields that every generating endpoint has."""

    hints: ClassVar = frozenset({"prompt_cache_retention", "prompt_cache_options"})
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = rejected_fields.NEUTRAL
    unsupported: ClassVar[Mapping[str, str]] = rejected_fields.OF_ALL
    unsupported_members: ClassVar[Mapping[str, str]] = rejected_fields.MEMBERS

    model: Id
    stream: bool = False
    # seconds until the response must be complete; the server caps it
    timeout: float | None = Field(None, gt=0)
    stream_options: StreamOptions = Field(default_factory=lambda: _NO_STREAM_OPTIONS)
    max_tokens: MaxTokens = None
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1 mean all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[
        dict[int, float],
        Field(max_length=MAX_BIASED),
        BeforeValidator(_bias, json_schema_input_type=BiasSent),
    ] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    stop: Annotated[
        Stops, BeforeValidator(_stops, json_schema_input_type=Literal[""] | Stop | Stops)
    ] = Field(default_factory=list)
    stop_token_ids: List[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    priority: Priority | None = None  # lower values first
    attention_dp_relax: bool = False
    conversation_params: ConversationParams | None = None
    nvext: NvExt = Field(default_factory=NvExt)
    # These four never change a response; `/v1/responses` repeats them.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _common_fields_agree(self) -> Self:
        # A client can give each of these values in two fields. Reading the property rejects two
        # different values.
        _ = self.past_eos, self.salt, self.requested_priority
        if (
            self.attention_dp_relax
            and self.nvext.dp_rank is None
            and self.nvext.prefill_dp_rank is None
        ):
            invalid(
                "is only allowed with nvext.dp_rank or nvext.prefill_dp_rank",
                field="attention_dp_relax",
            )
        if "stream_options" in self.model_fields_set and not self.stream:
            invalid("is only allowed with stream set to true", field="stream_options")
        return self

    @property
    def requested_priority(self) -> int | None:
        """The priority of the request; None: it was not given. Lower values come first."""
        hints = self.nvext.agent_hints
        hint = None if hints is None or hints.priority is None else -hints.priority
        return single_value({"priority": self.priority, "nvext.agent_hints.priority": hint})

    @property
    def num_choices(self) -> int:
        """The number of choices that are generated."""
        return self.n

    @property
    def past_eos(self) -> bool:
        """True if generation continues past the model's stop tokens."""
        return bool(
            single_value({"ignore_eos": self.ignore_eos, "nvext.ignore_eos": self.nvext.ignore_eos})
        )

    @property
    def salt(self) -> str | None:
        """The prefix-cache salt."""
        return single_value(
            {"cache_salt": self.cache_salt, "nvext.cache_salt": self.nvext.cache_salt}
        )

    def call(self, request_id: str, deadline: float, session_id: str) -> GenerateRequest:
        """Return the request as a call to workers, which has no prompt and no sampling values yet.

        Args:
            request_id: the id of the request in logs and on the wire.
            deadline: the deadline in seconds since the epoch.
            session_id: the header X-Session-ID, or "". A conversation id in the body overrides it.
        """
        nvext = self.nvext
        conversation_id = session_id or None
        if self.conversation_params is not None:
            conversation_id = self.conversation_params.conversation_id
        return GenerateRequest(
            request_id=request_id,
            model=self.model,
            token_ids=token_ids(),
            sampling=_NO_SAMPLING,
            deadline=deadline,
            cache_salt=self.salt,
            priority=self.requested_priority or 0,
            dp_rank=nvext.dp_rank,
            prefill_dp_rank=nvext.prefill_dp_rank,
            relax_dp_rank=self.attention_dp_relax,
            conversation_id=conversation_id,
        )


NO_OPS: dict[str, tuple[Any, ...]] = {
    **rejected_fields.NEUTRAL,
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "service_tier": ("auto", "default", "fast", "flex", "scale", "priority"),  # there are no tiers
    "store": (False, True),  # nothing is stored, and no response depends on it
}
"""Fields that are accepted only with the values that do not change a response."""


# --- structured output ----------------------------------------------------------------------------


def _parsed_schema(value: Any) -> Any:
    """Parse a schema that is sent as text, as vLLM allows. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_BYTES:
        invalid(f"may have {MAX_SCHEMA_BYTES} characters at most, not {len(value)}")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        invalid("is a text that is not valid JSON")


Pattern = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]
JsonSent: TypeAlias = Schema | Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)]
Json = Annotated[Schema, BeforeValidator(_parsed_schema, json_schema_input_type=JsonSent)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Words = Annotated[
    List[Word],
    Field(
        min_length=1,
        max_length=MAX_WORDS,
        description=f"At most {MAX_SCHEMA_BYTES} bytes of JSON together.",
    ),
    BeforeValidator(lambda words: check_size(words, MAX_SCHEMA_BYTES)),
]


class StructuredOutputs(RequestModel):
    """The `structured_outputs` object of vLLM. One of its formats must be given."""

    no_ops: ClassVar = {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (True, False),  # there is one backend
    }
    unsupported: ClassVar = {
        "structural_tag": "use tools, or one of the other formats",
        "whitespace_pattern": "whitespace in structured output can't be chosen",
    }

    json_: Json | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Words | None = None
    grammar: Pattern | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _has_one_format(self) -> StructuredOutputs:
        if len(self.formats()) != 1:
            invalid("must have exactly one of json, regex, choice, grammar and json_object")
        return self

    def formats(self) -> dict[str, OutputFormat]:
        """Return the formats that are given, by field."""
        any_object = (
            {"json_object": OutputFormat(json_schema=ANY_OBJECT)} if self.json_object else {}
        )
        return any_object | formats_of(self.json_, self.regex, self.choice, self.grammar)


def formats_of(
    json: Mapping[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, OutputFormat]:
    """Return the formats that are not None, by kind."""
    formats = {
        "json": None if json is None else OutputFormat(json_schema=schema_text(dict(json))),
        "regex": None if regex is None else OutputFormat(json_schema="", regex=regex),
        "choice": None if choice is None else OutputFormat(json_schema="", regex=_one_of(choice)),
        "grammar": None if grammar is None else OutputFormat(json_schema="", grammar=grammar),
    }
    return {kind: output for kind, output in formats.items() if output is not None}


def _one_of(texts: list[str]) -> str:
    """Return a regular expression that matches exactly these texts, in the syntax that all engines
    share.
    """
    return "|".join(_METACHARACTERS.sub(r"\\\g<0>", text) for text in texts)


class CompletionFields(SamplingFields):
    """The fields of chat and text completions that other endpoints do not have.

    Their names are vLLM's.
    """

    hints: ClassVar = SamplingFields.hints | {"guided_decoding_backend"}
    unsupported: ClassVar = {**SamplingFields.unsupported, **rejected_fields.OF_COMPLETIONS}

    skip_special_tokens: bool = True
    # Keep only this many tokens at the end of the prompt. -1: as many as the context allows.
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: Pattern | None = None
    guided_choice: Words | None = None
    guided_grammar: Pattern | None = None

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            invalid("must be -1 or at least 1, not 0", field="truncate_prompt_tokens")
        if self.prompt_logprobs is not None and self.stream:
            invalid("is not available in a stream; set stream to false", field="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _formats_agree(self) -> CompletionFields:
        single_value(self.output_formats())  # rejects two different formats
        return self

    def output_formats(self) -> dict[str, OutputFormat]:
        """Return the formats that the output must follow, by the path of their field.

        A validator has rejected two different formats.
        """
        guided = formats_of(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        )
        formats = {f"guided_{kind}": output for kind, output in guided.items()}
        if self.structured_outputs is not None:
            formats |= {
                f"structured_outputs.{kind}": output
                for kind, output in self.structured_outputs.formats().items()
            }
        return formats

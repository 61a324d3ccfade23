"""Define the interface between a worker and its inference engine, which receives and returns token
ids.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from dynamo_trtllm.models.parser_names import PARSERS
from dynamo_trtllm.protocol.cost_model import CostModel
from dynamo_trtllm.protocol.errors import ConfigError, ContextTooLong, RequestRejected
from dynamo_trtllm.protocol.messages import (
    MAX_VOCABULARY,
    GenerateRequest,
    KvLayout,
    Limits,
    Phase,
    Sampling,
)
from dynamo_trtllm.protocol.streams import Generator, OnEvent, StreamHandle

# The index of a choice. The frontend appends it to the unique part of a request id.
_CHOICE_INDEX = re.compile(r"(?<=[0-9a-f]{16})-[0-9]+$")
_DEFAULTS = Sampling(max_tokens=1)
# Features that an engine may lack, and that `unsupported_features` may name.
_FEATURES = (
    *(name for name in Sampling.__struct_fields__ if name != "max_tokens"),
    "cache_salt",
    "resumed_tokens",
)
# Features that few engines have, and that `supported_features` may name.
_OPTIONAL_FEATURES = ("priority", "dp_rank")
NO_KV_LAYOUT = KvLayout(dtype="none", block_tokens=32, num_layers=1, num_kv_heads=1, head_dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of a loaded engine, which its worker registers."""

    engine: str  # kind of the engine; KV moves only between engines of one kind
    context_length: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # How frontends turn conversations into tokens. "harmony" is the format of gpt-oss.
    # "chat_template" needs `files`.
    renderer: str
    layout: KvLayout = NO_KV_LAYOUT  # the default is for engines that transfer no KV
    limits: Limits = field(default_factory=Limits)
    # values, besides the layout, that must be equal in prefill and decode
    kv_compat: Mapping[str, str] = field(default_factory=dict)
    # What the engine does not support: fields of Sampling, "cache_salt" or "resumed_tokens". An
    # engine that lists "resumed_tokens" treats output of another worker as prompt, which is
    # equivalent only for greedy requests without grammar and penalties.
    unsupported_features: tuple[str, ...] = ()
    # "priority" and "dp_rank", if requests may have them. Requests that need a feature go only to
    # workers that list it.
    supported_features: tuple[str, ...] = ()
    can_aggregate: bool = False  # the engine accepts Phase.AGGREGATED in every role
    reuses_prefixes: bool = True  # False: the engine computes each prompt in full
    # True if only a fetch, or a timeout of the library, frees KV that a prefill call has exported.
    # Then frontends let a decode worker fetch even KV that no request needs any more.
    keeps_unfetched_kv: bool = False
    # "host:port" of each listener to which decode workers connect to fetch KV; empty if not known
    kv_addresses: tuple[str, ...] = ()
    # files that frontends fetch, by name: tokenizer.json, tokenizer_config.json,
    # chat_template.jinja
    files: Mapping[str, Path] = field(default_factory=dict)
    # estimate of the time of the engine's steps, for the time before steps are measured
    cost_prior: CostModel | None = None

    def __post_init__(self) -> None:
        """Check the values, because wrong values would fail only later, in frontends or requests.

        Raises:
            ConfigError: names the field.
        """
        _check_value("renderer", self.renderer in PARSERS, self.renderer, " or ".join(PARSERS))
        _check_value("context_length", self.context_length >= 1, self.context_length, "at least 1")
        is_size = 1 <= self.vocab_size <= MAX_VOCABULARY
        _check_value("vocab_size", is_size, self.vocab_size, f"1 to {MAX_VOCABULARY}")
        for name in self.unsupported_features:
            known = ", ".join(_FEATURES)
            _check_value("unsupported_features", name in _FEATURES, name, f"among {known}")
        for name in self.supported_features:
            known = ", ".join(_OPTIONAL_FEATURES)
            _check_value("supported_features", name in _OPTIONAL_FEATURES, name, f"among {known}")


def _check_value(field_name: str, is_valid: bool, value: object, wanted: str) -> None:
    if not is_valid:
        raise ConfigError(
            f"EngineInfo.{field_name} has {value!r}; it must be {wanted}", field=field_name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine at one moment, read at every scrape of /metrics and for every report of
    the load. All are 0 before `start`.
    """

    running: int = 0  # requests in the batch
    waiting: int = 0  # requests queued for KV blocks or a batch slot
    kv_blocks_used: int = 0  # includes pending_kv_blocks
    kv_blocks_total: int = 0  # 0: not reported
    pending_kv_transfers: int = 0  # KV transfers whose KV the engine still holds
    pending_kv_blocks: int = 0  # blocks of those transfers
    kv_checksum_mismatches: int = 0  # fetches with a wrong checksum; 0 when checksums are off
    # times that the engine's library lost KV events because its buffer was full
    kv_event_gaps: int = 0
    kv_events_unreadable: int = 0  # KV events of the library that could not be read
    # blocks that no decode worker fetched and that the engine's library never frees
    leaked_kv_blocks: int = 0
    # prompt tokens of waiting and running requests that are not computed yet
    queued_prefill_tokens: int = 0
    context_tokens: int = 0  # tokens of the requests in the batch, prompts and output


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem that preflight reports. An error stops the worker before it loads the model."""

    severity: Literal["error", "warning", "note"]
    rule: str  # stable name, as in docs/preflight.md
    field: str  # dotted name of the argument
    value: str  # the value and its source
    # what it conflicts with: another argument, the other role, the GPU or the model
    other: str = ""
    why: str
    fix: str


class Engine(Generator, Protocol):
    """An inference engine. It has five methods; `capabilities` has base classes for what else an
    engine can do.

    A class of an engine need not inherit from this class. All methods are called on the event loop
    of the worker.
    """

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Load the model and warm up. After it returns, `generate` accepts requests.

        Raises:
            EngineFailed: the engine could not be loaded.
            ConfigError: an argument is invalid.
        """

    @abstractmethod
    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """Start a request. See `streams.Generator.generate`.

        Cancelling the stream aborts the request and frees its KV.

        A PREFILL call ends with KV_TRANSFER and KV transfer parameters, or with STOP or LENGTH and
        the tokens if the request ends with its first token. Only its last chunk has KV transfer
        parameters. The first chunk of a DECODE call has the first token of the transfer parameters.
        An engine that samples this token again (vLLM, for penalties, structured output and seeds)
        sends its own instead.

        Errors that end a stream, among others:
            RequestRejected: this engine does not support the request.
            ContextTooLong: the prompt leaves no space for output.
            Overloaded: the queue is full.
            KvTransferError: the KV could not be fetched.
            EngineFailed: the engine is not started, failed, or was closed.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Wait until no request runs and no KV of a transfer is held.

        The caller sets the time limit.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters, also before `start`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Shut down; running streams end in EngineFailed.

        Idempotent, and allowed after a failed `start`.
        """


def client_request_id(request: GenerateRequest) -> str:
    """Return the part of the request id that all choices of one client's request share."""
    return _CHOICE_INDEX.sub("", request.request_id)


class PromptLimit(NamedTuple):
    """Length of the longest prompt that a worker accepts."""

    tokens: int
    why: str  # argument that sets it, for messages


def check_request(
    request: GenerateRequest,
    info: EngineInfo,
    *,
    transfers_kv: bool,
    engine: str,
    limit: PromptLimit | None = None,
    priority_argument: str = "",
) -> None:
    """Check a request before the engine receives it.

    Args:
        request: the call.
        info: properties of the engine.
        transfers_kv: the engine accepts prefill and decode calls.
        engine: its name, for error texts.
        limit: the longest prompt; None: one that leaves one token of the context for output.
        priority_argument: name of the argument that gives priorities an effect; "" if the engine
            has no such argument.

    Raises:
        RequestRejected: names the field.
        ContextTooLong: the prompt is longer than `limit`, or leaves no space for output.
    """
    if not request.token_ids:
        raise RequestRejected("the prompt is empty", field="token_ids")
    _check_vocabulary(request, info.vocab_size)
    if request.phase is not Phase.AGGREGATED and not transfers_kv:
        raise RequestRejected(
            f"this worker is aggregated and does not accept {request.phase} calls", field="phase"
        )
    for name in info.unsupported_features:
        if _is_used(request, name, info):
            raise RequestRejected(
                f"{name} is not supported by this worker's {engine}; omit it, or see the worker's"
                " log for the reason",
                field=name,
            )
    if limit is not None and len(request.token_ids) > limit.tokens:
        raise ContextTooLong(
            f"the prompt has {len(request.token_ids)} tokens, but this worker accepts at most"
            f" {limit.tokens} ({limit.why}); shorten it"
        )
    if len(request.token_ids) >= info.context_length:
        raise ContextTooLong(
            f"a prompt of {len(request.token_ids)} tokens leaves no space for output in the context"
            f" of {info.context_length}; shorten it"
        )
    if priority_argument and request.priority and "priority" not in info.supported_features:
        raise RequestRejected(
            "priority has no effect on this worker; omit it, or start the worker with"
            f" {priority_argument}: priority",
            field="priority",
        )


def _check_vocabulary(request: GenerateRequest, vocab_size: int) -> None:
    """Raise RequestRejected unless the ids by which engines index tensors are in range."""
    sampling = request.sampling
    ids: dict[str, Collection[int]] = {
        "token_ids": request.token_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
    }
    if request.kv_params is not None:
        ids["first_token_ids"] = request.kv_params.first_token_ids
    guided = sampling.guided
    if guided is not None:
        ids["unfinished_ids"] = guided.unfinished_ids
    for name, token_ids in ids.items():
        largest = max(token_ids, default=0)
        if largest >= vocab_size:
            raise RequestRejected(
                f"token id {largest} in {name} is out of range: the vocabulary has {vocab_size}"
                " tokens",
                field=name,
            )


def _is_used(request: GenerateRequest, name: str, info: EngineInfo) -> bool:
    if name == "cache_salt":
        return request.cache_salt is not None
    if name == "stop_token_ids":
        # Chat requests have the stop tokens of the model's format, at which engines end anyway.
        return not set(request.sampling.stop_token_ids) <= set(info.eos_token_ids)
    if name == "resumed_tokens":
        return False  # the engine accepts such a request, and treats the tokens as prompt
    return bool(getattr(request.sampling, name) != getattr(_DEFAULTS, name))


def stop_token_ids(sampling: Sampling, info: EngineInfo) -> frozenset[int]:
    """Return the token ids that end the output. Ids outside of the vocabulary are left out.

    With `ignore_eos` the model's own stop tokens do not end the output, even if the request lists
    them. Other stop tokens of the request still end it.

    Args:
        sampling: sampling parameters of the request.
        info: properties of the engine, with the model's own stop tokens.
    """
    ends = set(info.eos_token_ids)
    named = {token_id for token_id in sampling.stop_token_ids if token_id < info.vocab_size}
    if sampling.ignore_eos:
        return frozenset(named - ends)
    return frozenset(named | ends)

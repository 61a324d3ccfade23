"""Values that cross a process: requests, chunks, tickets, instances. No behavior beyond simple properties.

They are msgspec structs, frozen and keyword-only, because they are encoded on the hot path (`codec`); unknown
fields are skipped when decoding, so that an older process reads what a newer one wrote. Nothing here imports
anything of this project.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # array.array takes no subscript at run time before Python 3.12


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Packed unsigned 32-bit token ids. Raises OverflowError or TypeError for what is not one."""
    return array("I", ids)


WIRE_VERSION = 2
"""Version of what frontends and workers send each other. Neighboring versions work together.

1: streams, cancels, control verbs, empty pings. 2: a ping is answered with a report of the streams both sides share.
"""


def wire_mismatch(theirs: int) -> str:
    """Return why a peer of wire version `theirs` and this process can't work together; "" when they can."""
    if abs(theirs - WIRE_VERSION) <= 1:
        return ""
    return (
        f"wire version {theirs} is too far from {WIRE_VERSION}, which this process speaks: only neighboring versions "
        "work together; upgrade the side with the lower wire version until the two differ by at most 1"
    )


class Role(StrEnum):
    """What a worker does. The values are those of `--disaggregation-mode`."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "prefill_and_decode"


class Phase(StrEnum):
    """Which phase of a request a call runs."""

    PREFILL = "prefill"  # process the prompt, keep its KV, answer with a ticket
    DECODE = "decode"  # fetch the ticket's KV, replay its first token, go on
    AGGREGATED = "whole"  # both, in one worker


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token (which is the last of the chunk's ids)
    LENGTH = "length"  # max_tokens or the context length is reached
    KV_TRANSFER = "handoff"  # the prefill phase ended with a ticket


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One form that guided output may take: `prefix`, then JSON of the schema, then nothing more."""

    json_schema: str  # JSON Schema as JSON text; "{}": any JSON object
    prefix: str = msgspec.field(default="", name="literal")  # text before the JSON, control tokens as text


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Guided decoding. The output is free until `trigger` was written, then it takes one of the forms and ends."""

    alternatives: tuple[OutputFormat, ...]  # at least one
    trigger: str = msgspec.field(default="", name="after")  # control tokens as text; "": from the first token on
    trigger_ids: TokenIds = msgspec.field(default_factory=token_ids, name="after_ids")  # `trigger`, encoded


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when to stop. Validated at the edge: temperature 0 means greedy."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # tokens less likely than this share of the likeliest are left out
    frequency_penalty: float = 0.0  # taken off a logit per occurrence in the answer
    presence_penalty: float = 0.0  # taken off once when the token is in the answer
    repetition_penalty: float = 1.0  # logits of tokens in prompt or answer: divided when positive, else multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id -> added to its logit
    guided: StructuredOutput | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # go on past the model's own stop tokens
    logprobs: int | None = None  # number of alternatives per token; None: none at all


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of one emitted token and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill and decode must agree on before KV can move."""

    dtype: str
    block_tokens: int  # tokens in one KV block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int = 1  # may differ: an engine that needs it equal says so in its `kv_compat`


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """Lets a decode engine fetch one request's KV from the prefill engine that holds it.

    `engine_state` belongs to the engine kind named in `engine`; nothing between the two engines reads it.
    """

    version: int
    ticket_id: str
    engine: str
    model: str
    layout: KvLayout
    # what else must be equal at both ends, in the engine's own words
    kv_compat: Mapping[str, str] = msgspec.field(default_factory=dict, name="pairing")
    prefill_instance_id: int = msgspec.field(name="holder")  # instance id of the prefill worker
    expires_at: float  # seconds since the epoch; the holder may free the blocks after it
    prompt_tokens: int
    first_token_ids: TokenIds
    first_logprobs: tuple[TokenLogprob, ...] = ()
    transport: str  # name of the KV transfer backend, for people
    kv_bytes: int
    engine_state: bytes = msgspec.field(name="opaque")


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One phase of one request, already rendered and checked. It can't be invalid for the model's card."""

    request_id: str
    model: str
    token_ids: TokenIds
    sampling: Sampling
    deadline: float  # seconds since the epoch
    phase: Phase = Phase.AGGREGATED
    ticket: KvTransferParams | None = None  # set exactly when phase is DECODE
    # so many of the last `token_ids` are the answer's: another worker made them and left
    num_resumed_output_tokens: int = msgspec.field(default=0, name="resumed_tokens")
    reservation_id: str | None = None  # decode call: the slot that was reserved for it
    cache_salt: str | None = None  # KV is reused only among requests with the same salt


class PhaseTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time of one call went, in seconds; sent with its terminal chunk."""

    queue_s: float = 0.0  # waiting for KV blocks or a batch slot
    prefill_s: float = 0.0
    kv_transfer_s: float = msgspec.field(default=0.0, name="handoff_s")  # decode call: from ticket to KV in place
    # decode call: from KV in place to first own step
    decode_queue_s: float = msgspec.field(default=0.0, name="decode_wait_s")
    cached_tokens: int = 0
    kv_bytes: int = 0
    transport: str = ""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Tokens of one request: of one engine step as sent, possibly of several as received. A stream ends with exactly
    one chunk that has `finish_reason`.

    `gc=False`: chunks form no cycles, and a busy frontend holds many.
    """

    token_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    finish_reason: FinishReason | None = None
    ticket: KvTransferParams | None = None  # set exactly when finish_reason is KV_TRANSFER
    stats: PhaseTimings | None = None  # set on the terminal chunk


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one instance can hold; 0: it does not say."""

    max_batch_size: int = 0  # requests in one step
    max_num_tokens: int = 0  # tokens in one step
    kv_blocks: int = 0


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model wants to be sampled: used for fields that a request leaves out. None: the API's own default.

    Names and meaning are those of generation_config.json; the bounds are those of a request.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None  # 0 and -1: all
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None

    def given(self) -> dict[str, float]:
        """Return the values that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class ModelDeploymentCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All a frontend must know to render for and parse from a model; equal on every worker of a model."""

    name: str  # the served name, which clients send as `model`
    context_length: int  # prompt and output tokens together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    renderer: str  # "harmony" or "chat_template"
    reasoning_parser: str = "none"  # as in --dyn-reasoning-parser
    tool_call_parser: str = "none"  # as in --dyn-tool-call-parser
    # what the engine can't honor, see EngineInfo
    unsupported_features: tuple[str, ...] = msgspec.field(default=(), name="refuses")
    files: Mapping[str, str] = {}  # file name -> sha256; fetched over the plane with the control verb `file`
    sampling_defaults: SamplingDefaults = SamplingDefaults()


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live worker as discovery knows it."""

    id: int  # up to 63 bits, unique in the cluster; hexadecimal wherever it is shown
    namespace: str
    component: str
    endpoint: str
    subject: str  # request-plane address of `generate`; the plane derives that of `control`
    role: Role
    engine: str
    card: ModelDeploymentCard
    layout: KvLayout
    limits: Limits = Limits()
    # what else prefill and decode must share, in the engine's own words
    kv_compat: Mapping[str, str] = msgspec.field(default_factory=dict, name="pairing")
    can_aggregate: bool = msgspec.field(default=False, name="serves_whole")  # a decode worker that can also prefill
    strategy: str = "prefill_first"
    version: str = ""  # of dynamo_trtllm
    wire: int = 1  # WIRE_VERSION of the worker; version 1 does not send it


# --- control verbs (design: every instance has `generate` and `control`) -------------------------------


class ReleaseOutcome(StrEnum):
    FETCHED = "redeemed"
    ABORTED = "refused"


class ReleaseKv(msgspec.Struct, frozen=True, tag="release"):
    """The pipeline tells a prefill worker that a ticket is done with."""

    ticket_id: str
    outcome: ReleaseOutcome


class GetFile(msgspec.Struct, frozen=True, tag="file"):
    """Asks for a piece of one of the card's files, named by content."""

    sha256: str
    offset: int = 0


class FileChunk(msgspec.Struct, frozen=True):
    data: bytes
    total_bytes: int


class ReserveSlot(msgspec.Struct, frozen=True, tag="reserve"):
    """Keeps a decode slot for a request whose prefill has not run yet. Answered with nothing, or Overloaded."""

    reservation_id: str
    expires_at: float  # seconds since the epoch; forgotten then


class ReleaseSlot(msgspec.Struct, frozen=True, tag="unreserve"):
    """The slot is not needed after all. Unknown reservations are no error."""

    reservation_id: str


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Asks a worker whose transfers keep failing to drain and to exit with a status that has it started again."""

    reason: str


Control = ReleaseKv | GetFile | ReserveSlot | ReleaseSlot | Restart

# --- conversation: what the renderer takes -------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str  # system, developer, user, assistant, tool
    content: str = ""
    name: str | None = None
    reasoning: str | None = None  # assistant: what it thought before a tool call
    tool_calls: tuple[ToolCall, ...] = ()  # assistant
    tool_call_id: str | None = None  # tool


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}  # JSON Schema


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    reasoning_effort: str = "medium"  # low, medium, high
    template_args: Mapping[str, Any] = {}  # extra variables of a chat template
    answer_schema: str = ""  # JSON Schema that the answer is held to; formats with a place for it tell the model

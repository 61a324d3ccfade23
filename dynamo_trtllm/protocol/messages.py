"""Define and encode the values that processes exchange, such as requests, chunks and instances.

They are msgspec structs, encoded as MessagePack with token ids packed as 32-bit little-endian
integers. Decoding skips unknown fields, so an older process can read what a newer one sends.

A field that is renamed here keeps its name on the wire (`name=`): only processes read it, and a
change would need two forms of the message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from dynamo_trtllm.protocol.cost_model import CostModel, EngineWork
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.former_names import FORMER_AGGREGATED, FORMER_KV_TRANSFER
from dynamo_trtllm.protocol.mixed_steps import mixed_step_target_s
from dynamo_trtllm.protocol.number_types import (
    MAX_COUNT,
    MAX_DP_RANKS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    Count,
    EpochSeconds,
    Int64,
    Number,
    PositiveCount,
    Seconds,
    SloSeconds,
    TokenId,
)
from dynamo_trtllm.protocol.shares import ALL_WORK, Shares

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # array.array takes no subscript at run time before Python 3.12


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Pack token ids into an array of unsigned 32-bit integers.

    Raises:
        OverflowError: an id is negative or does not fit into 32 bits.
        TypeError: an id is not an integer.
    """
    return array("I", ids)


WIRE_VERSION = 4
"""Version of the messages between frontends and workers. Neighboring versions work together.

2: the worker replies to a ping with a report of the shared streams. 3: a frame may be the id of one
token. 4: error codes and other values have new names, see `former_names`.
"""


def wire_mismatch(theirs: int) -> str:
    """Return the reason why a peer of wire version `theirs` can't work with this process; "" when
    it can.
    """
    if abs(theirs - WIRE_VERSION) <= 1:
        return ""
    return (
        f"wire versions {theirs} (peer) and {WIRE_VERSION} (this process) differ by more than 1;"
        " upgrade the side with the lower one"
    )


class Role(StrEnum):
    """The role of a worker. The values are those of `--disaggregation-mode`."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "prefill_and_decode"
    # Any phase, chosen per request: see `shares`. Its record has another value, see `records`.
    ELASTIC = "elastic"


# Python 3.11 looks up a member of an enum in 150 ns.
_PREFILL: Final = Role.PREFILL
_ELASTIC: Final = Role.ELASTIC


class Phase(StrEnum):
    """The phase of a request that a call runs."""

    PREFILL = "prefill"  # process the prompt, hold its KV, return KV transfer parameters
    DECODE = "decode"  # fetch the KV, replay the first token, generate the others
    AGGREGATED = "aggregated"  # both, in one worker

    @classmethod
    def _missing_(cls, value: object) -> Phase | None:
        return cls.AGGREGATED if value == FORMER_AGGREGATED else None


class ClientShare(IntEnum):
    """What the sender of a request has got of the workers, compared with other clients."""

    EVEN = 0  # about its share, or not known
    BELOW = 1  # less than its share: its prompts go before those of others
    # Its share or more, while there are requests of clients that have got less: a step with only
    # such prompts is shorter, because another prompt may have to wait for its end.
    ABOVE = 2


class FinishReason(StrEnum):
    """The reason why a call ended without an error."""

    STOP = "stop"  # a stop token, which is the last of the chunk's ids
    LENGTH = "length"  # max_tokens or the context length is reached
    KV_TRANSFER = "kv_transfer"  # the prefill phase ended; its chunk has KV transfer parameters

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.KV_TRANSFER if value == FORMER_KV_TRANSFER else None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One allowed form of structured output: `prefix`, then a content in the form of another field,
    then the end.
    """

    # JSON Schema as JSON text; "{}": any JSON object; "": another field has the form
    json_schema: str
    regex: str = ""  # the whole content matches it
    grammar: str = ""  # EBNF as in llama.cpp and xgrammar, with the start rule `root`
    # text before the JSON, control tokens as text
    prefix: str = msgspec.field(default="", name="literal")


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Structured output.

    Text is free up to `trigger`; after it, the output takes one of the forms and ends.
    """

    alternatives: tuple[OutputFormat, ...]  # at least one
    # control tokens as text; "": from the first token on
    trigger: str = msgspec.field(default="", name="after")
    # `trigger`, encoded
    trigger_ids: TokenIds = msgspec.field(default_factory=token_ids, name="after_ids")
    # Stop tokens that may not end the free text: an output without its trigger would have no
    # answer.
    unfinished_ids: tuple[TokenId, ...] = ()
    # Another trigger with forms of its own. The one that comes first in the output counts.
    otherwise: StructuredOutput | None = None


_Temperature: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=2)]
_Probability: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_TopP: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
_TopK: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]  # 0 and -1: all
_Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_RepetitionPenalty: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=10)]
_Bias: TypeAlias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_NumLogprobs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
_DpRank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_DP_RANKS)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters and stop conditions of a request.

    The frontend has validated them. Temperature 0: greedy.
    """

    max_tokens: Count  # longest output
    min_tokens: Count = 0  # shortest output: stop tokens do not end it before
    temperature: _Temperature = 1.0  # divides the logits; 0: greedy
    top_p: _TopP = 1.0  # keep the most probable tokens with this total probability
    top_k: _TopK = 0  # number of most probable tokens to keep; 0: all
    min_p: _Probability = 0.0  # drop tokens less probable than min_p times the most probable one
    frequency_penalty: _Penalty = 0.0  # subtracted from a logit for each occurrence in the output
    presence_penalty: _Penalty = 0.0  # subtracted once if the token is in the output
    # The logits of tokens in prompt or output are divided by it if positive, else multiplied.
    repetition_penalty: _RepetitionPenalty = 1.0
    logit_bias: tuple[tuple[TokenId, _Bias], ...] = ()  # (token id, value added to its logit)
    guided: StructuredOutput | None = None  # format that the output must have
    seed: Int64 | None = None  # equal requests with equal seeds get equal outputs
    stop_token_ids: tuple[TokenId, ...] = ()  # further tokens that end the output
    ignore_eos: bool = False  # continue after the model's own stop tokens
    # number of alternatives per token; None: no log-probabilities
    logprobs: _NumLogprobs | None = None
    prompt_logprobs: _NumLogprobs | None = None  # the same for the tokens of the prompt


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of one token and of the most likely alternatives.

    NaN: the prompt's first token.

    Readers expect any number, because an engine may report infinity.
    """

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the KV cache. KV can move only between workers whose layouts match."""

    dtype: str
    block_tokens: PositiveCount  # tokens in one KV block
    num_layers: PositiveCount
    num_kv_heads: PositiveCount
    head_dim: PositiveCount
    # may differ; an engine that needs it equal also puts it into `kv_compat`
    tensor_parallel_size: PositiveCount = 1


class TransferSignature(msgspec.Struct, frozen=True, array_like=True):
    """Signature of KV transfer parameters by a key of the deployment, see `kv_transfer.signer`."""

    key_id: str
    request_id: str  # id of the only request that may use the parameters
    receivers: tuple[Number, ...]  # ids of the decode instances that may use them
    mac: bytes  # HMAC-SHA256


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters with which a decode engine fetches one request's KV from the prefill engine that
    holds it.

    `engine_state` is in the format of the engine kind `engine`. Only the two engines read it.
    """

    version: Count
    transfer_id: str = msgspec.field(name="ticket_id")
    engine: str
    model: str
    layout: KvLayout
    # engine-specific names and values that must be equal on both workers
    kv_compat: Mapping[str, str] = msgspec.field(default_factory=dict, name="pairing")
    prefill_instance_id: Number = msgspec.field(name="holder")
    expires_at: EpochSeconds  # afterwards the prefill worker may free the blocks
    prompt_tokens: Count
    first_token_ids: TokenIds
    first_logprobs: tuple[TokenLogprob, ...] = ()
    transport: str  # name of the KV transfer backend, for logs and metrics
    kv_bytes: Number
    engine_state: bytes = msgspec.field(name="opaque")
    signature: TransferSignature | None = None  # None: the prefill worker has no key


class RequestSlo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of the times of a request (service-level objective). None: those of the frontend.

    Frontends choose paths by them. Elastic engines read `itl_s`, which frontends add if the request
    does not set it.
    """

    ttft_s: SloSeconds | None = None  # time to first token
    itl_s: SloSeconds | None = None  # time between two tokens


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call: one phase of a request whose prompt is tokenized and whose fields are valid for the
    model's card.
    """

    request_id: str  # unique among the calls that run
    model: str  # name that the engine serves
    token_ids: TokenIds  # prompt, an array of unsigned 32-bit integers
    sampling: Sampling  # how to sample, and when to stop
    deadline: EpochSeconds  # seconds since the epoch, after which the call ends
    phase: Phase = Phase.AGGREGATED  # which phase this call runs
    # set exactly when phase is DECODE
    kv_params: KvTransferParams | None = msgspec.field(default=None, name="ticket")
    # number of the last `token_ids` that are output tokens of another worker, which failed after it
    # sent them
    num_resumed_output_tokens: Count = msgspec.field(default=0, name="resumed_tokens")
    # prefill call: ids of the decode instances that may fetch its KV
    kv_receivers: tuple[Number, ...] = ()
    reservation_id: str | None = None  # decode call: the slot that was reserved for it
    # the prefix cache is shared only among requests with the same salt
    cache_salt: str | None = None
    # lower values leave an engine's queue earlier; needs the feature "priority"
    priority: _Priority = 0
    # among requests of the same priority; engines that can't use it ignore it
    client_share: ClientShare = ClientShare.EVEN
    # attention-DP rank of the decode or aggregated worker; needs the feature "dp_rank"
    dp_rank: _DpRank | None = None
    prefill_dp_rank: _DpRank | None = None  # the same of the prefill worker
    relax_dp_rank: bool = False  # other ranks may run the call if that rank is full
    # a hint: an engine may run requests of one conversation on one rank
    conversation_id: str | None = None
    traceparent: str | None = None  # header of the client: engines may add spans to its trace
    slo: RequestSlo | None = None  # None: the limits of the frontend, if it has some


class PhaseTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Time per phase of one call, in seconds, by the worker's clock: adjacent intervals that begin
    with the call.
    """

    queue_s: Seconds = 0.0  # waiting for KV blocks or a batch slot
    prefill_s: Seconds = 0.0
    # decode call: until the KV is in its blocks
    kv_transfer_s: Seconds = msgspec.field(default=0.0, name="handoff_s")
    # Decode call: from then to its first step.
    decode_queue_s: Seconds = msgspec.field(default=0.0, name="decode_wait_s")
    # Further phases by name, and as "phase.part" what a phase consists of or waits for.
    more: Mapping[str, Seconds] = {}
    cached_tokens: Count = 0
    kv_bytes: Number = 0
    transport: str = ""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Output tokens of one call. Exactly one chunk, the last one of a stream, has `finish_reason`.

    An engine sends one chunk per step; a receiver may merge several. `gc=False`: chunks form no
    cycles, and a busy frontend holds many.
    """

    # generated since the chunk before
    token_ids: TokenIds = msgspec.field(default_factory=token_ids)
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if requested
    # of the next prompt tokens; such a chunk has no other field
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None  # why the stream ends; None: it goes on
    # set exactly when finish_reason is KV_TRANSFER
    kv_params: KvTransferParams | None = msgspec.field(default=None, name="ticket")
    # set on the terminal chunk, and on the first one if it is known by then
    stats: PhaseTimings | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the chunk has only tokens and their log-probabilities, as nearly all
        chunks have.
        """
        if self.finish_reason is not None or self.kv_params is not None or self.stats is not None:
            return False
        return not self.prompt_logprobs


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Capacity of one instance. 0: not reported."""

    max_batch_size: Count = 0  # requests in one step
    max_num_tokens: Count = 0  # tokens in one step
    kv_blocks: Count = 0
    # Of an elastic worker: its blocks that KV for other workers may take. Its decode calls can
    # always use the others.
    max_transfer_blocks: Count = 0


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling values of a model for fields that a request leaves out. None: the API's default.

    Names and meanings are those of generation_config.json (Hugging Face). The bounds are those of a
    request.
    """

    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    min_p: _Probability | None = None
    repetition_penalty: _RepetitionPenalty | None = None

    def given(self) -> dict[str, float]:
        """Return the values that are set, by name."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }


MAX_VOCABULARY: Final = 1 << 24


class ModelDeploymentCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a model with which a frontend renders prompts and parses outputs.

    Equal on all its workers.
    """

    name: str  # the served name, which clients send as `model`
    context_length: PositiveCount  # tokens, prompt plus output
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_VOCABULARY)]
    eos_token_ids: tuple[TokenId, ...]
    renderer: str  # "harmony" or "chat_template"
    reasoning_parser: str = "none"  # a value of --dyn-reasoning-parser
    tool_call_parser: str = "none"  # a value of --dyn-tool-call-parser
    # names of request features that the engine does not support, see EngineInfo
    unsupported_features: tuple[str, ...] = msgspec.field(default=(), name="refuses")
    # file name -> sha256; frontends fetch the content with the control verb `file`
    files: Mapping[str, str] = {}
    sampling_defaults: SamplingDefaults = SamplingDefaults()


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One registered worker."""

    id: Number  # up to 63 bits, unique in the cluster; shown in hexadecimal
    namespace: str
    component: str
    endpoint: str
    subject: str  # request-plane address of `generate`; that of `control` is derived from it
    role: Role
    engine: str
    card: ModelDeploymentCard
    layout: KvLayout
    limits: Limits = Limits()
    # equal on prefill and decode
    kv_compat: Mapping[str, str] = msgspec.field(default_factory=dict, name="pairing")
    # a prefill or decode worker that can also run aggregated requests
    can_aggregate: bool = msgspec.field(default=False, name="serves_whole")
    # see EngineInfo; older workers ignore these fields of a request
    supported_features: tuple[str, ...] = ()
    keeps_unfetched_kv: bool = False  # see EngineInfo; older frontends leave such KV to its timeout
    strategy: str = "prefill_first"
    version: str = ""  # version of dynamo_trtllm
    wire: Count = 1  # WIRE_VERSION of the worker
    publishes_kv_events: bool = False  # see `kv_events`
    # The worker has keys of KV transfers. Only workers that have such keys can be its partners.
    signs_kv_transfers: bool = False
    reuses_prefixes: bool = True  # see EngineInfo; older workers do not say that they do not
    # "host:port" of each listener for readers of its KV. Empty: unknown, or the worker is older.
    kv_addresses: tuple[str, ...] = ()
    # The role is ELASTIC. In records, the role of such a worker is AGGREGATED, as which frontends
    # of earlier versions use it.
    is_elastic: bool = msgspec.field(default=False, name="elastic")
    shares: Shares = ALL_WORK  # of an elastic worker, until a share table has others


class LoadReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The load of one worker at one moment.

    Of two reports, the one with the higher number is newer.
    """

    instance_id: Number
    number: Number  # counts from 1
    running: Count  # requests in the batch
    waiting: Count  # requests queued in the engine
    queued_prefill_tokens: Count  # prompt tokens that are not computed yet
    kv_blocks_used: Count
    kv_blocks_total: Count  # 0: not reported by the engine
    context_tokens: Count  # tokens of the context of the requests in the batch
    cost: CostModel | None = None  # only broadcasts have it
    # Of a prefill or elastic worker: the requests that generate tokens, and the tokens of their
    # context. Older workers do not report them. Those of other roles report all in `running`.
    num_generating: Count = 0
    generating_tokens: Count = 0
    # The prompts that were computed since the worker has started, and their tokens that were not in
    # the prefix cache. Older workers do not report them.
    computed_prompts: Count = 0
    computed_tokens: Count = 0
    fetching_tokens: Count = 0  # prompt tokens of the decode calls without a first token yet

    def work(
        self,
        role: Role,
        more_tokens: int = 0,
        more_requests: int = 0,
        slo: RequestSlo | None = None,
    ) -> EngineWork:
        """Return what a new request finds at the worker.

        Args:
            role: of the worker.
            more_tokens: prompt tokens that came since the report.
            more_requests: requests that came since the report.
            slo: the limits of the new request, which those that run are assumed to have, too.
        """
        running = self.running
        context = self.context_tokens
        if role is _PREFILL or role is _ELASTIC:
            running = self.num_generating
            context = self.generating_tokens
        return EngineWork(
            running,
            context,
            self.queued_prefill_tokens + more_tokens,
            self.waiting + more_requests,
            mixed_step_target_s(None if slo is None else slo.itl_s) if role is _ELASTIC else 0.0,
        )


class ReleaseOutcome(StrEnum):
    """The reason why a prefill worker may free the KV of a transfer."""

    FETCHED = "redeemed"
    ABORTED = "refused"


class ReleaseKv(msgspec.Struct, frozen=True, tag="release"):
    """Let a prefill worker free the KV of one transfer."""

    transfer_id: str = msgspec.field(name="ticket_id")
    outcome: ReleaseOutcome


class ReissueKvParams(msgspec.Struct, frozen=True, tag="reissue"):
    """Ask a prefill worker to sign KV transfer parameters again, for another decode instance.

    The reply is the new `KvTransferParams`. The KV must still be pending.
    """

    kv_params: KvTransferParams = msgspec.field(name="ticket")
    receivers: tuple[Number, ...]


class GetFile(msgspec.Struct, frozen=True, tag="file"):
    """Request a chunk of one of the card's files by content hash and offset in bytes."""

    sha256: str
    offset: Number = 0


class FileChunk(msgspec.Struct, frozen=True):
    """Reply to `GetFile`."""

    data: bytes
    total_bytes: Number


# Until a reserved slot expires, in case its frontend dies. An expired slot does no harm: the decode
# call is then queued.
MAX_RESERVATION_S: Final = 60.0


class ReserveSlot(msgspec.Struct, frozen=True, tag="reserve"):
    """Reserve a decode slot for a request before its prefill call.

    The reply is empty, or the error Overloaded.
    """

    reservation_id: str
    expires_at: EpochSeconds  # a time by the clock of the sender
    # seconds until then: clocks of two machines may differ. 0: an older sender
    left_s: Seconds = 0.0


class ReleaseSlot(msgspec.Struct, frozen=True, tag="unreserve"):
    """Release a reserved slot. An unknown reservation is not an error."""

    reservation_id: str


class ResyncKvEvents(msgspec.Struct, frozen=True, tag="resync_kv_events"):
    """Ask a worker to publish all blocks of its prefix cache again, see `kv_events`.

    The reply is empty.
    """


Control = ReleaseKv | ReissueKvParams | GetFile | ReserveSlot | ReleaseSlot | ResyncKvEvents

T = TypeVar("T")


def packed(ids: TokenIds) -> bytes:
    """Return token ids as they are sent."""
    return ids.tobytes()  # every machine with a supported accelerator is little-endian


def _pack(value: Any) -> bytes:
    if isinstance(value, array):
        return packed(value)
    raise TypeError(f"{type(value).__name__} has no wire form")


def _unpack(wanted: Any, value: Any) -> Any:
    if wanted is array and isinstance(value, bytes):
        return array("I", value)  # ValueError unless whole 32-bit words
    raise TypeError(f"{wanted} has no wire form")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """Encode a value, such as one of these structs."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, wanted: type[T]) -> T:
    """Decode `data` as a value of type `wanted`.

    Raises:
        BadFrame: `data` is not such a value.
    """
    decoder = _decoders.get(wanted)
    if decoder is None:
        decoder = msgspec.msgpack.Decoder(wanted, dec_hook=_unpack)
        _decoders[wanted] = decoder
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    # RecursionError: the value is nested too deeply.
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as exc:
        raise BadFrame(f"not a {getattr(wanted, '__name__', wanted)}: {exc}") from exc

"""Define the events and the actions of `flow.GenerationFlow`, and the values that both sides share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

import msgspec

from dynamo_trtllm.cost_model import Prediction
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.messages import GenerateRequest, Instance, PhaseTimings, ReleaseKv, ReleaseSlot, TokenLogprob
from dynamo_trtllm.observability.metrics import Span
from dynamo_trtllm.router.policy import WorkerSelection
from dynamo_trtllm.router.view import Pair
from dynamo_trtllm.streams import StreamEvent


class Signal(Enum):
    """The events that carry no value."""

    START = auto()
    CANCEL = auto()
    WORKERS_CHANGED = auto()  # answers `WaitForWorkers`, as does the next one
    WAIT_TIMED_OUT = auto()
    SLOT_RESERVED = auto()  # answers `ReserveDecodeSlot`
    NO_OTHER_DECODE = auto()  # answers `SelectOtherDecode`


FlowEvent: TypeAlias = Signal | WorkerSelection | Instance | StreamEvent
"""A signal; the selected workers; another decode instance; an event of the current call.

An error is the event of a selection, reservation or call that failed.
"""


class SelectWorkers(msgspec.Struct, frozen=True, gc=False):
    """Select the workers of an attempt. The answer is a `WorkerSelection` or an error, at once."""

    attempt: int  # the same number again: the selection before found no workers
    excluded: frozenset[int]  # instances that failed this request
    avoid: int | None  # a prefill instance whose KV transfer failed: used only if there is no other
    is_last_resort: bool  # pairs that were never probed may be selected, too


class WaitForWorkers(msgspec.Struct, frozen=True, gc=False):
    """Wait for a change of the workers, at most `limit_s` seconds after the first selection of the attempt."""

    limit_s: float


class ReserveDecodeSlot(msgspec.Struct, frozen=True):
    """Reserve a slot for the decode call. The answer is SLOT_RESERVED or an error."""

    decode: Instance
    reservation_id: str


class CallWorker(msgspec.Struct, frozen=True):
    """Start a call. The answers are the events of its stream."""

    worker: Instance
    request: GenerateRequest


class SelectOtherDecode(msgspec.Struct, frozen=True):
    """Select another decode instance for the same KV. The answer is an `Instance` or NO_OTHER_DECODE, at once."""

    prefill: Instance
    tried: frozenset[int]


class SendControl(msgspec.Struct, frozen=True):
    """Send a control message to a worker, in the background."""

    worker: Instance
    message: ReleaseKv | ReleaseSlot


class RecordTransfer(msgspec.Struct, frozen=True):
    """Record that the KV of a pair arrived, or that its transfer failed."""

    pair: Pair  # (None, instance): an aggregated worker answered
    error: DynamoError | None = None


class RecordFailure(msgspec.Struct, frozen=True):
    """Record that a call to a worker failed."""

    worker: Instance
    error: DynamoError
    next_step: str  # how the request goes on, for the log; "": it ends


Action: TypeAlias = (
    StreamEvent
    | SelectWorkers
    | WaitForWorkers
    | ReserveDecodeSlot
    | CallWorker
    | SelectOtherDecode
    | SendControl
    | RecordTransfer
    | RecordFailure
)
"""What the pipeline does. It passes a chunk or an error on to the client."""


@dataclass(slots=True)
class RouteTrace:
    """The workers and timings of a request, filled while the request runs. Instances and stats: of its last attempt.

    The pipeline fills the spans. Its caller sets the times of tokens when it gets them.
    """

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: PhaseTimings | None = None
    decode_stats: PhaseTimings | None = None
    retries: int = 0
    migrations: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list, compare=False)
    first_s: float | None = None  # when the first tokens arrived, of `time.monotonic()`
    last_s: float = 0.0  # when the newest ones arrived
    expected: tuple[float, Prediction] | None = None  # when the last attempt began, and the time to its first tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The limits and fallbacks for requests whose workers fail or are missing.

    Calls that a worker did not accept do not count as retries or migrations.
    """

    retries: int = 3  # of a request before its first token was sent; also how often all workers are tried again
    migrations: int = 3  # of a request after its first token was sent
    hold_s: float = 0.0  # longest wait for a role that has no instance
    selects_at_random: bool = False  # instead of round robin, if nothing else selects
    decode_fallback: bool = False  # without a prefill worker, decode workers run aggregated requests
    # True: probes test new and quarantined pairs. False: requests test them; quarantined pairs when the breaker's open
    # time is over.
    has_probes: bool = False

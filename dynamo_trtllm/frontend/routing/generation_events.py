"""Define the events of `GenerationFlow`, its driver, and the values that both share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeAlias

from dynamo_trtllm.frontend.routing.pairs import Pair, WorkerSelection
from dynamo_trtllm.protocol.errors import DynamoError, QueryOfDeath
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    KvTransferParams,
    ReissueKvParams,
    ReleaseKv,
    ReleaseSlot,
)
from dynamo_trtllm.protocol.streams import StreamEvent


class Signal(Enum):
    """The events that carry no value."""

    START = auto()
    CANCEL = auto()
    WORKERS_CHANGED = auto()  # ends `wait_for_workers`
    WAIT_TIMED_OUT = auto()  # ends `wait_for_workers`, too
    SLOT_RESERVED = auto()  # `reserve_decode_slot` has succeeded
    WORKER_LISTENS = auto()  # `check_worker` has found that the worker's process runs


FlowEvent: TypeAlias = Signal | KvTransferParams | StreamEvent
"""A signal, the answer of `reissue_params`, or an event of the current call.

An error is the event of a failure: of a reservation, of `reissue_params`, of a call or of a check.
"""


class FlowDriver(Protocol):
    """The methods that a flow calls for a request.

    No method calls the flow. A wait, a reservation, a call or a check that a method starts ends
    with an event later.
    """

    def select(
        self, attempt: int, excluded: frozenset[int], avoid: int | None, is_last_resort: bool
    ) -> WorkerSelection | DynamoError:
        """Return the workers of an attempt, or the error that says why there are none.

        Args:
            attempt: number of the attempt. If a selection finds no workers, the next selection is
                for the same attempt.
            excluded: instances that failed this request.
            avoid: a prefill instance whose KV transfer failed; it is used only if there is no
                other.
            is_last_resort: pairs that were never probed may be selected, too.
        """

    def select_other_decode(self, prefill: Instance, tried: frozenset[int]) -> Instance | None:
        """Return another decode instance for the same KV; None if there is none."""

    def wait_for_workers(self, limit_s: float) -> None:
        """Wait for a change of the workers.

        The wait ends at most `limit_s` seconds after the first selection of the attempt.
        """

    def reserve_decode_slot(self, decode: Instance, reservation_id: str) -> None:
        """Reserve a slot for the decode call."""

    def reissue_params(self, prefill: Instance, message: ReissueKvParams) -> None:
        """Request KV transfer parameters that are signed for another decode instance."""

    def check_worker(self, worker: Instance) -> None:
        """Check whether the process of a worker has ended. The error is WorkerDied if it has."""

    def call_worker(self, worker: Instance, request: GenerateRequest) -> None:
        """Start a call."""

    def is_pause_short(self, decode: Instance) -> bool:
        """Return whether the client may get the first token before the decode worker is called."""

    def cancel_call(self) -> None:
        """Cancel the current call, whose answer is of no use. No event of this call follows."""

    def collect_kv(self, prefill: Instance, decode: Instance, request: GenerateRequest) -> None:
        """Let a decode worker fetch the KV of a cancelled request, because nothing else frees it.

        Args:
            prefill: the worker that holds the KV, or may hold it soon.
            decode: the worker that fetches the KV.
            request: the decode call in progress. If the prefill call is still in progress, it has
                no KV transfer parameters.
        """

    def send_control(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        """Send a control message to a worker, in the background."""

    def record_transfer(self, pair: Pair, error: DynamoError | None = None) -> None:
        """Record that the KV of a pair arrived, or that its transfer failed.

        Args:
            pair: (None, id) is an aggregated worker.
            error: the failure; None: the KV arrived.
        """

    def record_death(self, worker: Instance) -> QueryOfDeath | None:
        """Record that the current call failed because a worker died.

        Return the error with which the request is given up; None if it continues.
        """

    def is_death_explained(self, worker: Instance) -> bool:
        """Return whether another request, which was given up, has probably ended a worker."""

    def end_trial(self) -> None:
        """Free the workers of a suspect for other suspects, because the suspect has settled."""

    def record_failure(self, worker: Instance, error: DynamoError, next_step: str | None) -> None:
        """Record that a call failed.

        Args:
            worker: the worker that was called.
            error: the error of the call.
            next_step: how the request continues, for the log; None: the error ends it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The limits and fallbacks for requests whose workers fail or are missing.

    Calls that a worker did not accept do not count as retries or migrations.
    """

    # Limit of the attempts after the first one, while no decode call has generated a token of the
    # request. After all workers have failed, all of them are tried again up to this many times.
    retries: int = 3
    migrations: int = 3  # limit of the further attempts once a decode call has generated a token
    hold_s: float = 0.0  # longest wait for a role that has no instance
    # If there is no cost placement: select at random instead of round robin.
    selects_at_random: bool = False
    # Send the first token when the prefill worker answers, if the pause after it is at most this
    # long: see `early_token`. 0: never.
    early_token_pause_s: float = 0.0
    # A request with a limit of its own between tokens uses this part of its limit in place of
    # `early_token_pause_s`.
    early_token_part: float = 0.0
    # The limit between tokens of requests that set none. Elastic workers get it with each call.
    # None: there is no limit.
    itl_s: float | None = None
    # Without a prefill worker, decode workers run aggregated requests.
    decode_fallback: bool = False
    # True: probes test new and quarantined pairs. False: requests test new pairs, and quarantined
    # ones when the open time of the breaker is over.
    has_probes: bool = False

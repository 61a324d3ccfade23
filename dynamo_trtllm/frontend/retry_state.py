"""Decides after a failed call: give up, retry, or continue on another worker from the tokens so far. Pure.

A request none of whose tokens was sent is retried. One whose tokens were sent migrates: prompt and output so far become
the prompt of the rest, which a greedy engine continues as if nothing had happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from dynamo_trtllm.errors import Draining, DynamoError, KvTransferError, MigrationFailed, Overloaded, Unreachable
from dynamo_trtllm.messages import Chunk, GenerateRequest, ModelDeploymentCard, Sampling, TokenIds, token_ids
from dynamo_trtllm.request_plane.base import Sink

COOLDOWN_S = 5.0


class Cooldown:
    """Placement avoids these instances for a while if there are others; then one request tries them again.

    `ids` is read per request: it returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # when the next instance is tried again

    def start(self, instance_id: int, now: float) -> None:
        """`now` in seconds of a clock that only rises."""
        self._until[instance_id] = now + COOLDOWN_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """It was seen to work."""
        if self._until.pop(instance_id, None) is not None:
            self._changed()

    def ids(self, now: float) -> frozenset[int]:
        if self._next_until <= now:
            self._until = {instance_id: until for instance_id, until in self._until.items() if until > now}
            self._changed()
        return self._ids

    def _changed(self) -> None:
        self._next_until = min(self._until.values(), default=math.inf)
        if self._ids != self._until.keys():
            self._ids = frozenset(self._until)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryLimits:
    """How often one request may be placed again. A worker that has not taken it up is not counted."""

    retries: int = 3  # while none of its tokens has left; and how often all workers are tried anew
    migrations: int = 3  # afterwards


@dataclass(slots=True, kw_only=True)
class RetryState:
    """What happened to one request so far."""

    request: GenerateRequest
    limits: RecoveryLimits
    sent_ids: TokenIds = field(default_factory=token_ids)  # what has left, of all attempts
    excluded: set[int] = field(default_factory=set)  # instances that failed it
    avoid: int | None = None  # a prefill instance whose hand-off failed: only taken when there is no other
    retries: int = 0
    migrations: int = 0
    rounds: int = 0  # how often each instance had failed it
    error: DynamoError | None = None  # of the last attempt
    _transfer_failures: int = 0
    _is_first_chunk: bool = True  # the running attempt has given nothing yet

    def on_chunk(self, chunk: Chunk) -> None:
        """A chunk of the running attempt is on its way to the client."""
        self.sent_ids.extend(chunk.token_ids)
        self._is_first_chunk = False

    def count_tokens(self, sink: Sink) -> Sink:
        """`sink`, and a note of each chunk that it takes: none of them is the first of an attempt."""

        extend = self.sent_ids.extend

        def counting(chunk: Chunk) -> bool:
            accepted = sink(chunk)
            if accepted:
                extend(chunk.token_ids)
            return accepted

        return counting

    @property
    def is_complete(self) -> bool:
        """All tokens left, and only the end of the stream was lost."""
        return len(self.sent_ids) >= self.request.sampling.max_tokens

    @property
    def is_worth_waiting(self) -> bool:
        """Whether to wait for another instance. Not after Overloaded: waiting here frees no capacity."""
        return not isinstance(self.error, Overloaded)

    def pause_s(self, hold_s: float) -> float | None:
        """How long to look for another instance when each has failed it, before they are tried anew: perhaps it was
        the way there that failed, not they. Each pause is twice the one before, all together `hold_s`. None: no more.
        """
        if self.rounds >= self.limits.retries:
            return None
        return float(hold_s * 2**self.rounds / (2**self.limits.retries - 1))

    def next_round(self) -> None:
        """After the pause."""
        self.excluded.clear()
        self.rounds += 1

    def remaining(self) -> GenerateRequest:
        """The request of the next attempt."""
        self._is_first_chunk = True
        num_sent = len(self.sent_ids)
        if num_sent == 0:
            return self.request
        sampling = self.request.sampling
        rest = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - num_sent, min_tokens=max(0, sampling.min_tokens - num_sent)
        )
        return msgspec.structs.replace(
            self.request,
            token_ids=self.request.token_ids + self.sent_ids,
            sampling=rest,
            num_resumed_output_tokens=num_sent,
        )

    def record_failure(
        self, error: DynamoError, *, at: int | None, prefill: int | None, card: ModelDeploymentCard
    ) -> None:
        """Note the failure. `at` is the instance whose call failed, `prefill` the attempt's prefill instance.

        Raises `error` when there is no further attempt, or MigrationFailed when no other worker can continue it.
        """
        self.error = error
        if not error.retryable or (
            isinstance(error, Overloaded) and not self._is_first_chunk
        ):  # the latter: a slow reader
            raise error
        if self.sent_ids:
            self._migrate(error, card)
        else:
            self._retry(error)
        if isinstance(error, KvTransferError):
            self.avoid = prefill
        elif at is not None:
            self.excluded.add(at)

    def _retry(self, error: DynamoError) -> None:
        self.retries += not is_not_accepted(error)
        self._transfer_failures += isinstance(error, KvTransferError)
        if self.retries > self.limits.retries or self._transfer_failures > 1:
            raise error

    def _migrate(self, error: DynamoError, card: ModelDeploymentCard) -> None:
        history = _token_dependence(self.request.sampling)
        if history is not None and "resumed_tokens" in card.unsupported_features:
            raise _migration_failed(error, f"its engine can't take up {history} midway; send it without")
        self.migrations += not is_not_accepted(error)
        if self.migrations > self.limits.migrations:
            raise error


def is_not_accepted(error: DynamoError) -> bool:
    """Whether the worker never accepted the call: it is draining or unreachable."""
    return isinstance(error, Draining | Unreachable)


def _token_dependence(sampling: Sampling) -> str | None:
    """What makes the next token depend on how the ones before came about, and not on them as a prompt alone."""
    if sampling.guided is not None:
        return "the form of its output"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties of the answer's tokens"
    return "a seed's randomness" if sampling.seed is not None and sampling.temperature > 0 else None


def _migration_failed(error: DynamoError, why: str) -> MigrationFailed:
    failed = MigrationFailed(
        f"the stream broke and can't be continued on another worker: {why} ({error.code}: {error.message})"
    )
    failed.__cause__ = error
    return failed

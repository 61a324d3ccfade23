"""Decide how a request continues after a failed call: fail, retry, or migrate with the tokens so far. Pure.

A request is retried if none of its tokens was sent to the client. Otherwise it migrates: prompt and output so far
become the prompt of the rest. A greedy engine then generates the same tokens as without the failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from dynamo_trtllm.errors import Draining, DynamoError, KvTransferError, MigrationFailed, Overloaded, Unreachable
from dynamo_trtllm.messages import Chunk, GenerateRequest, ModelDeploymentCard, Sampling, TokenIds, token_ids
from dynamo_trtllm.streams import OnChunk

COOLDOWN_S = 5.0


class Cooldown:
    """The instances that selection avoids for COOLDOWN_S seconds, if there are others.

    `ids` is read per request. It returns the same set object until an instance is added or removed.
    """

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._ids: frozenset[int] = frozenset()
        self._next_until = math.inf  # when the next instance is tried again

    def start(self, instance_id: int, now: float) -> None:
        """Avoid an instance from now on. `now` is in seconds of a monotonic clock."""
        self._until[instance_id] = now + COOLDOWN_S
        self._changed()

    def forget(self, instance_id: int) -> None:
        """Stop avoiding an instance, because it worked."""
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
    """The limits on restarts of one request. Workers that did not accept the request do not count."""

    retries: int = 3  # before its first token was sent; also how often all workers are tried again
    migrations: int = 3  # after its first token was sent


@dataclass(slots=True, kw_only=True)
class RetryState:
    """The attempts of one request so far."""

    request: GenerateRequest
    limits: RecoveryLimits
    sent_ids: TokenIds = field(default_factory=token_ids)  # tokens sent to the client by all attempts
    excluded: set[int] = field(default_factory=set)  # instances that failed this request
    avoid: int | None = None  # a prefill instance whose KV transfer failed: used only if there is no other
    retries: int = 0
    migrations: int = 0
    rounds: int = 0  # how often all instances were tried again
    error: DynamoError | None = None  # of the last attempt
    _transfer_failures: int = 0
    _is_final: bool = False  # the last error was not a worker's

    def recording(self, on_chunk: OnChunk) -> OnChunk:
        """Return a callback that records the tokens of each chunk and passes the chunk on."""
        extend = self.sent_ids.extend

        def record(chunk: Chunk) -> bool:
            extend(chunk.token_ids)
            try:
                return on_chunk(chunk)
            except DynamoError:
                self._is_final = True  # this frontend failed, not the worker
                raise

        return record

    @property
    def is_complete(self) -> bool:
        """True if all tokens were sent and only the end of the stream was lost."""
        return len(self.sent_ids) >= self.request.sampling.max_tokens

    @property
    def is_worth_waiting(self) -> bool:
        """True if the request should wait for another instance. After Overloaded, waiting frees no capacity."""
        return not isinstance(self.error, Overloaded)

    def pause_s(self, hold_s: float) -> float | None:
        """Return how long to wait for another instance before all are tried again; None: fail now.

        All instances may have failed because of the network. Each pause is twice the one before; their sum is `hold_s`.
        """
        if self.rounds >= self.limits.retries:
            return None
        return float(hold_s * 2**self.rounds / (2**self.limits.retries - 1))

    def next_round(self) -> None:
        """Try all instances again, after the pause."""
        self.excluded.clear()
        self.rounds += 1

    def remaining(self) -> GenerateRequest:
        """Return the request of the next attempt, without the tokens that were sent."""
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
        """Record the failure of an attempt. Returns if there is a further attempt.

        Args:
            at: the instance whose call failed.
            prefill: the attempt's prefill instance.

        Raises:
            MigrationFailed: no other worker can continue the request.
            DynamoError: `error`, if there is no further attempt.
        """
        self.error = error
        if self._is_final or not error.retryable:
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
            raise _migration_failed(error, f"its engine cannot resume {history}; retry, or send the request without")
        self.migrations += not is_not_accepted(error)
        if self.migrations > self.limits.migrations:
            raise error


def is_not_accepted(error: DynamoError) -> bool:
    """Return True if the worker never accepted the call: it is draining or unreachable."""
    return isinstance(error, Draining | Unreachable)


def _token_dependence(sampling: Sampling) -> str | None:
    """Return which sampling field needs state beyond the tokens so far, as text for people; None if no field does."""
    if sampling.guided is not None:
        return "structured output"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties of output tokens"
    return "seeded sampling" if sampling.seed is not None and sampling.temperature > 0 else None


def _migration_failed(error: DynamoError, why: str) -> MigrationFailed:
    failed = MigrationFailed(
        f"the stream broke and cannot continue on another worker: {why} ({error.code}: {error.message})"
    )
    failed.__cause__ = error
    return failed

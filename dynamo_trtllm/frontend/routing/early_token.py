"""Send the first token of a request when the prefill worker answers (`--early-token-pause-ms`).

The answer of a prefill call has the first token. The client can get it now, and wait for the KV
between its first and second token, or get it from the decode worker after the KV has moved. The
first is better if the pause is short. The decode worker repeats the token; the repeated one is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.frontend.routing.attempt import feature_with_state
from dynamo_trtllm.protocol.errors import StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, KvTransferParams, Sampling, TokenIds

# How much the newest pause counts for the mean, and for the mean deviation: as for round-trip times
# of TCP (RFC 6298, section 2).
_OF_MEAN: Final = 1 / 8
_OF_DEVIATION: Final = 1 / 4
# So many mean deviations above the mean, about one of twenty pauses is longer.
_DEVIATIONS: Final = 2.0
# Longer pauses count as this long, so that one of them is soon forgotten.
_LONGEST_S: Final = 1.0
_MAX_WORKERS: Final = 8192  # that are known at once, with those that have left


class _Pause(NamedTuple):
    """The pauses of one decode worker lately."""

    mean_s: float
    deviation_s: float


@dataclass(eq=False)
class DecodePauses:
    """How long decode workers lately took from their call to their first answer."""

    _by_worker: dict[int, _Pause] = field(default_factory=dict)

    def note(self, decode_id: int, seconds: float) -> None:
        """Note the time of one call."""
        seconds = min(seconds, _LONGEST_S)
        last = self._by_worker.get(decode_id)
        if last is None:
            if len(self._by_worker) >= _MAX_WORKERS:
                self._by_worker.pop(next(iter(self._by_worker)))
            self._by_worker[decode_id] = _Pause(seconds, seconds / 2)
            return
        difference = seconds - last.mean_s
        self._by_worker[decode_id] = _Pause(
            last.mean_s + _OF_MEAN * difference,
            last.deviation_s + _OF_DEVIATION * (abs(difference) - last.deviation_s),
        )

    def is_short(self, decode_id: int, limit_s: float) -> bool:
        """Return whether the next call will probably take at most this time.

        False: it is not known.
        """
        pause = self._by_worker.get(decode_id)
        return pause is not None and pause.mean_s + _DEVIATIONS * pause.deviation_s <= limit_s


def early_chunk(sampling: Sampling, kv_params: KvTransferParams) -> Chunk | None:
    """Return the first token as the client gets it; None: it comes from the decode worker.

    With a grammar, penalties or a seed, some engines sample the first token again, and a stream
    that has begun can't continue on every other worker.
    """
    first_ids = kv_params.first_token_ids
    logprobs = kv_params.first_logprobs
    # Some engines report no log-probability with the answer of a prefill call.
    lacks_logprobs = sampling.logprobs is not None and len(logprobs) != len(first_ids)
    if not first_ids or lacks_logprobs or feature_with_state(sampling) is not None:
        return None
    return Chunk(token_ids=first_ids, logprobs=logprobs)


def without_repeated(chunk: Chunk, sent_ids: TokenIds) -> tuple[Chunk, TokenIds]:
    """Return a chunk of a decode call without tokens that the client has, and which of them follow.

    Args:
        chunk: of the decode call.
        sent_ids: the tokens that the client has and that were not repeated yet.

    Raises:
        StreamIncomplete: the call has other tokens, or ends before it has repeated all.
    """
    num_repeated = min(len(chunk.token_ids), len(sent_ids))
    still_to_come = sent_ids[num_repeated:]
    has_ended = chunk.finish_reason is not None
    if chunk.token_ids[:num_repeated] != sent_ids[:num_repeated] or (has_ended and still_to_come):
        raise StreamIncomplete(
            "the decode worker did not begin with the first token of the prefill worker; use"
            " engines of the same version, or --early-token-pause-ms 0"
        )
    rest = msgspec.structs.replace(
        chunk, token_ids=chunk.token_ids[num_repeated:], logprobs=chunk.logprobs[num_repeated:]
    )
    return rest, still_to_come

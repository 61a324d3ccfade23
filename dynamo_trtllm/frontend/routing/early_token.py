"""Send the first token of a request when the prefill worker answers (`--early-token-pause-ms`).

The answer of a prefill call has the first token. The client can get this token at once, and then
waits for the transfer of the KV between its first and its second token. Or it gets the first token
from the decode worker, after the transfer. To send the token at once is better if the pause after
it is short. The decode worker generates the first token in any case. If the client has it already,
the repeated token is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from dynamo_trtllm.frontend.routing.attempt import feature_with_state
from dynamo_trtllm.frontend.routing.recent_durations import RecentDurations
from dynamo_trtllm.protocol.errors import StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, KvTransferParams, Sampling, TokenIds

# A pause is expected to be at most this many mean deviations above the mean. About one of twenty
# pauses is longer.
_MAX_DEVIATIONS: Final = 2.0
# Longer pauses count as this long, so that one very long pause is soon forgotten.
_LONGEST_S: Final = 1.0
# Limit of the workers whose pauses are known. Workers that have left count, too.
_MAX_WORKERS: Final = 8192


@dataclass(eq=False)
class DecodePauses:
    """How long decode workers lately took from their call to their first answer."""

    _by_worker: dict[int, RecentDurations] = field(default_factory=dict)

    def note(self, decode_id: int, seconds: float) -> None:
        """Note the time of one call."""
        seconds = min(seconds, _LONGEST_S)
        pauses = self._by_worker.get(decode_id)
        if pauses is not None:
            pauses.note(seconds)
            return
        if len(self._by_worker) >= _MAX_WORKERS:
            self._by_worker.pop(next(iter(self._by_worker)))
        # One pause says little, so the next ones are expected to differ from it.
        self._by_worker[decode_id] = RecentDurations(seconds, deviation_s=seconds / 2)

    def is_short(self, decode_id: int, limit_s: float) -> bool:
        """Return whether the next call will probably be answered within this time.

        Return False for a worker without a known pause, too.
        """
        pauses = self._by_worker.get(decode_id)
        return pauses is not None and pauses.within_s(_MAX_DEVIATIONS) <= limit_s


def early_chunk(sampling: Sampling, kv_params: KvTransferParams) -> Chunk | None:
    """Return the first token as the client gets it; None: it must come from the decode worker.

    It must do so if the request has a grammar, penalties or a seed: with these, some engines sample
    the first token again, and a stream that has begun can't continue on every other worker.
    """
    first_ids = kv_params.first_token_ids
    logprobs = kv_params.first_logprobs
    # Some engines report no log-probability with the answer of a prefill call.
    lacks_logprobs = sampling.logprobs is not None and len(logprobs) != len(first_ids)
    if not first_ids or lacks_logprobs or feature_with_state(sampling) is not None:
        return None
    return Chunk(token_ids=first_ids, logprobs=logprobs)


def without_repeated(chunk: Chunk, sent_ids: TokenIds) -> tuple[Chunk, TokenIds]:
    """Return a chunk without the tokens that the client already has.

    Return also the tokens that the client has and that later chunks must repeat.

    Args:
        chunk: a chunk of the decode call.
        sent_ids: the tokens that the client has and that the decode call has not repeated yet.

    Raises:
        StreamIncomplete: the decode call has other tokens, or ends before it has repeated all.
    """
    num_repeated = min(len(chunk.token_ids), len(sent_ids))
    still_to_come = sent_ids[num_repeated:]
    has_other_tokens = chunk.token_ids[:num_repeated] != sent_ids[:num_repeated]
    ends_too_early = chunk.finish_reason is not None and len(still_to_come) > 0
    if has_other_tokens or ends_too_early:
        raise StreamIncomplete(
            "the decode worker did not begin with the first token of the prefill worker; use"
            " engines of the same version, or --early-token-pause-ms 0"
        )
    rest = msgspec.structs.replace(
        chunk, token_ids=chunk.token_ids[num_repeated:], logprobs=chunk.logprobs[num_repeated:]
    )
    return rest, still_to_come

"""Send the first token of a request when the prefill worker answers (`--early-first-token`).

The answer of a prefill call has the first token. Without this option, the client gets it from the
decode worker, after the KV has moved. With it, the client does not wait for the KV before its first
token, but between its first and second token. The decode worker repeats the token; the repeated one
is dropped.
"""

from __future__ import annotations

import msgspec

from dynamo_trtllm.frontend.routing.attempt import feature_with_state
from dynamo_trtllm.protocol.errors import StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, KvTransferParams, Sampling, TokenIds


def can_send_early(sampling: Sampling) -> bool:
    """Return whether a decode worker repeats exactly what the prefill worker has sampled.

    With a grammar, with penalties or a seed, some engines sample the first token again, and a
    stream that has begun can't continue on every other worker.
    """
    return feature_with_state(sampling) is None


def early_chunk(sampling: Sampling, kv_params: KvTransferParams) -> Chunk | None:
    """Return the first token as the client gets it; None: it comes from the decode worker."""
    first_ids = kv_params.first_token_ids
    logprobs = kv_params.first_logprobs
    # Some engines report no log-probability with the answer of a prefill call.
    lacks_logprobs = sampling.logprobs is not None and len(logprobs) != len(first_ids)
    if not first_ids or lacks_logprobs or not can_send_early(sampling):
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
            " engines of the same version, or --no-early-first-token"
        )
    rest = msgspec.structs.replace(
        chunk, token_ids=chunk.token_ids[num_repeated:], logprobs=chunk.logprobs[num_repeated:]
    )
    return rest, still_to_come

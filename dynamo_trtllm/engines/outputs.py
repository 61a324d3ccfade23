"""What engines over another library make of its answers alike: chunks, and the times that go with them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    PhaseTimings,
    TokenLogprob,
    token_ids,
)

# The libraries' words for an end that is an answer.
ENDS: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one answer of the library added."""

    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None  # the library's word

    @property
    def is_broken(self) -> bool:
        """It ends the request, and is no end of an answer."""
        return self.finish is not None and self.finish not in ENDS


def chunk_of(step: EngineOutput, stats: PhaseTimings) -> Chunk:
    """Of one that is not broken. `stats` goes with the last one only."""
    if step.finish is None:
        return Chunk(token_ids=token_ids(step.token_ids), logprobs=step.logprobs)
    return Chunk(
        token_ids=token_ids(step.token_ids), logprobs=step.logprobs, finish_reason=ENDS[step.finish], stats=stats
    )


def transfer_chunk(ticket: KvTransferParams, stats: PhaseTimings) -> Chunk:
    """Return the terminal chunk of a prefill call."""
    stats = msgspec.structs.replace(stats, kv_bytes=ticket.kv_bytes, transport=ticket.transport)
    return Chunk(finish_reason=FinishReason.HANDOFF, ticket=ticket, stats=stats)


def phase_timings(request: GenerateRequest, first_s: float, *, cached_tokens: int) -> PhaseTimings:
    """Seen from outside the library: `first_s`, to the first answer, holds queue and work, or queue and transfer."""
    ticket = request.ticket
    if ticket is None:
        return PhaseTimings(prefill_s=first_s, cached_tokens=cached_tokens)
    return PhaseTimings(handoff_s=first_s, kv_bytes=ticket.kv_bytes, transport=ticket.transport)

"""Hold one attempt of a request, and say which requests another attempt can't continue exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_trtllm.frontend.routing.pairs import Pair
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    KvTransferParams,
    Sampling,
    TokenIds,
    token_ids,
)


@dataclass(slots=True)
class Attempt:
    """One prefill call and the decode call of its KV, or one call of an aggregated worker.

    A decode worker that does not take its call is replaced, so there may be several decode calls.
    """

    prefill: Instance | None  # None: `decode` is an aggregated worker
    decode: Instance
    worker: Instance  # the instance that was called last. Failures are attributed to it.
    # The request that the next call sends to `decode`. After the prefill call, it has the KV
    # transfer parameters.
    request: GenerateRequest
    tried: frozenset[int]  # decode instances that were called
    num_sent_before: int  # tokens that were sent to the client before this attempt
    # With this many tokens, the call shows that it does not crash its worker: it has settled (see
    # `suspects`). 0: it has settled, or the request is no suspect.
    tokens_to_settle: int
    reservation_id: str | None = None  # names the decode slot, which may not be reserved yet
    # These describe the KV that waits at the prefill instance. None: no KV is known to wait there.
    params: KvTransferParams | None = None
    has_begun: bool = False  # the decode call has begun to answer
    # tokens that the client has got before the decode call repeats them: see `early_token`
    sent_early: TokenIds = field(default_factory=token_ids)
    transfer_error: DynamoError | None = None  # why the transfer of the KV failed

    @property
    def pair(self) -> Pair:
        prefill_id = None if self.prefill is None else self.prefill.id
        return prefill_id, self.decode.id


def feature_with_state(sampling: Sampling) -> str | None:
    """Return the name of a sampling feature whose state is lost when output becomes prompt.

    None: the request has no such feature. The name is for error messages.
    """
    if sampling.guided is not None:
        return "structured output"
    if sampling.frequency_penalty or sampling.presence_penalty:
        return "penalties of output tokens"
    if sampling.seed is not None and sampling.temperature > 0:
        return "seeded sampling"
    return None

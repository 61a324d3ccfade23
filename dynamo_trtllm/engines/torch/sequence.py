"""One request inside the torch engine, and what the scheduler says about it. Values; computes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.sampler import LogitsProcessor
from dynamo_trtllm.engines.torch.transfer_buffer import Allocation
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.messages import Chunk, GenerateRequest, Phase, PhaseTimings


class BlocksReserved(NamedTuple):
    """A decode job has its blocks and its transfer-buffer space; fetched pieces go to these rows of the pool."""

    allocation: Allocation
    rows: Tensor


class PrefillDone(NamedTuple):
    """A prefill job is done and its KV must be transferred; its blocks stay counted until the job is dropped."""

    allocation: Allocation
    copied: list[torch.cuda.Event]  # on a GPU: when each piece may be read
    first: Chunk


class Freed(NamedTuple):
    """The job's blocks are free: nothing of it is left here."""


Event: TypeAlias = Chunk | DynamoError | BlocksReserved | PrefillDone
Delivery: TypeAlias = list[tuple["TorchSequence", Event | Freed]]


@dataclass(slots=True, eq=False)
class TorchSequence:
    """One request. Its fields below `inbox` belong to the scheduler's thread."""

    request: GenerateRequest
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    inbox: Callable[[Event], None]  # called on the event loop
    logits_processor: LogitsProcessor | None = None
    seed: int = field(default_factory=lambda: random.getrandbits(64))
    piece_bytes: int = 0  # decode: as the prefill side cut its KV
    blocks: Tensor | None = None
    allocation: Allocation | None = None  # its KV on its way
    prefilled: int = 0  # tokens whose KV is in the pool
    finite: Tensor | None = None  # prefill: whether the keys of those tokens are finite, on the device
    last_token: int = -1  # the newest token, whose KV is not in the pool yet
    num_output_tokens: int = 0  # tokens of the answer
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    ready_at: float = 0.0  # decode: KV in place; otherwise: first token chosen
    stepped_at: float = 0.0  # decode: first own step

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def kv_tokens(self) -> int:
        """The most tokens whose KV this job keeps: the newest token of an answer never has any."""
        return self.prompt_tokens + (0 if self.request.phase is Phase.PREFILL else self.max_new_tokens - 1)


def phase_timings(seq: TorchSequence) -> PhaseTimings:
    queue_s = seq.admitted_at - seq.submitted_at
    if seq.request.phase is not Phase.DECODE:
        return PhaseTimings(queue_s=queue_s, prefill_s=seq.ready_at - seq.admitted_at)
    ticket = seq.request.ticket
    return PhaseTimings(
        queue_s=queue_s,
        kv_transfer_s=seq.ready_at - seq.admitted_at,
        decode_queue_s=max(0.0, seq.stepped_at - seq.ready_at),
        kv_bytes=ticket.kv_bytes if ticket else 0,
        transport=ticket.transport if ticket else "",
    )

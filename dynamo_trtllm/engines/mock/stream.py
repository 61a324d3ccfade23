"""One request of the mock engine, and its simulated output."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from dynamo_trtllm.engines.block_manager import BlockTable
from dynamo_trtllm.engines.waiting_requests import FIRST, QueueOrder, queue_order
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS
from dynamo_trtllm.protocol.messages import GenerateRequest, Phase
from dynamo_trtllm.protocol.phases import CallPhases
from dynamo_trtllm.protocol.streams import KvHolder, OnEvent, TaskStream

MAX_SEED = 0xFFFF
# <|channel|>final<|message|> of the Harmony format. The tokens after it are content.
_OPENING = (200005, 17196, 200008)


class MockStream(TaskStream):
    """One request in the simulated batch, and the stream of its output.

    Args:
        request: the request.
        on_event: receives the events.
        tasks: see `TaskStream`.
        kv_holder: see `Stream`.
        retire: removes the stream from the batch in any state.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_event: OnEvent,
        *,
        tasks: set[asyncio.Task[None]],
        kv_holder: KvHolder,
        retire: Callable[[MockStream], None],
        clock: Callable[[], float] = SYSTEM_CLOCKS.monotonic,
    ) -> None:
        super().__init__(on_event, tasks, kv_holder)
        self._retire = retire
        self.request = request
        # Tokens that an earlier worker generated follow the client's prompt.
        prompt_tokens = len(request.token_ids) - request.num_resumed_output_tokens
        prompt = request.token_ids[:prompt_tokens]
        self.seed = zlib.crc32(prompt) & MAX_SEED
        self.block_table = BlockTable()
        self.prefill_left = 0 if request.kv_params else len(request.token_ids)
        self.num_output = 0
        self.wanted = 0  # tokens to generate, one per step
        self.first_step = 0  # number of the first step that may include this stream
        # Set when the stream is in the batch; None: nothing waits for it.
        self.admitted: asyncio.Future[None] | None = None
        self.phases = CallPhases(request.kv_params, clock)
        # How long the queue had waited for each resource when the stream was queued.
        self.queue_waits: dict[str, float] = {}
        # The attributes of `WaitingRequest`.
        self.queued_s = 0.0
        self.is_overdue = False
        self.recorded_wait = ""

    @property
    def queue_order(self) -> QueueOrder:
        """Return the place in the queue."""
        return FIRST if self.is_overdue else queue_order(self.request)

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens to reserve KV blocks for."""
        prompt_tokens = len(self.request.token_ids)
        if self.request.phase is Phase.PREFILL:
            return prompt_tokens
        return prompt_tokens + self.request.sampling.max_tokens

    def token(self, index: int) -> int:
        """Return an output token of this call.

        The output begins with the Harmony prefix. Then each token is a function of seed and index.
        """
        position = self.request.num_resumed_output_tokens + index
        if position < len(_OPENING):
            return _OPENING[position]
        return 1000 + (self.seed + position * 7919) % 4000

    def _free(self) -> None:
        self._retire(self)

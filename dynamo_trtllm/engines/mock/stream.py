"""One request of the mock engine, and its simulated output."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable

from dynamo_trtllm.engines.block_manager import BlockTable
from dynamo_trtllm.engines.waiting_requests import FIRST, QueueOrder, queue_order
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, Phase, token_ids
from dynamo_trtllm.protocol.phases import CallPhases
from dynamo_trtllm.protocol.streams import KvHolder, OnEvent, StreamEvent, TaskStream

MAX_SEED = 0xFFFF
_NUM_TOKENS = 4000  # how many tokens of the vocabulary are used after the prefix
# <|channel|>final<|message|> of the Harmony format. The tokens after it are content.
_HARMONY_PREFIX = (200005, 17196, 200008)


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

    continues_after_task = True

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
        # Limit of the time between two tokens; None without a limit.
        self.itl_limit_s = None if request.slo is None else request.slo.itl_s
        self.prompt_tokens = len(request.token_ids)
        # After the client's prompt, `token_ids` has the tokens that an earlier worker generated.
        # The seed must not depend on them.
        client_prompt = request.token_ids[: self.prompt_tokens - request.num_resumed_output_tokens]
        self.seed = zlib.crc32(client_prompt) & MAX_SEED
        self.block_table = BlockTable()
        self.prefill_left = 0 if request.kv_params else len(request.token_ids)
        self.num_output = 0  # output tokens so far
        self.num_unsent = 0  # number of the newest output tokens that were not sent yet
        self.token_s = math.inf  # when the newest token was generated or sent
        self.worst_gap_s = 0.0  # longest time between two tokens
        self.wanted = 0  # number of tokens to generate, one per step
        self.first_step = 0  # number of the first step that may include this stream
        # A future that is set when the stream is in the batch; None while nothing waits for this.
        self.admitted: asyncio.Future[None] | None = None
        self._clock = clock
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
    def is_decode_call(self) -> bool:
        """Return whether the KV of the prompt is fetched."""
        return self.request.kv_params is not None

    @property
    def is_fetching(self) -> bool:
        """Return whether this is a decode call whose KV has not arrived yet."""
        return self.is_decode_call and not self.wanted and not self.num_output

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens to reserve KV blocks for."""
        if self.request.phase is Phase.PREFILL:
            return self.prompt_tokens
        return self.prompt_tokens + self.request.sampling.max_tokens

    def emit(self, event: StreamEvent) -> None:
        """Pass an event on, and note the time of its tokens."""
        if isinstance(event, Chunk) and event.token_ids:
            self.note_token(self._clock())
        super().emit(event)

    def note_token(self, now_s: float) -> None:
        """Note when a token was generated or sent."""
        self.worst_gap_s = max(self.worst_gap_s, now_s - self.token_s)
        self.token_s = now_s

    def send_unsent(self) -> None:
        """Send the tokens that were generated and not sent yet. Their times were noted."""
        if self.num_unsent:
            indices = range(self.num_output - self.num_unsent, self.num_output)
            self.num_unsent = 0
            super().emit(Chunk(token_ids=token_ids(map(self.token, indices))))

    def attention_pairs(self, count: int) -> float:
        """Return the number of attention pairs of the next `count` tokens of the prompt.

        Each of these tokens attends to all computed tokens, and on average to half of the tokens of
        its step.
        """
        computed_tokens = self.prompt_tokens - self.prefill_left
        return count * (computed_tokens + count / 2)

    def token(self, index: int) -> int:
        """Return an output token of this call.

        The output begins with the Harmony prefix. Each token after the prefix is a function of seed
        and index.
        """
        position = self.request.num_resumed_output_tokens + index
        if position < len(_HARMONY_PREFIX):
            return _HARMONY_PREFIX[position]
        # Seeds that are equal modulo _NUM_TOKENS have other steps between their tokens. So no two
        # seeds give equal answers.
        step = 7919 + self.seed // _NUM_TOKENS
        return 1000 + (self.seed + position * step) % _NUM_TOKENS

    def _free(self) -> None:
        self._retire(self)

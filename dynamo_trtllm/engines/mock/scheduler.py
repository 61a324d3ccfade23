"""Simulate the batch of the mock engine: its requests, its queue, its KV blocks, and its steps."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dynamo_trtllm.engines.block_manager import BlockManager, BlockTable
from dynamo_trtllm.engines.capabilities import MAX_STEPS
from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.mock.step_times import StepTimes
from dynamo_trtllm.engines.mock.stream import MockStream
from dynamo_trtllm.engines.mock.transfer_posts import TransferPosts
from dynamo_trtllm.engines.waiting_requests import (
    MAX_WAIT_S,
    enqueue,
    group_of,
    promote_overdue,
    record_wait,
    step_limit,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.counted import counted_are
from dynamo_trtllm.protocol.errors import ContextTooLong, EngineFailed, Overloaded, RequestRejected
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, Phase, token_ids
from dynamo_trtllm.protocol.number_types import ceil_div
from dynamo_trtllm.protocol.phases import QueueWaits
from dynamo_trtllm.protocol.streams import TOKEN_CHUNKS


class MockScheduler:
    """The batch of one engine. A task runs its steps on the event loop.

    Args:
        args: the arguments of the engine.
        on_prefilled: called with a prefill call and its first token, when its KV is to be exported.
        clock: returns seconds of a monotonic clock.
        seed: the seed of the noise of step times. None: the noise differs from run to run.
        is_elastic: while streams run, steps have fewer prompt tokens.
        tokens_per_event: the most tokens of a stream that are sent together. It is above 1 in
            simulations, which need no event for each token.
    """

    def __init__(
        self,
        args: MockArgs,
        on_prefilled: Callable[[MockStream, int], None],
        clock: Callable[[], float] = SYSTEM_CLOCKS.monotonic,
        seed: int | None = None,
        *,
        is_elastic: bool = False,
        tokens_per_event: int = 1,
    ) -> None:
        self._args = args
        self._on_prefilled = on_prefilled
        # Without a time per prompt token, a smaller step would save nothing.
        self._limits_prompts = is_elastic and args.has_prompt_time
        self._chunk_size = ChunkSize(args.prefill_tokens_per_step)
        self._clock = clock
        self._tokens_per_event = tokens_per_event
        self._step_times = StepTimes(args, seed)
        self._queue_waits = QueueWaits(clock)
        self._waiting: deque[MockStream] = deque()
        self._running: dict[MockStream, None] = {}
        # The running streams whose prompts are not computed yet. The first one is computed next.
        self._prompts: list[MockStream] = []
        self._blocks = BlockManager(
            args.kv_cache_blocks, args.kv_block_size, has_prefix_cache=args.enable_prefix_caching
        )
        self._posts = TransferPosts()
        # Send the results of the last step, once the step that runs has been launched.
        self._delayed_sends: list[Callable[[], None]] = []
        self._sent_s = 0.0  # when results were last sent
        self._step_number = 0  # the number of the step that runs, or of the last one
        # How many tokens of this step decode requests take. Prompts can't have these.
        self._num_decoding = 0
        self._next_unplanned = 0  # the number of the first step that is not planned yet
        self._work = asyncio.Event()  # set when the next step has work
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.steps: deque[StepSample] = deque(maxlen=MAX_STEPS)

    def start(self) -> None:
        """Start the steps."""
        self._task = asyncio.create_task(self._run(), name="mock-engine-steps")

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def report_kv_events(self, on_events: OnKvEvents) -> None:
        """Report the blocks that the prefix cache stores and evicts from now on."""
        self._blocks.on_events = on_events

    def submit(self, stream: MockStream) -> None:
        """Queue a stream.

        Raises:
            ContextTooLong: prompt and output exceed the context.
            RequestRejected: the engine has too few KV blocks.
            Overloaded: the queue is full.
        """
        args = self._args
        total = len(stream.request.token_ids) + stream.request.sampling.max_tokens
        if total > args.max_seq_len:
            raise ContextTooLong(
                f"{total} prompt and output tokens exceed the context of {args.max_seq_len}"
            )
        needed = self.num_blocks(stream.kv_tokens)
        if needed > args.kv_cache_blocks:
            raise RequestRejected(
                f"the request needs {needed} KV blocks; the engine has {args.kv_cache_blocks}"
            )
        if len(self._waiting) >= args.max_queue:
            raise Overloaded(
                f"{counted_are(len(self._waiting), 'request')} queued; try again later"
            )
        stream.queue_waits = self._queue_waits.read()
        stream.first_step = self._next_unplanned
        enqueue(self._waiting, stream, self._clock)
        self._idle.clear()
        self._work.set()

    def generate_rest(self, stream: MockStream) -> None:
        """Let the next steps generate the missing tokens of a call."""
        stream.first_step = self._next_unplanned
        if stream.request.phase is Phase.PREFILL:
            stream.wanted = 1
        else:
            stream.wanted = stream.request.sampling.max_tokens - stream.num_output
        self._work.set()

    async def until_space(self, stream: MockStream) -> None:
        """Wait until a decode call may fetch its KV: until it has blocks, if too few are free now.

        Meanwhile, the prefill worker holds the KV.
        """
        is_in_batch = stream in self._running
        num_free = self._args.kv_cache_blocks - self._blocks.num_used
        if is_in_batch or self.num_blocks(stream.kv_tokens) <= num_free:
            return
        stream.admitted = asyncio.get_running_loop().create_future()
        await stream.admitted

    async def until_posted(self, pause_s: float) -> None:
        """Wait until a KV transfer may begin, and for the time by which it delays a step."""
        if not pause_s:
            return
        posted = self._posts.add(pause_s, self._next_unplanned)
        self._work.set()
        await posted
        await asyncio.sleep(pause_s)

    def retire(self, stream: MockStream) -> None:
        """Remove a stream in any state and free its blocks. A step in progress skips it."""
        stream.wanted = 0
        stream.prefill_left = 0
        if stream in self._prompts:
            self._prompts.remove(stream)
        if stream in self._running:
            del self._running[stream]
            # `_generate` has stored the prompt with the first output token. Only later tokens have
            # added KV.
            if stream.num_output > 1:
                self.store(stream)
            self.free(stream.block_table)
        elif stream in self._waiting:
            self._waiting.remove(stream)
        self._note_idle()

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of KV blocks for a number of tokens."""
        return ceil_div(num_tokens, self._args.kv_block_size)

    def free(self, block_table: BlockTable) -> None:
        """Free blocks that no stream uses any more."""
        self._blocks.free(block_table)
        self._work.set()
        self._note_idle()

    def store(self, stream: MockStream) -> None:
        """Store the full blocks of a stream in the prefix cache.

        The last output token of the stream has no KV yet.
        """
        if self._args.enable_prefix_caching:
            output = token_ids(map(stream.token, range(stream.num_output - 1)))
            ids = stream.request.token_ids + output
            self._blocks.store(stream.block_table, ids, stream.request.cache_salt)

    def stats(self, pending: Sequence[int]) -> EngineStats:
        """Return the statistics.

        Args:
            pending: the length of the prompt of each pending KV transfer, in tokens.
        """
        pending_blocks = sum(self.num_blocks(prompt_tokens) for prompt_tokens in pending)
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=self._blocks.num_used,
            kv_blocks_total=self._args.kv_cache_blocks,
            pending_kv_transfers=len(pending),
            # Transfers share cached blocks, so the sum may be too large.
            pending_kv_blocks=min(self._blocks.num_used, pending_blocks),
            queued_prefill_tokens=sum(
                stream.prefill_left for stream in (*self._waiting, *self._running)
            ),
            context_tokens=sum(
                stream.prompt_tokens + stream.num_output for stream in self._running
            ),
        )

    async def drain(self) -> None:
        """Wait until no stream and no published prompt uses blocks."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """End the steps. All streams end with an error."""
        self._blocks.on_events = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_idle(self) -> None:
        # Prompts that are published use blocks.
        is_busy = self._waiting or self._running or self._blocks.num_used
        if not is_busy:
            self._idle.set()

    async def _run(self) -> None:
        """Run steps for ever; sleep when there is nothing to do. Requests fail when this ends.

        A step starts when the time of the step before it is over, so other work on the event loop
        does not lengthen steps.
        """
        begun_s = 0.0  # when the step would begin if no other work delayed it
        last_s = 0.0  # when the last step really ended
        try:
            while True:
                self._step_number += 1
                self._num_decoding = self._count_decoding()
                self._admit()
                pause_s = self._posts.begin(self._step_number)
                if not any(self._is_in_step(stream) for stream in self._running):
                    self._send_delayed()
                    self._next_unplanned = 0  # nothing is planned: any step takes what comes
                    if self._has_later_work():
                        # All streams that were planned for this step were cancelled. Streams that
                        # came later are for the next step.
                        continue
                    self._work.clear()
                    await self._work.wait()
                    begun_s = self._clock()
                    last_s = begun_s
                    self._sent_s = begun_s
                    continue
                prompts = self._plan_prompts()
                decoding = self._decoding()
                step_s = self._step_times.seconds(prompts, decoding) + pause_s
                await self._launch(prompts, begun_s + step_s)
                await asyncio.sleep(begun_s + step_s - self._clock())
                now = self._clock()
                # The step after a late one is shorter. At most one missed step is caught up on.
                begun_s = max(begun_s + step_s, now - step_s)
                if prompts and decoding:
                    planned = self._chunk_size.tokens
                    is_full = sum(prompts.values()) >= planned
                    self._chunk_size.measured(step_s, planned, is_full=is_full)
                self._step(now - last_s, prompts, decoding)
                last_s = now
        finally:
            for stream in (*self._waiting, *self._running):
                stream.emit(EngineFailed("the mock engine stopped during the request"))

    async def _launch(self, prompts: Mapping[MockStream, int], end_s: float) -> None:
        """Launch the step that has begun: send what waited for it, and plan the next one.

        The launch begins when the results of the step before the last one are sent. Calls that come
        before it ends are in the next step.

        Args:
            prompts: the tokens of prompts that the step computes.
            end_s: when the step ends.
        """
        has_graph = sum(prompts.values()) <= self._args.max_graph_tokens
        if self._args.prefill_launch_s and not has_graph:
            self._next_unplanned = self._step_number + 1
            launched_s = self._sent_s + self._args.prefill_launch_s
            await asyncio.sleep(min(launched_s, end_s) - self._clock())
        if self._delayed_sends:
            self._send_delayed()
        self._plan_next(prompts)

    def _plan_prompts(self) -> dict[MockStream, int]:
        """Return how many tokens of which prompts the next step computes."""
        max_tokens = self._args.prefill_tokens_per_step
        if self._limits_prompts and self._prompts and (streams := self._streams()):
            self._chunk_size.follow(stream.itl_limit_s for stream in streams)
            max_tokens = min(max_tokens, self._chunk_size.tokens + self._num_decoding)
        planned: dict[MockStream, int] = {}
        num_planned = self._num_decoding  # tokens of the step
        for stream in self._prompts:
            limit = max_tokens
            left = max_tokens - self._num_decoding
            # Without a time per prompt token, a smaller step would save nothing.
            if self._args.has_prompt_time and left > 0:
                limit = self._num_decoding + step_limit(left, stream.request)
            count = min(limit - num_planned, stream.prefill_left)
            # Without `splits_prompts`, a prompt that does not fit waits, unless it is the first.
            if planned and count < stream.prefill_left and not self._args.splits_prompts:
                break
            if count > 0:
                planned[stream] = count
                num_planned += count
        return planned

    def _count_decoding(self) -> int:
        """Return how many tokens decode requests take of the step that begins."""
        if not self._args.decodes_take_step_tokens:
            return 0
        return len(self._decoding())

    def _is_in_step(self, stream: MockStream) -> bool:
        """Return whether the step that begins has work for a stream."""
        return stream.wanted > 0 and stream.first_step <= self._step_number

    def _has_later_work(self) -> bool:
        """Return whether the next steps have work that this one has not."""
        number = self._step_number
        streams = (*self._waiting, *self._running)
        if any(stream.wanted > 0 and stream.first_step > number for stream in streams):
            return True
        return self._posts.has_later(number)

    def _plan_next(self, prompts: Mapping[MockStream, int]) -> None:
        """Note which step has place for what comes while this one runs.

        An engine that plans ahead plans the next step now, if work is left for it.

        Args:
            prompts: the tokens of prompts that this step computes.
        """
        self._next_unplanned = self._step_number + 1
        if self._args.plan_ahead and (self._waiting or self._has_work_left(prompts)):
            self._next_unplanned += 1

    def _has_work_left(self, prompts: Mapping[MockStream, int]) -> bool:
        """Return whether the running streams have work for the step after this one."""
        for stream in self._running:
            if stream.prefill_left > prompts.get(stream, 0):
                return True
            if stream.wanted > 1 or (stream.wanted and not self._is_in_step(stream)):
                return True
        return False

    def _decoding(self) -> list[MockStream]:
        """Return the streams that get a token in the step that begins, and have no prompt left."""
        number = self._step_number
        # `_is_in_step` has the same tests. Calls of it would take a fifth of a simulation's time.
        return [
            stream
            for stream in self._running
            if stream.wanted > 0 and stream.first_step <= number and not stream.prefill_left
        ]

    def _streams(self) -> list[MockStream]:
        """Return the streams that generate tokens, in this step or once their KV is fetched."""
        number = self._step_number
        running = [
            stream
            for stream in self._running
            if not stream.prefill_left and (stream.wanted or stream.is_fetching)
        ]
        # They begin as soon as there is space.
        waiting = [
            stream
            for stream in self._waiting
            if stream.is_decode_call and stream.first_step <= number
        ]
        return running + waiting

    def _admit(self) -> None:
        """Start queued streams in order, while there is space in the batch and in the KV blocks."""
        lacking = ""  # what the next waiting request lacks
        # Tokens of a step that running prompts do not take, by group (`QueueOrder` has two).
        budgets = [self._args.prefill_tokens_per_step - self._num_decoding] * 2
        for stream in self._prompts:
            _take(budgets, stream)
        while self._waiting:
            promote_overdue(self._waiting, self._clock)
            stream = self._next_waiting(budgets)
            if stream.first_step > self._step_number:
                break
            # In elastic engines, prompts leave decode calls tokens of each step.
            needs_budget = not (self._limits_prompts and stream.is_decode_call)
            if needs_budget and budgets[stream.queue_order.group] <= 0:
                # The running prefills take all tokens of a step.
                lacking = "slots"
            else:
                lacking = self._reserve(stream)
            if lacking:
                record_wait(stream, lacking)
                break
            self._waiting.remove(stream)
            _take(budgets, stream)
            self._begin(stream)
        self._queue_waits.waiting_for(lacking)

    def _next_waiting(self, budgets: Sequence[int]) -> MockStream:
        """Return the waiting stream that starts next.

        In elastic engines, decode calls start before prompts (see `vllm.chunk_threshold`). A prompt
        that has waited for MAX_WAIT_S for a slot or for KV blocks goes first. One that only waits
        for tokens of a step (`budgets`) does not.
        """
        if self._limits_prompts:
            overdue_s = self._clock() - MAX_WAIT_S
            for stream in self._waiting:
                if stream.queued_s <= overdue_s and budgets[stream.queue_order.group] > 0:
                    return stream
                if stream.is_decode_call and stream.first_step <= self._step_number:
                    return stream
        return self._waiting[0]

    def _begin(self, stream: MockStream) -> None:
        """Add a stream to the batch.

        A decode call fetches its KV while it is in the batch. Then `generate_rest` lets the next
        steps generate its tokens.
        """
        self._running[stream] = None
        if stream.admitted is not None and not stream.admitted.done():
            stream.admitted.set_result(None)
        if stream.prefill_left:
            insort(self._prompts, stream, key=group_of)
        RECORDER.record(stream.request.request_id, RecordedEvent.STARTED_IN_ENGINE)
        if stream.request.kv_params is None:
            stream.phases.end("queue")
            stream.phases.seconds |= self._queue_waits.since(stream.queue_waits)

    def _reserve(self, stream: MockStream) -> str:
        """Reserve what a waiting request needs to start.

        Return the resource that it lacks; "" if it can start.
        """
        if len(self._running) >= self._args.max_batch_size:
            return "slots"
        request = stream.request
        # A decode call fetches the KV of its prompt, and takes none from the prefix cache.
        prompt = None if request.kv_params else request.token_ids
        is_reserved = self._blocks.reserve(
            stream.block_table, prompt, request.cache_salt, self.num_blocks(stream.kv_tokens)
        )
        if not is_reserved:
            return "kv_blocks"
        cached_tokens = len(stream.block_table.chain) * self._args.kv_block_size
        stream.phases.cached_tokens = cached_tokens
        stream.prefill_left -= cached_tokens
        return ""

    def _step(
        self, seconds: float, prompts: Mapping[MockStream, int], decoding: Sequence[MockStream]
    ) -> None:
        """End a step, which has computed tokens of `prompts` and a token of each of `decoding`."""
        num_decoding = 0
        context_tokens = 0
        prefill_tokens = 0
        attention_pairs = 0.0
        for stream, count in prompts.items():
            if not stream.prefill_left:
                continue  # it was retired meanwhile
            prefill_tokens += count
            attention_pairs += stream.attention_pairs(count)
            stream.prefill_left -= count
        self._prompts = [stream for stream in self._prompts if stream.prefill_left]
        is_launch_slow = self._is_launch_slow()
        emit = self._delay if is_launch_slow else MockStream.emit
        sends_each = self._tokens_per_event == 1 or is_launch_slow
        now = self._clock()
        for stream in decoding:
            if stream.wanted <= 0:
                continue  # it was retired meanwhile
            num_decoding += 1
            context_tokens += stream.prompt_tokens + stream.num_output
            if sends_each or stream.wanted == 1 or stream.num_output < 2:
                self._generate(stream, emit)
            else:
                self._generate_unsent(stream, now)
        for stream in prompts:
            if stream.wanted > 0 and not stream.prefill_left:
                self._generate(stream, emit)
        if not self._delayed_sends:
            self._sent_s = self._clock()
        if num_decoding or prefill_tokens:
            sample = StepSample(
                seconds, num_decoding, context_tokens, prefill_tokens, attention_pairs
            )
            self.steps.append(sample)

    def _is_launch_slow(self) -> bool:
        """Return whether the results of this step wait until the next one is launched."""
        if not self._args.prefill_launch_s:
            return False
        num_tokens = sum(stream.prefill_left for stream in self._prompts)
        if self._waiting and self._waiting[0].first_step <= self._step_number + 1:
            num_tokens += self._waiting[0].prefill_left
        return num_tokens > self._args.max_graph_tokens

    def _delay(self, stream: MockStream, chunk: Chunk) -> None:
        """Send a chunk once the next step has been launched."""
        self._delayed_sends.append(partial(stream.emit, chunk))

    def _send_delayed(self) -> None:
        """Send the results that waited for the launch of a step."""
        for send in self._delayed_sends:
            send()
        self._delayed_sends.clear()
        self._sent_s = self._clock()

    def _generate_unsent(self, stream: MockStream, now: float) -> None:
        """Generate a token of a stream that is not among its first two, and not its last one.

        It is sent together with the next tokens.
        """
        stream.num_output += 1
        stream.wanted -= 1
        stream.num_unsent += 1
        # `note_token` does the same. Calls of it would take a part of a simulation's time.
        gap_s = now - stream.token_s
        if gap_s > stream.worst_gap_s:
            stream.worst_gap_s = gap_s
        stream.token_s = now
        if stream.num_unsent >= self._tokens_per_event:
            stream.send_unsent()

    def _generate(self, stream: MockStream, emit: Callable[[MockStream, Chunk], None]) -> None:
        """Generate the next token of a stream.

        Args:
            stream: the stream.
            emit: a function that sends the chunk, or delays it.
        """
        request = stream.request
        stream.send_unsent()
        first = stream.token(stream.num_output)
        new = token_ids((first,))
        stats = None
        if stream.num_output == 0:
            if request.kv_params is None:
                stream.phases.end("prefill")
                RECORDER.record(request.request_id, RecordedEvent.PREFILL_DONE)
            else:
                stream.phases.end("first_token")
                # vLLM has the first token as a part of the prompt, so the step computes the second.
                new.append(stream.token(1))
            self.store(stream)
            stats = stream.phases.timings()
        elif stream.num_output == 1 and request.kv_params is not None:
            stream.phases.end("decode_wait")
        stream.num_output += len(new)
        stream.wanted -= len(new)
        if stream.wanted and stats is None:
            emit(stream, TOKEN_CHUNKS[first])
        elif stream.wanted:
            emit(stream, Chunk(token_ids=new, stats=stats))
        elif request.phase is Phase.PREFILL and request.sampling.max_tokens > 1:
            self._on_prefilled(stream, first)
        else:
            stats = stream.phases.timings()
            emit(stream, Chunk(token_ids=new, finish_reason=FinishReason.LENGTH, stats=stats))


def _take(budgets: list[int], stream: MockStream) -> None:
    """Subtract the tokens of a prompt from the budgets of its group and of all later groups."""
    for group in range(stream.queue_order.group, len(budgets)):
        budgets[group] -= stream.prefill_left

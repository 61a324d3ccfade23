"""Simulate an engine, to test and measure workers, request plane and frontends without a model.

The "KV" of a request is the seed of its tokens and the index of each block. A decode engine
generates the right tokens only from the KV that it received; with other KV it generates other
tokens, as a model would. Every output has exactly `max_tokens` tokens.

Tokens are deterministic, so the engine accepts and ignores parameters that shape only random
sampling (temperature, top_p, top_k, min_p, seed) or only prevent an early end. It rejects
parameters whose absence a client could notice.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from array import array
from collections import deque

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.cost_model import StepSample
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.base import MOST_STEPS, Engine, EngineInfo, EngineStats
from dynamo_trtllm.engines.block_manager import BlockManager, BlockTable
from dynamo_trtllm.engines.mock.args import KV_WORDS, MockArgs, mock_info
from dynamo_trtllm.engines.waiting import FIRST, enqueue, promote_overdue, record_wait
from dynamo_trtllm.errors import (
    ContextTooLong,
    DynamoError,
    EngineFailed,
    Overloaded,
    RequestRejected,
)
from dynamo_trtllm.kv_events import OnKvEvents
from dynamo_trtllm.kv_transfer.base import Destination, TransferBackend
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.transfers import KvTransfers
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    token_ids,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.phases import CallPhases, QueueWaits
from dynamo_trtllm.streams import OnEvent, StreamHandle, TaskStream

# <|channel|>final<|message|> of the Harmony format; tokens after it are content
_OPENING = (200005, 17196, 200008)
_MAX_SEED = 0xFFFF


class MockStream(TaskStream):
    """One request in the simulated batch.

    It passes tokens on within the step, and imports and exports its KV in a task.
    """

    def __init__(self, engine: MockEngine, request: GenerateRequest, on_event: OnEvent) -> None:
        super().__init__(on_event, engine.tasks, engine)
        # Tokens that an earlier worker generated follow the client's prompt.
        prompt_tokens = len(request.token_ids) - request.num_resumed_output_tokens
        prompt = request.token_ids[:prompt_tokens]
        self._engine = engine
        self.request = request
        most_new = 0 if request.phase is Phase.PREFILL else request.sampling.max_tokens
        self.num_blocks = engine.num_blocks(len(request.token_ids) + most_new)
        self.block_table = BlockTable()
        self.seed = zlib.crc32(prompt) & _MAX_SEED
        self.prefill_left = 0 if request.kv_params else len(request.token_ids)
        self.num_output = 0
        self.wanted = 0  # tokens to generate, one per step
        self.phases = CallPhases(request.kv_params)
        self._queue_waits = engine.queue_waits.read()  # at the arrival
        self.queued_s = 0.0  # as for `WaitingRequest`
        self.is_overdue = False  # as for `WaitingRequest`
        self.recorded_wait = ""  # as for `WaitingRequest`

    @property
    def queue_order(self) -> float:
        """Return the place in the queue: lower values first."""
        return FIRST if self.is_overdue else self.request.priority

    def admitted(self) -> None:
        """End the wait in the queue.

        A decode call fetches its KV meanwhile and waits for its first step afterwards.
        """
        RECORDER.record(self.request.request_id, RecordedEvent.STARTED_IN_ENGINE)
        if self.request.kv_params is None:
            self.phases.end("queue")
            self.phases.seconds |= self._engine.queue_waits.since(self._queue_waits)

    def start(self) -> None:
        """Queue the request. Raises the error of a rejected one."""
        self._engine.add(self)
        if self.request.kv_params is None:
            self.generate_rest()
        else:
            importing = self._engine.import_kv(self, self.request.kv_params)
            self.run(importing, f"mock-import-{self.request.request_id}")

    def generate_rest(self) -> None:
        """Let the next steps generate the tokens of this call that it does not have yet."""
        if self.request.phase is Phase.PREFILL:
            self.wanted = 1
        else:
            self.wanted = self.request.sampling.max_tokens - self.num_output
        self._engine.work.set()

    def token(self, index: int) -> int:
        """Return an output token of this call.

        The output begins with the Harmony prefix. Then each token is a function of seed and index.
        """
        position = self.request.num_resumed_output_tokens + index
        if position < len(_OPENING):
            return _OPENING[position]
        return 1000 + (self.seed + position * 7919) % 4000

    def step(self) -> None:
        """Generate one token."""
        token = self.token(self.num_output)
        stats = None
        if self.num_output == 0:
            self.phases.end("prefill")
            RECORDER.record(self.request.request_id, RecordedEvent.PREFILL_DONE)
            self._engine.store(self)
            stats = self.phases.timings()
        elif self.num_output == 1 and self.request.kv_params is not None:
            self.phases.end("decode_wait")
        self.num_output += 1
        self.wanted -= 1
        if self.wanted:
            self.emit(Chunk(token_ids=token_ids((token,)), stats=stats))
        elif self.request.phase is Phase.PREFILL and self.request.sampling.max_tokens > 1:
            exporting = self._engine.export_kv(self, token)
            self.run(exporting, f"mock-export-{self.request.request_id}")
        else:
            last = Chunk(
                token_ids=token_ids([token]),
                finish_reason=FinishReason.LENGTH,
                stats=self.phases.timings(),
            )
            self.emit(last)

    def _free(self) -> None:
        self._engine.remove(self)


class MockEngine(Engine):
    """An `Engine` that simulates a model."""

    def __init__(
        self, config: WorkerConfig, *, instance_id: int, backend: TransferBackend | None = None
    ) -> None:
        args = engine_arguments(config, MockArgs, "mock")
        if backend is None:
            backend = create_backend(args.transfer_backend, config, kv_checksums=args.kv_checksums)
        self._args = args
        self._backend = backend
        self._transfers = KvTransfers(
            self._backend, config, engine="mock", instance_id=instance_id, layout=args.layout
        )
        self.queue_waits = QueueWaits()
        self._waiting: deque[MockStream] = deque()
        self._running: dict[MockStream, None] = {}
        self._blocks = BlockManager(
            args.kv_cache_blocks, args.kv_block_size, has_prefix_cache=args.enable_prefix_caching
        )
        self.work = asyncio.Event()  # set when the next step has work
        self._idle = asyncio.Event()
        self._idle.set()
        self._step_task: asyncio.Task[None] | None = None
        self._steps: deque[StepSample] = deque(maxlen=MOST_STEPS)
        self.tasks: set[asyncio.Task[None]] = set()  # of streams

    async def start(self) -> EngineInfo:
        await self._backend.start(self._transfers.release)
        self._step_task = asyncio.create_task(self._run(), name="mock-engine-steps")
        return mock_info(self._args, self._transfers.identity.layout)

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = MockStream(self, request, on_event)
        try:
            self._check()
            stream.start()
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        return stream

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `Engine.start_kv_events`."""
        self._blocks.on_events = on_events

    # --- called by streams ------------------------------------------------------------------------

    def add(self, stream: MockStream) -> None:
        """Queue a stream.

        Raises ContextTooLong, RequestRejected or Overloaded if it does not fit.
        """
        args = self._args
        total = len(stream.request.token_ids) + stream.request.sampling.max_tokens
        if total > args.max_seq_len:
            raise ContextTooLong(
                f"{total} prompt and output tokens exceed the context of {args.max_seq_len}"
            )
        if stream.num_blocks > args.kv_cache_blocks:
            raise RequestRejected(
                f"the request needs {stream.num_blocks} KV blocks; the engine has"
                f" {args.kv_cache_blocks}"
            )
        if len(self._waiting) >= args.max_queue:
            raise Overloaded(f"{len(self._waiting)} requests are queued; try again later")
        enqueue(self._waiting, stream)
        self._idle.clear()
        self.work.set()

    def remove(self, stream: MockStream) -> None:
        """Remove a stream in any state and free its blocks. A step in progress skips it."""
        stream.wanted = 0
        stream.prefill_left = 0
        if stream in self._running:
            del self._running[stream]
            if stream.num_output > 1:
                self.store(stream)
            self._free(stream.block_table)
        elif stream in self._waiting:
            self._waiting.remove(stream)
        self._note_idle()

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of KV blocks for a number of tokens."""
        return -(-num_tokens // self._args.kv_block_size)

    def _free(self, block_table: BlockTable) -> None:
        self._blocks.free(block_table)
        self.work.set()

    def store(self, stream: MockStream) -> None:
        """Let the prefix cache have the full blocks of a stream.

        Its last output token has no KV yet.
        """
        if self._args.enable_prefix_caching:
            output = token_ids(map(stream.token, range(stream.num_output - 1)))
            ids = stream.request.token_ids + output
            self._blocks.store(stream.block_table, ids, stream.request.cache_salt)

    async def import_kv(self, stream: MockStream, kv_params: KvTransferParams) -> Chunk:
        """Fetch the seed, and return a chunk with the first tokens of the KV transfer parameters.

        The rest follows.
        """
        num_blocks = self.num_blocks(len(stream.request.token_ids))
        kv_bytes = num_blocks * KV_WORDS * array("I").itemsize
        # Check the parameters before allocating this much memory.
        self._transfers.validate(stream.request, kv_bytes=kv_bytes)
        if len(kv_params.first_token_ids) >= stream.request.sampling.max_tokens:
            raise RequestRejected(
                f"KV transfer {kv_params.transfer_id} has all requested tokens; increase max_tokens"
                " to decode more"
            )
        kv = array("I", bytes(kv_bytes))
        address, _ = kv.buffer_info()
        region = MemoryRegion(address, kv_bytes)
        await self._transfers.fetch(stream.request, kv_params.engine_state, Destination([region]))
        stream.seed = _seed_of(kv)
        stream.num_output = len(kv_params.first_token_ids)
        stream.phases.end("handoff")
        self.store(stream)
        stream.generate_rest()
        return Chunk(token_ids=kv_params.first_token_ids, stats=stream.phases.timings())

    async def export_kv(self, stream: MockStream, first: int) -> Chunk:
        """Publish the KV of a prompt, and return the chunk with its KV transfer parameters."""
        kv = _kv_of(stream.seed, stream.num_blocks)
        # The blocks stay reserved until `unpublished`, also after the end of the stream.
        block_table = stream.block_table
        stream.block_table = BlockTable()

        # The default value keeps the memory alive until then.
        def unpublished(_: array[int] = kv) -> None:
            self._free(block_table)
            self._note_idle()

        address, _ = kv.buffer_info()
        regions = [MemoryRegion(address, len(kv) * kv.itemsize)]
        chunk = Chunk(token_ids=token_ids([first]))
        kv_params = await self._transfers.publish(stream.request, chunk, regions, unpublished)
        stream.phases.end_export(kv_params)
        return Chunk(
            finish_reason=FinishReason.KV_TRANSFER,
            kv_params=kv_params,
            stats=stream.phases.timings(),
        )

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        self._transfers.release(transfer_id)

    def is_pending(self, transfer_id: str) -> bool:
        return self._transfers.is_pending(transfer_id)

    def _note_idle(self) -> None:
        # Prompts that are published use blocks.
        is_busy = self._waiting or self._running or self._blocks.used
        if not is_busy:
            self._idle.set()

    @property
    def steps(self) -> deque[StepSample]:
        return self._steps

    def stats(self) -> EngineStats:
        pending = self._transfers.prompt_tokens
        pending_blocks = sum(self.num_blocks(prompt_tokens) for prompt_tokens in pending)
        used = self._blocks.used
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=used,
            kv_blocks_total=self._args.kv_cache_blocks,
            tickets_held=len(pending),
            # Transfers share cached blocks, so the sum may be too large.
            ticket_kv_blocks=min(used, pending_blocks),
            kv_checksum_mismatches=self._backend.checksums.mismatches,
            queued_prefill_tokens=sum(
                stream.prefill_left for stream in (*self._waiting, *self._running)
            ),
            context_tokens=sum(
                len(stream.request.token_ids) + stream.num_output for stream in self._running
            ),
        )

    # --- the batch --------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run steps forever; sleep when there is nothing to do. When this ends, each request fails.

        A step starts when the time of the step before it is over, so other work on the event loop
        does not lengthen steps.
        """
        is_constant = self._args.is_constant
        begun_s = 0.0  # when the step would begin if no other work delayed it
        last_s = 0.0  # when the last step really ended
        try:
            while True:
                self._admit()
                if not any(stream.wanted for stream in self._running):
                    self.work.clear()
                    await self.work.wait()
                    begun_s = time.monotonic()
                    last_s = begun_s
                    continue
                if is_constant:
                    step_s = self._args.step_s
                else:
                    step_s = self._step_seconds()
                await asyncio.sleep(begun_s + step_s - time.monotonic())
                now = time.monotonic()
                # Catch up on at most one missed step.
                begun_s = max(begun_s + step_s, now - step_s)
                self._step(now - last_s)
                last_s = now
        finally:
            for stream in (*self._waiting, *self._running):
                stream.emit(EngineFailed("the mock engine stopped during the request"))

    def _step_seconds(self) -> float:
        """Return how long a step with the running calls takes."""
        num_decoding = 0
        context_tokens = 0
        prefill_tokens = 0
        for stream in self._running:
            prefill_tokens += stream.prefill_left
            if stream.wanted > 0 and stream.prefill_left == 0:
                num_decoding += 1
                context_tokens += len(stream.request.token_ids) + stream.num_output
        return self._args.step_seconds(
            num_decoding=num_decoding, context_tokens=context_tokens, prefill_tokens=prefill_tokens
        )

    def _admit(self) -> None:
        lacking = ""
        to_prefill = sum(stream.prefill_left for stream in self._running)
        budget = self._args.prefill_tokens_per_step - to_prefill
        while self._waiting:
            promote_overdue(self._waiting)
            lacking = "slots" if budget <= 0 else self._lacking()
            if lacking:
                break
            stream = self._waiting.popleft()
            budget -= stream.prefill_left
            stream.admitted()
            self._running[stream] = None
        self.queue_waits.waiting_for(lacking if self._waiting else "")
        if self._waiting:
            record_wait(self._waiting[0], lacking)

    def _lacking(self) -> str:
        """Reserve what the first waiting request needs.

        Return what it lacks; "" if it can start.
        """
        if len(self._running) >= self._args.max_batch_size:
            return "slots"
        stream = self._waiting[0]
        request = stream.request
        # A decode call fetches the KV of its prompt, and takes none from the prefix cache.
        prompt = None if request.kv_params else request.token_ids
        is_reserved = self._blocks.reserve(
            stream.block_table, prompt, request.cache_salt, stream.num_blocks
        )
        if not is_reserved:
            return "kv_blocks"
        stream.phases.cached_tokens = len(stream.block_table.chain) * self._args.kv_block_size
        stream.prefill_left -= stream.phases.cached_tokens
        return ""

    def _step(self, seconds: float) -> None:
        num_decoding = 0
        context_tokens = 0
        prefill_tokens = 0
        attention_pairs = 0.0
        for stream in list(self._running):
            prompt_tokens = len(stream.request.token_ids)
            if stream.prefill_left > 0:
                budget = self._args.prefill_tokens_per_step - prefill_tokens
                taken = min(budget, stream.prefill_left)
                prefill_tokens += taken
                stream.prefill_left -= taken
                computed_tokens = prompt_tokens - stream.prefill_left
                attention_pairs += taken * (computed_tokens - taken / 2)
            elif stream.wanted > 0:
                num_decoding += 1
                context_tokens += prompt_tokens + stream.num_output
            if stream.prefill_left == 0 and stream.wanted > 0:
                stream.step()
        if num_decoding or prefill_tokens:
            sample = StepSample(
                seconds, num_decoding, context_tokens, prefill_tokens, attention_pairs
            )
            self._steps.append(sample)

    async def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._step_task is None or self._step_task.done():
            raise EngineFailed("the mock engine is not running")
        self._backend.check()

    async def drain(self) -> None:
        await self._idle.wait()

    async def aclose(self) -> None:
        self._blocks.on_events = None
        if self._step_task is not None:
            self._step_task.cancel()
            await asyncio.gather(self._step_task, return_exceptions=True)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._transfers.aclose()


def _kv_of(seed: int, blocks: int) -> array[int]:
    kv = array("I", [seed]) * (blocks * KV_WORDS)
    kv[::KV_WORDS] = array("I", range(seed, seed + blocks))
    return kv


def _seed_of(kv: array[int]) -> int:
    """Return the seed in `kv`, or another seed if any bit of `kv` has changed."""
    seed = kv[-1]
    if seed <= _MAX_SEED and kv == _kv_of(seed, len(kv) // KV_WORDS):
        return seed
    return zlib.crc32(kv) & _MAX_SEED

"""Run the model in one thread that owns the KV pool and every sequence: one forward pass per step.

The event loop posts closures (`post`). All events of a step return in one call of `deliver`. A
sequence reserves its blocks for prompt and output before it starts, so a running sequence is never
preempted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.engine_interface import EngineStats, client_request_id
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.block_allocator import AwaitingFetch, BlockAllocator
from dynamo_trtllm.engines.torch.grammar import LEFT_FORMAT
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.model_runner import ModelRunner, PrefillChunk
from dynamo_trtllm.engines.torch.sampler import SampledToken
from dynamo_trtllm.engines.torch.scheduler_load import SchedulerLoad
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.engines.waiting_requests import (
    enqueue,
    group_of,
    promote_overdue,
    record_wait,
    step_limit,
)
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.counted import counted_are
from dynamo_trtllm.protocol.errors import (
    EngineFailed,
    NonFinite,
    NonFiniteKv,
    Overloaded,
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, Phase, token_ids
from dynamo_trtllm.protocol.phases import QueueWaits

log = logging.getLogger(__name__)
# The engine fails when this many requests within _NON_FINITE_S seconds had NaN or infinity.
_MAX_NON_FINITE = 3
_NON_FINITE_S = 60.0
# The most prompt tokens of a step whose log-probabilities are requested. Each of these tokens takes
# memory for its logits.
_MAX_SCORED = 256

Delivery: TypeAlias = list[Callable[[], None]]
"""The events of one step, in order: calls to make on the event loop."""


@dataclass(eq=False)
class Scheduler:
    """The thread that runs the model.

    The methods under "called from outside" may run on any thread, all others run on this thread.
    """

    model_runner: ModelRunner
    pool: KvPool
    # The buffer of an aggregated engine has no bytes.
    transfer_buffer: TransferBuffer
    args: TorchArgs
    num_threads: int | None  # CPU threads of the model, None for PyTorch's default
    deliver: Callable[[Delivery], None]  # called on the thread with the events of a step
    # The next three are called as events of a step.
    # Called when blocks and transfer-buffer space for the KV of a decode call are reserved. The
    # tensor has the rows of `KvPool.all_rows` that the KV goes to, int64 [rows].
    on_reserved: Callable[[TorchSequence, Allocation, Tensor], None]
    # Called when the KV of a prefill call is copied to the transfer buffer, or is being copied. On
    # a GPU, the event of a region shows that its copy is done. The blocks stay reserved until the
    # sequence is retired.
    on_prefilled: Callable[[TorchSequence, Allocation, list[torch.cuda.Event]], None]
    # Called when a sequence was dropped, and its blocks are free.
    on_freed: Callable[[TorchSequence], None]
    # Called on the thread with the reason why no step follows.
    on_end: Callable[[EngineFailed], None]
    # In an elastic engine, steps have fewer prompt tokens while streams run.
    is_elastic: bool = False

    def __post_init__(self) -> None:
        self.blocks = BlockAllocator(self.pool, has_prefix_cache=self.args.enable_prefix_caching)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[TorchSequence] = deque()
        self._reserved: list[TorchSequence] = []  # decode calls whose KV is being fetched
        self._prefilling: list[TorchSequence] = []
        self._decoding: list[TorchSequence] = []
        # Prefilled sequences that wait for space in the transfer buffer.
        self._awaiting_buffer: deque[TorchSequence] = deque()
        self._stages = [
            self._waiting,
            self._reserved,
            self._prefilling,
            self._decoding,
            self._awaiting_buffer,
        ]
        self._awaiting_fetch = AwaitingFetch()
        self._queue_waits = QueueWaits()
        self._events: Delivery = []
        # `client_request_id` of a request -> when an output of it was last NaN or infinite.
        self._non_finite: dict[str, float] = {}
        self._stopping = False
        self._chunk_size = ChunkSize(self.args.max_step_tokens)
        self.load = SchedulerLoad(self._take_stats())
        self.thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    # --- called from outside ----------------------------------------------------------------------

    def join(self) -> None:
        if self.thread.ident is not None:
            self.thread.join()

    def post(self, message: Callable[[], None]) -> None:
        """Run `message` on the scheduler's thread before its next step."""
        self._posted.put(message)

    def submit(self, seq: TorchSequence) -> None:
        """Queue a sequence. The statistics count it from now on.

        Only one thread may call this method.
        """
        self.load.submit(seq)
        self.post(partial(self._take, seq))

    # --- messages: run on the thread --------------------------------------------------------------

    def _take(self, seq: TorchSequence) -> None:
        self.load.take(seq)
        if len(self._waiting) >= self.args.max_queue:
            rejected = Overloaded(
                f"{counted_are(len(self._waiting), 'request')} queued; try again later"
            )
            self._events.append(partial(seq.emit, rejected))
        else:
            seq.queue_waits = self._queue_waits.read()
            enqueue(self._waiting, seq)

    def install(self, seq: TorchSequence) -> None:
        """Continue a sequence whose KV was fetched and whose copies into the pool are queued."""
        kv_params = seq.request.kv_params
        if seq not in self._reserved or kv_params is None:
            # The sequence was dropped in the meantime.
            return
        if not self.pool.is_finite(seq.blocks, seq.prompt_tokens):
            self._drop(seq)
            worker = kv_params.prefill_instance_id
            text = (
                f"KV transfer {kv_params.transfer_id}: the KV has NaN or infinity; check prefill"
                f" worker {worker:x}"
            )
            self._events.append(partial(seq.emit, NonFiniteKv(text)))
            return
        self._reserved.remove(seq)
        self._free_allocation(seq)
        seq.num_computed_tokens = seq.prompt_tokens
        self.blocks.store(seq)
        seq.output_ids += kv_params.first_token_ids
        if seq.logits_processor is not None:
            for token_id in kv_params.first_token_ids:
                seq.logits_processor.accept_token(token_id)
        seq.phases.end("kv_transfer")
        first = Chunk(
            token_ids=kv_params.first_token_ids,
            logprobs=kv_params.first_logprobs,
            stats=seq.phases.timings(),
        )
        if seq.num_output_tokens < seq.max_new_tokens:
            seq.awaits_step = True
            self._decoding.append(seq)
        else:
            # The prefill call has generated all tokens that the request may have.
            first = msgspec.structs.replace(first, finish_reason=FinishReason.LENGTH)
            self._drop(seq)
        self._events.append(partial(seq.emit, first))

    def retire(self, seq: TorchSequence) -> None:
        """End a sequence in any state, free its blocks and call `on_freed` with it.

        Idempotent.
        """
        self._drop(seq)
        self._events.append(partial(self.on_freed, seq))

    def _drop(self, seq: TorchSequence) -> None:
        """Free all that a sequence has. Its full blocks stay in the prefix cache.

        Unlike `retire`, it does not call `on_freed`.
        """
        if seq in self._decoding:
            self.blocks.store(seq)
        for seqs in self._stages:
            if seq in seqs:
                seqs.remove(seq)
        self._awaiting_fetch.discard(seq)
        self._free_allocation(seq)
        self.blocks.manager.free(seq.block_table)

    def _free_allocation(self, seq: TorchSequence) -> None:
        if seq.allocation is not None:
            self.transfer_buffer.free(seq.allocation)
            seq.allocation = None

    def stop(self) -> None:
        self._stopping = True

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = EngineFailed("the engine was closed")
        try:
            if self.num_threads is not None:
                # This is a setting of the thread.
                torch.set_num_threads(self.num_threads)
            if self.pool.device.type == "cuda":
                # Some kernels use the current device.
                torch.cuda.set_device(self.pool.device)
            with torch.inference_mode():
                while not self._stopping:
                    self._run_iteration()
        except EngineFailed as exc:
            reason = exc
        except Exception as exc:
            # Any error of a step ends all streams.
            log.exception("the torch engine's step failed")
            reason = EngineFailed(f"the torch engine's step failed: {exc}")
        try:
            # A copy, because `_drop` removes the sequences.
            unfinished = list(chain(*self._stages, self._awaiting_fetch.sequences))
            for seq in unfinished:
                self._drop(seq)
            self.load.count_all_as_taken()
            self._publish()
        finally:
            # This is called even if the sequences could not be dropped, as on a broken GPU.
            self.on_end(reason)

    def _run_iteration(self) -> None:
        # Without sequences to compute, wait for the first message. The others are taken only if
        # they are queued already.
        waits = not (self._prefilling or self._decoding)
        while True:
            try:
                message = self._posted.get(block=waits)
            except queue.Empty:
                break
            message()
            waits = False
        self._export_prefilled()
        self._admit()
        if self._prefilling or self._decoding:
            # The statistics are published before the step, which may take seconds.
            self.load.publish(self._take_stats())
            self._step()
        self._publish()

    def _publish(self) -> None:
        self.load.publish(self._take_stats())
        if self._events:
            events = self._events
            self._events = []
            self.deliver(events)

    def _take_stats(self) -> EngineStats:
        return EngineStats(
            running=self._num_running(),
            waiting=len(self._waiting),
            kv_blocks_used=self.blocks.manager.num_used,
            kv_blocks_total=self.pool.num_blocks,
            pending_kv_transfers=len(self._awaiting_fetch.sequences),
            pending_kv_blocks=len(self._awaiting_fetch.blocks),
            queued_prefill_tokens=sum(
                seq.prefill_left for seq in (*self._waiting, *self._prefilling)
            ),
            context_tokens=sum(seq.num_computed_tokens for seq in self._decoding),
        )

    def _admit(self) -> None:
        """Start queued sequences in order, while there is space in the batch and the KV pool."""
        lacking = ""  # what the first waiting sequence lacks
        while self._waiting:
            promote_overdue(self._waiting)
            lacking = self._try_reserve(self._waiting[0])
            if lacking:
                break
            seq = self._waiting.popleft()
            seq.phases.end("queue")
            # The parts of the phase "queue": how long the sequence has waited for each resource.
            seq.phases.seconds |= self._queue_waits.since(seq.queue_waits)
            RECORDER.record(seq.request.request_id, RecordedEvent.STARTED_IN_ENGINE)
            # Only decode calls have an allocation before they start: they fetch their KV.
            if seq.allocation is not None:
                self._reserved.append(seq)
                rows = self.pool.rows(seq.blocks, seq.prompt_tokens)
                self._events.append(partial(self.on_reserved, seq, seq.allocation, rows))
            else:
                # Prompts of clients below their share go before other prompts that have begun.
                insort(self._prefilling, seq, key=group_of)
        # From now on, the sequences in the queue wait for this resource.
        self._queue_waits.waiting_for(lacking)
        if lacking:
            record_wait(self._waiting[0], lacking)

    def _try_reserve(self, seq: TorchSequence) -> str:
        """Reserve what the first waiting sequence needs.

        Return the resource that it lacks; "" if it can start.
        """
        if self._num_running() >= self.args.max_batch_size:
            return "slots"
        if seq.request.phase is Phase.DECODE and seq.allocation is None:
            # The sequence keeps this space while it waits for KV blocks. Meanwhile no other
            # sequence overtakes it (see `TorchSequence.queue_order`).
            seq.allocation = self.transfer_buffer.allocate(
                seq.prompt_tokens, seq.region_bytes, is_fetched=True
            )
            if seq.allocation is None:
                return "transfer_buffer"
        return "" if self.blocks.reserve(seq) else "kv_blocks"

    def _num_running(self) -> int:
        running = len(self._reserved) + len(self._prefilling) + len(self._decoding)
        if self.is_elastic:
            # Sequences that await the transfer buffer take no slot here. Otherwise two elastic
            # engines A and B could block each other: A's slots are full of prompts whose KV B has
            # to fetch, and B's slots are full of prompts whose KV A has to fetch.
            return running
        return running + len(self._awaiting_buffer)

    def _export_prefilled(self) -> None:
        """Copy the KV of prefilled prompts to the transfer buffer, in order, while it has space."""
        while self._awaiting_buffer:
            seq = self._awaiting_buffer[0]
            region_bytes = REGION_BYTES[self.pool.device.type]
            seq.allocation = self.transfer_buffer.allocate(seq.prompt_tokens, region_bytes)
            if seq.allocation is None:
                return
            self._awaiting_buffer.popleft()
            seq.phases.end_part("export.transfer_buffer")
            self._awaiting_fetch.add(seq)
            rows = self.pool.rows(seq.blocks, seq.prompt_tokens)
            copied = self.transfer_buffer.gather(seq.allocation, rows)
            self._events.append(partial(self.on_prefilled, seq, seq.allocation, copied))

    def _step(self) -> None:
        begun_s = time.monotonic()
        decoding = self._decoding[: self.args.max_step_tokens]
        chunks = self._plan_chunks(self.args.max_step_tokens - len(decoding))
        output = self.model_runner.run(decoding, chunks)
        for seq, prompt_chunk in output.prompt_chunks:
            self._events.append(partial(seq.emit, prompt_chunk))
        if output.sampled:
            self._update_from_output(output.sampled, output.tokens)
        # Sampling waits until the device has computed the step. If nothing was sampled, the step
        # may only be queued on the device, and the time measured here is not that of the step.
        is_awaited = bool(output.sampled)
        seconds = time.monotonic() - begun_s
        self.load.measured(output.batch, seconds, is_awaited=is_awaited)
        if decoding and chunks:
            planned_tokens = self._chunk_size.tokens
            is_full = sum(chunk.num_tokens for chunk in chunks) >= planned_tokens
            self._chunk_size.measured(seconds, planned_tokens, is_full=is_full)

    def _plan_chunks(self, budget: int) -> list[PrefillChunk]:
        """Return the number of tokens to compute of each prompt, at most `budget` together."""
        if self.is_elastic and self._decoding:
            slos = [seq.request.slo for seq in self._decoding]
            self._chunk_size.follow(None if slo is None else slo.itl_s for slo in slos)
            budget = min(budget, self._chunk_size.tokens)
        planned = []
        num_planned = 0
        scores_budget = _MAX_SCORED
        for seq in self._prefilling:
            tokens_left = seq.prompt_tokens - seq.num_computed_tokens
            # The limit of this prompt may be lower than that of earlier prompts. Then the step may
            # already have more tokens than this limit.
            left_of_step = max(0, step_limit(budget, seq.request) - num_planned)
            count = min(left_of_step, self.args.prefill_chunk_tokens, tokens_left)
            if seq.scores_prompt:
                count = min(count, scores_budget)
                scores_budget -= count
            if count > 0:
                planned.append(PrefillChunk(seq, count))
                num_planned += count
        return planned

    def _update_from_output(
        self, sampled: list[TorchSequence], tokens: list[SampledToken | None]
    ) -> None:
        """Add the sampled tokens to their sequences.

        The token of a sequence is None if its output was NaN or infinite.
        """
        for seq, token in zip(sampled, tokens, strict=True):
            if seq in self._prefilling:
                seq.phases.end("prefill")
                RECORDER.record(seq.request.request_id, RecordedEvent.PREFILL_DONE)
                self._prefilling.remove(seq)
                self._decoding.append(seq)
                if token is not None:
                    self.blocks.store(seq)
            elif seq.awaits_step:
                seq.awaits_step = False
                seq.phases.end("decode_wait")
            self._handle_token(seq, token)
        if len(self._non_finite) >= _MAX_NON_FINITE:
            raise EngineFailed(
                f"the model's output was NaN or infinite in {len(self._non_finite)} requests within"
                f" {_NON_FINITE_S:g} s"
            )

    def _end_non_finite(self, seq: TorchSequence) -> None:
        """End a sequence whose output is NaN or infinite, and count its request."""
        log.error(
            "request %s: the model's output is NaN or infinite; ending the request",
            seq.request.request_id,
        )
        self.blocks.manager.forget(seq.block_table)
        # `_drop` would store the blocks of a sequence in `_decoding`, but the KV of these blocks is
        # wrong.
        self._decoding.remove(seq)
        self._drop(seq)
        text = (
            "the model's output for this request is NaN or infinite; if it repeats, check weights,"
            " dtype and GPU"
        )
        self._events.append(partial(seq.emit, NonFinite(text)))
        now = time.monotonic()
        recent = {
            name: failed_at
            for name, failed_at in self._non_finite.items()
            if now - failed_at < _NON_FINITE_S
        }
        self._non_finite = recent | {client_request_id(seq.request): now}

    def _handle_token(self, seq: TorchSequence, token: SampledToken | None) -> None:
        """Add a token to its sequence, and emit it, export the prompt's KV, or end the sequence."""
        if token is None:
            self._end_non_finite(seq)
            return
        seq.output_ids.append(token.token_id)
        if seq.logits_processor is not None:
            seq.logits_processor.accept_token(token.token_id)
            failure = seq.logits_processor.failure
            if failure is not None:
                log.warning(
                    "request %s: structured output failed: %s", seq.request.request_id, failure
                )
                rejected = RequestRejected(LEFT_FORMAT, field="guided")
                self._events.append(partial(seq.emit, rejected))
                self._drop(seq)
                return
        ids = token_ids([token.token_id])
        reason = seq.finish_reason()
        logprobs = (token.logprob,) if token.logprob is not None else ()
        if reason is None and seq.request.phase is Phase.PREFILL:
            self._decoding.remove(seq)
            seq.first_chunk = Chunk(token_ids=ids, logprobs=logprobs)
            self._awaiting_buffer.append(seq)
            self._export_prefilled()
            return
        is_first_or_last = reason is not None or seq.num_output_tokens == 1
        stats = seq.phases.timings() if is_first_or_last else None
        chunk = Chunk(token_ids=ids, logprobs=logprobs, finish_reason=reason, stats=stats)
        self._events.append(partial(seq.emit, chunk))
        if reason is not None:
            self._drop(seq)

"""The scheduler: one thread that owns the model, the KV pool and every job, and runs one forward pass per step.

The event loop's side posts closures (`post`); all that a step made goes back in one call of `deliver`. A job's blocks
for prompt and answer are reserved before it starts, so a running job never runs out and nothing is preempted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.torch.attention import ForwardBatch, SequenceSlice
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.sampler import SampledToken, SamplingMetadata, sample
from dynamo_trtllm.engines.torch.sequence import (
    BlocksReserved,
    Delivery,
    Freed,
    PrefillDone,
    TorchSequence,
    phase_timings,
)
from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES, Allocation, TransferBuffer
from dynamo_trtllm.errors import EngineFailed, NonFinite, NonFiniteKv, Overloaded, RequestRejected
from dynamo_trtllm.messages import Chunk, FinishReason, Phase, token_ids

_log = logging.getLogger(__name__)
_MOST_NON_FINITE = 3  # as many requests within _NON_FINITE_S mean that the engine is at fault
_NON_FINITE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    max_batch_size: int
    max_num_tokens: int
    max_queue: int
    prefill_chunk_tokens: int
    num_threads: int | None


class KvMemory(NamedTuple):
    pool: KvPool
    staging: TransferBuffer | None  # None: an engine that hands nothing over


class Scheduler:
    """`post` and `stats` from any thread; everything else on its own."""

    def __init__(
        self,
        module: Any,
        memory: KvMemory,
        limits: BatchLimits,
        *,
        deliver: Callable[[Delivery], None],
        on_end: Callable[[EngineFailed], None],
    ) -> None:
        """`deliver` gets all events of a step, `on_end` the reason why no step will follow; both on the thread."""
        self._module = module
        self._pool, self._staging = memory
        self._limits = limits
        self._deliver = deliver
        self._on_end = on_end
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[TorchSequence] = deque()
        self._reserved: set[TorchSequence] = set()  # decode jobs whose KV is on its way
        self._prefilling: list[TorchSequence] = []
        self._decoding: list[TorchSequence] = []
        self._unstaged: deque[tuple[TorchSequence, Chunk]] = deque()  # prefilled, wait for transfer-buffer space
        self._held: set[TorchSequence] = set()  # copied to the transfer buffer, blocks still counted
        self._events: Delivery = []
        self._non_finite: dict[str, float] = {}  # when each request with NaN or infinity ended
        self._stopping = False
        self._stats = self._take_stats()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    # --- called from outside ---------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def post(self, message: Callable[[], None]) -> None:
        """Runs `message` on the scheduler's thread before its next step."""
        self._posted.put(message)

    def stats(self) -> EngineStats:
        return self._stats

    # --- messages: run on the thread -------------------------------------------------------------------

    def submit(self, job: TorchSequence) -> None:
        if len(self._waiting) >= self._limits.max_queue:
            self._events.append((job, Overloaded(f"{len(self._waiting)} requests wait already; try again later")))
        else:
            self._waiting.append(job)

    def install(self, job: TorchSequence) -> None:
        """A reserved job's KV has been fetched, and its copies into the pool are queued: the job goes on."""
        ticket = job.request.ticket
        if job not in self._reserved or job.blocks is None or ticket is None:
            return  # dropped meanwhile
        self._reserved.remove(job)
        self._unload(job)
        if not self._pool.is_finite(job.blocks, job.prompt_tokens):
            self._pool.scrub(job.blocks[: self._pool.blocks_for(job.prompt_tokens)])
            self._drop(job)
            text = (
                f"the KV of ticket {ticket.ticket_id} has NaN or infinity: check its prefill worker {ticket.holder:x}"
            )
            self._events.append((job, NonFiniteKv(text)))
            return
        job.prefilled = job.prompt_tokens
        job.pending = ticket.first_token_ids[-1]
        job.made = len(ticket.first_token_ids)
        if job.shaping is not None:
            for token_id in ticket.first_token_ids:
                job.shaping.note(token_id)
        job.ready_at = time.monotonic()
        first = Chunk(token_ids=ticket.first_token_ids, logprobs=ticket.first_logprobs)
        if job.made < job.max_new_tokens:
            self._decoding.append(job)
        else:  # the decode call has a lower token limit than the prefill call
            first = msgspec.structs.replace(first, finish_reason=FinishReason.LENGTH, stats=phase_timings(job))
            self._drop(job)
        self._events.append((job, first))

    def retire(self, job: TorchSequence) -> None:
        """Ends a job wherever it is, frees its blocks and says so; no error when it has ended already."""
        self._drop(job)
        self._events.append((job, Freed()))

    def _drop(self, job: TorchSequence) -> None:
        if job in self._reserved and job.blocks is not None:  # its KV has arrived in part at most
            self._pool.scrub(job.blocks[: self._pool.blocks_for(job.prompt_tokens)])
        for group in (self._reserved, self._held):
            group.discard(job)
        for jobs in (self._waiting, self._prefilling, self._decoding):
            if job in jobs:
                jobs.remove(job)
        self._unstaged = deque(entry for entry in self._unstaged if entry[0] is not job)
        self._unload(job)
        if job.blocks is not None:
            self._pool.free(job.blocks)
            job.blocks = None

    def _unload(self, job: TorchSequence) -> None:
        if job.parcel is not None and self._staging is not None:
            self._staging.give_back(job.parcel)
            job.parcel = None

    def stop(self) -> None:
        self._stopping = True

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = EngineFailed("the engine was closed")
        try:
            if self._limits.num_threads is not None:
                torch.set_num_threads(self._limits.num_threads)  # counts per thread
            if self._pool.device.type == "cuda":
                torch.cuda.set_device(self._pool.device)  # as well: some kernels go by it
            with torch.inference_mode():
                while not self._stopping:
                    self._turn()
        except EngineFailed as exc:
            reason = exc
        except Exception as exc:  # noqa: BLE001 - the end of the thread: all streams must hear of it, whatever it was
            _log.exception("the torch engine's step failed")
            reason = EngineFailed(f"the torch engine's step failed: {exc}")
        unstaged = [job for job, _ in self._unstaged]
        try:
            for job in (*self._waiting, *self._reserved, *self._prefilling, *self._decoding, *unstaged, *self._held):
                self._drop(job)
            self._publish()
        finally:  # on a broken GPU blocks can't be freed
            self._on_end(reason)

    def _turn(self) -> None:
        busy = bool(self._prefilling or self._decoding)
        while True:
            try:
                message = self._posted.get(block=not busy)
            except queue.Empty:
                break
            message()
            busy = True  # wait for one message at most; take the others that are there
        self._hand_off()
        self._admit()
        if self._prefilling or self._decoding:
            self._step()
        self._publish()

    def _publish(self) -> None:
        self._stats = self._take_stats()
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _take_stats(self) -> EngineStats:
        return EngineStats(
            running=self._running(),
            waiting=len(self._waiting),
            kv_blocks_used=self._pool.used,
            kv_blocks_total=self._pool.num_blocks,
            tickets_held=len(self._held),
            ticket_kv_blocks=sum(len(_blocks(job)) for job in self._held),
        )

    def _admit(self) -> None:
        """In order of arrival, while there is a place in the batch and blocks for the whole answer."""
        while self._waiting and self._running() < self._limits.max_batch_size:
            job = self._waiting[0]
            is_fetched = job.request.phase is Phase.DECODE and self._staging is not None
            if is_fetched and job.parcel is None:
                job.parcel = self._allocate(job, job.piece_bytes)
                if job.parcel is None:
                    return
            job.blocks = self._pool.reserve(job.kv_tokens)
            if job.blocks is None:
                return
            self._waiting.popleft()
            job.admitted_at = time.monotonic()
            if job.parcel is not None:
                self._reserved.add(job)
                self._events.append((job, BlocksReserved(job.parcel, self._pool.rows(job.blocks, job.prompt_tokens))))
            else:
                self._prefilling.append(job)

    def _running(self) -> int:
        return len(self._reserved) + len(self._prefilling) + len(self._decoding) + len(self._unstaged)

    def _allocate(self, job: TorchSequence, piece_bytes: int) -> Allocation | None:
        return self._staging.take(job.prompt_tokens, piece_bytes) if self._staging is not None else None

    def _hand_off(self) -> None:
        """Copy each prefilled prompt's KV to where the transfer backend reads it, in order, while there is space."""
        while self._unstaged and self._staging is not None:
            job, first = self._unstaged[0]
            job.parcel = self._allocate(job, REGION_BYTES[self._pool.device.type])
            if job.parcel is None:
                return
            self._unstaged.popleft()
            self._held.add(job)
            copied = self._staging.gather(job.parcel, self._pool.rows(_blocks(job), job.prompt_tokens))
            self._events.append((job, PrefillDone(job.parcel, copied, first)))

    def _step(self) -> None:
        decoding = self._decoding[: self._limits.max_num_tokens]
        chunks = self._plan_chunks(self._limits.max_num_tokens - len(decoding))
        ids = [job.pending for job in decoding]
        for job, count in chunks:
            ids += job.request.token_ids[job.prefilled : job.prefilled + count]
        step = ForwardBatch(
            self._pool.keys,
            self._pool.values,
            [SequenceSlice(_blocks(job), job.prefilled, 1) for job in decoding],
            [SequenceSlice(_blocks(job), job.prefilled, count) for job, count in chunks],
        )
        if step.entered:
            self._pool.scrub(torch.cat(step.entered))
        for job, count in [*((job, 1) for job in decoding), *chunks]:
            job.prefilled += count
        finished = [job for job, _ in chunks if job.prefilled == job.prompt_tokens]
        rows = list(range(len(decoding)))
        at = len(decoding)
        for job, count in chunks:
            at += count
            if job.prefilled == job.prompt_tokens:
                rows.append(at - 1)
        logits = self._forward(ids, step, rows)
        finite = self._finite(step, decoding, chunks)
        sampled = [*decoding, *finished]
        if sampled:
            self._take(decoding, finished, sample(logits, [_row(job) for job in sampled], finite))

    def _finite(
        self, step: ForwardBatch, decoding: list[TorchSequence], chunks: list[tuple[TorchSequence, int]]
    ) -> Tensor:
        """Return, on the device, whether the keys of each job that gets a token in this step are finite."""
        written = self._pool.finite_keys(step.slots)
        found = [written[: len(decoding)]]
        at = len(decoding)
        for job, count in chunks:
            chunk = written[at : at + count].all(dim=0, keepdim=True)
            job.finite = chunk if job.finite is None else job.finite & chunk
            at += count
            if job.prefilled == job.prompt_tokens:
                found.append(job.finite)
        return torch.cat(found)

    def _plan_chunks(self, budget: int) -> list[tuple[TorchSequence, int]]:
        planned = []
        for job in self._prefilling:
            count = min(budget, self._limits.prefill_chunk_tokens, job.prompt_tokens - job.prefilled)
            if count <= 0:
                break
            planned.append((job, count))
            budget -= count
        return planned

    def _forward(self, ids: list[int], step: ForwardBatch, rows: list[int]) -> Tensor:
        """Logits of the given rows only; a chunk in the middle of a prompt needs none."""
        device = step.keys.device
        output = self._module(
            input_ids=torch.tensor([ids], device=device),
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
            step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _take(
        self, decoding: list[TorchSequence], finished: list[TorchSequence], choices: list[SampledToken | None]
    ) -> None:
        now = time.monotonic()
        for job, choice in zip(decoding, choices, strict=False):
            job.stepped_at = job.stepped_at or now
            self._emit(job, choice)
        for job, choice in zip(finished, choices[len(decoding) :], strict=True):
            job.ready_at = now
            self._prefilling.remove(job)
            self._decoding.append(job)
            self._emit(job, choice)
        if len(self._non_finite) >= _MOST_NON_FINITE:
            raise EngineFailed(
                f"the model's output was NaN or infinite in {len(self._non_finite)} requests within {_NON_FINITE_S:g} s"
            )

    def _end_non_finite(self, job: TorchSequence) -> None:
        _log.error("the model's output for request %s is NaN or infinite; ending the request", job.request.request_id)
        self._pool.scrub(_blocks(job)[: self._pool.blocks_for(job.prefilled)])
        self._drop(job)
        text = "the model's output for this request is NaN or infinite; if others are too, check weights, dtype and GPU"
        self._events.append((job, NonFinite(text)))
        now = time.monotonic()
        recent = {name: at for name, at in self._non_finite.items() if now - at < _NON_FINITE_S}
        self._non_finite = recent | {job.request.request_id: now}

    def _emit(self, job: TorchSequence, choice: SampledToken | None) -> None:
        if choice is None:
            self._end_non_finite(job)
            return
        job.pending = choice.token_id
        job.made += 1
        if job.shaping is not None:
            job.shaping.note(choice.token_id)
            if job.shaping.failure is not None:
                self._events.append((job, RequestRejected(f"guided decoding failed: {job.shaping.failure}")))
                self._drop(job)
                return
        ids = token_ids([choice.token_id])
        logprobs = (choice.logprob,) if choice.logprob is not None else ()
        if choice.token_id in job.stop_ids:
            reason: FinishReason | None = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if job.made >= job.max_new_tokens else None
        if reason is None and job.request.phase is Phase.PREFILL:
            self._decoding.remove(job)
            self._unstaged.append((job, Chunk(token_ids=ids, logprobs=logprobs, stats=phase_timings(job))))
            self._hand_off()
            return
        stats = phase_timings(job) if reason is not None else None
        self._events.append((job, Chunk(token_ids=ids, logprobs=logprobs, finish_reason=reason, stats=stats)))
        if reason is not None:
            self._drop(job)


def _row(job: TorchSequence) -> SamplingMetadata:
    request = job.request
    return SamplingMetadata(request.sampling, job.seed, job.made, job.stop_ids, job.shaping, request.resumed_tokens)


def _blocks(job: TorchSequence) -> Tensor:
    if job.blocks is None:
        raise RuntimeError(f"request {job.request.request_id} runs without KV blocks")
    return job.blocks

"""Simulate an engine, so that workers, the request plane and frontends can be tested and measured without a model.

The "KV" of a request is the seed of its tokens and the index of each block. A decode engine generates the right tokens
only from the KV that it received; with other KV it generates other tokens, as a model would. Every output has exactly
`max_tokens` tokens.

Tokens are deterministic, so the engine accepts and ignores parameters that shape only random sampling (temperature,
top_p, top_k, min_p, seed) or only prevent an early end. It rejects parameters whose absence a client could notice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.base import EngineInfo, EngineStats
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.mock.steps import MockScheduler, MockSequence
from dynamo_trtllm.errors import DynamoError, EngineFailed, RequestRejected, TransferMismatch
from dynamo_trtllm.kv_transfer import params
from dynamo_trtllm.kv_transfer.base import MemoryRegion, TransferBackend
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.params import Destination, FetchLimits, fetch
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Limits,
    Phase,
    PhaseTimings,
    ReleaseOutcome,
    token_ids,
)
from dynamo_trtllm.streams import OnEvent, StreamHandle, TaskStream

_KV_WORDS = 64  # 32-bit words of simulated KV per block
_MAX_SEED = 0xFFFF
_UNSUPPORTED_FEATURES = (
    "guided",
    "logit_bias",
    "logprobs",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
)


class _MockTransfer(NamedTuple):
    """The blocks and memory of one KV transfer."""

    blocks: int
    kv: array[int]  # the memory that the backend reads
    expiry: asyncio.TimerHandle


class _MockStream(TaskStream):
    """One request: passes tokens on within the simulated step; imports and exports its KV in a task."""

    __slots__ = ("_engine", "_is_added", "_sequence")

    def __init__(self, engine: MockEngine, request: GenerateRequest, on_event: OnEvent) -> None:
        super().__init__(on_event, engine.tasks, engine)
        prompt = request.token_ids[: len(request.token_ids) - request.num_resumed_output_tokens]
        self._engine = engine
        self._is_added = False
        self._sequence = MockSequence(
            request,
            self._on_token,
            self._on_stop,
            engine.num_blocks(request),
            zlib.crc32(prompt) & _MAX_SEED,
            len(request.token_ids),
        )

    def start(self) -> None:
        """Queue the sequence. Raises the error of a rejected request."""
        request = self._sequence.request
        self._engine.add(self._sequence)
        self._is_added = True
        if request.kv_params is None:
            self._engine.schedule(self._sequence)
        else:
            self.run(self._import_kv(request.kv_params), f"mock-import-{request.request_id}")

    async def _import_kv(self, kv_params: KvTransferParams) -> None:
        self.emit(await self._engine.import_kv(self._sequence, kv_params))
        if not self.has_ended:
            self._engine.schedule(self._sequence)

    def _on_token(self, token: int, is_last: bool) -> None:
        if not is_last:
            self.emit(Chunk(token_ids=token_ids((token,))))
            return
        request = self._sequence.request
        if request.phase is Phase.PREFILL and request.sampling.max_tokens > 1:
            self.run(self._engine.export_kv(self._sequence, token), f"mock-export-{request.request_id}")
        else:
            stats = self._engine.timings(self._sequence)
            self.emit(Chunk(token_ids=token_ids([token]), finish_reason=FinishReason.LENGTH, stats=stats))

    def _on_stop(self) -> None:
        self.emit(EngineFailed("the mock engine stopped during the request"))

    def _free(self) -> None:
        if self._is_added:
            self._engine.remove(self._sequence)


def _ignore(*_: object) -> None: ...


class MockEngine:
    """An `Engine` with `KvHolder` and `HasStats` that simulates a model."""

    def __init__(self, config: WorkerConfig, *, instance_id: int, backend: TransferBackend | None = None) -> None:
        self._args = args = engine_arguments(config, MockArgs, "mock")
        self._model = config.served_model_name or Path(config.model_path).name
        self._instance_id = instance_id
        self._backend = backend or create_backend(args.transfer_backend, config, kv_checksums=args.kv_checksums)
        self._ticket_ttl_s = config.ticket_ttl_s
        self._handoff_timeout_s = config.handoff_timeout_s
        self._layout = KvLayout(
            dtype="uint32", block_tokens=args.kv_block_size, num_layers=1, num_kv_heads=1, head_dim=_KV_WORDS
        )
        self._scheduler = MockScheduler(args)
        self._sequences: set[MockSequence] = set()
        self._awaiting_fetch: dict[str, _MockTransfer] = {}
        self._num_transfers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._step_task: asyncio.Task[None] | None = None
        self._unpublish_tasks: set[asyncio.Task[None]] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of streams

    async def start(self) -> EngineInfo:
        await self._backend.start(lambda transfer_id: self.release(transfer_id, ReleaseOutcome.FETCHED))
        self._step_task = asyncio.create_task(self._scheduler.run(), name="mock-engine-steps")
        return EngineInfo(
            engine="mock",
            context_length=self._args.max_seq_len,
            vocab_size=201088,
            eos_token_ids=(200002, 200012),
            renderer="harmony",
            layout=self._layout,
            limits=Limits(max_batch_size=self._args.max_batch_size, kv_blocks=self._args.kv_cache_blocks),
            unsupported_features=_UNSUPPORTED_FEATURES,
            can_aggregate=True,
        )

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = _MockStream(self, request, on_event)
        try:
            self._check()
            stream.start()
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        return stream

    # --- called by streams -------------------------------------------------------------------------------

    def add(self, sequence: MockSequence) -> None:
        """Queue a sequence. Raises the error of a rejected request."""
        self._scheduler.add(sequence)
        self._sequences.add(sequence)
        self._idle.clear()

    def schedule(self, sequence: MockSequence) -> None:
        """Let a sequence generate the tokens of its call that it does not have yet."""
        request = sequence.request
        num_tokens = 1 if request.phase is Phase.PREFILL else request.sampling.max_tokens - sequence.num_output_tokens
        self._scheduler.schedule(sequence, num_tokens)

    def remove(self, sequence: MockSequence) -> None:
        """Remove a sequence and free its blocks. A step in progress may still call it."""
        sequence.on_token = sequence.on_stop = _ignore
        self._scheduler.remove(sequence)
        self._sequences.discard(sequence)
        self._note_idle()

    def num_blocks(self, request: GenerateRequest) -> int:
        """Return the number of KV blocks that the call needs."""
        tokens = len(request.token_ids) + (1 if request.phase is Phase.PREFILL else request.sampling.max_tokens)
        return -(-tokens // self._args.kv_block_size)

    def _prompt_blocks(self, prompt_tokens: int) -> int:
        return -(-prompt_tokens // self._args.kv_block_size)

    async def import_kv(self, sequence: MockSequence, kv_params: KvTransferParams) -> Chunk:
        """Fetch the seed, and return a chunk with the first tokens of the KV transfer parameters."""
        params.check_params(kv_params, engine="mock", model=self._model, layout=self._layout, now=time.time())
        if len(kv_params.first_token_ids) >= sequence.request.sampling.max_tokens:
            raise RequestRejected(
                f"KV transfer {kv_params.transfer_id} has all requested tokens; increase max_tokens to decode more"
            )
        kv_bytes = self._prompt_blocks(len(sequence.request.token_ids)) * _KV_WORDS * array("I").itemsize
        if kv_params.kv_bytes != kv_bytes:  # check before allocating this much memory
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id}: kv_bytes is {kv_params.kv_bytes} at prefill and "
                f"{kv_bytes} at decode",
                field="kv_bytes",
            )
        kv = array("I", bytes(kv_bytes))
        region = MemoryRegion(kv.buffer_info()[0], kv_params.kv_bytes)
        limits = FetchLimits(sequence.request.deadline, self._handoff_timeout_s)
        await fetch(self._backend, kv_params, kv_params.engine_state, Destination([region]), limits)
        sequence.seed = _seed_of(kv)
        sequence.prefill_left = 0
        sequence.num_output_tokens = len(kv_params.first_token_ids)
        return Chunk(token_ids=kv_params.first_token_ids)

    def timings(self, sequence: MockSequence) -> PhaseTimings:
        """Return the timings of a call."""
        request = sequence.request
        return PhaseTimings(
            queue_s=max(0.0, (sequence.started or sequence.created_at) - sequence.created_at),
            kv_bytes=request.kv_params.kv_bytes if request.kv_params else 0,
            transport=self._backend.name if request.kv_params else "",
        )

    async def export_kv(self, sequence: MockSequence, first: int) -> Chunk:
        """Publish the KV of a prompt, and return the chunk with its KV transfer parameters."""
        prompt = len(sequence.request.token_ids)
        blocks = self._prompt_blocks(prompt)
        kv = _kv_of(sequence.seed, blocks)
        kv_bytes = len(kv) * kv.itemsize
        self._num_transfers += 1
        transfer_id = f"{self._instance_id:x}-{self._num_transfers}"
        loop = asyncio.get_running_loop()
        expires_at = time.time() + self._ticket_ttl_s
        expiry = loop.call_later(self._ticket_ttl_s, self.release, transfer_id, ReleaseOutcome.ABORTED)
        self._awaiting_fetch[transfer_id] = _MockTransfer(blocks, kv, expiry)
        self._scheduler.transfer_ownership(sequence, blocks)
        try:
            engine_state = await self._backend.publish(transfer_id, [MemoryRegion(kv.buffer_info()[0], kv_bytes)])
        except BaseException:  # also if cancelled: the backend may have published this memory
            self.release(transfer_id, ReleaseOutcome.ABORTED)
            raise
        kv_params = KvTransferParams(
            version=params.TRANSFER_PARAMS_VERSION,
            transfer_id=transfer_id,
            engine="mock",
            model=self._model,
            layout=self._layout,
            prefill_instance_id=self._instance_id,
            expires_at=expires_at,
            prompt_tokens=prompt,
            first_token_ids=token_ids([first]),
            transport=self._backend.name,
            kv_bytes=kv_bytes,
            engine_state=engine_state,
        )
        return Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params, stats=self.timings(sequence))

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        pending = self._awaiting_fetch.pop(transfer_id, None)
        if pending is None:
            return
        pending.expiry.cancel()
        task = asyncio.get_running_loop().create_task(self._unpublish(transfer_id, pending))
        self._unpublish_tasks.add(task)
        task.add_done_callback(self._unpublished)

    def is_pending(self, transfer_id: str) -> bool:
        return transfer_id in self._awaiting_fetch

    async def _unpublish(self, transfer_id: str, pending: _MockTransfer) -> None:
        """Unpublish the memory and free its blocks. `pending` keeps the memory alive until then."""
        await self._backend.unpublish(transfer_id)
        self._scheduler.free_blocks(pending.blocks)

    def _unpublished(self, task: asyncio.Task[None]) -> None:
        self._unpublish_tasks.discard(task)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._sequences and not self._awaiting_fetch and not self._unpublish_tasks:
            self._idle.set()
        else:
            self._idle.clear()

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats(
            len(self._awaiting_fetch), sum(pending.blocks for pending in self._awaiting_fetch.values())
        )
        return dataclasses.replace(stats, kv_checksum_mismatches=self._backend.checksums.mismatches)

    async def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._step_task is None or self._step_task.done():
            raise EngineFailed("the mock engine is not running")
        self._backend.check()

    async def drain(self) -> None:
        await self._idle.wait()

    async def aclose(self) -> None:
        if self._step_task is not None:
            self._step_task.cancel()
            await asyncio.gather(self._step_task, return_exceptions=True)
        for transfer_id in list(self._awaiting_fetch):
            self.release(transfer_id, ReleaseOutcome.ABORTED)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*self._unpublish_tasks)
        await self._backend.aclose()


def _kv_of(seed: int, blocks: int) -> array[int]:
    kv = array("I", [seed]) * (blocks * _KV_WORDS)
    kv[::_KV_WORDS] = array("I", range(seed, seed + blocks))
    return kv


def _seed_of(kv: array[int]) -> int:
    """Return the seed in `kv`, or another seed if any bit of `kv` has changed."""
    seed = kv[-1]
    return seed if seed <= _MAX_SEED and kv == _kv_of(seed, len(kv) // _KV_WORDS) else zlib.crc32(kv) & _MAX_SEED

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
import dataclasses
import zlib
from array import array
from collections import deque

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.block_manager import BlockTable
from dynamo_trtllm.engines.capabilities import (
    ChecksHealth,
    GuardsKvTransfers,
    MeasuresSteps,
    PublishesKvEvents,
    TransfersKv,
)
from dynamo_trtllm.engines.engine_interface import (
    Engine,
    EngineInfo,
    EngineStats,
    check_request,
)
from dynamo_trtllm.engines.mock.args import KV_WORDS, MockArgs, mock_info
from dynamo_trtllm.engines.mock.scheduler import MockScheduler
from dynamo_trtllm.engines.mock.stream import MAX_SEED, MockStream
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.pending_transfers import KvTransfers
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, TransferBackend
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    RequestRejected,
)
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    ReleaseOutcome,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, StreamHandle


class MockEngine(
    Engine, TransfersKv, GuardsKvTransfers, ChecksHealth, MeasuresSteps, PublishesKvEvents
):
    """An `Engine` that simulates a model.

    Args:
        config: the configuration of the worker.
        instance_id: id of the worker.
        backend: moves the simulated KV; by default, the backend that the engine arguments name.
        clocks: the clocks of the process.
        seed: see `MockScheduler`.
        tokens_per_event: see `MockScheduler`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        instance_id: int,
        backend: TransferBackend | None = None,
        clocks: Clocks = SYSTEM_CLOCKS,
        seed: int | None = None,
        tokens_per_event: int = 1,
    ) -> None:
        args = engine_arguments(config, MockArgs, "mock")
        if backend is None:
            backend = create_backend(args.transfer_backend, config, kv_checksums=args.kv_checksums)
        self._backend = backend
        self._args = args
        self._clock = clocks.monotonic
        self._transfers = KvTransfers(
            self._backend,
            config,
            engine="mock",
            instance_id=instance_id,
            layout=args.layout,
            clocks=clocks,
        )
        self._info = mock_info(args, self._transfers.identity.layout)
        self._scheduler = MockScheduler(
            args,
            self._on_prefilled,
            self._clock,
            seed,
            is_elastic=config.disaggregation_mode is Role.ELASTIC,
            tokens_per_event=tokens_per_event,
        )
        self._tasks: set[asyncio.Task[None]] = set()  # the tasks of streams
        self._network_free_at = 0.0  # when the KV transfers so far will have ended

    async def start(self) -> EngineInfo:
        await self._backend.start(self._transfers.release)
        self._scheduler.start()
        return dataclasses.replace(self._info, kv_addresses=self._transfers.addresses)

    def use_transfer_guard(self, guard: TransferGuard) -> None:
        """See `GuardsKvTransfers.use_transfer_guard`."""
        self._transfers.use_guard(guard)

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = MockStream(
            request,
            on_event,
            tasks=self._tasks,
            kv_holder=self,
            retire=self._scheduler.retire,
            clock=self._clock,
        )
        try:
            self._start(stream)
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        return stream

    def _start(self, stream: MockStream) -> None:
        """Queue a request. Raises the error with which it is rejected."""
        self._check()
        check_request(stream.request, self._info, transfers_kv=True, engine="mock engine")
        self._scheduler.submit(stream)
        kv_params = stream.request.kv_params
        if kv_params is None:
            self._scheduler.generate_rest(stream)
        else:
            importing = self.import_kv(stream, kv_params)
            stream.run(importing, f"mock-import-{stream.request.request_id}")

    def _on_prefilled(self, stream: MockStream, token: int) -> None:
        """Export the KV of a prefill call, see `MockScheduler`."""
        exporting = self.export_kv(stream, token)
        stream.run(exporting, f"mock-export-{stream.request.request_id}")

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `PublishesKvEvents.start_kv_events`."""
        self._scheduler.report_kv_events(on_events)

    async def import_kv(self, stream: MockStream, kv_params: KvTransferParams) -> Chunk | None:
        """Fetch the seed, and return a chunk with the first tokens, which are in the KV transfer
        parameters. The scheduler generates the rest.

        If the engine computes the first tokens again, the scheduler generates all tokens, and None
        is returned.
        """
        num_blocks = self._scheduler.num_blocks(len(stream.request.token_ids))
        kv_bytes = num_blocks * KV_WORDS * array("I").itemsize
        # Check the parameters before allocating this much memory.
        self._transfers.validate(stream.request, kv_bytes=kv_bytes)
        if len(kv_params.first_token_ids) >= stream.request.sampling.max_tokens:
            raise RequestRejected(
                f"KV transfer {kv_params.transfer_id} has all requested tokens; increase max_tokens"
                " to decode more"
            )
        await self._scheduler.until_space(stream)
        kv = array("I", bytes(kv_bytes))
        address, _ = kv.buffer_info()
        region = MemoryRegion(address, kv_bytes)
        await self._scheduler.until_posted(self._args.kv_post_s(num_blocks))
        await self._transfers.fetch(stream.request, kv_params.engine_state, Destination([region]))
        transfer_s = self._transfer_s(num_blocks)
        if transfer_s:
            await asyncio.sleep(transfer_s)
        stream.seed = _seed_of(kv)
        stream.phases.end("kv_transfer")
        if self._args.recompute_last_token:
            self._scheduler.generate_rest(stream)
            return None
        stream.num_output = len(kv_params.first_token_ids)
        self._scheduler.store(stream)
        self._scheduler.generate_rest(stream)
        return Chunk(token_ids=kv_params.first_token_ids, stats=stream.phases.timings())

    def _transfer_s(self, num_blocks: int) -> float:
        """Add a KV transfer that begins now, and return how long it takes.

        It waits for the transfers that were added before it.
        """
        now = self._clock()
        begins_at = max(now, self._network_free_at)
        self._network_free_at = begins_at + self._args.kv_transfer_block_s * num_blocks
        return self._args.kv_transfer_s + self._network_free_at - now

    async def export_kv(self, stream: MockStream, first: int) -> Chunk:
        """Publish the KV of a prompt, and return the chunk with its KV transfer parameters."""
        kv = _kv_of(stream.seed, self._scheduler.num_blocks(stream.kv_tokens))
        # The blocks stay reserved while the KV is published, also after the end of the stream.
        block_table = stream.block_table
        stream.block_table = BlockTable()

        # The default value keeps the memory of the KV alive while it is published.
        def on_unpublished(_: array[int] = kv) -> None:
            self._scheduler.free(block_table)

        address, _ = kv.buffer_info()
        regions = [MemoryRegion(address, len(kv) * kv.itemsize)]
        chunk = Chunk(token_ids=token_ids([first]))
        kv_params = await self._transfers.publish(stream.request, chunk, regions, on_unpublished)
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

    @property
    def steps(self) -> deque[StepSample]:
        return self._scheduler.steps

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats(self._transfers.prompt_tokens)
        mismatches = self._backend.checksums.num_mismatches
        return dataclasses.replace(stats, kv_checksum_mismatches=mismatches)

    async def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if not self._scheduler.is_running:
            raise EngineFailed("the mock engine is not running")
        self._backend.check()

    async def drain(self) -> None:
        await self._scheduler.drain()

    async def aclose(self) -> None:
        await self._scheduler.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transfers.aclose()


def _kv_of(seed: int, blocks: int) -> array[int]:
    """Return the simulated KV of a number of blocks.

    All words are the seed, except the first word of each block, to which the block's index is
    added.
    """
    kv = array("I", [seed]) * (blocks * KV_WORDS)
    kv[::KV_WORDS] = array("I", range(seed, seed + blocks))
    return kv


def _seed_of(kv: array[int]) -> int:
    """Return the seed in `kv`, or a seed that no prompt has if any bit of `kv` has changed."""
    seed = kv[-1]
    if seed <= MAX_SEED and kv == _kv_of(seed, len(kv) // KV_WORDS):
        return seed
    return MAX_SEED + 1 + (zlib.crc32(kv) & MAX_SEED)

"""Implement the `Engine` interface over the scheduler, on the event loop.

The model, the KV pool and every sequence belong to the scheduler's thread; this module computes
nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.capabilities import (
    ChecksHealth,
    GuardsKvTransfers,
    MeasuresSteps,
    PublishesKvEvents,
    ReportsProgress,
    TransfersKv,
)
from dynamo_trtllm.engines.engine_interface import (
    Engine,
    EngineInfo,
    EngineStats,
    check_request,
    stop_token_ids,
)
from dynamo_trtllm.engines.torch import format_compiler
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.grammar_compiler import GrammarCompiler
from dynamo_trtllm.engines.torch.kv import KvPool
from dynamo_trtllm.engines.torch.kv_connector import KvConnector
from dynamo_trtllm.engines.torch.loading_progress import IMPORTING, LoadingProgress
from dynamo_trtllm.engines.torch.logits_processor import logits_processor_for
from dynamo_trtllm.engines.torch.model_runner import ModelRunner
from dynamo_trtllm.engines.torch.random_numbers import MASK_64
from dynamo_trtllm.engines.torch.scheduler import Delivery, Scheduler
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.engines.torch.transfer_buffer import Allocation, TransferBuffer
from dynamo_trtllm.engines.warm_up import WarmUp, WarmUpStep, run_first_request, variants
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    EngineNotReady,
    NonFinite,
    RequestRejected,
)
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Phase,
    ReleaseOutcome,
    Role,
    StructuredOutput,
)
from dynamo_trtllm.protocol.streams import OnEvent, StreamHandle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dynamo_trtllm.engines.torch.load import LoadedModel

log = logging.getLogger(__name__)


class _Prepared(NamedTuple):
    """The scheduler of a loaded model, and what the engine reports of itself."""

    scheduler: Scheduler
    info: EngineInfo


class TorchEngine(
    Engine,
    TransfersKv,
    GuardsKvTransfers,
    ChecksHealth,
    ReportsProgress,
    MeasuresSteps,
    PublishesKvEvents,
):
    """An `Engine` that runs transformers models.

    `config.model_path` must be a folder. The engine owns its KV transfer backend and closes it.
    """

    def __init__(
        self, config: WorkerConfig, *, instance_id: int, backend: TransferBackend | None = None
    ) -> None:
        args = engine_arguments(config, TorchArgs, "torch")
        self._args = args
        self._is_elastic = config.disaggregation_mode is Role.ELASTIC
        self._model_path = config.model_path
        self._model_name = config.model_name
        self._loading = LoadingProgress()
        self._warming = WarmUp(config.warm_up_budget_s)
        if backend is None and config.disaggregation_mode is not Role.AGGREGATED:
            name = None if args.transfer_backend == "auto" else args.transfer_backend
            backend = create_backend(name, config, kv_checksums=args.kv_checksums)
        self._backend = backend
        self._create_connector = partial(KvConnector, config=config, instance_id=instance_id)
        self.kv_connector: KvConnector | None = None  # None for an aggregated worker
        self._transfer_guard = TransferGuard()
        self._tasks: set[asyncio.Task[None]] = set()  # the tasks of streams
        self._sequences: set[TorchSequence] = set()  # sequences whose blocks are not freed yet
        self._scheduler: Scheduler | None = None
        self._grammar_compiler: GrammarCompiler | None = None
        self._info: EngineInfo | None = None
        self._ended: EngineFailed | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Load the model, start the scheduler and run one request. See `Engine.start`."""
        model = await asyncio.to_thread(self._load)
        scheduler, info = self._prepare(model)
        self._info = info
        self._scheduler = scheduler
        if self._backend is not None:
            self.kv_connector = self._create_connector(self._backend, layout=info.layout)
            self.kv_connector.use_guard(self._transfer_guard)
            await self.kv_connector.start(scheduler.transfer_buffer)
            info = dataclasses.replace(info, kv_addresses=self.kv_connector.addresses)
        scheduler.thread.start()
        await self._warm_up(info, is_gpu=model.device.type == "cuda")
        log.info(
            "torch engine ready on %s: context %d, %d KV blocks of %d tokens",
            model.device,
            info.context_length,
            info.limits.kv_blocks,
            info.layout.block_tokens,
        )
        return info

    def use_transfer_guard(self, guard: TransferGuard) -> None:
        """See `GuardsKvTransfers.use_transfer_guard`."""
        self._transfer_guard = guard

    def _load(self) -> LoadedModel:
        self._loading.text = IMPORTING
        from dynamo_trtllm.engines.torch.load import load  # importing transformers takes seconds

        try:
            return load(self._model_path, self._args, self._loading)
        finally:
            self._loading.text = ""

    def _prepare(self, model: LoadedModel) -> _Prepared:
        """Create the scheduler of a loaded model, whose thread is not started."""
        from dynamo_trtllm.engines.torch import load

        args = self._args
        plan = load.plan_memory(model, args, has_transfer_buffer=self._backend is not None)
        if model.tokenizer is not None and format_compiler.is_available():
            self._grammar_compiler = GrammarCompiler(
                model.tokenizer,
                vocab_size=model.info.vocab_size,
                eos_token_ids=model.info.eos_token_ids,
            )
        pool = KvPool(
            model.info.layout, plan.num_blocks, windows=model.windows, device=model.device
        )
        loop = asyncio.get_running_loop()
        num_threads = args.num_threads
        if num_threads is None and model.device.type == "cpu":
            num_threads = 1
        buffer = TransferBuffer(pool, plan.transfer_buffer_bytes, is_divided=self._is_elastic)
        # The scheduler's thread puts its events into deliveries. `_receive` calls the events of a
        # delivery on the loop. The calls of `on_reserved`, `on_prefilled` and `on_freed` are such
        # events, so they run on the loop, too.
        scheduler = Scheduler(
            ModelRunner(model.module, pool),
            pool,
            buffer,
            args,
            num_threads=num_threads,
            deliver=partial(_call_soon, loop, self._receive),
            on_reserved=self._on_reserved,
            on_prefilled=self._on_prefilled,
            on_freed=self._sequences.discard,
            on_end=partial(_call_soon, loop, self._end),
            is_elastic=self._is_elastic,
        )
        max_transfer_blocks = 0
        if self._is_elastic:
            max_transfer_blocks = buffer.longest_prompt // pool.block_tokens
        limits = msgspec.structs.replace(
            model.info.limits,
            kv_blocks=plan.num_blocks,
            max_transfer_blocks=max_transfer_blocks,
        )
        unsupported_features: tuple[str, ...] = ()
        if self._grammar_compiler is None:
            unsupported_features = ("guided",)
        info = dataclasses.replace(
            model.info,
            context_length=plan.context_length,
            limits=limits,
            unsupported_features=unsupported_features,
        )
        return _Prepared(scheduler, info)

    def progress(self) -> str:
        """See `ReportsProgress.progress`."""
        return self._loading.text or self._warming.progress()

    async def _warm_up(self, info: EngineInfo, *, is_gpu: bool) -> None:
        try:
            await run_first_request(self, self._model_name, max_tokens=2)
        except NonFinite as exc:
            raise EngineFailed(
                f"{self._model_path} computes NaN or infinity; check its weights and the engine"
                " argument dtype"
            ) from exc
        steps: list[WarmUpStep] = []
        if is_gpu:  # libraries load their kernels at first use; on a CPU there are none
            steps = variants(self, self._model_name, info)
        elif self._grammar_compiler is not None:
            # At the first request with structured output, all running requests would wait while
            # the tokenizer is read.
            steps = [WarmUpStep("structured output", self._grammar_compiler.load)]
        await self._warming.run(steps)

    async def check(self) -> None:
        self._ready()
        if self._backend is not None:
            self._backend.check()

    def _ready(self) -> _Prepared:
        """Return the scheduler and what the engine reports.

        Raises:
            EngineFailed: the engine has failed or was closed.
            EngineNotReady: the engine was not started.
        """
        if self._ended is not None:
            raise EngineFailed(self._ended.message)
        if self._scheduler is None or self._info is None:
            raise EngineNotReady("the torch engine has not been started")
        if not self._scheduler.thread.is_alive():
            raise EngineFailed("the torch engine's thread has ended; restart the worker")
        return _Prepared(self._scheduler, self._info)

    async def drain(self) -> None:
        await self._idle.wait()

    async def aclose(self) -> None:
        if self._scheduler is not None:
            self._scheduler.post(self._scheduler.stop)
            await asyncio.to_thread(self._scheduler.join)
        self._end(EngineFailed("the engine was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._grammar_compiler is not None:
            await self._grammar_compiler.aclose()
        if self.kv_connector is not None:
            await self.kv_connector.aclose()
        elif self._backend is not None:  # the start failed before the connector owned it
            await self._backend.aclose()

    # --- requests ---------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """See `Engine.generate`."""
        seq = TorchSequence(
            request, on_event, tasks=self._tasks, kv_holder=self, retire=self._retire
        )
        try:
            self._start(seq)
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(seq.emit, exc)
        except BaseException:
            # A bug: the caller gets the exception, and no sequence may stay behind.
            seq.cancel()
            raise
        return seq

    def _start(self, seq: TorchSequence) -> None:
        """Check a request, and submit its sequence once its output format is compiled.

        Raises:
            RequestRejected: this engine does not support the request.
            ContextTooLong: the prompt leaves no space for output.
            KvTransferError: the request's KV transfer parameters do not fit this engine.
        """
        scheduler, info = self._ready()
        request = seq.request
        sampling = seq.request.sampling
        prompt_tokens = seq.prompt_tokens
        if sampling.guided is not None and self._grammar_compiler is None:
            raise RequestRejected(
                "guided decoding needs the package llguidance and the model's tokenizer.json",
                field="guided",
            )
        check_request(
            request, info, transfers_kv=self.kv_connector is not None, engine="torch engine"
        )
        seq.max_new_tokens = min(sampling.max_tokens, info.context_length - prompt_tokens)
        seq.stop_ids = tuple(sorted(stop_token_ids(sampling, info)))
        if sampling.seed is not None:
            seq.seed = sampling.seed & MASK_64
        if request.phase is Phase.DECODE and self.kv_connector is not None:
            kv_bytes = scheduler.pool.moved_bytes(prompt_tokens)
            state = self.kv_connector.engine_state(request, kv_bytes=kv_bytes)
            seq.offer = state.offer
            seq.seed = state.seed
            seq.region_bytes = state.region_bytes
        self._sequences.add(seq)
        self._idle.clear()
        if sampling.guided is not None:
            seq.run(
                self._compile_and_submit(seq, sampling.guided, scheduler),
                f"torch-grammar-{request.request_id}",
            )
        else:
            seq.logits_processor = logits_processor_for(request, None)
            scheduler.submit(seq)

    async def _compile_and_submit(
        self, seq: TorchSequence, guided: StructuredOutput, scheduler: Scheduler
    ) -> None:
        """Compile the request's output format, before anything is computed for the request.

        Raises:
            RequestRejected: the format can't be compiled.
            Overloaded: the CPU is too busy.
        """
        # `_start` has checked this.
        assert self._grammar_compiler is not None
        if seq.request.sampling.min_tokens:
            raise RequestRejected(
                "min_tokens must be 0 with guided decoding: the format decides where the output"
                " ends",
                field="min_tokens",
            )
        matcher = await self._grammar_compiler.compile(guided, seq.stop_ids)
        seq.phases.end("grammar")
        seq.logits_processor = logits_processor_for(seq.request, matcher)
        scheduler.submit(seq)

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `PublishesKvEvents.start_kv_events`."""
        scheduler = self._ready().scheduler
        report = partial(_call_soon, asyncio.get_running_loop(), on_events)
        # `on_events` of the block manager belongs to the scheduler's thread, so it is set there.
        scheduler.post(partial(setattr, scheduler.blocks.manager, "on_events", report))

    def _retire(self, seq: TorchSequence) -> None:
        """End a sequence in any state and free its blocks."""
        # A sequence that was rejected was not added to `_sequences`, and has no blocks.
        if self._scheduler is not None and seq in self._sequences:
            self._scheduler.post(partial(self._scheduler.retire, seq))

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """End a KV transfer. See `TransfersKv.release`."""
        log.debug("KV transfer %s: %s", transfer_id, outcome)
        if self.kv_connector is not None:
            self.kv_connector.release(transfer_id)

    def is_pending(self, transfer_id: str) -> bool:
        """See `TransfersKv.is_pending`."""
        return self.kv_connector is not None and self.kv_connector.is_pending(transfer_id)

    def stats(self) -> EngineStats:
        if self._scheduler is None:
            return EngineStats()
        mismatches = 0 if self._backend is None else self._backend.checksums.num_mismatches
        return dataclasses.replace(self._scheduler.load.read(), kv_checksum_mismatches=mismatches)

    @property
    def steps(self) -> deque[StepSample]:
        """See `MeasuresSteps.steps`."""
        return deque() if self._scheduler is None else self._scheduler.load.steps

    # --- called by the scheduler, on the loop -----------------------------------------------------

    def _on_reserved(self, seq: TorchSequence, allocation: Allocation, rows: Tensor) -> None:
        """Fetch the KV of a decode call, see `Scheduler.on_reserved`."""
        if not seq.has_ended:
            fetching = self._fetch_kv(seq, allocation, rows)
            seq.run(fetching, f"torch-fetch-{seq.request.request_id}")

    async def _fetch_kv(self, seq: TorchSequence, allocation: Allocation, rows: Tensor) -> None:
        """Fetch the prompt's KV.

        Once the copies of all regions into the pool are queued, continue the sequence.
        """
        scheduler = self._ready().scheduler
        assert self.kv_connector is not None
        scatter = partial(scheduler.transfer_buffer.scatter, allocation, rows)
        begun_s = time.monotonic()
        await self.kv_connector.import_kv(seq, allocation, scatter)
        seq.phases.seconds["kv_transfer.read"] = time.monotonic() - begun_s
        scheduler.post(partial(scheduler.install, seq))

    def _on_prefilled(
        self, seq: TorchSequence, allocation: Allocation, copied: list[torch.cuda.Event]
    ) -> None:
        """Export the KV of a prefill call, see `Scheduler.on_prefilled`."""
        if not seq.has_ended:
            assert self.kv_connector is not None  # an aggregated worker accepts no prefill calls
            exporting = self.kv_connector.export_kv(seq, allocation, copied)
            seq.run(exporting, f"torch-export-{seq.request.request_id}")

    def _receive(self, delivery: Delivery) -> None:
        for event in delivery:
            try:
                event()
            except Exception:
                # This is a bug of one receiver. The other receivers still get their events now,
                # before the events of the next delivery, which may be queued already.
                log.exception("a receiver failed on an event of its stream")
        if not self._sequences:
            self._idle.set()

    def _end(self, reason: EngineFailed) -> None:
        """End every stream with `reason`, because no further step will run."""
        if self._ended is None:
            self._ended = reason
        sequences = list(self._sequences)
        self._sequences.clear()
        try:
            for seq in sequences:
                try:
                    seq.emit(EngineFailed(reason.message))
                except Exception:
                    # This is a bug of one receiver. The other streams still end.
                    log.exception("a receiver failed while its stream ended")
        finally:
            self._idle.set()


def _call_soon(
    loop: asyncio.AbstractEventLoop, receive: Callable[[Any], None], value: object
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(receive, value)

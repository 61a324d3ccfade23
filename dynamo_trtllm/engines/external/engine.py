"""Define the base class of engines that wrap an inference library.

The base class loads the library and warms it up, runs requests, checks health, drains, and shuts
the library down.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.arguments import LibraryArgs
from dynamo_trtllm.engines.capabilities import (
    ChecksHealth,
    GuardsKvTransfers,
    ReportsProgress,
    TransfersKv,
)
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, EngineStats
from dynamo_trtllm.engines.external.library import Library
from dynamo_trtllm.engines.external.runner import ExternalCall, LibraryCalls
from dynamo_trtllm.engines.warm_up import WarmUp, WarmUpStep, run_first_request, variants
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.transfer_backend import TransferIdentity
from dynamo_trtllm.models.checkpoint import Checkpoint, weight_bytes
from dynamo_trtllm.protocol.errors import DynamoError, EngineFailed, EngineNotReady
from dynamo_trtllm.protocol.messages import GenerateRequest, ReleaseOutcome
from dynamo_trtllm.protocol.streams import OnEvent

log = logging.getLogger(__name__)

_SHUTDOWN_S = 60.0  # longest wait for the shutdown of the library
_GIB = 1 << 30

T = TypeVar("T")
V = TypeVar("V")


async def run_in_daemon_thread(
    call: Callable[[], T], *, name: str, unwanted: Callable[[T], None] | None = None
) -> T:
    """Run `call` on a daemon thread, and return its result or raise its exception.

    A daemon thread does not keep the process alive, so the process can end even if `call` never
    ends.

    Args:
        call: blocking function.
        name: name of the thread, for logs.
        unwanted: receives the result, on another thread, if this coroutine was cancelled before
            `call` ended.
    """
    result: Future[T] = Future()
    # From now on, a cancel of the future does not prevent the call.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - raised again below
            result.set_exception(exc)

    def discard(ended: Future[T]) -> None:
        error = ended.exception()
        if error is not None:
            log.debug("%s failed after its caller was cancelled: %s", name, error)
        elif unwanted is not None:
            thread = threading.Thread(
                target=unwanted, args=(ended.result(),), name=f"{name}-unwanted", daemon=True
            )
            thread.start()

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.wrap_future(result)
    except (asyncio.CancelledError, GeneratorExit):
        result.add_done_callback(discard)
        raise


LOADING_WEIGHTS = "loading weights"


def _report_nothing() -> str:
    return ""


class LoadProgress:
    """How far the loading of one engine is."""

    def __init__(
        self,
        weight_bytes: int,
        reported: Callable[[], str] = _report_nothing,
        look_every_s: float = 2.0,
    ) -> None:
        """Note the memory in use.

        Args:
            weight_bytes: size of the weights of one GPU. The weights count as loaded once this
                much more GPU memory is used.
            reported: returns the phase that the library's processes have reported; "" if they
                report none.
            look_every_s: shortest time between two queries of the driver.
        """
        self._look_every_s = look_every_s
        self._weight_bytes = weight_bytes
        self._reported = reported
        self._bytes_before = gpu.memory_used_bytes()
        self._bytes_now = self._bytes_before
        self._looked_at = time.monotonic()

    def progress(self) -> str:
        """Describe the loading phase.

        If the library reports no phase, the phase is derived from the GPU memory in use.
        """
        if time.monotonic() - self._looked_at > self._look_every_s:
            self._looked_at = time.monotonic()
            self._bytes_now = gpu.memory_used_bytes()
        phase = self._reported()
        if self._bytes_now is None or self._bytes_before is None:
            return phase or "building the engine"
        loaded_bytes = max(0, self._bytes_now - self._bytes_before)
        percent = 100 * loaded_bytes // self._weight_bytes
        if not phase:
            if percent == 0:
                phase = "importing the library"
            elif percent < 100:
                phase = LOADING_WEIGHTS
            else:
                phase = "capturing CUDA graphs and warming up"
        if phase == LOADING_WEIGHTS:
            phase = f"{phase} {min(percent, 100)}%"
        return f"{phase}, {loaded_bytes / _GIB:.1f} GiB of GPU memory used"


class ExternalEngine(Engine, TransfersKv, GuardsKvTransfers, ChecksHealth, ReportsProgress):
    """The base class of engines that wrap a library. A subclass adds `start`."""

    library: Library  # set once the library is loaded

    def __init__(
        self, config: WorkerConfig, *, engine: str, library: str, instance_id: int
    ) -> None:
        """Initialize an engine that is not loaded.

        Args:
            config: settings of the worker.
            engine: value of `--engine`.
            library: name of the library, for messages.
            instance_id: id of the worker, part of its KV transfer parameters.
        """
        self.calls = LibraryCalls(
            library,
            kv_fetch_timeout_s=config.kv_fetch_timeout_s,
            unavailable=EngineNotReady(f"the {engine} engine has not been started"),
        )
        self.kv_transfer_ttl_s = config.kv_transfer_ttl_s
        self._engine = engine
        self._library_name = library
        self._instance_id = instance_id
        self._model = config.model_name
        self._warming = WarmUp(config.warm_up_budget_s)
        self._transfer_guard = TransferGuard()
        self._loading: LoadProgress | None = None
        self._llm: Any = None  # the library's own object
        # Functions that stop the readers of the library, such as threads. Each is idempotent.
        self._stop_readers: list[Callable[[], None]] = []

    def use_transfer_guard(self, guard: TransferGuard) -> None:
        """See `GuardsKvTransfers.use_transfer_guard`."""
        self._transfer_guard = guard

    def progress(self) -> str:
        """See `ReportsProgress.progress`."""
        if self._loading is not None:
            return self._loading.progress()
        return self._warming.progress()

    async def _load(
        self,
        build: Callable[[], tuple[V, Any]],
        args: LibraryArgs,
        checkpoint: Checkpoint,
        reported: Callable[[], str] = _report_nothing,
    ) -> V:
        """Build the library's engine object and store it. Return the library's bindings.

        Raises the exceptions of `build`.

        If this coroutine is cancelled, it ends at once, and the engine object is shut down after it
        was built.

        Args:
            build: blocking function that returns the bindings and the engine object.
            args: the arguments, whose notes are logged.
            checkpoint: the model.
            reported: see `LoadProgress`.
        """
        for note in args.notes:
            log.info("%s", note)
        bytes_per_gpu = weight_bytes(checkpoint).total // args.count("tensor_parallel_size")
        self._loading = LoadProgress(bytes_per_gpu, reported)
        try:
            bindings, self._llm = await run_in_daemon_thread(
                build, name="engine-load", unwanted=self._discard
            )
        finally:
            self._loading = None
        return bindings

    def _accept_requests(self, library: Library, info: EngineInfo, transport: str) -> None:
        """Accept requests, which the loaded library runs.

        `transport`: how KV is transferred, for logs and metrics.
        """
        identity = TransferIdentity(
            info.engine, self._instance_id, self._model, info.layout, info.kv_compat, transport
        )
        self.library = library
        self.calls.open(library, identity, ttl_s=self.kv_transfer_ttl_s)

    async def _warm_up(
        self,
        info: EngineInfo,
        warm_up_steps: Sequence[WarmUpStep] = (),
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Generate one token, so that `start` returns only when the library responds.

        Then run the warm-up.

        Args:
            info: properties of the engine.
            warm_up_steps: steps of this engine, before the requests.
            cache_salt: the cache salt of the requests.

        Raises:
            EngineFailed: the library does not respond, or failed during the warm-up.
        """
        try:
            await run_first_request(self, self._model, max_tokens=1, cache_salt=cache_salt)
        except DynamoError as exc:
            text = f"{self._library_name} was loaded but the warm-up request failed: {exc.message}"
            raise EngineFailed(text) from exc
        await self._warming.run([*warm_up_steps, *variants(self, self._model, info, cache_salt)])
        await self.check()

    async def check(self) -> None:
        """See `ChecksHealth.check`. If the library can no longer serve, all streams end."""
        self.calls.check()

    def fail(self, why: str) -> None:
        """End all streams with an error. The first reason is reported for later requests too."""
        self.calls.fail(why)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        await self.calls.drain()

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        for stop_reader in self._stop_readers:
            await asyncio.to_thread(stop_reader)
        self.fail("the engine is closed")
        await asyncio.gather(*self.calls.tasks, return_exceptions=True)
        if self.calls.is_open:
            await self.library.aclose()
        llm = self._llm
        self._llm = None
        if llm is None:
            return
        shut_down = partial(self._shut_down, llm)
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await run_in_daemon_thread(shut_down, name=f"{self._engine}-shutdown")
        except TimeoutError:
            log.error(
                "%s did not shut down within %g s; check that its processes have ended",
                self._library_name,
                _SHUTDOWN_S,
            )

    def _shut_down(self, llm: Any) -> None:
        """Shut the library down; called on a thread."""
        try:
            llm.shutdown()
        except Exception as exc:  # noqa: BLE001 - logged; libraries raise errors of any class
            log.warning(
                "%s failed to shut down; check for leftover processes: %s",
                self._library_name,
                exc,
            )

    def _discard(self, built: tuple[Any, Any]) -> None:
        """Shut down what `build` of `_load` has returned."""
        _, llm = built
        self._shut_down(llm)

    # --- requests ---------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> ExternalCall:
        """See `Engine.generate`."""
        return ExternalCall(self.calls, request, on_event)

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """See `TransfersKv.release`."""
        self.calls.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `TransfersKv.is_pending`."""
        return self.calls.is_pending(transfer_id)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self.calls.stats()

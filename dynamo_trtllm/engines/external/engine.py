"""Base class of engines that wrap an inference library: loading on a thread, warm-up, requests and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from dynamo_trtllm.engines.base import NO_STATS, EngineInfo, EngineStats
from dynamo_trtllm.engines.external.library import Library
from dynamo_trtllm.engines.external.loading import EngineLoader, run_in_daemon_thread
from dynamo_trtllm.engines.external.runner import Runner, Times
from dynamo_trtllm.engines.warm_up import WarmUp, WarmUpStep, first_request, variants
from dynamo_trtllm.errors import DynamoError, EngineFailed, EngineNotReady
from dynamo_trtllm.kv_transfer.base import TransferIdentity
from dynamo_trtllm.messages import GenerateRequest, ReleaseOutcome
from dynamo_trtllm.streams import OnEvent, Stream, StreamHandle

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 60.0

V = TypeVar("V")


class ExternalEngine:
    """Implementation of `Engine`, `KvHolder`, `HasStats` and `HasProgress` without `start`."""

    def __init__(self, engine: str, library: str, *, warm_up_budget_s: float) -> None:
        """Initialize an engine that is not loaded.

        Args:
            engine: value of `--engine`.
            library: name of the library, for messages.
            warm_up_budget_s: see `WarmUp`.
        """
        self._warming = WarmUp(warm_up_budget_s)
        self._engine = engine
        self._library = library
        self._loading: EngineLoader[Any] | None = None
        self._llm: Any = None  # the library's own object
        self._runner: Runner | None = None
        self._closed = False

    def progress(self) -> str:
        """See `HasProgress`."""
        loading = self._loading
        return self._warming.progress() if loading is None else loading.progress()

    async def _load(self, loading: EngineLoader[tuple[V, Any]]) -> V:
        """Return the library's bindings and store its engine object. Raises the exceptions of the builder."""
        self._loading = loading
        try:
            bindings, self._llm = await loading.load()
        finally:
            self._loading = None
        return bindings

    def _run(self, library: Library, identity: TransferIdentity, times: Times) -> None:
        """Accept requests, which the loaded library runs."""
        self._runner = Runner(library, identity, times)

    async def _warm_up(self, model: str, info: EngineInfo, passes: Sequence[WarmUpStep] = ()) -> None:
        """Generate one token, so that `start` returns only when the library responds. Then run the warm-up.

        Args:
            model: name of the model.
            info: properties of the engine.
            passes: steps of this engine, before the requests.

        Raises:
            EngineFailed: the library does not respond, or failed during the warm-up.
        """
        try:
            await first_request(self, model, max_tokens=1)
        except DynamoError as exc:
            raise EngineFailed(f"{self._library} was loaded but the warm-up request failed: {exc.message}") from exc
        await self._warming.run([*passes, *variants(self, model, info)])
        await self.check()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._runner is None:
            raise self._not_ready()
        self._runner.check()

    async def drain(self) -> None:
        """See `Engine.drain`."""
        if self._runner is not None:
            await self._runner.drain()

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        self._closed = True
        if self._runner is not None:
            await self._runner.aclose()
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await run_in_daemon_thread(partial(self._shut_down, llm), name=f"{self._engine}-shutdown")
        except TimeoutError:
            _log.error(
                "%s did not shut down within %g s; check that its processes have ended", self._library, _SHUTDOWN_S
            )

    def _shut_down(self, llm: Any) -> None:
        """Shut the library down; called on a thread."""
        try:
            llm.shutdown()
        except Exception as exc:  # noqa: BLE001 - of any class; nothing can be done about it
            _log.warning("%s failed to shut down; check for leftover processes: %s", self._library, exc)

    def _discard(self, built: tuple[Any, Any]) -> None:
        self._shut_down(built[1])

    # --- requests --------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """See `Engine.generate`."""
        if self._runner is not None:
            return self._runner.generate(request, on_event)
        stream = Stream(on_event)
        asyncio.get_running_loop().call_soon(stream.emit, self._not_ready())
        return stream

    def _not_ready(self) -> DynamoError:
        if self._closed:
            return EngineFailed("the engine is closed")
        return EngineNotReady(f"the {self._engine} engine has not been started")

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """See `KvHolder.release`."""
        _log.debug("KV transfer %s released: %s", transfer_id, outcome)
        if self._runner is not None:
            self._runner.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        return self._runner is not None and self._runner.is_pending(transfer_id)

    def stats(self) -> EngineStats:
        """See `HasStats`."""
        return NO_STATS if self._runner is None else self._runner.stats()

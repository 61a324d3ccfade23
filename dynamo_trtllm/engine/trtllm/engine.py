"""TensorRT-LLM's `LLM` as an `Engine`: from configuration to a built LLM, and its end.

Computes nothing and moves no KV: the vendor's executor and cache transceiver do. Blocking calls run on threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.base import EngineInfo, EngineStats, Finding
from dynamo_trtllm.engine.checkpoint import read_checkpoint
from dynamo_trtllm.engine.loading import Loading, on_thread
from dynamo_trtllm.engine.trtllm import gpu, kernels, settings
from dynamo_trtllm.engine.trtllm.args import trtllm_args
from dynamo_trtllm.engine.trtllm.desk import Terms
from dynamo_trtllm.engine.trtllm.flight import VENDOR_ERRORS
from dynamo_trtllm.engine.trtllm.preflight.checks import check_peers, check_role
from dynamo_trtllm.engine.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engine.trtllm.releases import release_for
from dynamo_trtllm.engine.trtllm.serving import Serving, Times
from dynamo_trtllm.engine.trtllm.vendor import Vendor, installed_version, load_vendor, release_line
from dynamo_trtllm.engine.weights import weight_bytes
from dynamo_trtllm.errors import ConfigError, DynamoError, EngineFailed, EngineNotReady
from dynamo_trtllm.messages import (
    Chunk,
    GenerateRequest,
    Instance,
    KvLayout,
    Phase,
    ReleaseOutcome,
    Role,
    Sampling,
    token_ids,
)

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 60.0
_CANARY_S = 600.0
_OWN_PHASE = {Role.PREFILL: Phase.PREFILL, Role.DECODE: Phase.DECODE, Role.AGGREGATED: Phase.WHOLE}
_NO_STATS = EngineStats(running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, tickets_held=0, ticket_kv_blocks=0)


class TrtllmEngine:
    """`Engine` with `HasTickets`, `HasStats`, `HasProgress` and `HasPreflight`. `config.model_path` is a folder."""

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        """Raises ConfigError: for TensorRT-LLM not installed, arguments it does not take, a folder with no model."""
        version = installed_version()
        gpus = gpu.visible_gpus()
        self._release = release_for(version)
        self._args = trtllm_args(config, self._release, gpus)
        self._checkpoint = read_checkpoint(Path(config.model_path))
        self._model = config.served_model_name or self._checkpoint.folder.name
        self._holder = instance_id
        self._facts = RoleFacts(
            role=config.disaggregation_mode,
            args=self._args,
            release=version,
            model=self._checkpoint,
            gpu=gpus[0] if gpus else None,
            num_gpus=len(gpus) or None,
            environment={**self._args.profile.environment, **process_environment()},
            strategy=config.disaggregation_strategy,
        )
        self._times = Times(settings.ticket_ttl_s(self._facts, config.ticket_ttl_s), config.handoff_timeout_s)
        self._pairing = settings.pairing(self._facts, release_line(version))
        self._loading: Loading[tuple[Vendor, Any]] | None = None
        self._llm: Any = None
        self._serving: Serving | None = None
        self._closed = False

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """See `HasPreflight`."""
        return [*check_role(self._facts), *check_peers(self._facts, peers, self._pairing)]

    def progress(self) -> str:
        """See `HasProgress`."""
        loading = self._loading
        return "" if loading is None else loading.progress()

    # --- life ------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        for note in self._args.notes:
            _log.info("%s", note)
        self._loading = Loading(
            self._build,
            discard=_discard,
            gpu_bytes_used=gpu.memory_used_bytes,
            weight_bytes=weight_bytes(self._checkpoint).total // self._facts.tensor_parallel,
        )
        try:
            vendor, self._llm = await self._loading.built()
        finally:
            self._loading = None
        info = self._serve(vendor)
        await self._canary()
        if settings.has_statistics(self._args) and self._serving is not None:
            self._serving.poll_stats()
        return info

    def _build(self) -> tuple[Vendor, Any]:
        """On a thread. The environment is set before the vendor is imported, which reads it."""
        kernels.apply(self._args.profile)
        vendor = load_vendor()
        values = settings.llm_values(self._args, model=str(self._checkpoint.folder))
        try:
            llm = vendor.llm(**values)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"TensorRT-LLM {vendor.version} refuses the engine arguments: {exc}") from exc
        except (vendor.request_error, *VENDOR_ERRORS) as exc:
            raise EngineFailed(f"TensorRT-LLM could not be started: {exc}") from exc
        return vendor, llm

    def _serve(self, vendor: Vendor) -> EngineInfo:
        refused = settings.refuses(self._args, self._release, cache_salt=vendor.capabilities.cache_salt)
        rules = settings.rules(self._facts, self._checkpoint, vendor.capabilities, refused)
        terms = Terms(self._holder, self._model, self._layout(), self._pairing, vendor.capabilities)
        self._serving = Serving(vendor, self._llm, rules, terms, self._times)
        limit = rules.prompt_limits[_OWN_PHASE[rules.role]]
        _log.info(
            "TensorRT-LLM %s (as %s) is loaded: context %d, prompts up to %d (%s)",
            vendor.version,
            self._release.title,
            rules.context_length,
            limit.tokens,
            limit.why,
        )
        return EngineInfo(
            engine="trtllm",
            context_length=rules.context_length,
            vocab_size=rules.vocab_size,
            eos_token_ids=rules.end_ids,
            renderer=self._checkpoint.renderer,
            layout=terms.layout,
            limits=settings.limits(self._facts),
            pairing=self._pairing,
            refuses=(*refused, "resumed_tokens"),  # they are prompt to it and nothing else
            serves_whole=True,
            files=self._checkpoint.files,
        )

    def _layout(self) -> KvLayout:
        layout = self._facts.layout()
        assert layout is not None  # None only without a model
        return layout

    async def _canary(self) -> None:
        """One token, so that `start` returns only when the executor answers. Asks nothing of the transceiver."""
        request = GenerateRequest(
            request_id="canary",
            model=self._model,
            token_ids=token_ids([0]),
            sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            deadline=time.time() + _CANARY_S,
        )
        try:
            async with aclosing(self.generate(request)) as stream:
                async for _ in stream:
                    pass
        except DynamoError as exc:
            raise EngineFailed(f"TensorRT-LLM was loaded, and does not answer: {exc.message}") from exc

    async def check(self) -> None:
        """See `Engine.check`."""
        self._ready().check()

    async def drain(self) -> None:
        if self._serving is not None:
            await self._serving.drain()

    async def aclose(self) -> None:
        self._closed = True
        if self._serving is not None:
            await self._serving.aclose()
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await on_thread(partial(_shut_down, llm), name="trtllm-shutdown")
        except TimeoutError:
            _log.error("TensorRT-LLM did not shut down in %g s", _SHUTDOWN_S)

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        async with aclosing(self._ready().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _ready(self) -> Serving:
        if self._serving is None:
            if self._closed:
                raise EngineFailed("the engine was closed")
            raise EngineNotReady("the trtllm engine has not been started")
        return self._serving

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """See `HasTickets.release`."""
        _log.debug("ticket %s: %s", ticket_id, outcome)
        if self._serving is not None:
            self._serving.release(ticket_id, outcome)

    def stats(self) -> EngineStats:
        return _NO_STATS if self._serving is None else self._serving.stats()


def _discard(built: tuple[Vendor, Any]) -> None:
    _shut_down(built[1])


def _shut_down(llm: Any) -> None:
    """Blocks: run it on a thread."""
    try:
        llm.shutdown()
    except VENDOR_ERRORS as exc:
        _log.warning("TensorRT-LLM's shutdown: %s", exc)

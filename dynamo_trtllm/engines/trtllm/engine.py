"""Implement `Engine` with TensorRT-LLM's `LLM`: check the arguments, build the LLM on a thread, shut it down.

TensorRT-LLM's executor computes the tokens, and its cache transceiver transfers the KV.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import environ
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.base import EngineInfo, Finding
from dynamo_trtllm.engines.checkpoint import read_checkpoint, weight_bytes
from dynamo_trtllm.engines.external.engine import ExternalEngine, run_in_daemon_thread
from dynamo_trtllm.engines.external.library import end_ids
from dynamo_trtllm.engines.trtllm import kernels, settings
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.trtllm.bindings import PACKAGE, TrtllmBindings, load_bindings
from dynamo_trtllm.engines.trtllm.library import TrtllmLibrary, error_text
from dynamo_trtllm.engines.trtllm.polling import KvEventPoller
from dynamo_trtllm.engines.trtllm.preflight.checks import check_peers, check_role
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.warm_up import cache_folders
from dynamo_trtllm.errors import ConfigError, EngineFailed
from dynamo_trtllm.kv_events import OnKvEvents
from dynamo_trtllm.messages import Instance, Limits, Phase, Role

_log = logging.getLogger(__name__)

# Errors of the preflight command with which a worker starts all the same: it restarts when too much KV has leaked.
_TOLERATED = frozenset({"unfetched-kv-leaks"})
_MEMORY_TAGS = ("kv_cache", "model", "model_weights")
_OWN_PHASE = {Role.PREFILL: Phase.PREFILL, Role.DECODE: Phase.DECODE, Role.AGGREGATED: Phase.AGGREGATED}


class TrtllmEngine(ExternalEngine):
    """An `Engine` with `KvHolder`, `HasStats`, `HasProgress`, `HasPreflight`, `HasKvEvents` and `CanSleep`."""

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        """Merge and check the arguments.

        Args:
            config: settings of the worker; `model_path` is a folder.
            instance_id: id of the worker, part of its KV transfer parameters.

        Raises:
            ConfigError: TensorRT-LLM is not installed, an argument is invalid, or the folder has no model.
        """
        super().__init__(config, engine="trtllm", library="TensorRT-LLM", instance_id=instance_id)
        version = PACKAGE.version()
        gpus = gpu.visible_gpus()
        self._release = release_for(version)
        self._args = trtllm_args(config, self._release, gpus)
        self._checkpoint = read_checkpoint(Path(config.model_path))
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
        self.ticket_ttl_s = settings.ticket_ttl_s(self._facts, config.ticket_ttl_s)
        self._kv_compat = settings.kv_compat(self._facts, version)
        self._kv_events: KvEventPoller | None = None
        if config.publish_kv_events:
            settings.check_kv_events(self._facts)
        self._cache_folders = {} if config.compile_cache is None else cache_folders(config.compile_cache.absolute())

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """See `HasPreflight`."""
        findings = [*check_role(self._facts), *check_peers(self._facts, peers, self._kv_compat)]
        return [replace(each, severity="warning") if each.rule in _TOLERATED else each for each in findings]

    @property
    def sleep_obstacle(self) -> str:
        """See `CanSleep`."""
        has_names = hasattr(self._llm, "_collective_rpc") and self._memory_tags()
        return settings.sleep_obstacle(self._facts) or ("" if has_names else "this TensorRT-LLM can't sleep")

    async def sleep(self) -> None:
        """See `CanSleep`. TensorRT-LLM restores weights as `sleep_config` says; KV is lost."""
        await self._change_memory("sleep")

    async def wake(self) -> None:
        """See `CanSleep`."""
        await self._change_memory("wakeup")

    async def _change_memory(self, method: str) -> None:
        """Call all ranks, as TensorRT-LLM's own tests of sleep do (main of 2026-09)."""
        call = partial(self._llm._collective_rpc, method, (self._memory_tags(),))
        try:
            await run_in_daemon_thread(call, name=f"trtllm-{method}")
        except Exception as exc:
            raise EngineFailed(f"TensorRT-LLM failed at {method}: {error_text(exc)}") from exc

    def _memory_tags(self) -> list[Any]:
        """Return the kinds of GPU memory to release, of those that the release has."""
        modules = ("tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args", "tensorrt_llm._torch.virtual_memory")
        kinds = PACKAGE.find_optional("ExecutorMemoryType", *modules) or ()
        return [kind for kind in kinds if str(kind) in _MEMORY_TAGS]

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `HasKvEvents`."""
        self._kv_events = KvEventPoller(self._llm.get_kv_cache_events, self._facts.block_tokens)
        self._kv_events.start(on_events)

    # --- start and stop ------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        for note in self._args.notes:
            _log.info("%s", note)
        weights = weight_bytes(self._checkpoint).total // self._facts.tensor_parallel
        info, library = self._serve(await self._load(self._build, weight_bytes=weights))
        await self._warm_up(info)
        if self._args.values.get("enable_iter_perf_stats"):
            library.poll_stats()
        return info

    def _build(self) -> tuple[TrtllmBindings, Any]:
        """Build the LLM; called on a thread. TensorRT-LLM reads the environment when it is imported."""
        kernels.apply(self._args.profile)
        for name, value in self._cache_folders.items():
            environ.export(name, value, wanted_by="--compile-cache")
        bindings = load_bindings()
        own = {"model": str(self._checkpoint.folder), "backend": "pytorch"}
        values = bindings.engine_arguments({**self._args.values, **own})
        try:
            llm = bindings.create_llm(values)
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"TensorRT-LLM {bindings.version} rejected the engine arguments: {exc}") from exc
        except Exception as exc:
            raise EngineFailed(f"TensorRT-LLM failed to start: {error_text(exc)}") from exc
        return bindings, llm

    def _serve(self, bindings: TrtllmBindings) -> tuple[EngineInfo, TrtllmLibrary]:
        facts, checkpoint, layout = self._facts, self._checkpoint, self._facts.layout()
        assert layout is not None  # the model was read
        info = EngineInfo(
            engine="trtllm",
            context_length=settings.context_length(facts),
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=end_ids(checkpoint),
            renderer=checkpoint.renderer,
            layout=layout,
            limits=Limits(max_batch_size=facts.max_batch_size, max_num_tokens=facts.max_num_tokens),
            kv_compat=self._kv_compat,
            unsupported_features=(*settings.unsupported_features(facts, bindings), "resumed_tokens"),
            supported_features=settings.supported_features(facts, bindings),
            can_aggregate=True,
            files=checkpoint.files,
        )
        model_limits = settings.model_limits(facts, info, bindings)
        library = TrtllmLibrary(
            bindings=bindings,
            llm=self._llm,
            model_limits=model_limits,
            instance_id=self._instance_id,
            ticket_ttl_s=self.ticket_ttl_s,
            kv_timeout_s=settings.kv_timeout_s(facts),
            runtime=facts.set_runtime,
            num_kv_ranks=facts.tensor_parallel if facts.on("enable_attention_dp") else 1,
        )
        self._run(library, info, f"trtllm/{self._kv_compat.get('transceiver', '')}".lower())
        limit = model_limits.prompt_limits[_OWN_PHASE[facts.role]]
        _log.info(
            "Loaded TensorRT-LLM %s (schema of %s): context length %d, longest prompt %d tokens (%s)",
            bindings.version,
            self._release.title,
            info.context_length,
            limit.tokens,
            limit.why,
        )
        return info, library

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.stop)
        await super().aclose()

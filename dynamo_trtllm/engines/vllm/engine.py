"""vLLM's `AsyncLLM` as an `Engine`: from configuration to a built engine, and its end.

Computes nothing and moves no KV: vLLM's engine process and its NixlConnector do. Blocking calls run on threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dynamo_trtllm.config import environ
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.base import EngineInfo, EngineStats, Finding
from dynamo_trtllm.engines.checkpoint import TOKENIZER, read_checkpoint, weight_bytes
from dynamo_trtllm.engines.external import NO_STATS, Counts, EngineLoader, ExternalEngine, Times
from dynamo_trtllm.engines.pending_transfers import TransferIdentity
from dynamo_trtllm.engines.vllm import preflight, settings
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.engines.vllm.bindings import VENDOR_ERRORS, VllmBindings, installed_version, load_bindings
from dynamo_trtllm.engines.vllm.session import VllmSession
from dynamo_trtllm.messages import Instance, Role
from dynamo_trtllm.network.addresses import LOOPBACK


class SchedulerStats(Protocol):
    """What is read of the vendor's class of that name."""

    num_waiting_reqs: int
    num_skipped_waiting_reqs: int  # waiting for KV to come, or for a form to be compiled
    kv_cache_usage: float


class StepStats:
    """Keeps the last step of each rank. Called and read on the event loop."""

    def __init__(self) -> None:
        self._last: dict[int, SchedulerStats] = {}
        self.blocks_per_rank = 0  # settled once the engine is built

    def record(self, rank: int, stats: SchedulerStats) -> None:
        self._last[rank] = stats

    def counts(self, ranks: int = 1) -> Counts:
        """Of all data-parallel ranks together."""
        usable = max(0, self.blocks_per_rank - 1)  # one is the null block, which no request gets
        return Counts(
            waiting=sum(each.num_waiting_reqs + each.num_skipped_waiting_reqs for each in self._last.values()),
            kv_blocks_used=sum(round(each.kv_cache_usage * usable) for each in self._last.values()),
            kv_blocks_total=usable * ranks,
        )


_log = logging.getLogger(__name__)

_WANTED_BY = "the vllm engine"
# vLLM's processes are spawned, because this one has threads. vLLM reports no usage statistics. flashinfer's cubins are
# optional.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
}


class VllmEngine(ExternalEngine[VllmSession]):
    """`Engine` with `HasTickets`, `HasStats`, `HasProgress` and `HasPreflight`. `config.model_path` is a folder."""

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        """Raises ConfigError: for vLLM not installed, arguments it does not take, a folder with no model."""
        super().__init__("vllm", "vLLM")
        self._release = installed_version()
        self._args = vllm_args(config)
        self._checkpoint = read_checkpoint(Path(config.model_path))
        self._model = config.served_model_name or self._checkpoint.folder.name
        self._instance_id = instance_id
        self._role = config.disaggregation_mode
        self._kv_transfer_host = config.kv_transfer_host or LOOPBACK
        self._times = Times(config.ticket_ttl_s, config.handoff_timeout_s)
        self._has_tokenizer = (self._checkpoint.folder / TOKENIZER).is_file()
        gpus = gpu.visible_gpus()
        self._facts = preflight.VllmFacts(
            role=self._role,
            args=self._args,
            model=self._checkpoint,
            gpu=gpus[0] if gpus else None,
            num_gpus=len(gpus),
        )
        self._steps = StepStats()

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """See `HasPreflight`."""
        return preflight.findings(self._facts, peers)

    # --- life ------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """See `Engine.start`."""
        for note in self._args.notes:
            _log.info("%s", note)
        loading = EngineLoader(
            self._build,
            discard=self._discard,
            gpu_bytes_used=gpu.memory_used_bytes,
            weight_bytes=weight_bytes(self._checkpoint).total // self._args.count("tensor_parallel_size"),
        )
        info = self._serve(await self._load(loading))
        await self._ready().bind_lifetime()
        await self._warm_up(self._model)
        return info

    def _build(self) -> tuple[VllmBindings, Any]:
        """On a thread. The environment is set before the vendor is imported, which reads it."""
        for name, value in _ENVIRONMENT.items():
            environ.export(name, value, wanted_by=_WANTED_BY)
        channel = None
        if self._role is not Role.AGGREGATED:
            ranks = self._args.count("data_parallel_size")
            channel = settings.choose(self._kv_transfer_host, ranks, process_environment())
            _log.info("NixlConnector listens for handshakes at %s port %d", channel.host, channel.port)
        bindings = load_bindings()
        values = settings.engine_values(self._args, self._checkpoint.folder, channel, has_tokenizer=self._has_tokenizer)
        return bindings, bindings.build(values, self._steps.record)

    def _serve(self, bindings: VllmBindings) -> EngineInfo:
        config = self._llm.vllm_config
        self._steps.blocks_per_rank = int(config.cache_config.num_gpu_blocks or 0)
        layout = settings.layout(self._checkpoint, config)
        model_limits = settings.model_limits(self._role, self._checkpoint, config, has_tokenizer=self._has_tokenizer)
        kv_compat = settings.kv_compat(self._role, self._checkpoint, config, self._release)
        identity = TransferIdentity("vllm", self._instance_id, self._model, layout, kv_compat, transport="vllm/nixl")
        self._session = VllmSession(bindings, self._llm, model_limits, identity, self._times)
        _log.info(
            "vLLM %s is loaded: context %d, %d KV blocks of %d tokens",
            bindings.version,
            model_limits.context_length,
            self._steps.blocks_per_rank,
            layout.block_tokens,
        )
        return EngineInfo(
            engine="vllm",
            context_length=model_limits.context_length,
            vocab_size=model_limits.vocab_size,
            eos_token_ids=model_limits.end_ids,
            renderer=self._checkpoint.renderer,
            layout=layout,
            limits=settings.limits(config),
            kv_compat=kv_compat,
            # they are prompt to it and nothing else
            unsupported_features=(*model_limits.unsupported_features, "resumed_tokens"),
            can_aggregate=True,
            files=self._checkpoint.files,
        )

    def stats(self) -> EngineStats:
        if self._session is None:
            return NO_STATS
        return self._session.stats(self._steps.counts(self._args.count("data_parallel_size")))

    def _shut_down(self, llm: Any) -> None:
        try:
            llm.shutdown()
        except VENDOR_ERRORS as exc:
            _log.warning("vLLM's shutdown: %s", exc)

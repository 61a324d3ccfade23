"""Run vLLM's `AsyncLLM` as an `Engine`: load it, describe it, and shut it down.

vLLM's engine process computes, and its NixlConnector transfers KV. Blocking calls run on threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import environ
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.capabilities import (
    MAX_STEPS,
    MeasuresSteps,
    PublishesKvEvents,
    RunsPreflight,
)
from dynamo_trtllm.engines.engine_interface import EngineInfo, Finding
from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.external.library import Counts, model_stop_ids
from dynamo_trtllm.engines.vllm import chunk_threshold, compilation, releases, transfer_params
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.engines.vllm.bindings import VllmBindings
from dynamo_trtllm.engines.vllm.kv_events import KvEventSubscriber
from dynamo_trtllm.engines.vllm.library import VllmLibrary
from dynamo_trtllm.engines.vllm.patches import decode_graphs
from dynamo_trtllm.engines.vllm.preflight import VllmFacts, findings
from dynamo_trtllm.engines.vllm.requests import VllmModelLimits
from dynamo_trtllm.engines.vllm.start_progress import StartProgress
from dynamo_trtllm.engines.vllm.steps import step_of
from dynamo_trtllm.models.checkpoint import TOKENIZER, Checkpoint, read_checkpoint
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import Instance, KvLayout, Limits, Role
from dynamo_trtllm.support.network.addresses import LOOPBACK

log = logging.getLogger(__name__)


class StepStats:
    """The statistics of the last step of each rank. Used on the event loop only."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}  # vLLM's `SchedulerStats`
        self.samples: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self.blocks_per_rank = 0  # set once the engine is built

    def record(self, rank: int, stats: Any) -> None:
        self._last[rank] = stats
        step = step_of(stats)
        if step is not None:
            self.samples.append(step)

    def counts(self, ranks: int = 1) -> Counts:
        """Return the sums over all data-parallel ranks. `ranks`: their number."""
        # One block is vLLM's null block, which no request gets.
        usable_blocks = max(0, self.blocks_per_rank - 1)
        num_waiting = 0
        used_blocks = 0
        for stats in self._last.values():
            # Skipped requests wait for KV or for a compiled grammar.
            num_waiting += stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            used_blocks += round(stats.kv_cache_usage * usable_blocks)
        return Counts(
            waiting=num_waiting, kv_blocks_used=used_blocks, kv_blocks_total=usable_blocks * ranks
        )


# A variable of vLLM from 0.29 on: the order of blocks, heads, layers, tokens and channels.
KV_CACHE_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
_WANTED_BY = "the vllm engine"
# Spawn vLLM's processes, because this process has threads. Send no usage statistics. Accept a
# FlashInfer without its matching cubin package.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
}
# These apply unless the user has set them. FlashInfer compiles its sampler with nvcc for 136 s on
# the first start with a type of GPU.
_PREFERRED = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


class VllmEngine(ExternalEngine, RunsPreflight, MeasuresSteps, PublishesKvEvents):
    """An `Engine` that runs vLLM.

    `config.model_path` must be a folder.
    """

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        """Check the arguments and read the model folder; load nothing.

        Raises:
            ConfigError: vLLM is not installed, an argument is invalid, or the folder has no model.
        """
        super().__init__(config, engine="vllm", library="vLLM", instance_id=instance_id)
        self._release = releases.installed()
        if self._release.note:
            log.warning("%s", self._release.note)
        self._args = vllm_args(config, self._release.manifest)
        self._checkpoint = read_checkpoint(Path(config.model_path))
        self._role = config.disaggregation_mode
        self._kv_transfer_host = config.kv_transfer_host or LOOPBACK
        # The addresses of the side channels, once they are chosen.
        self._kv_addresses: tuple[str, ...] = ()
        self._compile_cache: Path | None = None
        if config.compile_cache is not None:
            self._compile_cache = config.compile_cache.absolute()
        self._has_tokenizer = (self._checkpoint.folder / TOKENIZER).is_file()
        gpus = gpu.visible_gpus()
        self._facts = VllmFacts(
            role=self._role,
            args=self._args,
            model=self._checkpoint,
            gpu=gpus[0] if gpus else None,
            num_gpus=len(gpus),
        )
        self._steps = StepStats()
        self._start_progress: StartProgress | None = None
        self._publishes_kv_events = config.publish_kv_events
        self._kv_events: KvEventSubscriber | None = None

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """Check this worker against `peers`, see `RunsPreflight.preflight`."""
        return findings(self._facts, peers)

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Load the engine and run one request, see `Engine.start`."""
        self._start_progress = StartProgress()
        self._stop_readers.append(self._start_progress.close)
        if self._publishes_kv_events:
            ranks = self._args.count("data_parallel_size")
            self._kv_events = KvEventSubscriber(ranks, releases.PACKAGE.load("zmq"))
            self._stop_readers.append(self._kv_events.close)
        bindings = await self._load(
            self._build, self._args, self._checkpoint, self._start_progress.phase
        )
        info, library = self._serve(bindings)
        await library.bind_lifetime()
        counts = compilation.token_counts(self._checkpoint, self._llm.vllm_config)
        async with library.compiling():
            await self._warm_up(info, library.warm_up_steps(counts))
        return info

    @property
    def steps(self) -> deque[StepSample]:
        """See `MeasuresSteps.steps`."""
        return self._steps.samples

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `PublishesKvEvents.start_kv_events`."""
        assert self._kv_events is not None
        self._kv_events.start(int(self._llm.vllm_config.cache_config.block_size), on_events)

    def _build(self) -> tuple[VllmBindings, Any]:
        """Build the AsyncLLM, on a thread.

        Sets the environment before it imports vLLM, which reads it.
        """
        progress = self._start_progress
        assert progress is not None
        folders = compilation.cache_folders(self._compile_cache, process_environment())
        for name, value in (_ENVIRONMENT | folders).items():
            environ.export(name, value, wanted_by=_WANTED_BY)
        environ.prefer(_PREFERRED)
        environ.replace(progress.environment)
        values = {
            **self._args.values,
            "model": str(self._checkpoint.folder),
            "disable_log_stats": True,
        }
        # vLLM needs the tokenizer for structured output only.
        values["skip_tokenizer_init"] = not self._has_tokenizer
        if self._role is not Role.AGGREGATED:
            ranks = self._args.count("data_parallel_size")
            channel = transfer_params.choose_side_channel(
                self._kv_transfer_host, ranks, process_environment()
            )
            log.info("NixlConnector: listening for handshakes at %s port %d", *channel.values())
            self._kv_addresses = transfer_params.side_channels(channel, ranks)
            transfer = values["kv_transfer_config"]
            extra = transfer["kv_connector_extra_config"] | channel
            extra[decode_graphs.NEVER_DECODES] = self._role is Role.PREFILL
            extra[chunk_threshold.IS_ELASTIC] = self._role is Role.ELASTIC
            values["kv_transfer_config"] = transfer | {"kv_connector_extra_config": extra}
        if self._kv_events is not None:
            values["kv_events_config"] = values["kv_events_config"] | self._kv_events.config
        bindings = VllmBindings(self._release.manifest)
        return bindings, bindings.build(values, self._steps.record)

    def _serve(self, bindings: VllmBindings) -> tuple[EngineInfo, VllmLibrary]:
        """Accept requests, which the loaded AsyncLLM runs."""
        config = self._llm.vllm_config
        checkpoint = self._checkpoint
        num_blocks = int(config.cache_config.num_gpu_blocks or 0)
        self._steps.blocks_per_rank = num_blocks
        if not self._has_tokenizer:
            log.info(
                "structured output is not available, because %s has no tokenizer.json",
                checkpoint.folder,
            )
        # vLLM would treat resumed tokens as prompt.
        unsupported = ["resumed_tokens"]
        if not self._has_tokenizer:
            unsupported.insert(0, "guided")
        has_priority = str(config.scheduler_config.policy) == "priority"
        info = EngineInfo(
            engine="vllm",
            context_length=int(config.model_config.max_model_len),
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=model_stop_ids(checkpoint),
            renderer=checkpoint.renderer,
            layout=_layout(checkpoint, config),
            limits=Limits(
                max_batch_size=int(config.scheduler_config.max_num_seqs),
                max_num_tokens=int(config.scheduler_config.max_num_batched_tokens),
                kv_blocks=num_blocks,
            ),
            kv_compat=_kv_compat(self._role, checkpoint, config, self._release.version),
            unsupported_features=tuple(unsupported),
            supported_features=("priority",) if has_priority else (),
            can_aggregate=True,
            reuses_prefixes=self._args.values.get("enable_prefix_caching") is not False,
            kv_addresses=self._kv_addresses,
            files=checkpoint.files,
        )
        model_limits = VllmModelLimits(
            role=self._role, info=info, max_logprobs=int(config.model_config.max_logprobs)
        )
        ranks = self._args.count("data_parallel_size")
        last_counts = partial(self._steps.counts, ranks)
        library = VllmLibrary(bindings, self._llm, model_limits, last_counts, self._transfer_guard)
        self._accept_requests(library, info, "vllm/nixl")
        log.info(
            "vLLM %s loaded: context %d, %d KV blocks of %d tokens",
            bindings.version,
            info.context_length,
            num_blocks,
            info.layout.block_tokens,
        )
        return info, library


def _layout(checkpoint: Checkpoint, config: Any) -> KvLayout:
    """Return the layout of the KV cache."""
    dtype = str(config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(config.model_config.dtype).removeprefix("torch.")
    # The variants of fp8 have the same size.
    if dtype.startswith("fp8"):
        dtype = "fp8"
    block_tokens = int(config.cache_config.block_size)
    ranks = int(config.parallel_config.tensor_parallel_size)
    return checkpoint.kv_layout(dtype, block_tokens, ranks)


def _kv_compat(role: Role, checkpoint: Checkpoint, config: Any, release: str) -> dict[str, str]:
    """Return the values, besides the layout, that must be equal in prefill and decode.

    NixlConnector's handshake compares these values, too.
    """
    if role is Role.AGGREGATED:
        return {}
    values = {
        "release": release,
        "model_folder": str(checkpoint.folder),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "attention_backend": str(config.attention_config.backend),
        "hybrid_kv_cache": str(not config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
    # The value is left out if the variable is not set, because workers of earlier releases of this
    # package have no such value.
    layout = process_environment().get(KV_CACHE_LAYOUT)
    if layout:
        values["kv_cache_layout"] = layout
    return values

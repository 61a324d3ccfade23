"""Implement `Engine` with TensorRT-LLM's `LLM`.

The arguments are checked, then the LLM is built on a thread, and shut down at the end.
TensorRT-LLM's executor computes the tokens, and its cache transceiver transfers the KV. Limits,
compatibility values and unsupported features are derived from the arguments, the release and the
checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo_trtllm.config import environ
from dynamo_trtllm.config.engine_names import BUILT_IN
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.capabilities import (
    MAX_STEPS,
    MeasuresSteps,
    PublishesKvEvents,
    RunsPreflight,
    Sleeps,
)
from dynamo_trtllm.engines.engine_interface import EngineInfo, EngineStats, Finding
from dynamo_trtllm.engines.external.engine import ExternalEngine, run_in_daemon_thread
from dynamo_trtllm.engines.external.library import model_stop_ids
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import statistics_note, trtllm_args
from dynamo_trtllm.engines.trtllm.bindings import PACKAGE, TrtllmBindings, release_line
from dynamo_trtllm.engines.trtllm.kernel_profiles import apply_profile
from dynamo_trtllm.engines.trtllm.library import TrtllmLibrary, error_text
from dynamo_trtllm.engines.trtllm.model_limits import (
    PENALTIES_SINCE,
    TrtllmModelLimits,
    context_length,
    dp_ranks,
    has_torch_sampler,
)
from dynamo_trtllm.engines.trtllm.preflight.checks import check_peers, check_role
from dynamo_trtllm.engines.trtllm.preflight.facts import BLOCK_SIZE, TIMEOUT, RoleFacts
from dynamo_trtllm.engines.trtllm.reports.kv_cache import KvCacheSize, check_block_size
from dynamo_trtllm.engines.trtllm.reports.kv_events import (
    KvEventPoller,
    check_kv_events,
    with_hash_algorithm,
)
from dynamo_trtllm.engines.trtllm.reports.steps import StepReader
from dynamo_trtllm.engines.trtllm.transfer_params import check_retries
from dynamo_trtllm.engines.trtllm.watchdog import HangDetector, Watchdog
from dynamo_trtllm.engines.warm_up import cache_folders
from dynamo_trtllm.models.checkpoint import read_checkpoint
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import Instance, Limits, Phase, Role

log = logging.getLogger(__name__)

# Rules whose findings are errors in the preflight command, but only warnings when a worker starts:
# a worker restarts when too much KV has leaked.
_TOLERATED = frozenset({"unfetched-kv-leaks"})
_MEMORY_TAGS = ("kv_cache", "model", "model_weights")  # GPU memory that `sleep` releases
# The default attention backend. Only its KV can be resharded for another number of ranks.
_ATTENTION = "TRTLLM"
_BLOCK_REUSE = "kv_cache_config.enable_block_reuse"
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# The first candidate of 1.3 that surely supports seeds. See PENALTIES_SINCE for the penalties.
_SEED_SINCE = 27
# Earlier releases reject context-only requests while the overlap scheduler is on.
_OVERLAPS_CONTEXT_ONLY_SINCE = (1, 3)


class TrtllmEngine(ExternalEngine, RunsPreflight, MeasuresSteps, PublishesKvEvents, Sleeps):
    """An `Engine` that runs TensorRT-LLM."""

    library: TrtllmLibrary

    @property
    def elastic_obstacle(self) -> str:
        """See `TransfersKv.elastic_obstacle`."""
        facts = self._facts
        overlaps = not facts.is_enabled("disable_overlap_scheduler")
        if overlaps and facts.line < _OVERLAPS_CONTEXT_ONLY_SINCE:
            return (
                f"disable_overlap_scheduler is not set, and TensorRT-LLM {facts.release} rejects"
                " prefill calls then, while decode calls are slower with it"
            )
        return BUILT_IN["trtllm"].elastic_obstacle

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        """Merge and check the arguments.

        Args:
            config: settings of the worker; `model_path` is a folder.
            instance_id: id of the worker, part of its KV transfer parameters.

        Raises:
            ConfigError: TensorRT-LLM is not installed, an argument is invalid, or the folder has no
                model.
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
        check_retries(self._facts.variable)
        self.kv_transfer_ttl_s = kv_transfer_ttl_s(self._facts, config.kv_transfer_ttl_s)
        self._kv_compat = kv_compat(self._facts, version)
        self._watchdog: Watchdog | None = None  # set once the LLM is built
        self._steps: deque[StepSample] = deque(maxlen=MAX_STEPS)
        self._publishes_kv_events = config.publish_kv_events
        self._kv_events: KvEventPoller | None = None  # set once events are read
        if config.publish_kv_events:
            check_kv_events(self._facts)
        # Environment variables that name the folders of compiled kernels.
        self._cache_folders: dict[str, str] = {}
        if config.compile_cache is not None:
            self._cache_folders = cache_folders(config.compile_cache.absolute())

    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """See `RunsPreflight.preflight`."""
        facts = self._facts
        sizes = {peer.layout.block_tokens for peer in peers if peer.engine == "trtllm"}
        if len(sizes) == 1 and not facts.is_given(BLOCK_SIZE):
            # The peers serve the same model, so this worker will have the same size.
            facts = replace(facts, running_block_tokens=sizes.pop())
        findings = [*check_role(self._facts), *check_peers(facts, peers, self._kv_compat)]
        return [
            replace(finding, severity="warning") if finding.rule in _TOLERATED else finding
            for finding in findings
        ]

    @property
    def sleep_obstacle(self) -> str:
        """See `Sleeps.sleep_obstacle`."""
        has_sleep_api = hasattr(self._llm, "_collective_rpc") and self._memory_tags()
        obstacle = sleep_obstacle(self._facts)
        if obstacle:
            return obstacle
        if not has_sleep_api:
            return "this TensorRT-LLM can't sleep"
        return ""

    async def sleep(self) -> None:
        """See `Sleeps.sleep`. TensorRT-LLM restores weights as `sleep_config` says; KV is lost."""
        await self._change_memory("sleep")

    async def wake(self) -> None:
        """See `Sleeps.wake`."""
        await self._change_memory("wakeup")

    async def _change_memory(self, method: str) -> None:
        """Call `method` of all ranks, as TensorRT-LLM's own tests of sleep do (main of 2026-09)."""
        call = partial(self._llm._collective_rpc, method, (self._memory_tags(),))
        try:
            await run_in_daemon_thread(call, name=f"trtllm-{method}")
        except Exception as exc:
            raise EngineFailed(f"TensorRT-LLM failed at {method}: {error_text(exc)}") from exc

    def _memory_tags(self) -> list[Any]:
        """Return the kinds of GPU memory to release, of those that the release has."""
        modules = (
            "tensorrt_llm.llmapi",
            "tensorrt_llm.llmapi.llm_args",
            "tensorrt_llm._torch.virtual_memory",
        )
        kinds = PACKAGE.find_optional("ExecutorMemoryType", *modules) or ()
        return [kind for kind in kinds if str(kind) in _MEMORY_TAGS]

    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """See `PublishesKvEvents.start_kv_events`."""
        get_events = self.library.bindings.reader(self._llm, "get_kv_cache_events")
        poller = KvEventPoller(get_events, self._facts.block_tokens)
        self._kv_events = poller
        self._stop_readers.append(poller.stop)
        poller.start(on_events)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        found = super().stats()
        if self._kv_events is None:
            return found
        converter = self._kv_events.converter
        return replace(
            found, kv_event_gaps=converter.num_gaps, kv_events_unreadable=converter.num_unreadable
        )

    # --- start and stop ---------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """See `Engine.start`.

        From then on, this process ends if TensorRT-LLM blocks the event loop for good.
        """
        # `_load` sets self._llm.
        bindings = await self._load(self._build, self._args, self._checkpoint)
        info, library = self._serve(bindings)
        # With attention DP, a rank has crashed when a request shared a prefix with TensorRT-LLM's
        # own dummy requests, which have no salt (health_check.py of Dynamo 1.7).
        await self._warm_up(info, cache_salt=secrets.token_hex(8))
        if self._args.get("enable_iter_perf_stats"):
            library.poll_stats(self._step_reader())
        else:
            log.warning("%s", statistics_note(self._args))
        return self._with_kv_cache(info, library, await library.kv_cache_size())

    def _with_kv_cache(
        self, info: EngineInfo, library: TrtllmLibrary, reported: KvCacheSize
    ) -> EngineInfo:
        """Return the properties to register, with the KV cache of the running engine.

        Raises:
            ConfigError: its block size is not the one that the user set.
        """
        block_tokens = check_block_size(self._facts, reported)
        library.block_tokens = block_tokens
        self._facts = replace(self._facts, running_block_tokens=block_tokens)
        layout = msgspec.structs.replace(info.layout, block_tokens=block_tokens)
        transfers = self.calls.transfers
        transfers.identity = transfers.identity._replace(layout=layout)
        if reported.blocks:
            log.info("KV cache: %d blocks of %d tokens on each rank", reported.blocks, block_tokens)
        return replace(
            info,
            layout=layout,
            limits=msgspec.structs.replace(info.limits, kv_blocks=reported.blocks),
        )

    async def aclose(self) -> None:
        """See `Engine.aclose`.

        The watchdog ends last, because the calls of a shutdown can block, too.
        """
        try:
            await super().aclose()
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    def _watch(self, library: TrtllmLibrary) -> None:
        """Start the thread that ends this process if the event loop is blocked for good."""
        failure = partial(library.bindings.recorded_failure, self._llm)
        detector = HangDetector(
            asyncio.get_running_loop(), library.calls, failure, lambda: library.iterated_at
        )
        self._watchdog = Watchdog(detector)
        self._watchdog.start()

    @property
    def steps(self) -> deque[StepSample]:
        """See `MeasuresSteps.steps`. Empty if `enable_iter_perf_stats` is off."""
        return self._steps

    def _step_reader(self) -> StepReader | None:
        """Return a reader of steps; None with pipeline parallelism.

        The stages of a pipeline compute different steps at the same time.
        """
        if self._facts.size("pipeline_parallel_size") > 1:
            return None
        return StepReader(
            self._steps, self._request_lengths, dp_ranks(self._facts) or 1, self._full_step
        )

    def _full_step(self) -> int:
        """Return the number of tokens from which a step counts as full.

        A full step computes only a part of its last prompt. The part ends at the end of a block, so
        a full step may have fewer tokens than `max_num_tokens`. Return 0 if prompts are never
        computed in parts.
        """
        if not self._facts.is_enabled("enable_chunked_prefill"):
            return 0
        return self._facts.max_num_tokens - self._facts.block_tokens + 1

    def _request_lengths(self) -> tuple[float, int]:
        """Return the mean context of the requests in the batch, and the length of the longest
        prompt. Prompts in the batch count with their output.

        Called on a thread.
        """
        # A copy, because the event loop may change the set meanwhile.
        loads = [call.tokens for call in list(self.calls.inflight)]
        contexts = [load.in_batch for load in loads if load.in_batch]
        mean_context = sum(contexts) / max(1, len(contexts))
        # A call has either tokens to compute or tokens in the batch.
        longest_prompt = max((load.to_compute + load.in_batch for load in loads), default=0)
        return mean_context, longest_prompt

    def _build(self) -> tuple[TrtllmBindings, Any]:
        """Build the LLM; called on a thread.

        TensorRT-LLM reads the environment when it is imported.
        """
        apply_profile(self._args.profile)
        for name, value in self._cache_folders.items():
            environ.export(name, value, wanted_by="--compile-cache")
        bindings = TrtllmBindings()
        set_here = {"model": str(self._checkpoint.folder), "backend": "pytorch"}
        values = bindings.engine_arguments({**self._args.values, **set_here})
        if self._publishes_kv_events:
            values = with_hash_algorithm(values, bindings)
        try:
            llm = bindings.create_llm(values)
        except (ValueError, TypeError) as exc:
            raise ConfigError(
                f"TensorRT-LLM {bindings.version} rejected the engine arguments: {exc}"
            ) from exc
        except Exception as exc:
            raise EngineFailed(f"TensorRT-LLM failed to start: {error_text(exc)}") from exc
        return bindings, llm

    def _serve(self, bindings: TrtllmBindings) -> tuple[EngineInfo, TrtllmLibrary]:
        """Accept requests, which the loaded LLM runs. Return what is known of the engine so far.

        The block size and the number of KV blocks are known only after the first request.
        """
        facts = self._facts
        checkpoint = self._checkpoint
        layout = self._facts.layout()
        assert layout is not None  # the model was read
        info = EngineInfo(
            engine="trtllm",
            context_length=context_length(facts),
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=model_stop_ids(checkpoint),
            renderer=checkpoint.renderer,
            layout=layout,
            limits=Limits(max_batch_size=facts.max_batch_size, max_num_tokens=facts.max_num_tokens),
            kv_compat=self._kv_compat,
            unsupported_features=(*unsupported_features(facts, bindings), "resumed_tokens"),
            supported_features=supported_features(facts, bindings),
            can_aggregate=True,
            reuses_prefixes=facts.args.get(_BLOCK_REUSE) is not False,
            keeps_unfetched_kv=facts.role is Role.PREFILL,
            files=checkpoint.files,
        )
        limits = TrtllmModelLimits(facts, info, is_since_1_2=bindings.is_since_1_2)
        library = TrtllmLibrary(
            bindings=bindings,
            llm=self._llm,
            model_limits=limits,
            instance_id=self._instance_id,
            kv_transfer_ttl_s=self.kv_transfer_ttl_s,
            kv_timeout_s=kv_timeout_s(facts),
            runtime=facts.set_runtime,
            transfer_hint=transfer_hint(facts),
        )
        self._watch(library)
        self._accept_requests(
            library, info, f"trtllm/{self._kv_compat.get('transceiver', '')}".lower()
        )
        limit = limits.prompt_limits[Phase[facts.role.name]]
        log.info(
            "Loaded TensorRT-LLM %s (schema of %s): context length %d, longest prompt %d tokens"
            " (%s)",
            bindings.version,
            self._release.title,
            info.context_length,
            limit.tokens,
            limit.why,
        )
        return info, library


def unsupported_features(facts: RoleFacts, bindings: TrtllmBindings) -> tuple[str, ...]:
    """Return the fields of Sampling that this release does not support with these arguments."""
    args = facts.args
    release = facts.args.release
    features: list[str] = []
    if not args.get("guided_decoding_backend"):
        features.append("guided")
    if has_torch_sampler(args):
        # Earlier candidates ignore without an error: penalties and min_p (pull requests 16485 and
        # 16590 of TensorRT-LLM), and the seed (pull request 17172).
        if not facts.is_at_least_candidate(PENALTIES_SINCE):
            features += [*_PENALTIES, "min_p"]
        if not facts.is_at_least_candidate(_SEED_SINCE):
            features.append("seed")
    if facts.is_disaggregated and "first_gen_log_probs" not in bindings.disagg_fields:
        # Without this field, the first token of a decode call has no log-probability, and the call
        # fails: its result asserts one per token (executor/result.py of 1.2; pull request 11727
        # transfers it).
        features.append("logprobs")
    if features:
        log.info(
            "Requests with %s will be rejected. To support them, set guided_decoding_backend or"
            " sampler_type: TRTLLMSampler, if TensorRT-LLM %s has these arguments",
            ", ".join(features),
            release.title,
        )
    # This adapter does not pass log-probabilities of prompts on.
    return (*features, "prompt_logprobs")


def supported_features(facts: RoleFacts, bindings: TrtllmBindings) -> tuple[str, ...]:
    """Return "priority" and "dp_rank", if requests may have them.

    Priorities have an effect only if the executor orders its queue by them. Its default policy is
    fcfs.
    """
    policy = str(facts.args.get("scheduler_config.waiting_queue_policy")).rpartition(".")[2]
    features: list[str] = []
    if "priority" in bindings.parameters and policy.lower() == "priority":
        features.append("priority")
    if dp_ranks(facts) and bindings.classes["SchedulingParams"] is not None:
        features.append("dp_rank")
    return tuple(features)


def sleep_obstacle(facts: RoleFacts) -> str:
    """Return why the engine can't sleep with these arguments, as text; "" if it can."""
    if not facts.has_section("sleep_config"):
        return "set sleep_config in the engine file to allow it (TensorRT-LLM 1.3)"
    if facts.is_disaggregated:
        return (
            "only aggregated workers can sleep: the transceiver of others has registered the KV"
            " memory"
        )
    if facts.args.get(_BLOCK_REUSE) is not False:
        return (
            f"set {_BLOCK_REUSE}: false to allow it, because KV is lost and would be reused"
            " afterwards"
        )
    return ""


def kv_compat(facts: RoleFacts, version: str) -> dict[str, str]:
    """Return the values, besides the layout, that must be equal in prefill and decode.

    The result is {} for aggregated workers. It contains the tensor-parallel size unless the
    attention backend supports resharding. Python transceivers exchange unversioned data, so workers
    with Python transceivers need the same build.

    Args:
        facts: the worker's arguments.
        version: installed version of TensorRT-LLM.
    """
    if not facts.is_disaggregated:
        return {}
    attention = facts.attention
    line = version if facts.runtime == "PYTHON" else release_line(version)
    values = {"release": line, "transceiver": str(facts.transceiver), "attn_backend": attention}
    if facts.has_runtimes:
        values["transceiver_runtime"] = facts.runtime or ""
    if attention != _ATTENTION:
        values["tensor_parallel_size"] = str(facts.tensor_parallel)
    return values


def kv_transfer_ttl_s(facts: RoleFacts, requested_s: float) -> float:
    """Return the lifetime of a KV transfer in seconds.

    The lifetime is at most TensorRT-LLM's own timeout of transfers.

    Args:
        facts: the worker's arguments.
        requested_s: value of `--kv-transfer-ttl-s`.
    """
    timeout_s = kv_timeout_s(facts)
    if not facts.is_disaggregated or timeout_s >= requested_s:
        return requested_s
    log.warning(
        "Reduced --kv-transfer-ttl-s from %g to %g; raise %s to keep it",
        requested_s,
        timeout_s,
        TIMEOUT,
    )
    return timeout_s


def transfer_hint(facts: RoleFacts) -> str:
    """Return what else may be wrong if the KV of a prompt was not received.

    The text is the end of a sentence; "" if nothing is known.

    In some candidates of July 2026 the C++ transceiver takes the type of its buffers from the pool
    of recurrent states (pull requests 16304 and 16505 of TensorRT-LLM). If KV has another type, the
    sender fails at the first request, and the receiver waits until its time is over.
    """
    is_affected = facts.is_at_least_candidate(15) and not facts.is_at_least_candidate(24)
    has_recurrent_layers = facts.model is not None and facts.model.has_recurrent_layers
    if is_affected and has_recurrent_layers and facts.runtime != "PYTHON":
        return (
            "; with models that have recurrent layers, TensorRT-LLM 1.3.0rc15 to rc23 may have"
            " transfer buffers of a wrong type (pull request 16505): install a newer one, or set"
            " transceiver_runtime: PYTHON and backend: NIXL"
        )
    return ""


def kv_timeout_s(facts: RoleFacts) -> float:
    """Return the seconds after which TensorRT-LLM frees KV that was not fetched; infinity if
    TensorRT-LLM never frees it.
    """
    timeout_ms = facts.number(TIMEOUT)
    return math.inf if timeout_ms is None else timeout_ms / 1000

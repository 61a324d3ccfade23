"""Derive limits, compatibility values and unsupported features from the arguments, the release and the checkpoint."""

from __future__ import annotations

import logging
import math

from dynamo_trtllm.engines.base import EngineInfo
from dynamo_trtllm.engines.manifests import Presence
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings, release_line
from dynamo_trtllm.engines.trtllm.preflight.facts import BUFFER, TIMEOUT, RoleFacts
from dynamo_trtllm.engines.trtllm.requests import PromptLimit, TrtllmModelLimits
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Phase

_log = logging.getLogger(__name__)

_ATTENTION = "TRTLLM"  # default attention backend; only its KV can be resharded for another number of ranks
_EVENT_BUFFER = "kv_cache_config.event_buffer_max_size"
_BLOCK_REUSE = "kv_cache_config.enable_block_reuse"
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# The first candidate of 1.3 that surely has them; the changes were merged one to three candidates before.
_PENALTIES_SINCE = 24
_SEED_SINCE = 27


def has_torch_sampler(args: TrtllmArgs) -> bool:
    """Return True if the PyTorch sampler runs, the only one from 1.3 on, and not the TRTLLM sampler."""
    if args.release.presence("TorchLlmArgs", "sampler_type") is Presence.PRESENT:
        return str(args.get("sampler_type")).rpartition(".")[2] != "TRTLLMSampler"
    return not args.values.get("enable_trtllm_sampler")


def unsupported_features(facts: RoleFacts, bindings: TrtllmBindings) -> tuple[str, ...]:
    """Return the fields of Sampling, and "cache_salt", that this release does not support with these arguments."""
    args, release = facts.args, facts.args.release
    features = [] if "cache_salt" in bindings.parameters else ["cache_salt"]
    if not args.get("guided_decoding_backend"):
        features.append("guided")
    if has_torch_sampler(args):
        # Ignored without an error before: penalties and min_p (pull requests 16485 and 16590 of TensorRT-LLM), and
        # the seed (pull request 17172).
        if not facts.is_at_least_candidate(_PENALTIES_SINCE):
            features += [*_PENALTIES, "min_p"]
        if not facts.is_at_least_candidate(_SEED_SINCE):
            features.append("seed")
    if args.values.get("enable_mixed_sampler"):
        features.append("logit_bias")
    if facts.is_disaggregated and "first_gen_log_probs" not in bindings.disagg_fields:
        # The first token of a decode call has no entry, and the call fails: its result asserts one per token
        # (executor/result.py of 1.2; pull request 11727 transfers the entry).
        features.append("logprobs")
    if features:
        _log.info(
            "Requests with %s will be rejected. To support them, set guided_decoding_backend or sampler_type: "
            "TRTLLMSampler, if TensorRT-LLM %s has these arguments",
            ", ".join(features),
            release.title,
        )
    return (*features, "prompt_logprobs")  # this adapter does not pass them on


def dp_ranks(facts: RoleFacts) -> int:
    """Return the number of attention-DP ranks among which requests can choose; 0 without attention DP."""
    return facts.tensor_parallel if facts.on("enable_attention_dp") else 0


def supported_features(facts: RoleFacts, bindings: TrtllmBindings) -> tuple[str, ...]:
    """Return "priority" and "dp_rank", if requests may have them.

    Priorities have an effect only if the executor orders its queue by them. Its default policy is fcfs.
    """
    policy = str(facts.args.get("scheduler_config.waiting_queue_policy")).rpartition(".")[2]
    features = ["priority"] if "priority" in bindings.parameters and policy.lower() == "priority" else []
    return (*features, *(["dp_rank"] if dp_ranks(facts) and bindings.classes["SchedulingParams"] is not None else []))


def has_conversations(facts: RoleFacts) -> bool:
    """Return True if the executor looks at conversation ids, to choose a rank or to keep KV blocks."""
    affinity = facts.on("attention_dp_config.kv_cache_routing_conversation_affinity") and dp_ranks(facts) > 0
    return affinity or facts.inside("kv_cache_config.block_reuse_config").get("policy") == "per_conversation"


def check_kv_events(facts: RoleFacts) -> None:
    """Check that TensorRT-LLM reports KV events with these arguments. Raises ConfigError."""
    for key, needed, is_set in (
        (_EVENT_BUFFER, "1 or more", (facts.number(_EVENT_BUFFER) or 0) > 0),
        (_BLOCK_REUSE, "true", facts.args.get(_BLOCK_REUSE) is not False),
    ):
        if not is_set:
            raise ConfigError(
                f"--publish-kv-events needs {key} of {needed}; it is {facts.shown(key)}. Set it, or remove the flag.",
                field=key,
            )


def sleep_obstacle(facts: RoleFacts) -> str:
    """Return why the engine can't sleep with these arguments, as text; "" if it can."""
    if not facts.section("sleep_config"):
        return "set sleep_config in the engine file to allow it (TensorRT-LLM 1.3)"
    if facts.is_disaggregated:
        return "only aggregated workers can sleep: the transceiver of others has registered the KV memory"
    if facts.args.get(_BLOCK_REUSE) is not False:
        return f"set {_BLOCK_REUSE}: false to allow it, because KV is lost and would be reused afterwards"
    return ""


def kv_compat(facts: RoleFacts, version: str) -> dict[str, str]:
    """Return the values, besides the layout, that must be equal in prefill and decode; {} for aggregated workers.

    The tensor-parallel size is one of them unless the attention backend supports resharding. Python transceivers
    exchange unversioned data, so with them both sides need the same build.

    Args:
        facts: the worker's arguments.
        version: installed version of TensorRT-LLM.
    """
    if not facts.is_disaggregated:
        return {}
    attention = str(facts.args.get("attn_backend") or _ATTENTION)
    line = version if facts.runtime == "PYTHON" else release_line(version)
    values = {"release": line, "transceiver": str(facts.transceiver), "attn_backend": attention}
    if facts.has_runtimes:
        values["transceiver_runtime"] = facts.runtime or ""
    if attention != _ATTENTION:
        values["tensor_parallel_size"] = str(facts.tensor_parallel)
    return values


def ticket_ttl_s(facts: RoleFacts, requested_s: float) -> float:
    """Return the lifetime of a KV transfer in seconds, limited by TensorRT-LLM's own transfer timeout.

    Args:
        facts: the worker's arguments.
        requested_s: value of `--ticket-ttl-s`.
    """
    timeout_ms = facts.number(TIMEOUT)
    if not facts.is_disaggregated or timeout_ms is None or timeout_ms / 1000 >= requested_s:
        return requested_s
    _log.warning("Reduced --ticket-ttl-s from %g to %g; raise %s to keep it", requested_s, timeout_ms / 1000, TIMEOUT)
    return timeout_ms / 1000


def kv_timeout_s(facts: RoleFacts) -> float:
    """Return the seconds after which TensorRT-LLM frees KV that was not fetched; infinity if it never does."""
    timeout_ms = facts.number(TIMEOUT)
    return math.inf if timeout_ms is None else timeout_ms / 1000


def context_length(facts: RoleFacts) -> int:
    """Return the longest request in tokens, prompt and output together.

    Raises:
        ConfigError: neither the arguments nor the model set it.
    """
    if not facts.max_seq_len:
        raise ConfigError("config.json has no context length. Pass --max-seq-len.", field="max_seq_len")
    return facts.max_seq_len


def prompt_limit(facts: RoleFacts, phase: Phase) -> PromptLimit:
    """Return the longest prompt of a call in this phase, and the argument that sets it."""
    context = context_length(facts)
    candidates = [PromptLimit(context - 1, f"max_seq_len {context}")]
    buffer = facts.buffer
    if buffer and phase is not Phase.AGGREGATED:  # longer prompts use a fallback that fails with NIXL
        candidates.append(PromptLimit(buffer, BUFFER))
    if phase is not Phase.DECODE and not facts.on("enable_chunked_prefill"):
        candidates.append(PromptLimit(facts.max_num_tokens, "max_num_tokens without enable_chunked_prefill"))
    return min(candidates)


def model_limits(facts: RoleFacts, info: EngineInfo, bindings: TrtllmBindings) -> TrtllmModelLimits:
    """Return the limits for all requests. `info`: properties of the engine."""
    xgrammar = facts.args.get("guided_decoding_backend") == "xgrammar"
    return TrtllmModelLimits(
        role=facts.role,
        info=info,
        prompt_limits={phase: prompt_limit(facts, phase) for phase in Phase},
        structural_tags=xgrammar and bindings.is_since_1_2,
        dp_ranks=dp_ranks(facts),
        conversations=has_conversations(facts),
        min_tokens=not has_torch_sampler(facts.args) or facts.is_at_least_candidate(_PENALTIES_SINCE),
    )

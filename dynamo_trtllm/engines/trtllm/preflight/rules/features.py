"""Rules about what runs beside KV transfers: block reuse, host offload, cache managers, drafts,
adapters.
"""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("Features beside KV transfer")
_DISAGGREGATED = (Role.PREFILL, Role.DECODE)
_REUSE = "kv_cache_config.enable_block_reuse"
_HOST = "kv_cache_config.host_cache_size"
_V2 = "kv_cache_config.use_kv_cache_manager_v2"
_EVENTS = "kv_cache_config.event_buffer_max_size"


@SECTION.rule(
    "error",
    "chunked-reuse-corruption",
    since=(1, 2, 0),
    before=(1, 2, 1),
    field=_REUSE,
    why="1.2.0 corrupts KV with chunked prefill and block reuse: the output is silently wrong",
    fix="use 1.2.1, or set kv_cache_config.enable_block_reuse: false",
)
def chunked_reuse_corruption(facts: RoleFacts) -> Violation | None:
    """Find chunked prefill with block reuse."""
    if not facts.is_enabled("enable_chunked_prefill") or not facts.is_enabled(_REUSE):
        return None
    chunked = facts.value_with_source("enable_chunked_prefill")
    return Violation(other=f"enable_chunked_prefill {chunked}, release {facts.release}")


@SECTION.rule(
    "note",
    "reuse-on-prefill",
    roles=(Role.PREFILL,),
    since=(1, 2),
    before=(1, 3),
    field=_REUSE,
    why=(
        "on 1.2 a block may be removed from the reuse tree before its transfer ends; decode then"
        " hangs"
    ),
    fix="if requests hang, set kv_cache_config.enable_block_reuse: false on prefill",
)
def reuse_on_prefill(facts: RoleFacts) -> Violation | None:
    """Find block reuse on a prefill worker."""
    if not facts.is_enabled(_REUSE):
        return None
    return Violation(other=f"a prefill worker of {facts.release}")


@SECTION.rule(
    "note",
    "reuse-with-windows",
    field=_REUSE,
    why="sliding-window layers limit block reuse, depending on the release",
    fix="none needed; if you rely on prefix caching, measure the cached tokens",
)
def reuse_with_windows(facts: RoleFacts) -> Violation | None:
    """Find block reuse of a model with sliding windows."""
    model = facts.model
    if model is None or not model.num_sliding_layers or not facts.is_enabled(_REUSE):
        return None
    return Violation(
        other=f"{model.num_sliding_layers} layers with a window of {model.sliding_window} tokens"
    )


@SECTION.rule(
    "note",
    "host-offload-chunked",
    before=(1, 3),
    field=_HOST,
    why=(
        "deadlocks of host offload with chunked prefill were reported; from 1.3 on it is in use for"
        " published results"
    ),
    fix="remove host_cache_size, or set enable_chunked_prefill: false",
)
def host_offload_chunked(facts: RoleFacts) -> Violation | None:
    """Find host offload with chunked prefill."""
    if (facts.number(_HOST) or 0) <= 0 or not facts.is_enabled("enable_chunked_prefill"):
        return None
    return Violation(
        other=f"enable_chunked_prefill {facts.value_with_source('enable_chunked_prefill')}"
    )


@SECTION.rule(
    "warning",
    "host-offload-corruption",
    before=(1, 2),
    field=_HOST,
    why="before 1.2 host offload reportedly mixes tokens of other prompts into the output",
    fix="remove host_cache_size, or use 1.2.1",
)
def host_offload_corruption(facts: RoleFacts) -> Violation | None:
    """Find host offload."""
    if (facts.number(_HOST) or 0) <= 0:
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "note",
    "speculative-disaggregated",
    roles=_DISAGGREGATED,
    field="speculative_config",
    why=(
        "this project has not tried drafts with KV transfer, and they were inaccurate with the"
        " overlap scheduler"
    ),
    fix="check output and acceptance rate first",
)
def speculative_disaggregated(facts: RoleFacts) -> Violation | None:
    """Find speculative decoding on workers that transfer KV."""
    if not facts.has_section("speculative_config"):
        return None
    return Violation(value="set", other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "error",
    "logits-processor-disaggregated",
    roles=_DISAGGREGATED,
    field="batched_logits_processor",
    why="TensorRT-LLM does not support logits processors with disaggregation",
    fix="remove it, or use aggregated workers",
)
def logits_processor_disaggregated(facts: RoleFacts) -> Violation | None:
    """Find logits processors on workers that transfer KV."""
    if facts.args.get("batched_logits_processor") is None:
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "warning",
    "lora-disaggregated",
    roles=_DISAGGREGATED,
    field="enable_lora",
    why="TensorRT-LLM does not test LoRA with disaggregation",
    fix="remove it, or check the output first",
)
def lora_disaggregated(facts: RoleFacts) -> Violation | None:
    """Find LoRA on workers that transfer KV."""
    if facts.is_enabled("enable_lora"):
        field = "enable_lora"
    elif facts.has_section("lora_config"):
        field = "lora_config"
    else:
        return None
    return Violation(field=field, value="set", other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "warning",
    "cache-manager-fallback",
    roles=_DISAGGREGATED,
    before=(1, 4),
    field=_V2,
    why=(
        "the C++ transceiver supports KV cache manager v1 only: TensorRT-LLM falls back to it, and "
        "newer builds fail at start"
    ),
    fix=(
        "remove it on both sides, or set cache_transceiver_config.backend: NIXL and"
        " transceiver_runtime: PYTHON there"
    ),
)
def cache_manager_fallback(facts: RoleFacts) -> Violation | None:
    """Find cache manager v2 with the C++ transceiver.

    Candidates of 1.3 fall back up to some build (pull request 16942), and fail from then on: in
    main of 2026-09 no fallback for the transceiver is left
    (_fallback_if_unsupported_kv_cache_manager_v2 in _torch/pyexecutor/_util.py).
    """
    return _v2_with_cpp(facts)


@SECTION.rule(
    "error",
    "cache-manager-transceiver",
    roles=_DISAGGREGATED,
    since=(1, 4),
    field=_V2,
    why="the C++ transceiver supports KV cache manager v1 only: TensorRT-LLM fails at start",
    fix=(
        "remove it on both sides, or set cache_transceiver_config.backend: NIXL and"
        " transceiver_runtime: PYTHON there"
    ),
)
def cache_manager_transceiver(facts: RoleFacts) -> Violation | None:
    """Find cache manager v2 with the C++ transceiver, where no fallback is left."""
    return _v2_with_cpp(facts)


@SECTION.rule(
    "warning",
    "cache-manager-v1-features",
    field=_V2,
    why="KV cache manager v2 has neither beam search nor connectors: TensorRT-LLM falls back to v1",
    fix="remove one of the two",
)
def cache_manager_v1_features(facts: RoleFacts) -> Violation | None:
    """Find cache manager v2 with features that only v1 has."""
    if not facts.is_enabled(_V2):
        return None
    if (facts.number("max_beam_width") or 1) > 1:
        return Violation(other=f"max_beam_width {facts.value_with_source('max_beam_width')}")
    if facts.has_section("kv_connector_config"):
        return Violation(other="kv_connector_config")
    return None


@SECTION.rule(
    "warning",
    "v2-without-fabric",
    roles=_DISAGGREGATED,
    field=_V2,
    why=(
        "without NVLink fabric, UCX can't map the blocks of KV cache manager v2 in another process."
        " KV moves through the memory of the host, measured at 193 ms per transfer instead of"
        " 0.4 ms"
    ),
    fix=(
        "set kv_cache_config.use_kv_cache_manager_v2: false on both sides, or use a newer release"
        " and measure"
    ),
)
def v2_without_fabric(facts: RoleFacts) -> Violation | None:
    """Find cache manager v2, set or chosen for gpt-oss, whose KV moves through the memory of the
    host.

    The figures are from pull request 17241. gpt-oss uses v2 by default since pull request 16942 (28
    July 2026, in rc24). The fix (pull request 18347, opened on 28 August 2026) needs UCX 1.22. It
    is not established which candidate is the first that has the fix.
    """
    if facts.runtime != "PYTHON" or facts.gpu is None or facts.has_multi_node_nvlink:
        return None
    if facts.candidate is None or facts.candidate > 26:
        return None
    is_left_to_model = facts.args.get(_V2) in (None, "auto") or _V2 not in facts.args.leaves
    is_chosen = facts.is_gpt_oss and facts.candidate >= 24 and is_left_to_model
    if not facts.is_enabled(_V2) and not is_chosen:
        return None
    return Violation(
        value="chosen for gpt-oss" if is_chosen else "",
        other=f"{facts.gpu_title}, release {facts.release}",
    )


@SECTION.rule(
    "warning",
    "events-without-reuse",
    field=_EVENTS,
    why="KV events report reusable blocks: without block reuse there are none",
    fix="set it to 0, or set kv_cache_config.enable_block_reuse: true",
)
def events_without_reuse(facts: RoleFacts) -> Violation | None:
    """Find KV events without block reuse."""
    if (facts.number(_EVENTS) or 0) <= 0 or facts.args.get(_REUSE) is not False:
        return None
    return Violation(other=f"{_REUSE} {facts.value_with_source(_REUSE)}")


def _v2_with_cpp(facts: RoleFacts) -> Violation | None:
    if not facts.is_enabled(_V2) or facts.runtime != "CPP":
        return None
    return Violation(other="the C++ transceiver")

"""Rules about KV transfers and the features that are enabled together with them."""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import BACKEND, BUFFER, TIMEOUT, RoleFacts
from dynamo_trtllm.messages import Role

_OVERLAP = "disable_overlap_scheduler"
_REUSE = "kv_cache_config.enable_block_reuse"
_HOST = "kv_cache_config.host_cache_size"
_CHUNKED = "enable_chunked_prefill"
# With prompts of 128 K tokens 60 s (0.5 ms per token) failed always and 600 s (4.6 ms per token) worked.
_TIMEOUT_MS_PER_TOKEN = 1.0


def _no_transceiver(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.transceiver is not None:
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


def _idle_transceiver(facts: RoleFacts) -> Violation | None:
    if facts.is_disaggregated or not facts.args.leaves.keys() & {BACKEND, BUFFER}:
        return None
    return Violation(
        other=f"--disaggregation-mode {facts.role}", field=BACKEND if BACKEND in facts.args.leaves else BUFFER
    )


def _default_transceiver(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or str(facts.args.get(BACKEND) or "").upper() != "DEFAULT":
        return None
    return Violation(other="NIXL, unless a TRTLLM_USE_*_KVCACHE variable is set")


def _mpi_transceiver(facts: RoleFacts) -> Violation | None:
    return Violation() if facts.is_disaggregated and facts.transceiver == "MPI" else None


def _overlap_on_prefill(facts: RoleFacts) -> Violation | None:
    if facts.role is not Role.PREFILL or facts.line >= (1, 3, 0) or facts.on(_OVERLAP):
        return None
    return Violation(other=f"a prefill worker of {facts.release}")


def _beams(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or (facts.number("max_beam_width") or 1) <= 1:
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


def _short_timeout(facts: RoleFacts) -> Violation | None:
    timeout, prompt = facts.number(TIMEOUT), facts.longest_prompt
    stated = TIMEOUT in facts.args.leaves or facts.load.isl is not None
    if not facts.is_disaggregated or timeout is None or prompt is None or not stated:
        return None
    needed = round(prompt * _TIMEOUT_MS_PER_TOKEN)
    if timeout >= needed:
        return None
    return Violation(other=f"prompts of up to {prompt} tokens", fix=f"set it to at least {needed}, on both sides")


def _no_timeout(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.line < (1, 3, 0) or facts.transceiver is None:
        return None
    return None if TIMEOUT in facts.args.leaves else Violation(other=f"release {facts.release}")


def _untested_timeout(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.line[:2] != (1, 2) or facts.number(TIMEOUT) is None:
        return None
    return Violation(other=f"release {facts.release}")


def _chunks_with_reuse(facts: RoleFacts) -> Violation | None:
    if facts.line != (1, 2, 0) or not facts.on(_CHUNKED) or not facts.on(_REUSE):
        return None
    return Violation(other=f"{_CHUNKED} {facts.shown(_CHUNKED)}, release {facts.release}")


def _reuse_on_prefill(facts: RoleFacts) -> Violation | None:
    if facts.role is not Role.PREFILL or facts.line[:2] != (1, 2) or not facts.on(_REUSE):
        return None
    return Violation(other=f"a prefill worker of {facts.release}")


def _reuse_with_windows(facts: RoleFacts) -> Violation | None:
    if facts.model is None or not facts.model.num_sliding_layers or not facts.on(_REUSE):
        return None
    return Violation(
        other=f"{facts.model.num_sliding_layers} layers with a window of {facts.model.sliding_window} tokens"
    )


def _host_with_chunks(facts: RoleFacts) -> Violation | None:
    if not (facts.number(_HOST) or 0) > 0 or not facts.on(_CHUNKED):
        return None
    return Violation(other=f"{_CHUNKED} {facts.shown(_CHUNKED)}")


def _host_corrupts(facts: RoleFacts) -> Violation | None:
    if not (facts.number(_HOST) or 0) > 0 or facts.line >= (1, 2, 0):
        return None
    return Violation(other=f"release {facts.release}")


def _speculative(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or not facts.section("speculative_config"):
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}", value="set")


def _logits_processor(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.args.get("batched_logits_processor") is None:
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


def _lora(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or not (facts.on("enable_lora") or facts.section("lora_config")):
        return None
    field = "enable_lora" if facts.on("enable_lora") else "lora_config"
    return Violation(other=f"--disaggregation-mode {facts.role}", field=field, value="set")


def _pipelined(facts: RoleFacts) -> Violation | None:
    if not facts.on("cache_transceiver_config.enable_pipelined_transfer"):
        return None
    return Violation(other=f"--disaggregation-strategy {facts.strategy}")


def _manager_v2(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.args.get("kv_cache_config.use_kv_cache_manager_v2") is not True:
        return None
    if str(facts.args.get("cache_transceiver_config.transceiver_runtime")).upper() == "PYTHON":
        return None
    return Violation(other="the C++ transceiver")


def _events_without_reuse(facts: RoleFacts) -> Violation | None:
    size = facts.number("kv_cache_config.event_buffer_max_size") or 0
    if size <= 0 or facts.args.get(_REUSE) is not False:
        return None
    return Violation(other=f"{_REUSE} {facts.shown(_REUSE)}")


RULES = (
    RoleRule(
        name="transceiver-missing",
        severity="error",
        field=BACKEND,
        why="without a transfer backend (unset or null) the first request of a prefill or decode worker fails",
        fix="set it to NIXL or UCX, the same on both sides",
        test=_no_transceiver,
    ),
    RoleRule(
        name="transceiver-idle",
        severity="note",
        field=BACKEND,
        why="an aggregated worker transfers no KV, but the buffers use memory",
        fix="remove cache_transceiver_config",
        test=_idle_transceiver,
    ),
    RoleRule(
        name="transceiver-default",
        severity="note",
        field=BACKEND,
        why="DEFAULT depends on environment variables, which may differ between the two sides",
        fix="set it to NIXL or UCX",
        test=_default_transceiver,
    ),
    RoleRule(
        name="transceiver-mpi",
        severity="warning",
        field=BACKEND,
        why="MPI is deprecated and needs both sides in one MPI world, but workers are separate",
        fix="set it to NIXL or UCX",
        test=_mpi_transceiver,
    ),
    RoleRule(
        name="overlap-on-prefill",
        severity="error",
        field=_OVERLAP,
        why="up to 1.2.1 context-only requests are rejected while the overlap scheduler is on",
        fix="set disable_overlap_scheduler: true on prefill",
        test=_overlap_on_prefill,
    ),
    RoleRule(
        name="beam-width",
        severity="error",
        field="max_beam_width",
        why="KV transfer does not support beam search",
        fix="set it to 1, or remove it",
        test=_beams,
    ),
    RoleRule(
        name="transfer-timeout-short",
        severity="warning",
        field=TIMEOUT,
        why="it covers the decode queue as well as the transfer: if it is too short, all long prompts fail (60 s did "
        "for 128 K tokens)",
        fix="set it to at least 1 ms per prompt token; 600000 is known to work for 128 K tokens",
        test=_short_timeout,
    ),
    RoleRule(
        name="transfer-timeout-unset",
        severity="note",
        field=TIMEOUT,
        why="1.3 aborts a transfer after 60 s, queue time included; earlier releases have no limit",
        fix="set it well above the longest decode queue time plus the transfer",
        test=_no_timeout,
    ),
    RoleRule(
        name="transfer-timeout-untested",
        severity="note",
        field=TIMEOUT,
        why="builds of the 1.2 line raised an exception in their timeout loop; 1.2.1 is unverified",
        fix="remove it, or test it under load first",
        test=_untested_timeout,
    ),
    RoleRule(
        name="chunked-reuse-corruption",
        severity="error",
        field=_REUSE,
        why="1.2.0 corrupts KV with chunked prefill and block reuse: the output is silently wrong",
        fix="use 1.2.1, or set kv_cache_config.enable_block_reuse: false",
        test=_chunks_with_reuse,
    ),
    RoleRule(
        name="reuse-on-prefill",
        severity="note",
        field=_REUSE,
        why="on 1.2 a block may be removed from the reuse tree before its transfer ends; decode then hangs",
        fix="if requests hang, set kv_cache_config.enable_block_reuse: false on prefill",
        test=_reuse_on_prefill,
    ),
    RoleRule(
        name="reuse-with-windows",
        severity="note",
        field=_REUSE,
        why="sliding-window layers limit block reuse, depending on the release",
        fix="none needed; if you rely on prefix caching, measure the cached tokens",
        test=_reuse_with_windows,
    ),
    RoleRule(
        name="host-offload-chunked",
        severity="warning",
        field=_HOST,
        why="host offload with chunked prefill reportedly deadlocks",
        fix="remove host_cache_size, or set enable_chunked_prefill: false",
        test=_host_with_chunks,
    ),
    RoleRule(
        name="host-offload-corruption",
        severity="warning",
        field=_HOST,
        why="before 1.2 host offload reportedly mixes tokens of other prompts into the output",
        fix="remove host_cache_size, or use 1.2.1",
        test=_host_corrupts,
    ),
    RoleRule(
        name="speculative-disaggregated",
        severity="warning",
        field="speculative_config",
        why="speculative decoding with KV transfer is unverified, and it was inaccurate with the overlap scheduler",
        fix="use aggregated workers, or check output and acceptance rate first",
        test=_speculative,
    ),
    RoleRule(
        name="logits-processor-disaggregated",
        severity="error",
        field="batched_logits_processor",
        why="TensorRT-LLM does not support logits processors with disaggregation",
        fix="remove it, or use aggregated workers",
        test=_logits_processor,
    ),
    RoleRule(
        name="lora-disaggregated",
        severity="warning",
        field="enable_lora",
        why="TensorRT-LLM does not test LoRA with disaggregation",
        fix="remove it, or check the output first",
        test=_lora,
    ),
    RoleRule(
        name="pipelined-transfer",
        severity="error",
        field="cache_transceiver_config.enable_pipelined_transfer",
        why="it needs a strategy in which decode starts first; here prefill does",
        fix="remove it",
        test=_pipelined,
    ),
    RoleRule(
        name="cache-manager-fallback",
        severity="note",
        field="kv_cache_config.use_kv_cache_manager_v2",
        why="with disaggregation TensorRT-LLM falls back to KV cache manager v1 unless the Python transceiver is used",
        fix="remove it, or set cache_transceiver_config.transceiver_runtime: PYTHON with NIXL",
        test=_manager_v2,
    ),
    RoleRule(
        name="events-without-reuse",
        severity="warning",
        field="kv_cache_config.event_buffer_max_size",
        why="KV events report reusable blocks: without block reuse there are none",
        fix="set it to 0, or set kv_cache_config.enable_block_reuse: true",
        test=_events_without_reuse,
    ),
)

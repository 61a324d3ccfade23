"""Rules about the cache transceiver, which transfers KV from prefill to decode workers."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import (
    BACKEND,
    BUFFER,
    RUNTIME,
    TIMEOUT,
    RoleFacts,
)
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("KV transfer")
_DISAGGREGATED = (Role.PREFILL, Role.DECODE)
_PIPELINED = "cache_transceiver_config.enable_pipelined_transfer"
_BOUNCE = "cache_transceiver_config.kv_cache_bounce_size_mb"
_INFLIGHT_CANCEL = "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL"
_AGENT = "TRTLLM_NIXL_KVCACHE_BACKEND"  # the library that NIXL uses; default: UCX
# Modes of KV transfers that can't be combined with in-flight cancellation.
_WITHOUT_CANCEL = (
    "TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP",
    "TRTLLM_DISAGG_LAYERWISE",
    "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER",
)


@SECTION.rule(
    "error",
    "transceiver-missing",
    roles=_DISAGGREGATED,
    field=BACKEND,
    why=(
        "without a transfer backend (unset or null) the first request of a prefill or decode worker"
        " fails"
    ),
    fix="set it to NIXL or UCX, the same on both sides",
)
def transceiver_missing(facts: RoleFacts) -> Violation | None:
    """Find prefill and decode workers that can't transfer KV."""
    if facts.args.get(BACKEND):
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "note",
    "transceiver-idle",
    roles=(Role.AGGREGATED,),
    field=BACKEND,
    why="an aggregated worker transfers no KV, but the buffers use memory",
    fix="remove cache_transceiver_config",
)
def transceiver_idle(facts: RoleFacts) -> Violation | None:
    """Find a transceiver of an aggregated worker."""
    for key in (BACKEND, BUFFER):
        if key in facts.args.leaves:
            return Violation(field=key, other=f"--disaggregation-mode {facts.role}")
    return None


@SECTION.rule(
    "note",
    "transceiver-default",
    roles=_DISAGGREGATED,
    field=BACKEND,
    why="DEFAULT depends on environment variables, which may differ between the two sides",
    fix="set it to NIXL or UCX, on both sides",
)
def transceiver_default(facts: RoleFacts) -> Violation | None:
    """Find a backend that environment variables choose."""
    if str(facts.args.get(BACKEND)).upper() != "DEFAULT":
        return None
    return Violation(
        other=f"{facts.default_backend}, unless a TRTLLM_USE_*_KVCACHE variable is set"
    )


@SECTION.rule(
    "warning",
    "transceiver-mpi",
    roles=_DISAGGREGATED,
    field=BACKEND,
    why="MPI is deprecated and needs both sides in one MPI world, but workers are separate",
    fix="set it to NIXL or UCX, on both sides",
)
def transceiver_mpi(facts: RoleFacts) -> Violation | None:
    """Find the MPI backend."""
    return Violation() if facts.transceiver == "MPI" else None


@SECTION.rule(
    "error",
    "overlap-on-prefill",
    roles=(Role.PREFILL,),
    before=(1, 3),
    field="disable_overlap_scheduler",
    why="up to 1.2.1 context-only requests are rejected while the overlap scheduler is on",
    fix="set disable_overlap_scheduler: true on prefill",
)
def overlap_on_prefill(facts: RoleFacts) -> Violation | None:
    """Find the overlap scheduler on a prefill worker."""
    if facts.is_enabled("disable_overlap_scheduler"):
        return None
    return Violation(other=f"a prefill worker of {facts.release}")


@SECTION.rule(
    "error",
    "beam-width",
    roles=_DISAGGREGATED,
    field="max_beam_width",
    why="the C++ transceiver does not transfer the KV of several beams",
    fix="set it to 1, or remove it",
)
def beam_width(facts: RoleFacts) -> Violation | None:
    """Find beam search with the C++ transceiver."""
    if (facts.number("max_beam_width") or 1) == 1 or facts.runtime == "PYTHON":
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "warning",
    "transfer-timeout-short",
    roles=_DISAGGREGATED,
    field=TIMEOUT,
    why=(
        "it covers the decode queue as well as the transfer: if it is too short, all long prompts "
        "fail (60 s did for 128 K tokens)"
    ),
    fix=(
        "raise it and --kv-transfer-ttl-s to at least 1 ms per prompt token; 600000 is known to"
        " work for 128 K tokens"
    ),
)
def transfer_timeout_short(facts: RoleFacts) -> Violation | None:
    """Find a timeout below 1 ms per prompt token.

    With prompts of 128 K tokens, 60 s (0.5 ms per token) always failed, and 600 s (4.6 ms per
    token) worked.
    """
    timeout = facts.number(TIMEOUT)
    prompt = facts.longest_prompt
    if timeout is None or prompt is None or timeout >= prompt:
        return None
    # If no load was given, prompts of this length may never come. Then a timeout is reported only
    # if the user has set it.
    if not facts.is_given(TIMEOUT) and facts.load.isl is None:
        return None
    return Violation(
        other=f"prompts of up to {prompt} tokens",
        fix=(
            f"raise --kv-transfer-ttl-s to at least {prompt / 1000:g}, and remove it or set it to"
            f" at least {prompt}, on both sides"
        ),
    )


@SECTION.rule(
    "error",
    "unfetched-kv-leaks",
    roles=(Role.PREFILL,),
    before=(1, 2),
    field="release",
    why=(
        "before 1.2 TensorRT-LLM never frees KV that no decode worker fetches, such as that of "
        "canceled requests. Workers start with a warning and restart when this is half of their KV"
    ),
    fix="use 1.2.1 or newer",
)
def unfetched_kv_leaks(facts: RoleFacts) -> Violation | None:
    """Find releases that keep KV for ever."""
    if not facts.transceiver:
        return None
    return Violation(value=facts.release, other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "warning",
    "transfer-timeout-null",
    roles=(Role.PREFILL,),
    since=(1, 2),
    field=TIMEOUT,
    why=(
        "without a timeout TensorRT-LLM never frees KV that no decode worker fetches, such as that "
        "of canceled requests. The worker restarts when this is half of its KV"
    ),
    fix="remove it; the worker then sets it to 1.1 times --kv-transfer-ttl-s",
)
def transfer_timeout_null(facts: RoleFacts) -> Violation | None:
    """Find a transceiver without a timeout."""
    if not facts.transceiver or facts.number(TIMEOUT) is not None:
        return None
    return Violation()


@SECTION.rule(
    "note",
    "transfer-timeout-untested",
    roles=_DISAGGREGATED,
    since=(1, 2),
    before=(1, 3),
    field=TIMEOUT,
    why="builds of the 1.2 line raised an exception in their timeout loop; 1.2.1 is unverified",
    fix="test it under load first; if prefill workers fail at their first transfer, set it to null",
)
def transfer_timeout_untested(facts: RoleFacts) -> Violation | None:
    """Find a timeout that the user set for 1.2."""
    if not facts.is_given(TIMEOUT) or not facts.number(TIMEOUT):
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "error",
    "pipelined-transfer",
    field=_PIPELINED,
    why="it needs a strategy in which decode starts first; here prefill does",
    fix="remove it",
)
def pipelined_transfer(facts: RoleFacts) -> Violation | None:
    """Find transfers that begin before the prompt is computed."""
    if not facts.is_enabled(_PIPELINED):
        return None
    return Violation(other=f"--disaggregation-strategy {facts.strategy}")


@SECTION.rule(
    "error",
    "transceiver-runtime-backend",
    field=RUNTIME,
    why="the Python transceiver supports NIXL only: TensorRT-LLM fails at start",
    fix="set cache_transceiver_config.backend: NIXL, or transceiver_runtime: CPP, on both sides",
)
def transceiver_runtime_backend(facts: RoleFacts) -> Violation | None:
    """Find the Python transceiver with another backend than NIXL."""
    if facts.runtime != "PYTHON" or facts.transceiver == "NIXL":
        return None
    return Violation(other=f"{BACKEND} {facts.value_with_source(BACKEND)}")


@SECTION.rule(
    "error",
    "python-transceiver-timeout",
    since=(1, 3),
    field=TIMEOUT,
    why=(
        "the Python transceiver needs a finite timeout: without one it fails at start, or hangs on"
        " a lost peer"
    ),
    fix="remove it; the worker then sets it to 1.1 times --kv-transfer-ttl-s",
)
def python_transceiver_timeout(facts: RoleFacts) -> Violation | None:
    """Find the Python transceiver, set by the user, without a timeout.

    Without a timeout, `auto` chooses the C++ transceiver.
    """
    if facts.transceiver != "NIXL" or facts.set_runtime != "PYTHON":
        return None
    if facts.number(TIMEOUT) is not None:
        return None
    return Violation(other=f"{RUNTIME} {facts.value_with_source(RUNTIME)}")


@SECTION.rule(
    "note",
    "cpp-transceiver-deprecated",
    roles=_DISAGGREGATED,
    since=(1, 3),
    field=RUNTIME,
    why="TensorRT-LLM 1.3 deprecates the C++ transceiver and announces its removal",
    fix="set cache_transceiver_config.backend: NIXL and transceiver_runtime: PYTHON on both sides",
)
def cpp_transceiver_deprecated(facts: RoleFacts) -> Violation | None:
    """Find the C++ transceiver."""
    if facts.runtime != "CPP":
        return None
    return Violation(other=f"{BACKEND} {facts.value_with_source(BACKEND)}")


@SECTION.rule(
    "warning",
    "beam-width-python-transceiver",
    roles=_DISAGGREGATED,
    field="max_beam_width",
    why=(
        "the Python transceiver transfers the KV of several beams, but TensorRT-LLM only has a pair"
        " of files for debugging it: whether its answers are right is not established"
    ),
    fix="set it to 1, or compare answers with those of an aggregated worker",
)
def beam_width_python_transceiver(facts: RoleFacts) -> Violation | None:
    """Find beam search with the Python transceiver (examples/disaggregated/debug_experiment, pull
    request 14876).
    """
    if (facts.number("max_beam_width") or 1) == 1 or facts.runtime != "PYTHON":
        return None
    return Violation(other=f"--disaggregation-mode {facts.role}")


@SECTION.rule(
    "warning",
    "runtime-auto-candidate",
    roles=_DISAGGREGATED,
    field=RUNTIME,
    why=(
        "1.3.0rc15 to rc25 choose the transceiver for auto by the model, and the choice for this"
        " one is not established. The worker assumes C++, whose buffer limits prompts"
    ),
    fix=(
        "set cache_transceiver_config.transceiver_runtime: PYTHON or CPP on both sides, or use"
        " 1.3.0rc26 or newer"
    ),
)
def runtime_auto_candidate(facts: RoleFacts) -> Violation | None:
    """Find a candidate for which it is not known which transceiver `auto` chooses for this model.

    See `RoleFacts.is_runtime_uncertain` for the pull requests.
    """
    if not facts.is_runtime_uncertain:
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "note",
    "transfer-timeout-crash",
    roles=(Role.PREFILL,),
    since=(1, 3),
    field=TIMEOUT,
    why=(
        "in candidates after 1.3.0rc12.post1, up to July 2026 or later, a prefill worker crashed"
        " when a transfer timed out (pull request 14565). Its other requests are then retried on"
        " another prefill worker"
    ),
    fix=(
        "use a newer candidate; null avoids the crash, but then KV that is not fetched is never"
        " freed"
    ),
)
def transfer_timeout_crash(facts: RoleFacts) -> Violation | None:
    """Find a timeout in the candidates that are known to crash.

    It is not established which candidate is the last that crashes.
    """
    if facts.candidate is None or not 13 <= facts.candidate <= 15:
        return None
    if facts.runtime != "CPP" or facts.number(TIMEOUT) is None:
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "warning",
    "pipeline-parallel-transfer-timeout",
    roles=(Role.PREFILL,),
    since=(1, 3),
    field="pipeline_parallel_size",
    why=(
        "an idle loop of pipeline parallelism does not check the transfer timeout: KV that is not"
        " fetched stays until the next request"
    ),
    fix="use tensor_parallel_size on prefill workers",
)
def pipeline_parallel_transfer_timeout(facts: RoleFacts) -> Violation | None:
    """Find a pipeline whose KV may wait for a peer (pull request 17124 of TensorRT-LLM)."""
    if facts.size("pipeline_parallel_size") == 1 or not facts.transceiver:
        return None
    return Violation(other=f"{TIMEOUT} {facts.value_with_source(TIMEOUT)}")


@SECTION.rule(
    "error",
    "inflight-cancel-transceiver",
    since=(1, 3),
    field=_INFLIGHT_CANCEL,
    why=(
        "TensorRT-LLM supports it for the C++ transceiver with backend NIXL over UCX and a finite"
        " timeout only, and fails at start otherwise"
    ),
    fix="unset it",
)
def inflight_cancel_transceiver(facts: RoleFacts) -> Violation | None:
    """Find in-flight cancellation where it is rejected.

    Source: _torch/pyexecutor/kv_cache_transceiver.py, main. TensorRT-LLM checks the backend before
    it resolves DEFAULT, so the backend must be NIXL itself.
    """
    if facts.variable(_INFLIGHT_CANCEL) != "1" or not facts.transceiver:
        return None
    is_nixl_over_ucx = (
        str(facts.args.get(BACKEND)).upper() == "NIXL"
        and (facts.variable(_AGENT) or "UCX").upper() == "UCX"
    )
    has_timeout = facts.number(TIMEOUT) is not None
    conflict = next((name for name in _WITHOUT_CANCEL if facts.variable(name) == "1"), "")
    if facts.runtime == "CPP" and is_nixl_over_ucx and has_timeout and not conflict:
        return None
    return Violation(
        value=facts.variable(_INFLIGHT_CANCEL),
        other=conflict
        or f"{BACKEND} {facts.value_with_source(BACKEND)}, transceiver {facts.runtime}",
    )


@SECTION.rule(
    "error",
    "context-parallel-python-transceiver",
    roles=_DISAGGREGATED,
    since=(1, 3),
    field="context_parallel_size",
    why=(
        "the Python transceiver has no context parallelism on prefill, and on decode not before"
        " 1.3.0rc25: it fails at start"
    ),
    fix="remove it, or set cache_transceiver_config.transceiver_runtime: CPP",
)
def context_parallel_python_transceiver(facts: RoleFacts) -> Violation | None:
    """Find context parallelism that the Python transceiver rejects.

    Source: _torch/disaggregation/transceiver.py; Helix on decode came with pull request 17794,
    opened after rc24.
    """
    if facts.size("context_parallel_size") == 1 or facts.runtime != "PYTHON":
        return None
    if facts.role is Role.DECODE and facts.has_helix and facts.is_at_least_candidate(25):
        return None
    return Violation(other=f"{RUNTIME} {facts.value_with_source(RUNTIME)}")


@SECTION.rule(
    "warning",
    "helix-python-transceiver",
    roles=(Role.DECODE,),
    since=(1, 3),
    before=(1, 4),
    field="context_parallel_size",
    why=(
        "the Python transceiver accepts context parallelism on decode since some candidate after"
        " 1.3.0rc24; which one is not established. Older ones fail at start"
    ),
    fix="use 1.4, or set cache_transceiver_config.transceiver_runtime: CPP",
)
def helix_python_transceiver(facts: RoleFacts) -> Violation | None:
    """Find Helix on decode in candidates that may not have it (pull requests 17794 and 19472)."""
    if facts.size("context_parallel_size") == 1 or facts.runtime != "PYTHON":
        return None
    if not facts.has_helix or not facts.is_at_least_candidate(25):
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "note",
    "bounce-buffer-cpp",
    roles=_DISAGGREGATED,
    field=_BOUNCE,
    why="only the Python transceiver has a bounce buffer: it has no effect",
    fix="remove it, or set cache_transceiver_config.backend: NIXL and transceiver_runtime: PYTHON",
)
def bounce_buffer_cpp(facts: RoleFacts) -> Violation | None:
    """Find a bounce buffer that is set for the C++ transceiver (pull request 15618)."""
    if not facts.is_given(_BOUNCE) or not facts.number(_BOUNCE) or facts.runtime != "CPP":
        return None
    return Violation(other=f"{RUNTIME} {facts.value_with_source(RUNTIME)}")

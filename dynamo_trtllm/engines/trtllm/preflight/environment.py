"""Rules about environment variables that TensorRT-LLM and UCX read. Pure."""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.messages import Role

_CUDA_TRANSPORTS = ("cuda", "all", "^")  # a list of exceptions has CUDA unless it names it
_FOR_MEASURING = ("ENABLE_PERFECT_ROUTER", "TLLM_OVERRIDE_LAYER_NUM", "TRTLLM_DISAGG_BENCHMARK_GEN_ONLY")
_BROKEN = ("TRTLLM_DISAGG_LAYERWISE", "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER")
_SYNCHRONOUS = "TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP"
_OFF = ("", "0")


def _no_cuda_transport(facts: RoleFacts) -> Violation | None:
    given = facts.variable("UCX_TLS")
    if not facts.is_disaggregated or facts.transceiver not in ("UCX", "NIXL") or not given:
        return None
    if any(word.strip().startswith(_CUDA_TRANSPORTS) for word in given.split(",")):
        return None
    return Violation(value=given, other="KV in GPU memory")


def _wrong_answers(facts: RoleFacts) -> Violation | None:
    return _first_set(facts, _FOR_MEASURING)


def _broken_transfers(facts: RoleFacts) -> Violation | None:
    return _first_set(facts, _BROKEN) if facts.is_disaggregated else None


def _waiting_decode(facts: RoleFacts) -> Violation | None:
    return _first_set(facts, (_SYNCHRONOUS,)) if facts.role is Role.DECODE else None


def _first_set(facts: RoleFacts, names: tuple[str, ...]) -> Violation | None:
    for name in names:
        if (value := facts.variable(name)) not in _OFF:
            return Violation(field=name, value=value, cure=f"unset {name}")
    return None


RULES = (
    RoleRule(
        name="ucx-without-cuda",
        severity="error",
        field="UCX_TLS",
        why="without a CUDA transport UCX takes GPU memory for host memory, and registering KV fails",
        cure="unset it, or add cuda_copy and cuda_ipc",
        test=_no_cuda_transport,
    ),
    RoleRule(
        name="variable-wrong-answers",
        severity="warning",
        field="ENABLE_PERFECT_ROUTER",
        why="it is for measuring: answers have no meaning",
        cure="unset ENABLE_PERFECT_ROUTER, TLLM_OVERRIDE_LAYER_NUM and TRTLLM_DISAGG_BENCHMARK_GEN_ONLY",
        test=_wrong_answers,
    ),
    RoleRule(
        name="variable-broken-transfer",
        severity="warning",
        field="TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER",
        why="this way to transfer is reported to hang or break",
        cure="unset TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER and TRTLLM_DISAGG_LAYERWISE",
        test=_broken_transfers,
    ),
    RoleRule(
        name="variable-waiting-decode",
        severity="warning",
        field=_SYNCHRONOUS,
        why="decode stands still while it receives KV: it is for finding faults",
        cure=f"unset {_SYNCHRONOUS}",
        test=_waiting_decode,
    ),
)

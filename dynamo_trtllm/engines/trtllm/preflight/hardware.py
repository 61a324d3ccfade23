"""Rules about the GPU architecture (MoE kernels, quantization, KV types) and about environment variables.

TensorRT-LLM runs an MXFP4 checkpoint as W4A8_MXFP4_FP8 (TRITON) or W4A8_MXFP4_MXFP8 (others) from compute capability
10.0 on, and as W4A16_MXFP4 below. OVERRIDE_QUANT_ALGO overrides that.
"""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.messages import Role

_MOE = "moe_config.backend"
_KV = "kv_cache_config.dtype"
_OVERRIDE = "OVERRIDE_QUANT_ALGO"
_BIASED = ("CUTLASS", "TRITON", "TRTLLM")  # support biases in experts and gpt-oss's activation
_FALLS_BACK = ("TRTLLM", "CUTEDSL")
# Compute capabilities of CUTLASS's MXFP4 kernels.
_CUTLASS = {"W4A16_MXFP4": (90,), "W4A8_MXFP4_FP8": (100, 103), "W4A8_MXFP4_MXFP8": (100, 103, 120, 121)}
_KV_KNOWN = ("auto", "fp8")
_KV_KNOWN_13 = ("auto", "fp8", "float16", "bfloat16", "float32", "fp8_ds_mla", "nvfp4")


def moe_backend(facts: RoleFacts) -> str:
    """Return the configured MoE backend, with AUTO resolved for the GPU."""
    name = str(facts.args.get(_MOE) or "CUTLASS").upper()
    if name != "AUTO" or facts.gpu is None:
        return name
    if 100 <= facts.gpu.sm < 120:
        return "TRTLLM"
    return "TRITON" if 90 <= facts.gpu.sm < 100 else "CUTLASS"


def mxfp4_algorithm(facts: RoleFacts) -> str | None:
    """Return the quantization algorithm of an MXFP4 model; None for other models or without a GPU."""
    if not _is_mxfp4(facts) or facts.gpu is None:
        return None
    override = facts.variable(_OVERRIDE)
    if override:
        return override
    if facts.gpu.sm < 100:
        return "W4A16_MXFP4"
    return "W4A8_MXFP4_FP8" if moe_backend(facts) == "TRITON" else "W4A8_MXFP4_MXFP8"


def _is_mxfp4(facts: RoleFacts) -> bool:
    return facts.model is not None and facts.model.quantization == "mxfp4"


def _is_gpt_oss(facts: RoleFacts) -> bool:
    return facts.model is not None and facts.model.model_type == "gpt_oss"


def _gpu(facts: RoleFacts) -> str:
    return f"{facts.gpu.name} (sm{facts.gpu.sm})" if facts.gpu else ""


def _moe_without_bias(facts: RoleFacts) -> Violation | None:
    name = moe_backend(facts)
    if not _is_gpt_oss(facts) or name in (*_BIASED, *_FALLS_BACK, "AUTO"):
        return None
    return Violation(other="model_type gpt_oss")


def _moe_falls_back(facts: RoleFacts) -> Violation | None:
    """Report backends without MXFP4 kernels: TRTLLM has them for data-center Blackwell only, CUTEDSL has none."""
    name = moe_backend(facts)
    if facts.gpu is None or name not in _FALLS_BACK or not (_is_mxfp4(facts) or name == "TRTLLM"):
        return None
    if facts.model is not None and not facts.model.num_experts:
        return None
    if name == "TRTLLM" and 100 <= facts.gpu.sm < 120:
        return None
    better = "TRITON" if 90 <= facts.gpu.sm < 100 else "CUTLASS"
    return Violation(other=_gpu(facts), fix=f"set it to {better}")


def _moe_quantization(facts: RoleFacts) -> Violation | None:
    algorithm, name = mxfp4_algorithm(facts), moe_backend(facts)
    if algorithm is None or facts.gpu is None or not algorithm.endswith(("MXFP4", "MXFP8", "MXFP4_FP8")):
        return None
    effective = "CUTLASS" if _moe_falls_back(facts) else name
    if effective == "CUTLASS":
        fits = facts.gpu.sm in _CUTLASS.get(algorithm, ())
    elif effective == "TRITON":
        fits = (90 <= facts.gpu.sm < 100 and algorithm == "W4A16_MXFP4") or 100 <= facts.gpu.sm < 120
    else:
        fits = 100 <= facts.gpu.sm < 120
    if fits:
        return None
    return Violation(
        other=f"{algorithm} on {_gpu(facts)}", fix=_kernel_fix(facts.gpu.sm, bool(facts.variable(_OVERRIDE)))
    )


def _kernel_fix(sm: int, overridden: bool) -> str:
    if overridden:
        return f"unset {_OVERRIDE}"
    if 90 <= sm < 100:
        return "set it to TRITON"
    return "set it to TRTLLM" if 100 <= sm < 120 else "set it to CUTLASS" if sm >= 120 else "use a newer GPU"


def _moe_unset(facts: RoleFacts) -> Violation | None:
    if not _is_gpt_oss(facts) or _MOE in facts.args.leaves or facts.line >= (1, 3, 0):
        return None
    return Violation(other=_gpu(facts) or "model_type gpt_oss")


def _cutlass_on_hopper(facts: RoleFacts) -> Violation | None:
    hopper = facts.gpu is not None and 90 <= facts.gpu.sm < 100
    if not hopper or not _is_mxfp4(facts) or _MOE not in facts.args.leaves or moe_backend(facts) != "CUTLASS":
        return None
    return Violation(other=_gpu(facts), fix="set it to TRITON" if facts.line >= (1, 1, 0) else "use 1.1.0 or newer")


def _consumer_blackwell(facts: RoleFacts) -> Violation | None:
    if not _is_gpt_oss(facts) or facts.gpu is None or facts.gpu.sm < 120:
        return None
    return Violation(other=_gpu(facts), value="gpt_oss")


def _kv_dtype_unknown(facts: RoleFacts) -> Violation | None:
    name = str(facts.args.get(_KV) or "auto").lower()
    known = _KV_KNOWN_13 if facts.line >= (1, 3, 0) else _KV_KNOWN
    if name in known:
        return None
    return Violation(other=f"known in {facts.release}: {', '.join(known)}")


def _kv_dtype_gpu(facts: RoleFacts) -> Violation | None:
    if facts.gpu is None:
        return None
    needed = {"fp8": 89, "fp8_ds_mla": 89, "nvfp4": 100}.get(str(facts.args.get(_KV) or "auto").lower(), 0)
    return Violation(other=_gpu(facts)) if facts.gpu.sm < needed else None


def _fp8_kv_on_hopper(facts: RoleFacts) -> Violation | None:
    hopper = facts.gpu is not None and 90 <= facts.gpu.sm < 100
    if not hopper or not _is_gpt_oss(facts) or str(facts.args.get(_KV) or "auto").lower() != "fp8":
        return None
    return Violation(other=_gpu(facts))


RULES = (
    RoleRule(
        name="moe-backend-bias",
        severity="error",
        field=_MOE,
        why="only CUTLASS, TRITON and TRTLLM support the biases and the activation of gpt-oss's experts; loading fails "
        "with other backends",
        fix="set it to TRTLLM on Blackwell, TRITON on Hopper",
        test=_moe_without_bias,
    ),
    RoleRule(
        name="moe-backend-falls-back",
        severity="warning",
        field=_MOE,
        why="this backend does not support this quantization on this GPU: TensorRT-LLM falls back to CUTLASS and only "
        "logs it",
        fix="set it to TRITON on Hopper, CUTLASS on other GPUs",
        test=_moe_falls_back,
    ),
    RoleRule(
        name="moe-quantization-gpu",
        severity="error",
        field=_MOE,
        why="this backend has no kernels for this GPU: loading fails",
        fix="set it to TRTLLM on data-center Blackwell, TRITON on Hopper, CUTLASS on RTX Blackwell; and unset "
        "OVERRIDE_QUANT_ALGO",
        test=_moe_quantization,
    ),
    RoleRule(
        name="moe-backend-unset",
        severity="note",
        field=_MOE,
        why="before 1.3 the default is CUTLASS on every GPU, which is slower for gpt-oss",
        fix="set it to TRTLLM on Blackwell, TRITON on Hopper (1.1.0 or newer)",
        test=_moe_unset,
    ),
    RoleRule(
        name="moe-cutlass-hopper",
        severity="note",
        field=_MOE,
        why="on Hopper CUTLASS runs MXFP4 with BF16 activations; NVIDIA's guide uses TRITON",
        fix="set it to TRITON (1.1.0 or newer)",
        test=_cutlass_on_hopper,
    ),
    RoleRule(
        name="gpt-oss-rtx-blackwell",
        severity="warning",
        field="model",
        why="gpt-oss reportedly fails on this architecture with an invalid argument in tinygemm2",
        fix="test one request first, or use a data-center GPU",
        test=_consumer_blackwell,
    ),
    RoleRule(
        name="kv-dtype-unknown",
        severity="warning",
        field=_KV,
        why="this release ignores unknown KV types and only logs it",
        fix="set it to auto or fp8",
        test=_kv_dtype_unknown,
    ),
    RoleRule(
        name="kv-dtype-gpu",
        severity="error",
        field=_KV,
        why="the GPU does not support this KV type",
        fix="set it to auto",
        test=_kv_dtype_gpu,
    ),
    RoleRule(
        name="kv-fp8-hopper",
        severity="warning",
        field=_KV,
        why="NVIDIA publishes gpt-oss on Hopper only with KV type auto; the accuracy with fp8 is unverified",
        fix="set it to auto, on both sides",
        test=_fp8_kv_on_hopper,
    ),
)


_CUDA_TRANSPORTS = ("cuda", "all", "^")  # "^…" excludes transports, so CUDA stays unless listed
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
            return Violation(field=name, value=value, fix=f"unset {name}")
    return None


ENVIRONMENT_RULES = (
    RoleRule(
        name="ucx-without-cuda",
        severity="error",
        field="UCX_TLS",
        why="without a CUDA transport UCX treats GPU memory as host memory and fails to register KV",
        fix="unset it, or add cuda_copy and cuda_ipc",
        test=_no_cuda_transport,
    ),
    RoleRule(
        name="variable-wrong-answers",
        severity="warning",
        field="ENABLE_PERFECT_ROUTER",
        why="this variable is for benchmarks: the output is meaningless",
        fix="unset ENABLE_PERFECT_ROUTER, TLLM_OVERRIDE_LAYER_NUM and TRTLLM_DISAGG_BENCHMARK_GEN_ONLY",
        test=_wrong_answers,
    ),
    RoleRule(
        name="variable-broken-transfer",
        severity="warning",
        field="TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER",
        why="this transfer mode reportedly hangs or fails",
        fix="unset TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER and TRTLLM_DISAGG_LAYERWISE",
        test=_broken_transfers,
    ),
    RoleRule(
        name="variable-waiting-decode",
        severity="warning",
        field=_SYNCHRONOUS,
        why="this variable is for debugging: decode stops while it receives KV",
        fix=f"unset {_SYNCHRONOUS}",
        test=_waiting_decode,
    ),
)

"""Rules about what the GPU can run: kernels of experts, and types of KV.

For an MXFP4 checkpoint, TensorRT-LLM chooses an algorithm by the GPU and the MoE backend. From
compute capability 10.0 on, it is W4A8_MXFP4_FP8 with the backend TRITON, and W4A8_MXFP4_MXFP8 with
other backends. On older GPUs it is W4A16_MXFP4. The variable OVERRIDE_QUANT_ALGO overrides this
choice.
"""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts

SECTION: RuleSection[RoleFacts] = RuleSection("GPU")
_MOE = "moe_config.backend"
_OVERRIDE = "OVERRIDE_QUANT_ALGO"
_KV_TYPE = "kv_cache_config.dtype"
# Compute capabilities of CUTLASS's MXFP4 kernels.
_CUTLASS = {
    "W4A16_MXFP4": (90,),
    "W4A8_MXFP4_FP8": (100, 103),
    "W4A8_MXFP4_MXFP8": (100, 103, 120, 121),
}
# The backends with which gpt-oss loads. AUTO chooses CUTLASS, TRITON or TRTLLM. CUTEDSL has no
# kernels for MXFP4 and falls back to CUTLASS.
_BIASED_EXPERTS = ("AUTO", "CUTEDSL", "CUTLASS", "TRITON", "TRTLLM")
_ATTENTION = ("TRTLLM", "FLASHINFER", "VANILLA", "FLASHINFER_STAR_ATTENTION")
_KV_TYPES = ("auto", "fp8")
_KV_TYPES_13 = ("auto", "fp8", "float16", "bfloat16", "float32", "fp8_ds_mla", "nvfp4")
# The lowest compute capability with this type of KV.
_KV_TYPE_SM = {"fp8": 89, "fp8_ds_mla": 89, "nvfp4": 100}


@SECTION.rule(
    "error",
    "moe-backend-bias",
    field=_MOE,
    why=(
        "only CUTLASS, TRITON and TRTLLM support the biases and the activation of gpt-oss's "
        "experts; loading fails with other backends"
    ),
    fix="set it to TRTLLM on Blackwell, TRITON (AUTO from 1.3 on) on Hopper",
)
def moe_backend_bias(facts: RoleFacts) -> Violation | None:
    """Find kernels without biases for gpt-oss."""
    if not facts.is_gpt_oss or _moe_backend(facts) in _BIASED_EXPERTS:
        return None
    return Violation(other="model_type gpt_oss")


@SECTION.rule(
    "warning",
    "moe-backend-falls-back",
    field=_MOE,
    why=(
        "this backend does not support this quantization on this GPU: TensorRT-LLM falls back to "
        "CUTLASS and only logs it"
    ),
    fix="set it to TRITON (AUTO from 1.3 on) on Hopper, CUTLASS on other GPUs",
)
def moe_backend_falls_back(facts: RoleFacts) -> Violation | None:
    """Find a backend that TensorRT-LLM replaces."""
    if not _moe_falls_back(facts):
        return None
    backend = _hopper_backend(facts) if _is_hopper(facts) else "CUTLASS"
    return Violation(other=facts.gpu_title, fix=f"set it to {backend}")


@SECTION.rule(
    "error",
    "moe-quantization-gpu",
    field=_MOE,
    why="this backend has no kernels for this GPU: loading fails",
    fix=(
        "set it to TRTLLM on data-center Blackwell, TRITON (AUTO from 1.3 on) on Hopper, CUTLASS "
        "on RTX Blackwell; and unset OVERRIDE_QUANT_ALGO"
    ),
)
def moe_quantization_gpu(facts: RoleFacts) -> Violation | None:
    """Find an algorithm that the backend can't run on the GPU."""
    algorithm = _algorithm_without_kernels(facts)
    if algorithm is None:
        return None
    return Violation(other=f"{algorithm} on {facts.gpu_title}", fix=_kernel_fix(facts))


@SECTION.rule(
    "note",
    "moe-backend-unset",
    before=(1, 3),
    field=_MOE,
    why="before 1.3 the default is CUTLASS on every GPU, which is slower for gpt-oss",
    fix="set it to TRTLLM on Blackwell, TRITON on Hopper",
)
def moe_backend_unset(facts: RoleFacts) -> Violation | None:
    """Find gpt-oss with the default backend, except on GPUs that have no other backend."""
    if not facts.is_gpt_oss or _MOE in facts.args.leaves:
        return None
    if facts.gpu is not None and facts.gpu.sm >= 120:
        return None
    return Violation(other=facts.gpu_title or "model_type gpt_oss")


@SECTION.rule(
    "note",
    "moe-cutlass-hopper",
    field=_MOE,
    why="on Hopper CUTLASS runs MXFP4 with BF16 activations; NVIDIA's guide uses TRITON",
    fix="set it to TRITON, or AUTO (1.3)",
)
def moe_cutlass_hopper(facts: RoleFacts) -> Violation | None:
    """Find a slower backend that was set for MXFP4 on Hopper."""
    if not _is_hopper(facts) or not _is_mxfp4(facts) or _MOE not in facts.args.leaves:
        return None
    if _moe_backend(facts) != "CUTLASS":
        return None
    return Violation(other=facts.gpu_title, fix=f"set it to {_hopper_backend(facts)}")


@SECTION.rule(
    "error",
    "triton-expert-parallel",
    field=_MOE,
    why="TRITON supports expert parallelism on Hopper only: loading fails",
    fix=(
        "set it to TRTLLM on data-center Blackwell, CUTLASS on other GPUs, or remove"
        " moe_expert_parallel_size"
    ),
)
def triton_expert_parallel(facts: RoleFacts) -> Violation | None:
    """Find TRITON with expert parallelism.

    Source: TritonFusedMoE.__init__ in _torch/modules/fused_moe/fused_moe_triton.py, 7b437aaa.
    """
    if facts.gpu is None or _is_hopper(facts) or _moe_backend(facts) != "TRITON":
        return None
    if facts.size("moe_expert_parallel_size") == 1:
        return None
    experts = facts.value_with_source("moe_expert_parallel_size")
    return Violation(
        other=f"moe_expert_parallel_size {experts} on {facts.gpu_title}",
        fix=f"{_kernel_fix(facts)}, or remove moe_expert_parallel_size",
    )


@SECTION.rule(
    "note",
    "triton-deprecated",
    since=(1, 3),
    field=_MOE,
    why="TensorRT-LLM 1.3 deprecates the TRITON experts and announces their removal",
    fix="set it to AUTO, which takes TRITON for gpt-oss on Hopper while it exists, or to CUTLASS",
)
def triton_deprecated(facts: RoleFacts) -> Violation | None:
    """Find TRITON (pull request 19035 of TensorRT-LLM, September 2026: removed after three
    months).
    """
    if facts.args.get(_MOE) != "TRITON":
        return None
    return Violation(other=f"release {facts.release}")


@SECTION.rule(
    "warning",
    "gpt-oss-rtx-blackwell",
    field="model",
    why="gpt-oss reportedly fails on this architecture with an invalid argument in tinygemm2",
    fix="test one request first, or use a data-center GPU",
)
def gpt_oss_rtx_blackwell(facts: RoleFacts) -> Violation | None:
    """Find gpt-oss on Blackwell GPUs that are not for data centers."""
    if not facts.is_gpt_oss or facts.gpu is None or facts.gpu.sm < 120:
        return None
    return Violation(value="gpt_oss", other=facts.gpu_title)


@SECTION.rule(
    "warning",
    "kv-dtype-unknown",
    field=_KV_TYPE,
    why="this release does not know the KV type, and ignores it or fails when it loads the model",
    fix="set it to auto or fp8, in small letters, on both sides",
)
def kv_dtype_unknown(facts: RoleFacts) -> Violation | None:
    """Find a type of KV that the release does not have."""
    known = _KV_TYPES_13 if facts.line >= (1, 3, 0) else _KV_TYPES
    # Upper and lower case matter, as they do for TensorRT-LLM.
    if str(facts.args.get(_KV_TYPE) or "auto") in known:
        return None
    return Violation(other=f"known in {facts.release}: {', '.join(known)}")


@SECTION.rule(
    "error",
    "kv-dtype-checkpoint",
    before=(1, 3),
    field=_KV_TYPE,
    why=(
        "a checkpoint with quantized KV can't have another KV type: TensorRT-LLM fails when it"
        " loads the model"
    ),
    fix="set it to auto",
)
def kv_dtype_checkpoint(facts: RoleFacts) -> Violation | None:
    """Find another type of KV than the checkpoint's."""
    return _other_kv_type(facts)


@SECTION.rule(
    "warning",
    "kv-dtype-overrides-checkpoint",
    since=(1, 3),
    field=_KV_TYPE,
    why=(
        "the checkpoint was calibrated for another KV type. Newer builds override it with a"
        " warning, older ones fail when they load the model; which candidate is the first is not"
        " established"
    ),
    fix="set it to auto, on both sides",
)
def kv_dtype_overrides_checkpoint(facts: RoleFacts) -> Violation | None:
    """Find another type of KV than the checkpoint's, where it may be overridden (_torch/pyexecutor,
    main of 2026).
    """
    return _other_kv_type(facts)


@SECTION.rule(
    "error",
    "kv-dtype-gpu",
    field=_KV_TYPE,
    why="the GPU does not support this KV type; with auto, the checkpoint chooses it",
    fix="set it to auto on both sides, or use a checkpoint without quantized KV",
)
def kv_dtype_gpu(facts: RoleFacts) -> Violation | None:
    """Find a type of KV that the GPU does not have."""
    if facts.gpu is None or facts.gpu.sm >= _KV_TYPE_SM.get(facts.kv_dtype, 0):
        return None
    return Violation(other=facts.gpu_title)


@SECTION.rule(
    "warning",
    "kv-fp8-hopper",
    field=_KV_TYPE,
    why=(
        "NVIDIA publishes gpt-oss on Hopper only with KV type auto; the accuracy with fp8 is"
        " unverified"
    ),
    fix="set it to auto, on both sides",
)
def kv_fp8_hopper(facts: RoleFacts) -> Violation | None:
    """Find gpt-oss with FP8 KV on Hopper."""
    if not facts.is_gpt_oss or not _is_hopper(facts) or facts.kv_setting != "fp8":
        return None
    return Violation(other=facts.gpu_title)


@SECTION.rule(
    "error",
    "attention-backend-sinks",
    field="attn_backend",
    why="the attention of gpt-oss has sinks, which only TRTLLM computes: loading fails",
    fix="set it to TRTLLM, or remove it",
)
def attention_backend_sinks(facts: RoleFacts) -> Violation | None:
    """Find another attention backend for gpt-oss (an assertion in _torch/modules/attention.py)."""
    if not facts.is_gpt_oss or facts.attention == "TRTLLM":
        return None
    return Violation(
        other="model_type gpt_oss", fix="set it to TRTLLM, or remove it, on both sides"
    )


@SECTION.rule(
    "warning",
    "attention-backend-spelling",
    field="attn_backend",
    why="TensorRT-LLM compares exact words, and takes TRTLLM for a word that it does not know",
    fix="write it in capitals",
)
def attention_backend_spelling(facts: RoleFacts) -> Violation | None:
    """Find a known backend in other letters (`get_attention_backend` in
    _torch/attention_backend/utils.py).
    """
    word = facts.attention
    if word in _ATTENTION or word.strip().upper() not in _ATTENTION:
        return None
    return Violation(fix=f"set it to {word.strip().upper()}, on both sides")


@SECTION.rule(
    "warning",
    "attention-backend-model",
    since=(1, 3),
    field="attn_backend",
    why="it overrides the attention backend that the model's class needs in newer builds",
    fix="remove it",
)
def attention_backend_model(facts: RoleFacts) -> Violation | None:
    """Find another attention backend than the model's class asks for."""
    wanted = facts.preferred.attention
    if wanted is None or facts.attention == wanted or facts.model is None:
        return None
    return Violation(other=f"model_type {facts.model.model_type}, which prefers {wanted}")


def _other_kv_type(facts: RoleFacts) -> Violation | None:
    calibrated = facts.model.kv_quantization if facts.model is not None else None
    if not calibrated or facts.kv_setting in ("auto", calibrated):
        return None
    return Violation(other=f"the checkpoint has {calibrated} KV (hf_quant_config.json)")


def _is_mxfp4(facts: RoleFacts) -> bool:
    return facts.model is not None and facts.model.quantization == "mxfp4"


def _is_hopper(facts: RoleFacts) -> bool:
    return facts.gpu is not None and 90 <= facts.gpu.sm < 100


def _is_datacenter_blackwell(sm: int) -> bool:
    return 100 <= sm < 120


def _moe_backend(facts: RoleFacts) -> str:
    """Return the configured MoE backend, with AUTO resolved for the GPU."""
    name = str(facts.args.get(_MOE) or "CUTLASS").upper()
    if name != "AUTO" or facts.gpu is None:
        return name
    if _is_datacenter_blackwell(facts.gpu.sm):
        return "TRTLLM"
    return "TRITON" if _is_hopper(facts) else "CUTLASS"


def _moe_falls_back(facts: RoleFacts) -> bool:
    """Return True if TensorRT-LLM replaces the configured backend by CUTLASS.

    TRTLLM has kernels for data-center Blackwell only. CUTEDSL has no MXFP4 kernels.
    """
    if facts.gpu is None:
        return False
    if facts.model is not None and not facts.model.num_experts:
        return False
    name = _moe_backend(facts)
    if name == "TRTLLM":
        return not _is_datacenter_blackwell(facts.gpu.sm)
    return name == "CUTEDSL" and _is_mxfp4(facts)


def _algorithm_without_kernels(facts: RoleFacts) -> str | None:
    """Return the algorithm of an MXFP4 model if the MoE backend can't run it on this GPU.

    Return None if the backend can run the algorithm, or if the algorithm is not for MXFP4.
    """
    if not _is_mxfp4(facts) or facts.gpu is None:
        return None
    sm = facts.gpu.sm
    name = _moe_backend(facts)
    algorithm = facts.variable(_OVERRIDE) or _derived_algorithm(sm, name)
    if not algorithm.endswith(("MXFP4", "MXFP8", "MXFP4_FP8")):
        return None
    if name == "CUTLASS" or _moe_falls_back(facts):
        has_kernels = sm in _CUTLASS.get(algorithm, ())
    elif name == "TRITON" and _is_hopper(facts):
        has_kernels = algorithm == "W4A16_MXFP4"
    else:
        has_kernels = _is_datacenter_blackwell(sm)
    return None if has_kernels else algorithm


def _derived_algorithm(sm: int, backend: str) -> str:
    """Return the algorithm that TensorRT-LLM chooses for MXFP4 weights."""
    if sm < 100:
        return "W4A16_MXFP4"
    return "W4A8_MXFP4_FP8" if backend == "TRITON" else "W4A8_MXFP4_MXFP8"


def _kernel_fix(facts: RoleFacts) -> str:
    if facts.variable(_OVERRIDE):
        return f"unset {_OVERRIDE}"
    sm = 0 if facts.gpu is None else facts.gpu.sm
    if sm < 90:
        return "use a newer GPU"
    if sm < 100:
        return f"set it to {_hopper_backend(facts)}"
    return f"set it to {'TRTLLM' if _is_datacenter_blackwell(sm) else 'CUTLASS'}"


def _hopper_backend(facts: RoleFacts) -> str:
    """Return the MoE backend that runs MXFP4 best on Hopper.

    1.3 deprecates TRITON. AUTO chooses TRITON while it exists.
    """
    return "AUTO" if facts.line >= (1, 3, 0) else "TRITON"

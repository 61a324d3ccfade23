"""Rules about environment variables of UCX, NIXL and TensorRT-LLM."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.transfer_params import NO_RETRY, forbids_retries
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("Environment")
_DISAGGREGATED = (Role.PREFILL, Role.DECODE)
# If an entry of UCX_TLS has one of these prefixes, UCX uses a CUDA transport. "^…" excludes the
# listed transports, and all other transports stay.
_CUDA_TRANSPORTS = ("cuda", "all", "^")
_SUBNET = "UCX_IB_ROCE_LOCAL_SUBNET"
_MNNVL = "UCX_CUDA_IPC_ENABLE_MNNVL"
_WRONG_ANSWERS = (
    "ENABLE_PERFECT_ROUTER",
    "TLLM_OVERRIDE_LAYER_NUM",
    "TRTLLM_DISAGG_BENCHMARK_GEN_ONLY",
)
_BROKEN_TRANSFER = ("TRTLLM_DISAGG_LAYERWISE", "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER")
_WAITING_DECODE = "TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP"


def _uses_ucx(facts: RoleFacts) -> bool:
    """Return True for the backends that transfer through UCX. NIXL uses UCX by default."""
    return facts.transceiver in ("UCX", "NIXL")


@SECTION.rule(
    "error",
    "ucx-without-cuda",
    roles=_DISAGGREGATED,
    field="UCX_TLS",
    why="without a CUDA transport UCX treats GPU memory as host memory and fails to register KV",
    fix="unset it, or add cuda_copy and cuda_ipc",
)
def ucx_without_cuda(facts: RoleFacts) -> Violation | None:
    """Find a list of transports without one for GPU memory."""
    transports = facts.variable("UCX_TLS")
    if not transports or not _uses_ucx(facts):
        return None
    if any(word.strip().startswith(_CUDA_TRANSPORTS) for word in transports.split(",")):
        return None
    return Violation(value=transports, other="KV in GPU memory")


@SECTION.rule(
    "note",
    "nvlink-domains",
    roles=_DISAGGREGATED,
    field=_MNNVL,
    why=(
        "between hosts of different NVLink domains KV transfers hang or are slow, and UCX logs "
        "cuMemImportFromShareableHandle"
    ),
    fix=(
        "compare Fabric.ClusterUUID in nvidia-smi -q: if it differs between the hosts set it to n,"
        " else to y"
    ),
)
def nvlink_domains(facts: RoleFacts) -> Violation | None:
    """Find GPUs of racks whose hosts share NVLink, without a decision whether KV may use it.

    Source: TensorRT-LLM's documentation of disaggregated serving (pull request 6085).
    """
    if not _uses_ucx(facts) or not facts.has_multi_node_nvlink or facts.variable(_MNNVL):
        return None
    return Violation(value="unset", other=facts.gpu_title)


@SECTION.rule(
    "note",
    "infiniband-loopback",
    roles=_DISAGGREGATED,
    field="UCX_TLS",
    why=(
        "between workers of one host UCX may choose InfiniBand loopback, which times out on some"
        " hosts: requests hang"
    ),
    fix=(
        "if KV transfers within a host hang, set it to ^ib for workers that transfer only within it"
    ),
)
def infiniband_loopback(facts: RoleFacts) -> Violation | None:
    """Find hosts on which UCX may choose InfiniBand for transfers within them.

    Source: pull request 18301 of TensorRT-LLM, seen on DGX B200.
    """
    if not _uses_ucx(facts) or facts.gpu is None or facts.gpu.sm != 100:
        return None
    if facts.has_multi_node_nvlink or facts.variable("UCX_TLS"):
        return None
    return Violation(value="unset", other=facts.gpu_title)


@SECTION.rule(
    "warning",
    "roce-local-subnet",
    roles=_DISAGGREGATED,
    field=_SUBNET,
    why="on RoCE with a subnet per rail UCX does not connect: KV transfers hang",
    fix="unset it",
)
def roce_local_subnet(facts: RoleFacts) -> Violation | None:
    """Find a variable that some clusters set in all containers (pull request 17300 of
    TensorRT-LLM).
    """
    value = facts.variable(_SUBNET)
    if not _uses_ucx(facts) or value.lower() not in ("y", "yes", "1", "on"):
        return None
    return Violation(value=value)


@SECTION.rule(
    "note",
    "foreign-nixl",
    roles=_DISAGGREGATED,
    field="LD_LIBRARY_PATH",
    why=(
        "if builds of NIXL and UCX are mixed, the engine fails at start (backend 'UCX' not found,"
        " undefined symbol)"
    ),
    fix=(
        "if it fails so, remove the path, or build NIXL and its plugins from the version in"
        " TensorRT-LLM's package"
    ),
)
def foreign_nixl(facts: RoleFacts) -> Violation | None:
    """Find a path by which another build of NIXL or UCX may be loaded.

    Source: issues 6671 of Dynamo and 9752 of TensorRT-LLM.
    """
    if facts.transceiver != "NIXL":
        return None
    for name in ("NIXL_PLUGIN_DIR", "LD_LIBRARY_PATH"):
        for path in facts.variable(name).split(":"):
            is_own = "tensorrt_llm" in path
            if ("nixl" in path or "ucx" in path) and not is_own:
                return Violation(field=name, value=path, other="the NIXL in TensorRT-LLM's package")
    return None


@SECTION.rule(
    "warning",
    "variable-wrong-answers",
    field="ENABLE_PERFECT_ROUTER",
    why="this variable is for benchmarks: the output is meaningless",
    fix="unset ENABLE_PERFECT_ROUTER, TLLM_OVERRIDE_LAYER_NUM and TRTLLM_DISAGG_BENCHMARK_GEN_ONLY",
)
def variable_wrong_answers(facts: RoleFacts) -> Violation | None:
    """Find variables with which answers are wrong."""
    name = facts.first_variable(*_WRONG_ANSWERS)
    if not name:
        return None
    return Violation(field=name, value=facts.variable(name), fix=f"unset {name}")


@SECTION.rule(
    "warning",
    "variable-broken-transfer",
    roles=_DISAGGREGATED,
    field="TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER",
    why="this transfer mode reportedly hangs or fails",
    fix="unset TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER and TRTLLM_DISAGG_LAYERWISE",
)
def variable_broken_transfer(facts: RoleFacts) -> Violation | None:
    """Find modes of transfer that do not work."""
    name = facts.first_variable(*_BROKEN_TRANSFER)
    if not name:
        return None
    return Violation(field=name, value=facts.variable(name), fix=f"unset {name}")


@SECTION.rule(
    "warning",
    "variable-waiting-decode",
    roles=(Role.DECODE,),
    field=_WAITING_DECODE,
    why="this variable is for debugging: decode stops while it receives KV",
    fix="unset TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP",
)
def variable_waiting_decode(facts: RoleFacts) -> Violation | None:
    """Find decode workers that stop for each transfer."""
    if not facts.first_variable(_WAITING_DECODE):
        return None
    return Violation(value=facts.variable(_WAITING_DECODE))


@SECTION.rule(
    "error",
    "prefill-retries",
    roles=_DISAGGREGATED,
    field=NO_RETRY,
    why=(
        "with this variable prefill calls must not be repeated, but frontends repeat them after a"
        " failed KV transfer: ranks end their process, and the worker does not start"
    ),
    fix="unset it",
)
def prefill_retries(facts: RoleFacts) -> Violation | None:
    """Find the variable that `check_retries` in trtllm/transfer_params.py rejects at start."""
    value = facts.variable(NO_RETRY)
    return Violation(value=value) if forbids_retries(value) else None

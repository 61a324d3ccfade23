"""Run the preflight rules for one role, for a pair of roles, and for a worker against registered workers.

It also has the facts that conditions use and that follow from one role's arguments, model, GPU and release.
TensorRT-LLM runs an MXFP4 checkpoint as W4A8_MXFP4_FP8 (TRITON) or W4A8_MXFP4_MXFP8 (others) from compute capability
10.0 on, and as W4A16_MXFP4 below. OVERRIDE_QUANT_ALGO overrides that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.rules import PeerFacts, RuleSet
from dynamo_trtllm.engines.trtllm.preflight.facts import TIMEOUT, RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.memory import memory_table
from dynamo_trtllm.kv_transfer.base import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, Role

_MOE = "moe_config.backend"
_OVERRIDE = "OVERRIDE_QUANT_ALGO"
_GRAPH = "cuda_graph_config.max_batch_size"
_GRAPHS = "cuda_graph_config.batch_sizes"
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_EXPERTS = ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size")
# Compute capabilities of CUTLASS's MXFP4 kernels.
_CUTLASS = {"W4A16_MXFP4": (90,), "W4A8_MXFP4_FP8": (100, 103), "W4A8_MXFP4_MXFP8": (100, 103, 120, 121)}
_KV_TYPES = ("auto", "fp8")
_KV_TYPES_13 = ("auto", "fp8", "float16", "bfloat16", "float32", "fp8_ds_mla", "nvfp4")
_CUDA_TRANSPORTS = ("cuda", "all", "^")  # "^…" excludes transports, so CUDA stays unless listed


def _is_mxfp4(facts: RoleFacts) -> bool:
    return facts.model is not None and facts.model.quantization == "mxfp4"


def _is_hopper(facts: RoleFacts) -> bool:
    return facts.gpu is not None and 90 <= facts.gpu.sm < 100


def _moe_backend(facts: RoleFacts) -> str:
    """Return the configured MoE backend, with AUTO resolved for the GPU."""
    name = str(facts.args.get(_MOE) or "CUTLASS").upper()
    if name != "AUTO" or facts.gpu is None:
        return name
    if 100 <= facts.gpu.sm < 120:
        return "TRTLLM"
    return "TRITON" if _is_hopper(facts) else "CUTLASS"


def _moe_falls_back(facts: RoleFacts) -> bool:
    """Return True for backends without MXFP4 kernels: TRTLLM has them for data-center Blackwell only, CUTEDSL never."""
    if facts.gpu is None or (facts.model is not None and not facts.model.num_experts):
        return False
    name = _moe_backend(facts)
    return (name == "TRTLLM" and not 100 <= facts.gpu.sm < 120) or (name == "CUTEDSL" and _is_mxfp4(facts))


def _algorithm_without_kernels(facts: RoleFacts) -> str | None:
    """Return the algorithm of an MXFP4 model that the MoE backend can't run on this GPU; None if it can."""
    if not _is_mxfp4(facts) or facts.gpu is None:
        return None
    sm, name = facts.gpu.sm, _moe_backend(facts)
    derived = "W4A16_MXFP4" if sm < 100 else "W4A8_MXFP4_FP8" if name == "TRITON" else "W4A8_MXFP4_MXFP8"
    algorithm = facts.variable(_OVERRIDE) or derived
    if not algorithm.endswith(("MXFP4", "MXFP8", "MXFP4_FP8")):
        return None
    if name == "CUTLASS" or _moe_falls_back(facts):
        fits = sm in _CUTLASS.get(algorithm, ())
    else:
        on_hopper = name == "TRITON" and _is_hopper(facts) and algorithm == "W4A16_MXFP4"
        fits = on_hopper or 100 <= sm < 120
    return None if fits else algorithm


def _kernel_fix(facts: RoleFacts) -> str:
    if facts.variable(_OVERRIDE):
        return f"unset {_OVERRIDE}"
    sm = 0 if facts.gpu is None else facts.gpu.sm
    if sm < 90:
        return "use a newer GPU"
    return f"set it to {_hopper_backend(facts) if sm < 100 else 'TRTLLM' if sm < 120 else 'CUTLASS'}"


def _hopper_backend(facts: RoleFacts) -> str:
    """Return the MoE backend that runs MXFP4 best on Hopper. 1.3 deprecates TRITON; AUTO takes it while it exists."""
    return "AUTO" if facts.line >= (1, 3, 0) else "TRITON"


def _moe_ranks(facts: RoleFacts) -> int | None:
    """Return the product of the MoE sizes; None unless both are set, as TensorRT-LLM otherwise derives one."""
    if any((facts.number(key) or 0) < 1 for key in _EXPERTS[:2]):
        return None
    return math.prod(facts.size(key) for key in _EXPERTS)


def _graph_key(facts: RoleFacts) -> str:
    return _GRAPH if facts.number(_GRAPH) else _GRAPHS


def _largest_graph(facts: RoleFacts) -> int | None:
    """Return the largest batch of the CUDA graphs; None if it is not set."""
    sizes = facts.args.get(_GRAPHS)
    largest = facts.number(_GRAPH) or (max(sizes) if isinstance(sizes, list) and sizes else 0)
    return largest if _graph_key(facts) in facts.args.leaves else None


def _lacks_cuda_transport(facts: RoleFacts) -> bool:
    given = facts.variable("UCX_TLS")
    return bool(given) and not any(word.strip().startswith(_CUDA_TRANSPORTS) for word in given.split(","))


def _foreign_nixl(facts: RoleFacts) -> tuple[str, str] | None:
    """Return the variable and its path by which another build of NIXL or UCX may be loaded; None if there is none."""
    for name in ("NIXL_PLUGIN_DIR", "LD_LIBRARY_PATH"):
        for path in facts.variable(name).split(":"):
            if path and "tensorrt_llm" not in path and ("nixl" in path or "ucx" in path):
                return name, path
    return None


def _has_multi_node_nvlink(facts: RoleFacts) -> bool | None:
    """Return True for GPUs of racks whose hosts share NVLink; None if the GPU is unknown."""
    return None if facts.gpu is None else any(name in facts.gpu.name.lower() for name in ("gb200", "gb300"))


# Facts by the names that conditions and texts use.
DERIVED: Mapping[str, Callable[[RoleFacts], object]] = {
    "algorithm_without_kernels": _algorithm_without_kernels,
    "answer": lambda facts: 1 if facts.role is Role.PREFILL else max(1, facts.load.osl or 1),
    "concurrency": lambda facts: facts.load.concurrency,
    "foreign_nixl": _foreign_nixl,
    "gpu_title": lambda facts: f"{facts.gpu.name} (sm{facts.gpu.sm})" if facts.gpu else "",
    "graph_key": _graph_key,
    "has_multi_node_nvlink": _has_multi_node_nvlink,
    "hopper_backend": _hopper_backend,
    "is_gpt_oss": lambda facts: facts.model is not None and facts.model.model_type == "gpt_oss",
    "is_hopper": _is_hopper,
    "is_mxfp4": _is_mxfp4,
    "isl": lambda facts: facts.load.isl,
    "kernel_fix": _kernel_fix,
    "known_kv_types": lambda facts: _KV_TYPES_13 if facts.line >= (1, 3, 0) else _KV_TYPES,
    "kv_setting": lambda facts: str(facts.args.get("kv_cache_config.dtype") or "auto").lower(),
    "lacks_cuda_transport": _lacks_cuda_transport,
    "largest_graph": _largest_graph,
    "memory": memory_table,
    "moe_backend": _moe_backend,
    "moe_falls_back": _moe_falls_back,
    "moe_ranks": _moe_ranks,
    "longest_accepted": lambda facts: facts.prompt_limit if facts.is_disaggregated else facts.number("max_seq_len"),
    "ranks": lambda facts: math.prod(facts.size(key) for key in _PARALLEL),
    "set_runtime_or_auto": lambda facts: facts.set_runtime or "auto",
    "timeout": lambda facts: facts.number(TIMEOUT),
}


_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Facts about a prefill worker and a decode worker."""

    prefill: RoleFacts
    decode: RoleFacts

    def shown(self, key: str) -> str:
        """Return prefill's value of an argument and its source as text."""
        return f"prefill: {self.prefill.shown(key)}"


def check_role(facts: RoleFacts) -> list[Finding]:
    """Return the findings for one role alone, most severe first."""
    return list(WORKER_RULES.evaluate(facts))


def check_pair(prefill: RoleFacts, decode: RoleFacts) -> list[Finding]:
    """Return the findings between two roles, most severe first. Findings within a role come from `check_role`."""
    found = PAIR_RULES.evaluate(PairFacts(prefill, decode))
    return [replace(each, other=each.other or f"decode: {decode.shown(each.field)}") for each in found]


def check_peers(mine: RoleFacts, peers: Sequence[Instance], kv_compat: dict[str, str] | None = None) -> list[Finding]:
    """Return a finding for each difference to a peer: an error if no peer of the other role matches, else a warning.

    Args:
        mine: facts about this worker.
        peers: registered workers; those of the same role are ignored.
        kv_compat: values that this worker will register besides its layout; None: they are not compared.
    """
    found = [
        list(PEER_RULES.evaluate(PeerFacts(mine=mine, peer=peer, kv_compat=kv_compat)))
        for peer in peers
        if {mine.role, peer.role} == {Role.PREFILL, Role.DECODE}
    ]
    severity: Literal["error", "warning"] = "error" if all(found) else "warning"
    return [replace(finding, severity=severity) for findings in found for finding in findings]


def _model_difference(pair: PairFacts) -> str | None:
    """Return the first property in which the models differ; None if there is none or a model is unknown."""
    mine, theirs = pair.prefill.model, pair.decode.model
    if mine is None or theirs is None:
        return None
    names = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "quantization")
    return next((name for name in names if getattr(mine, name) != getattr(theirs, name)), None)


def _layout_differences(facts: PeerFacts[RoleFacts]) -> list[str]:
    layout = facts.mine.layout()
    names = EQUAL_LAYOUT if layout is not None else ()
    return [name for name in names if getattr(layout, name) != getattr(facts.peer.layout, name)]


def _pairing_differences(facts: PeerFacts[RoleFacts]) -> list[str]:
    ours, theirs = facts.kv_compat or {}, facts.peer.kv_compat
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def _lengths_fit(facts: PeerFacts[RoleFacts]) -> bool:
    """Return True if decode accepts requests as long as prefill's."""
    ours, theirs = facts.mine.max_seq_len, facts.peer.card.context_length
    return ours is None or not theirs or (ours <= theirs if facts.mine.role is Role.PREFILL else theirs <= ours)


WORKER_RULES = RuleSet(_FOLDER / "worker_rules.yaml", RoleFacts, **DERIVED)
PAIR_RULES = RuleSet(_FOLDER / "pair_rules.yaml", PairFacts, model_difference=_model_difference)
PEER_RULES = RuleSet(
    _FOLDER / "peer_rules.yaml",
    PeerFacts[RoleFacts],
    layout_differences=_layout_differences,
    pairing_differences=_pairing_differences,
    lengths_fit=_lengths_fit,
)

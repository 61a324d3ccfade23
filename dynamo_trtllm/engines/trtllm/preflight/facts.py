"""Define the facts that the rules check: arguments, model, GPU, release and load of one role, and what they imply.

TensorRT-LLM runs an MXFP4 checkpoint as W4A8_MXFP4_FP8 (TRITON) or W4A8_MXFP4_MXFP8 (others) from compute capability
10.0 on, and as W4A16_MXFP4 below. OVERRIDE_QUANT_ALGO overrides that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs
from dynamo_trtllm.engines.trtllm.preflight.memory import memory_table
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import KvLayout, Role

PCIE5_BYTES_S = 64e9  # 16 lanes, one direction
PCIE4_BYTES_S = 32e9
NETWORK_BYTES_S = 50e9  # one 400 Gb/s adapter per GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu(Gpu):
    """Data-sheet values of one GPU model; the memory is what the driver reports."""

    nvlink_bytes_s: float | None  # one direction, all links; None without NVLink
    pcie_bytes_s: float = PCIE5_BYTES_S


def _gpu(name: str, sm: int, memory_mib: int, nvlink_gb_s: int | None, pcie: float = PCIE5_BYTES_S) -> KnownGpu:
    nvlink = None if nvlink_gb_s is None else nvlink_gb_s * 1e9
    return KnownGpu(name=name, sm=sm, memory_bytes=memory_mib << 20, nvlink_bytes_s=nvlink, pcie_bytes_s=pcie)


GPUS: Mapping[str, KnownGpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 80, 81_920, 300, PCIE4_BYTES_S),
        _gpu("l40s", 89, 46_068, None, PCIE4_BYTES_S),
        _gpu("h100", 90, 81_559, 450),
        _gpu("h20", 90, 97_871, 450),
        _gpu("h200", 90, 143_771, 450),
        _gpu("gh200", 90, 97_871, 450),
        _gpu("b200", 100, 183_359, 900),
        _gpu("gb200", 100, 189_471, 900),
        _gpu("b300", 103, 275_040, 900),
        _gpu("gb300", 103, 284_208, 900),
        _gpu("rtx-pro-6000", 120, 97_887, None),
        _gpu("rtx-5090", 120, 32_607, None),
    )
}


def known_gpu(name: str) -> KnownGpu:
    """Return a GPU by its name on the command line. Raises ConfigError if the name is unknown."""
    if name not in GPUS:
        raise ConfigError(f"Unknown --gpu {name}. Choose one of {', '.join(sorted(GPUS))}.", field="gpu")
    return GPUS[name]


def links_of(gpu_name: str) -> dict[str, float]:
    """Return the links for KV from this GPU model, in bytes per second and direction, by name.

    Args:
        gpu_name: name on the command line or from the driver.
    """
    plain = gpu_name.lower().replace(" ", "-")
    found = [known for known in GPUS if known in plain]
    gpu = GPUS[max(found, key=len)] if found else None  # "h200" contains "h20"
    links = {"PCIe": PCIE5_BYTES_S if gpu is None else gpu.pcie_bytes_s, "network (400 Gb/s)": NETWORK_BYTES_S}
    if gpu is None or gpu.nvlink_bytes_s is None:
        return links
    return {"NVLink": gpu.nvlink_bytes_s, **links}


BLOCK_TOKENS = 32  # default of tokens_per_block
BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
TIMEOUT = "cache_transceiver_config.kv_transfer_timeout_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The expected requests; None: not given."""

    isl: int | None = None  # tokens of the longest prompt
    osl: int | None = None  # tokens of the longest answer
    concurrency: int | None = None  # concurrent requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """Facts about one worker before it loads. Rules skip facts that are None."""

    role: Role
    args: TrtllmArgs
    release: str  # of TensorRT-LLM, installed or given: "1.2.1", "1.3.0rc27"
    model: Checkpoint | None = None
    gpu: Gpu | None = None  # the same model for all ranks
    num_gpus: int | None = None  # visible to the worker
    load: Load = Load()
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of TensorRT-LLM
    strategy: str = "prefill_first"

    @property
    def line(self) -> tuple[int, int, int]:
        """The release as (major, minor, patch); (0, 0, 0) for an invalid release."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.release)
        return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)

    @property
    def is_disaggregated(self) -> bool:
        return self.role is not Role.AGGREGATED

    def number(self, key: str) -> int | None:
        """Return an integer argument; None if it is unset or has another type."""
        value = self.args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def on(self, key: str) -> bool:
        """Return True if an argument is true."""
        return self.args.get(key) is True

    def section(self, key: str) -> bool:
        """Return True if a section is given and not null."""
        given = any(name == key or name.startswith(f"{key}.") for name in self.args.leaves)
        return given and not (key in self.args.leaves and self.args.leaves[key].value is None)

    def inside(self, key: str) -> dict[str, Any]:
        """Return the values that are set in a section."""
        leaves = self.args.leaves.items()
        return {name[len(key) + 1 :]: leaf.value for name, leaf in leaves if name.startswith(f"{key}.")}

    def first_section(self, *keys: str) -> str:
        """Return the first of these sections that is given and not null; "" if none is."""
        return next((key for key in keys if self.section(key)), "")

    def first_variable(self, *names: str) -> str:
        """Return the first of these environment variables that is on; "" if none is."""
        return next((name for name in names if self.variable(name) not in ("", "0")), "")

    def round_up(self, tokens: int) -> int:
        """Return the tokens of the KV blocks that hold a number of tokens."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def shown(self, key: str) -> str:
        """Return an argument's value and its source as text."""
        leaf = self.args.leaves.get(key)
        if leaf is not None:
            return f"{_text(leaf.value)} ({leaf.source})"
        value = self.args.get(key)
        return "unset" if value is None else f"{_text(value)} (default of {self.release})"

    def variable(self, name: str) -> str:
        """Return an environment variable, with `env_overrides` applied; "" if it is not set."""
        leaf = self.args.leaves.get(f"env_overrides.{name}")
        return str(leaf.value) if leaf is not None else self.environment.get(name, "")

    def size(self, key: str) -> int:
        """Return a parallel size; 1 if it is unset or invalid."""
        return max(1, self.number(key) or 1)

    @property
    def tensor_parallel(self) -> int:
        return self.size("tensor_parallel_size")

    @property
    def block_tokens(self) -> int:
        return self.number("kv_cache_config.tokens_per_block") or BLOCK_TOKENS

    @property
    def buffer(self) -> int | None:
        """Tokens in the transfer buffer; None if they are not set."""
        return self.number(BUFFER)

    @property
    def attention(self) -> str:
        """Attention backend in capitals."""
        return str(self.args.get("attn_backend") or "TRTLLM").upper()

    @property
    def sharding(self) -> str:
        """Distribution of attention over ranks, as text."""
        suffix = " with attention DP" if self.on("enable_attention_dp") else ""
        return f"tensor_parallel_size {self.tensor_parallel}{suffix}"

    @property
    def kv_dtype(self) -> str:
        """Data type of the KV cache; "auto" is resolved to the model's type if the model is known."""
        found = str(self.args.get("kv_cache_config.dtype") or "auto").lower()
        if found != "auto":
            return found
        return self.model.dtype if self.model is not None else "auto"

    @property
    def transceiver(self) -> str | None:
        """Transfer backend in capitals, with DEFAULT resolved to NIXL; None without one."""
        found = self.args.get("cache_transceiver_config.backend")
        name = str(found).upper() if found else None
        return "NIXL" if name == "DEFAULT" else name

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of prompt and output together: as set, else the model's context length; None if unknown."""
        found = self.number("max_seq_len")
        if found is None and self.model is not None:
            return self.model.context_length or None
        return found

    @property
    def max_num_tokens(self) -> int:
        return self.number("max_num_tokens") or 8192  # the value of 1.0 and 1.1 for null

    @property
    def max_batch_size(self) -> int:
        return self.number("max_batch_size") or 2048  # the value of all releases for null

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt: of the load, else the limit of the arguments; None if unknown."""
        return self.load.isl or prompt_limit(self.args)

    def layout(self) -> KvLayout | None:
        """Return the KV layout that this worker will register; None without a model."""
        if self.model is None:
            return None
        return KvLayout(
            dtype=self.kv_dtype,
            block_tokens=self.block_tokens,
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            tensor_parallel_size=self.tensor_parallel,
        )


def prompt_limit(args: TrtllmArgs) -> int | None:
    """Return the smaller of max_seq_len and the transfer buffer, in tokens; None if neither is set."""
    known = [limit for limit in (args.get("max_seq_len"), args.get(BUFFER)) if isinstance(limit, int) and limit > 0]
    return min(known) if known else None


def _text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


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
    return f"set it to {'TRITON' if sm < 100 else 'TRTLLM' if sm < 120 else 'CUTLASS'}"


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


# Facts by the names that conditions and texts use.
DERIVED: Mapping[str, Callable[[RoleFacts], object]] = {
    "algorithm_without_kernels": _algorithm_without_kernels,
    "answer": lambda facts: 1 if facts.role is Role.PREFILL else max(1, facts.load.osl or 1),
    "concurrency": lambda facts: facts.load.concurrency,
    "gpu_title": lambda facts: f"{facts.gpu.name} (sm{facts.gpu.sm})" if facts.gpu else "",
    "graph_key": _graph_key,
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
    "prompt_limit": lambda facts: prompt_limit(facts.args) if facts.is_disaggregated else facts.number("max_seq_len"),
    "ranks": lambda facts: math.prod(facts.size(key) for key in _PARALLEL),
    "timeout": lambda facts: facts.number(TIMEOUT),
}

"""What the rules look at: one role's arguments, and what is known of its model, GPU, release and load. Pure values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_trtllm.config.layers import Sourced
from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import KvLayout, Role

PCIE5_BYTES_S = 64e9  # sixteen lanes, one way
PCIE4_BYTES_S = 32e9
NETWORK_BYTES_S = 50e9  # one 400 Gb/s adapter per GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """One GPU as its maker describes it; memory is about what the driver shows."""

    name: str
    sm: int
    memory_bytes: int
    nvlink_bytes_s: float | None  # one way, all links together; None: it has none
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
    """Raises ConfigError for a name that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not known; known: {', '.join(sorted(GPUS))}", field="gpu")
    return GPUS[name]


def links_of(gpu_name: str) -> dict[str, float]:
    """Bytes per second, one way, of the ways KV can take from GPUs of this kind. `gpu_name`: ours or the driver's."""
    gpu = _alike(gpu_name)
    links = {"PCIe": PCIE5_BYTES_S if gpu is None else gpu.pcie_bytes_s, "network (400 Gb/s)": NETWORK_BYTES_S}
    if gpu is None or gpu.nvlink_bytes_s is None:
        return links
    return {"NVLink": gpu.nvlink_bytes_s, **links}


def _alike(name: str) -> KnownGpu | None:
    """The known GPU that a driver's name ("NVIDIA H200") means; the longest match, because H20 is in H200."""
    plain = name.lower().replace(" ", "-")
    found = [known for known in GPUS if known in plain]
    return GPUS[max(found, key=len)] if found else None


BLOCK_TOKENS = 32  # tokens_per_block where nothing names it
BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
BACKEND = "cache_transceiver_config.backend"
TIMEOUT = "cache_transceiver_config.kv_transfer_timeout_ms"


class RoleArguments(Protocol):
    """The merged arguments of one engine (`engines/trtllm/args.py`)."""

    @property
    def leaves(self) -> Mapping[str, Sourced]:
        """What was set, by dotted key, with the place that won."""
        ...

    def get(self, key: str) -> Any:
        """The value set for a dotted key, else the release's default, else None."""
        ...


class GpuFacts(Protocol):
    """One kind of GPU (`engines/gpu.py`)."""

    @property
    def name(self) -> str: ...
    @property
    def sm(self) -> int:
        """Compute capability times ten: 90 for Hopper."""
        ...

    @property
    def memory_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are meant to come; None: not said."""

    isl: int | None = None  # tokens of the longest prompt
    osl: int | None = None  # tokens of the longest answer
    concurrency: int | None = None  # requests at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """One worker before it loads. Rules about what is None stay silent."""

    role: Role
    args: RoleArguments
    release: str  # of TensorRT-LLM, as installed or claimed: "1.2.1", "1.3.0rc27"
    model: Checkpoint | None = None
    gpu: GpuFacts | None = None  # the kind that all its ranks run on
    num_gpus: int | None = None  # visible to it
    load: Load = Load()
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that TensorRT-LLM will read
    strategy: str = "prefill_first"

    @property
    def line(self) -> tuple[int, int, int]:
        """The release as numbers, without what follows them; (0, 0, 0) for text that is no release."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.release)
        return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)

    @property
    def is_disaggregated(self) -> bool:
        return self.role is not Role.AGGREGATED

    def number(self, key: str) -> int | None:
        """An argument that is a whole number; None when it is unset or no number."""
        value = self.args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def on(self, key: str) -> bool:
        return self.args.get(key) is True

    def section(self, key: str) -> bool:
        """Whether a whole sub-configuration is given, with or without leaves of its own."""
        given = any(name == key or name.startswith(f"{key}.") for name in self.args.leaves)
        return given and not (key in self.args.leaves and self.args.leaves[key].value is None)

    def shown(self, key: str) -> str:
        """A value for people: with the place that won, or as the release's default."""
        leaf = self.args.leaves.get(key)
        if leaf is not None:
            return f"{_text(leaf.value)} ({leaf.source})"
        value = self.args.get(key)
        return "unset" if value is None else f"{_text(value)} (default of {self.release})"

    def variable(self, name: str) -> str:
        """A variable as TensorRT-LLM will see it: `env_overrides` overrides the environment; "" when it is not set."""
        leaf = self.args.leaves.get(f"env_overrides.{name}")
        return str(leaf.value) if leaf is not None else self.environment.get(name, "")

    def size(self, key: str) -> int:
        """A parallel size; unset or nonsense is one."""
        return max(1, self.number(key) or 1)

    @property
    def tensor_parallel(self) -> int:
        return self.size("tensor_parallel_size")

    @property
    def block_tokens(self) -> int:
        return self.number("kv_cache_config.tokens_per_block") or BLOCK_TOKENS

    @property
    def kv_dtype(self) -> str:
        """What KV is stored as: "auto" is the model's own type."""
        found = str(self.args.get("kv_cache_config.dtype") or "auto").lower()
        if found != "auto":
            return found
        return self.model.dtype if self.model is not None else "auto"

    @property
    def transceiver(self) -> str | None:
        """The KV transport in capitals, with DEFAULT as what it means; None: there is none."""
        found = self.args.get(BACKEND)
        name = str(found).upper() if found else None
        return "NIXL" if name == "DEFAULT" else name

    @property
    def max_seq_len(self) -> int | None:
        """The longest request, prompt and answer: as set, else the model's; None: not known."""
        found = self.number("max_seq_len")
        if found is None and self.model is not None:
            return self.model.context_length or None
        return found

    @property
    def max_num_tokens(self) -> int:
        return self.number("max_num_tokens") or 8192  # 1.0 and 1.1 resolve None to it

    @property
    def max_batch_size(self) -> int:
        return self.number("max_batch_size") or 2048  # what every release resolves None to

    @property
    def longest_prompt(self) -> int | None:
        """The prompt length to be ready for: the load's, else what the arguments let in."""
        return self.load.isl or prompt_limit(self.args)

    def layout(self) -> KvLayout | None:
        """The KV layout that this worker will register; None without a model."""
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


def prompt_limit(args: RoleArguments) -> int | None:
    """The longest prompt to hand over: the smaller of max_seq_len and the transfer buffer; None: neither is set."""
    known = [limit for limit in (args.get("max_seq_len"), args.get(BUFFER)) if isinstance(limit, int) and limit > 0]
    return min(known) if known else None


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return str(value)

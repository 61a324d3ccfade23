"""Define the facts that the rules check: one role's arguments, model, GPU, release and load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.manifests import Presence
from dynamo_trtllm.engines.trtllm.args import ADAPTER, TrtllmArgs
from dynamo_trtllm.models.checkpoint import Checkpoint
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import KvLayout, Role
from dynamo_trtllm.protocol.number_types import ceil_div

PCIE5_BYTES_S = 64e9  # 16 lanes, one direction
NETWORK_BYTES_S = 50e9  # one 400 Gb/s adapter per GPU


class _KnownGpu(msgspec.Struct, frozen=True):
    """One entry of gpus.yaml, which describes its units."""

    sm: int
    memory_mib: int
    nvlink: float | None
    pcie: float


GPUS = msgspec.yaml.decode(
    Path(__file__).with_name("gpus.yaml").read_bytes(), type=dict[str, _KnownGpu]
)


def known_gpu(name: str) -> Gpu:
    """Return a GPU by its name on the command line. Raises ConfigError if the name is unknown."""
    if name not in GPUS:
        raise ConfigError(
            f"Unknown --gpu {name}. Choose one of {', '.join(sorted(GPUS))}.", field="gpu"
        )
    return Gpu(name=name, sm=GPUS[name].sm, memory_bytes=GPUS[name].memory_mib << 20)


def links_of(gpu_name: str) -> dict[str, float]:
    """Return the links for KV from this GPU model, in bytes per second and direction, by name.

    Args:
        gpu_name: name on the command line or from the driver.
    """
    plain = gpu_name.lower().replace(" ", "-")
    found = [known for known in GPUS if known in plain]
    gpu = GPUS[max(found, key=len)] if found else None  # "h200" contains "h20"
    links = {
        "PCIe": PCIE5_BYTES_S if gpu is None else gpu.pcie * 1e9,
        "network (400 Gb/s)": NETWORK_BYTES_S,
    }
    if gpu is None or gpu.nvlink is None:
        return links
    return {"NVLink": gpu.nvlink * 1e9, **links}


DEFAULT_BLOCK_TOKENS = 32
BLOCK_SIZE = "kv_cache_config.tokens_per_block"


class ModelDefaults(NamedTuple):
    """Values that a model's class prefers to TensorRT-LLM's defaults; None for the default."""

    attention: str | None = None
    block_tokens: int | None = None


# By `model_type`, the values that `get_model_defaults` of the model's class in _torch/models
# returns (main of October 2026). Candidates of 1.3 and 1.4 use these values for arguments that were
# not set (`apply_model_defaults_to_llm_args` in llmapi/llm_utils.py). It is not established which
# candidate was the first. Only models whose class was read are in this list.
MODEL_DEFAULTS = {
    "gemma4": ModelDefaults(attention="FLASHINFER"),
    "gemma4_text": ModelDefaults(attention="FLASHINFER"),
    "deepseek_v4": ModelDefaults(block_tokens=128),
    "kimi_k3": ModelDefaults(block_tokens=64),
}
BACKEND = "cache_transceiver_config.backend"
BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
TIMEOUT = "cache_transceiver_config.kv_transfer_timeout_ms"
RUNTIME = "cache_transceiver_config.transceiver_runtime"
_AUTO_SINCE = 15  # first candidate of 1.3 that may resolve `transceiver_runtime: auto`
# The backends that DEFAULT may mean. If several variables choose one, the first one counts.
_BACKENDS = ("NIXL", "UCX", "MOONCAKE", "MPI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The expected requests. A value that the user has not given is None."""

    isl: int | None = None  # tokens of the longest prompt
    osl: int | None = None  # tokens of the longest answer
    concurrency: int | None = None  # concurrent requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """Facts about one worker before it loads. Rules skip facts that are None."""

    role: Role
    args: TrtllmArgs
    # Release of TensorRT-LLM, installed or given, such as "1.2.1" or "1.3.0rc27".
    release: str
    model: Checkpoint | None = None
    gpu: Gpu | None = None  # the same model for all ranks
    num_gpus: int | None = None  # visible to the worker
    load: Load = Load()
    # environment variables of TensorRT-LLM
    environment: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "prefill_first"
    # tokens in a KV block of the running engine or of a live peer; None before they are known
    running_block_tokens: int | None = None

    @property
    def line(self) -> tuple[int, int, int]:
        """The release as (major, minor, patch); (0, 0, 0) for an invalid release."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.release)
        if found is None:
            return 0, 0, 0
        return int(found[1]), int(found[2]), int(found[3] or 0)

    @property
    def candidate(self) -> int | None:
        """The number of a candidate of 1.3.0; None for other releases."""
        found = re.match(r"1\.3\.0rc(\d+)", self.release)
        return int(found[1]) if found else None

    def is_at_least_candidate(self, number: int) -> bool:
        """Return True for 1.3 and newer, except candidates of 1.3.0 before this number."""
        return self.line >= (1, 3, 0) if self.candidate is None else self.candidate >= number

    @property
    def is_disaggregated(self) -> bool:
        return self.role is not Role.AGGREGATED

    @property
    def is_gpt_oss(self) -> bool:
        return self.model is not None and self.model.model_type == "gpt_oss"

    @property
    def has_helix(self) -> bool:
        """True for Helix, the only kind of context parallelism that can transfer KV and can be
        combined with expert parallelism.
        """
        return str(self.section_values("cp_config").get("cp_type")).upper() == "HELIX"

    @property
    def expert_ranks(self) -> int:
        """The number of ranks among which experts can be divided. With Helix, the ranks of context
        parallelism count, too.
        """
        ranks = self.tensor_parallel
        if self.has_helix:
            ranks *= self.size("context_parallel_size")
        return ranks

    @property
    def gpu_title(self) -> str:
        """Name and compute capability of the GPU; "" if it is unknown."""
        return f"{self.gpu.name} (sm{self.gpu.sm})" if self.gpu is not None else ""

    @property
    def has_multi_node_nvlink(self) -> bool:
        """True for GPUs of racks whose hosts share NVLink."""
        name = self.gpu.name.lower() if self.gpu is not None else ""
        return "gb200" in name or "gb300" in name

    def number(self, key: str) -> int | None:
        """Return an integer argument; None if it is unset or has another type."""
        value = self.args.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def is_given(self, key: str) -> bool:
        """Return True if the user or a kernels profile set an argument."""
        leaf = self.args.leaves.get(key)
        return leaf is not None and leaf.source != ADAPTER

    def is_enabled(self, key: str) -> bool:
        """Return True if an argument is true."""
        return self.args.get(key) is True

    def has_section(self, key: str) -> bool:
        """Return True if a section is given and not null."""
        leaf = self.args.leaves.get(key)
        if leaf is not None:
            return leaf.value is not None
        return any(name.startswith(f"{key}.") for name in self.args.leaves)

    def section_values(self, key: str) -> dict[str, Any]:
        """Return the values that are set in a section."""
        level: Any = self.args.values
        for part in key.split("."):
            level = level.get(part) if isinstance(level, Mapping) else None
        return dict(level) if isinstance(level, Mapping) else {}

    def first_section(self, *keys: str) -> str:
        """Return the first of these sections that is given and not null; "" if there is none."""
        return next((key for key in keys if self.has_section(key)), "")

    def first_variable(self, *names: str) -> str:
        """Return the first of these environment variables that is on; "" if there is none."""
        return next((name for name in names if self.variable(name) not in ("", "0")), "")

    def round_up(self, tokens: int) -> int:
        """Return the number of tokens, rounded up to whole KV blocks."""
        return ceil_div(tokens, self.block_tokens) * self.block_tokens

    def value_with_source(self, key: str) -> str:
        """Return an argument's value and its source as text."""
        leaf = self.args.leaves.get(key)
        if leaf is not None:
            return f"{_text(leaf.value)} ({leaf.source})"
        if key == BLOCK_SIZE and self.running_block_tokens is not None:
            return f"{self.running_block_tokens} (of the running engine)"
        preferred = {
            "attn_backend": self.preferred.attention,
            BLOCK_SIZE: self.preferred.block_tokens,
        }.get(key)
        if preferred is not None and self.model is not None:
            return f"{preferred} (preferred by {self.model.model_type})"
        value = self.args.get(key)
        if value is None:
            return "unset"
        return f"{_text(value)} (default of {self.release})"

    def variable(self, name: str) -> str:
        """Return an environment variable, with `env_overrides` applied; "" if it is not set."""
        overrides = self.section_values("env_overrides")
        return str(overrides[name]) if name in overrides else self.environment.get(name, "")

    def size(self, key: str) -> int:
        """Return a parallel size; 1 if it is unset or invalid."""
        return max(1, self.number(key) or 1)

    @property
    def tensor_parallel(self) -> int:
        return self.size("tensor_parallel_size")

    @property
    def preferred(self) -> ModelDefaults:
        """The values that the model's class prefers in this release. Arguments that are set
        override them.
        """
        if self.model is None or self.line < (1, 3):
            return ModelDefaults()
        return MODEL_DEFAULTS.get(self.model.model_type, ModelDefaults())

    @property
    def block_tokens(self) -> int:
        """Tokens in a KV block. The first of these numbers that is known counts: that of the
        running engine, the number that was set, the number that the model prefers, the default.
        """
        if self.running_block_tokens is not None:
            return self.running_block_tokens
        given = self.args.leaves.get(BLOCK_SIZE)
        if given is None and self.preferred.block_tokens is not None:
            return self.preferred.block_tokens
        return self.number(BLOCK_SIZE) or DEFAULT_BLOCK_TOKENS

    @property
    def buffer_tokens(self) -> int | None:
        """Tokens in the transfer buffer; None if the number is not set, or with the Python
        transceiver, which has no such buffer.
        """
        return None if self.runtime == "PYTHON" else self.number(BUFFER)

    @property
    def attention(self) -> str:
        """The attention backend that was set; if none was set, the one that the model's class
        prefers; without such a preference, TensorRT-LLM's default.

        Upper and lower case matter, as they do for TensorRT-LLM.
        """
        given = self.args.leaves.get("attn_backend")
        if given is not None and given.value is not None:
            return str(given.value)
        return self.preferred.attention or "TRTLLM"

    @property
    def sharding(self) -> str:
        """Distribution of attention over ranks, as text."""
        suffix = " with attention DP" if self.is_enabled("enable_attention_dp") else ""
        return f"tensor_parallel_size {self.tensor_parallel}{suffix}"

    @property
    def kv_setting(self) -> str:
        """Data type of the KV cache as set, in lower case."""
        return str(self.args.get("kv_cache_config.dtype") or "auto").lower()

    @property
    def kv_dtype(self) -> str:
        """Data type of the KV cache.

        If the model is known, "auto" means the type that the checkpoint sets for KV. If the
        checkpoint sets none, "auto" means the type of the model
        (`validate_and_set_kv_cache_quant` in _torch/pyexecutor/model_loader.py, 1.2 and main at
        00043967).
        """
        if self.kv_setting != "auto" or self.model is None:
            return self.kv_setting
        return self.model.kv_quantization or self.model.dtype

    @property
    def transceiver(self) -> str | None:
        """Transfer backend in capitals, with DEFAULT resolved as TensorRT-LLM does; None without
        one.
        """
        found = self.args.get(BACKEND)
        name = str(found).upper() if found else None
        if name != "DEFAULT":
            return name
        for backend in _BACKENDS:
            if self.variable(f"TRTLLM_USE_{backend}_KVCACHE") == "1":
                return backend
        return self.default_backend

    @property
    def default_backend(self) -> str:
        """The backend that DEFAULT means if no variable is set: UCX up to 1.1, NIXL in later
        releases (pull request 7926 of TensorRT-LLM).
        """
        return "NIXL" if self.line >= (1, 2) else "UCX"

    @property
    def has_runtimes(self) -> bool:
        """True if the release has more than the C++ transceiver."""
        return (
            self.args.release.presence("CacheTransceiverConfig", "transceiver_runtime")
            is not Presence.ABSENT
        )

    @property
    def set_runtime(self) -> str | None:
        """The transceiver that the arguments set, CPP or PYTHON. None if TensorRT-LLM chooses."""
        if self.transceiver is None or not self.has_runtimes:
            return None
        found = str(self.args.get(RUNTIME) or "CPP").upper()
        return None if found == "AUTO" else found

    @property
    def can_run_python_transceiver(self) -> bool:
        """True if neither the release, the backend nor the timeout rules out the Python
        transceiver.
        """
        return self.has_runtimes and self.transceiver == "NIXL" and self.number(TIMEOUT) is not None

    @property
    def is_runtime_uncertain(self) -> bool:
        """True if TensorRT-LLM chooses the transceiver (`auto`), and it is not established what
        this candidate chooses.

        This is known from the dates of merges and of uploads. `auto` came with pull request 16164
        (9 July 2026, after rc14), and meant the C++ transceiver for all models. Later pull requests
        changed it to the Python transceiver: 16479 (16 July) for gpt-oss, 16908, 16787 and 17396
        (up to 7 August) for DeepSeek, Llama and Gemma, and 18134 (after 24 August, by rc26) for all
        models.
        """
        if self.set_runtime is not None or not self.can_run_python_transceiver:
            return False
        if self.candidate is None:
            return False
        # All candidates from rc23 on were made after pull request 16479.
        last_uncertain = 22 if self.is_gpt_oss else 25
        return _AUTO_SINCE <= self.candidate <= last_uncertain

    @property
    def runtime(self) -> str | None:
        """The transceiver, CPP or PYTHON; None without a backend.

        `auto` means PYTHON if the Python transceiver can run. In older candidates, and in
        candidates whose choice is not established, `auto` is taken as CPP, because the buffer of
        the C++ transceiver limits prompts.
        """
        if self.transceiver is None:
            return None
        if self.set_runtime is not None:
            return self.set_runtime
        if not self.can_run_python_transceiver or self.is_runtime_uncertain:
            return "CPP"
        return "PYTHON" if self.is_at_least_candidate(_AUTO_SINCE) else "CPP"

    @property
    def max_seq_len(self) -> int | None:
        """The most tokens of prompt and output together, as set; if it is not set, the model's
        context length. None if both are unknown.
        """
        found = self.number("max_seq_len")
        if found is None and self.model is not None:
            return self.model.context_length or None
        return found

    @property
    def max_num_tokens(self) -> int:
        return self.number("max_num_tokens") or 8192  # the value of 1.1 for null

    @property
    def max_batch_size(self) -> int:
        return self.number("max_batch_size") or 2048  # the value of all releases for null

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt of the load; without a load, the limit of the arguments.
        None if both are unknown.
        """
        return self.load.isl or self.prompt_limit

    @property
    def prompt_limit(self) -> int | None:
        """The smaller of max_seq_len and the transfer buffer, in tokens; None if neither is set."""
        limits = (self.number("max_seq_len"), self.buffer_tokens)
        known = [limit for limit in limits if limit and limit > 0]
        return min(known) if known else None

    def layout(self) -> KvLayout | None:
        """Return the KV layout that this worker will register; None without a model."""
        if self.model is None:
            return None
        return self.model.kv_layout(self.kv_dtype, self.block_tokens, self.tensor_parallel)


def _text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)

"""Estimate the memory use of one GPU, the number of requests that fit, and the time of a KV
transfer.

KV is counted in full for every layer. Whether TensorRT-LLM frees KV outside a sliding window
depends on the release and the settings, so the possible saving is reported separately.
"""

from __future__ import annotations

from dynamo_trtllm.engines.external.external_transfers import KV_ITEM_BYTES
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts, links_of
from dynamo_trtllm.models.checkpoint import Checkpoint, weight_bytes
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.number_types import ceil_div

WORKSPACE_BYTES = 5 << 30  # CUDA context, NCCL, activations, CUDA graphs: an unverified estimate
KV_FRACTION = 0.9  # default of free_gpu_memory_fraction
_BUFFERS = 2  # staging buffers that a transceiver allocates


class MemoryTable:
    """Memory estimate for one GPU of one role.

    A value is None if the GPU or the load is unknown.
    """

    def __init__(self, facts: RoleFacts, model: Checkpoint) -> None:
        token_bytes = kv_token_bytes(facts, model)
        self.role = facts.role
        self.gpu = facts.gpu.name if facts.gpu else None
        self.gpu_bytes = facts.gpu.memory_bytes if facts.gpu else None
        self.weights_bytes = weights_per_gpu(facts, model)
        self.kv_token_bytes = token_bytes  # KV of one token in all layers
        # KV of one token outside all sliding windows, if the KV of layers with windows is freed.
        num_full_layers = model.num_layers - model.num_sliding_layers
        self.windowed_token_bytes = token_bytes * num_full_layers // model.num_layers
        self.buffer_bytes = 0
        if facts.is_disaggregated and facts.buffer_tokens is not None:
            self.buffer_bytes = _BUFFERS * facts.buffer_tokens * token_bytes
        self.kv_memory_bytes = self._kv_memory(facts)  # negative if weights and buffers do not fit
        self.blocks = self._blocks(facts)  # KV blocks
        # The number of tokens that fit into the KV blocks.
        self.pool_tokens = None if self.blocks is None else self.blocks * facts.block_tokens
        # Tokens of KV for one request of the load.
        self.request_tokens = _request_tokens(facts)
        # Concurrent requests of the load in this engine, and what limits them: "KV" or
        # "max_batch_size".
        self.concurrency, self.limited_by = self._concurrency(facts)

    @property
    def window_gain(self) -> float:
        """Factor by which more tokens fit if TensorRT-LLM frees KV outside the sliding windows."""
        return self.kv_token_bytes / max(1, self.windowed_token_bytes)

    @property
    def use(self) -> str:
        """The GPU memory and what is subtracted from it, as text."""
        return (
            f"{_gib(self.gpu_bytes or 0)} minus weights {_gib(self.weights_bytes)}, transfer"
            f" buffers {_gib(self.buffer_bytes)} and workspace {_gib(WORKSPACE_BYTES)} (estimate)"
        )

    def _kv_memory(self, facts: RoleFacts) -> int | None:
        if self.gpu_bytes is None:
            return None
        fraction = facts.args.get("kv_cache_config.free_gpu_memory_fraction")
        share = fraction if isinstance(fraction, int | float) else KV_FRACTION
        free = self.gpu_bytes - self.weights_bytes - WORKSPACE_BYTES - self.buffer_bytes
        free_bytes = round(free * share) if free > 0 else free
        ceiling = facts.number("kv_cache_config.max_gpu_total_bytes") or 0
        return min(free_bytes, ceiling) if ceiling > 0 else free_bytes

    def _blocks(self, facts: RoleFacts) -> int | None:
        if self.kv_memory_bytes is None:
            return None
        blocks = max(0, self.kv_memory_bytes) // (self.kv_token_bytes * facts.block_tokens)
        ceiling = facts.number("kv_cache_config.max_tokens")
        if not ceiling:
            return blocks
        return min(blocks, ceil_div(ceiling, facts.block_tokens))

    def _concurrency(self, facts: RoleFacts) -> tuple[int | None, str]:
        """Return the number of concurrent requests, and what limits them.

        With attention DP, each rank has requests of its own.
        """
        if self.blocks is None or self.request_tokens is None:
            return None, ""
        groups = facts.tensor_parallel if facts.is_enabled("enable_attention_dp") else 1
        by_kv = self.blocks // ceil_div(self.request_tokens, facts.block_tokens)
        if by_kv <= facts.max_batch_size:
            return by_kv * groups, "KV"
        return facts.max_batch_size * groups, "max_batch_size"


def memory_table(facts: RoleFacts) -> MemoryTable | None:
    """Estimate the memory use of one GPU; None without a model."""
    return None if facts.model is None else MemoryTable(facts, facts.model)


def weights_per_gpu(facts: RoleFacts, model: Checkpoint) -> int:
    """Return the weight bytes of one GPU. If the size of the checkpoint's files is known, the
    result is scaled to this size.
    """
    parts = weight_bytes(model)
    ranks = facts.tensor_parallel
    # Attention DP replicates the attention weights.
    shards = 1 if facts.is_enabled("enable_attention_dp") else ranks
    per_rank = parts.experts / ranks + (parts.attention + parts.vocabulary) / shards + parts.rest
    scale = model.index_bytes / parts.total if model.index_bytes else 1.0
    return round(per_rank * scale / facts.size("pipeline_parallel_size"))


def kv_token_bytes(facts: RoleFacts, model: Checkpoint) -> int:
    """Return the KV bytes of one token on one GPU.

    Heads are replicated if there are more ranks than heads.
    """
    ranks = 1 if facts.is_enabled("enable_attention_dp") else facts.tensor_parallel
    layers = ceil_div(model.num_layers, facts.size("pipeline_parallel_size"))
    heads = ceil_div(model.num_kv_heads, ranks)
    # Latent KV is not divided: every rank has all of it.
    per_layer = model.latent_kv_dim or 2 * heads * model.head_dim
    return round(layers * per_layer * KV_ITEM_BYTES.get(facts.kv_dtype, 2.0))


def transfer_s(prefill: RoleFacts, decode: RoleFacts, prompt_tokens: int) -> dict[str, float]:
    """Return the seconds to transfer the KV of one prompt at the full rate of each link; {} without
    a model.

    The number of parallel links is the number of GPUs on the smaller side.
    """
    model = prefill.model
    if model is None:
        return {}
    # The number of ranks of each side that share the KV of a prompt.
    num_ranks = [
        1 if facts.is_enabled("enable_attention_dp") else facts.tensor_parallel
        for facts in (prefill, decode)
    ]
    num_links = 1 if model.latent_kv_dim else min(*num_ranks, model.num_kv_heads)
    per_layer = model.latent_kv_dim or 2 * model.num_kv_heads * model.head_dim
    token_bytes = model.num_layers * per_layer * KV_ITEM_BYTES.get(prefill.kv_dtype, 2.0)
    name = prefill.gpu.name if prefill.gpu else ""
    return {
        link: prompt_tokens * token_bytes / (rate * num_links)
        for link, rate in links_of(name).items()
    }


def _request_tokens(facts: RoleFacts) -> int | None:
    """Return the KV tokens of one request.

    A prefill worker has only the KV of the prompt. Other workers also have the KV of the output.
    """
    if facts.load.isl is None:
        return None
    if facts.role is Role.PREFILL or facts.load.osl is None:
        return facts.load.isl
    return facts.load.isl + facts.load.osl


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"

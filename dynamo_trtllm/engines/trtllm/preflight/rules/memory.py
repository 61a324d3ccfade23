"""Rules about the memory of a GPU."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.memory import memory_table
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("Memory")
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
# Requests normally queue at prefill workers, so the load is not compared with their memory.
_DECODES = (Role.DECODE, Role.AGGREGATED)
_GIB = 2**30


@SECTION.rule(
    "error",
    "weights-over-memory",
    field="tensor_parallel_size",
    why="the weights of one rank do not fit the GPU",
    fix="raise tensor_parallel_size, or choose a larger GPU",
)
def weights_over_memory(facts: RoleFacts) -> Violation | None:
    """Find weights that are larger than the memory."""
    memory = memory_table(facts)
    gpu = facts.gpu
    if memory is None or gpu is None or memory.weights_bytes < gpu.memory_bytes:
        return None
    return Violation(
        other=(
            f"weights of {memory.weights_bytes / _GIB:.1f} GiB on a {gpu.name} of"
            f" {gpu.memory_bytes / _GIB:.1f} GiB"
        )
    )


@SECTION.rule(
    "warning",
    "no-memory-for-kv",
    field=_FRACTION,
    why="weights and buffers leave hardly any memory for KV (estimate)",
    fix="raise tensor_parallel_size, lower max_tokens_in_buffer, or choose a larger GPU",
)
def no_memory_for_kv(facts: RoleFacts) -> Violation | None:
    """Find too little memory for a single KV block.

    The rule weights-over-memory reports weights that do not fit.
    """
    memory = memory_table(facts)
    gpu = facts.gpu
    if memory is None or gpu is None or memory.weights_bytes >= gpu.memory_bytes:
        return None
    if memory.blocks is None or memory.blocks >= 1:
        return None
    return Violation(other=memory.use)


@SECTION.rule(
    "warning",
    "seq-len-over-kv",
    field="max_seq_len",
    why="one request of max_seq_len tokens does not fit the KV memory",
    fix=(
        "lower max_seq_len, raise the memory fraction or tensor_parallel_size, or use fp8 KV if the"
        " GPU has it"
    ),
)
def seq_len_over_kv(facts: RoleFacts) -> Violation | None:
    """Find sequences that are longer than the KV memory, also if windows free the most."""
    memory = memory_table(facts)
    limit = facts.max_seq_len
    if memory is None or limit is None or not memory.pool_tokens:
        return None
    if memory.pool_tokens * memory.window_gain >= limit:
        return None
    return Violation(other=f"KV for {memory.pool_tokens} tokens: {memory.use}")


@SECTION.rule(
    "warning",
    "load-over-kv",
    roles=_DECODES,
    field=_FRACTION,
    why="the KV memory is too small for the given concurrency: requests queue",
    fix=(
        "use more GPUs or workers of this role, fp8 KV if the GPU supports it, or lower concurrency"
    ),
)
def load_over_kv(facts: RoleFacts) -> Violation | None:
    """Find a load that needs more KV memory than there is."""
    memory = memory_table(facts)
    wanted = facts.load.concurrency
    if memory is None or wanted is None or not memory.blocks:
        return None
    if memory.limited_by != "KV" or memory.concurrency is None:
        return None
    fitting = int(memory.concurrency * memory.window_gain)
    if fitting >= wanted:
        return None
    return Violation(other=f"the load has {wanted} concurrent requests, {fitting} fit")


@SECTION.rule(
    "note",
    "load-over-batch",
    roles=_DECODES,
    field="max_batch_size",
    why="the given concurrency exceeds the batch: other requests queue or are in prefill",
    fix="raise it if memory allows, or start more workers of this role",
)
def load_over_batch(facts: RoleFacts) -> Violation | None:
    """Find a load of more requests than a batch has."""
    memory = memory_table(facts)
    wanted = facts.load.concurrency
    if memory is None or wanted is None or not memory.blocks:
        return None
    if memory.limited_by != "max_batch_size" or memory.concurrency is None:
        return None
    if memory.concurrency >= wanted:
        return None
    return Violation(other=f"the load has {wanted} concurrent requests, {memory.concurrency} fit")

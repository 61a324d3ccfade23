"""Rules about memory: do weights and KV fit, is it enough for the load. Pure.

They are estimates, so what is not sure is not said: KV counts as if windows were freed.
"""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.memory import WORKSPACE_BYTES, MemoryTable, memory_table
from dynamo_trtllm.messages import Role

_FRACTION = "kv_cache_config.free_gpu_memory_fraction"


def _weights_over_memory(facts: RoleFacts) -> Violation | None:
    table = memory_table(facts)
    if table is None or table.gpu_bytes is None or table.weights_bytes < table.gpu_bytes:
        return None
    return Violation(other=f"weights of {_gib(table.weights_bytes)} on a {table.gpu} of {_gib(table.gpu_bytes)}")


def _no_memory_for_kv(facts: RoleFacts) -> Violation | None:
    table = memory_table(facts)
    if table is None or table.blocks is None or table.gpu_bytes is None or table.weights_bytes >= table.gpu_bytes:
        return None  # without a GPU nothing is known; with too large weights another rule speaks
    return Violation(other=_spent(table)) if table.blocks < 1 else None


def _request_over_pool(facts: RoleFacts) -> Violation | None:
    table, longest = memory_table(facts), facts.max_seq_len
    if table is None or not table.pool_tokens or longest is None or table.pool_tokens * table.window_gain >= longest:
        return None
    return Violation(other=f"KV for {table.pool_tokens} tokens: {_spent(table)}")


def _load_over_kv(facts: RoleFacts) -> Violation | None:
    return _load_over(facts, "KV", gain=True)


def _load_over_batch(facts: RoleFacts) -> Violation | None:
    return _load_over(facts, "max_batch_size", gain=False)


def _load_over(facts: RoleFacts, limit: str, *, gain: bool) -> Violation | None:
    """Prefill is left out: requests come to it one after the other, and waiting there is its way to work."""
    table, wanted = memory_table(facts), facts.load.concurrency
    if table is None or wanted is None or table.concurrency is None or facts.role is Role.PREFILL:
        return None
    fitting = int(table.concurrency * table.window_gain) if gain else table.concurrency
    if not table.blocks or table.limited_by != limit or fitting >= wanted:
        return None
    return Violation(other=f"{wanted} requests wanted, {fitting} fit at once")


def _spent(table: MemoryTable) -> str:
    return (
        f"{_gib(table.gpu_bytes or 0)} less weights {_gib(table.weights_bytes)}, transfer buffers "
        f"{_gib(table.buffer_bytes)} and about {_gib(WORKSPACE_BYTES)} to work in"
    )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


RULES = (
    RoleRule(
        name="weights-over-memory",
        severity="error",
        field="tensor_parallel_size",
        why="the weights alone do not fit one GPU's share",
        cure="raise tensor_parallel_size, or choose a larger GPU",
        test=_weights_over_memory,
    ),
    RoleRule(
        name="no-room-for-kv",
        severity="warning",
        field=_FRACTION,
        why="beside weights and buffers hardly any memory is left for KV, by the estimate",
        cure="raise tensor_parallel_size, lower max_tokens_in_buffer, or choose a larger GPU",
        test=_no_memory_for_kv,
    ),
    RoleRule(
        name="seq-len-over-kv",
        severity="warning",
        field="max_seq_len",
        why="one request of full length would not fit the KV memory",
        cure="lower max_seq_len, raise the memory fraction or tensor_parallel_size, or use fp8 KV where the GPU has it",
        test=_request_over_pool,
    ),
    RoleRule(
        name="load-over-kv",
        severity="warning",
        field=_FRACTION,
        why="the wanted concurrency does not fit the KV memory: requests queue",
        cure="use more GPUs or workers of this role, fp8 KV where the GPU has it, or less concurrency",
        test=_load_over_kv,
    ),
    RoleRule(
        name="load-over-batch",
        severity="note",
        field="max_batch_size",
        why="the wanted concurrency does not run at once: the rest queues, or is with prefill",
        cure="raise it where memory allows, or start more workers of this role",
        test=_load_over_batch,
    ),
)

"""Rules about lengths of prompts and requests, and about sizes of batches."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import BLOCK_SIZE, BUFFER, RoleFacts
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("Lengths and counts")
_DISAGGREGATED = (Role.PREFILL, Role.DECODE)
_PREFILLS = (Role.PREFILL, Role.AGGREGATED)  # roles that compute prompts
_GRAPH = "cuda_graph_config.max_batch_size"
_GRAPHS = "cuda_graph_config.batch_sizes"
# Keys of speculative_config for the number of draft tokens: of a chain, of MTP up to 1.2, and of a
# tree.
_DRAFTS = ("max_draft_len", "num_nextn_predict_layers", "max_total_draft_tokens")


@SECTION.rule(
    "error",
    "buffer-block-multiple",
    field=BUFFER,
    why="otherwise an assertion of TensorRT-LLM fails and every rank exits at start",
    fix="make it a multiple of kv_cache_config.tokens_per_block",
)
def buffer_block_multiple(facts: RoleFacts) -> Violation | None:
    """Find a transfer buffer that ends within a KV block."""
    if facts.buffer_tokens is None or facts.buffer_tokens % facts.block_tokens == 0:
        return None
    return Violation(
        other=f"tokens_per_block {facts.block_tokens}",
        fix=f"set it to {facts.round_up(facts.buffer_tokens)}, on both sides",
    )


@SECTION.rule(
    "error",
    "prompt-over-buffer",
    roles=_DISAGGREGATED,
    field=BUFFER,
    why=(
        "the KV of a prompt must fit the transfer buffer: with NIXL longer prompts fail, with UCX "
        "each allocates another buffer until memory runs out"
    ),
    fix=(
        "raise it to the longest prompt, rounded up to a multiple of tokens_per_block, on both"
        " sides"
    ),
)
def prompt_over_buffer(facts: RoleFacts) -> Violation | None:
    """Find prompts of the load that do not fit the transfer buffer."""
    isl = facts.load.isl
    buffer = facts.buffer_tokens
    if isl is None or buffer is None or isl <= buffer:
        return None
    if facts.transceiver == "NIXL":
        why = "with NIXL such a prompt fails"
    else:
        why = (
            "each such prompt allocates another buffer, until memory runs out or the two sides"
            " differ"
        )
    return Violation(
        other=f"prompts of {isl} tokens",
        why=why,
        fix=f"set it to {facts.round_up(isl)}, on both sides",
    )


@SECTION.rule(
    "warning",
    "buffer-unset",
    roles=_DISAGGREGATED,
    field=BUFFER,
    why="the release then chooses a size; prompts that are longer than it fail",
    fix="set it to the longest prompt, rounded up to a multiple of tokens_per_block, on both sides",
)
def buffer_unset(facts: RoleFacts) -> Violation | None:
    """Find a C++ transceiver without a size of its buffer. The Python transceiver has none."""
    if facts.runtime != "CPP" or facts.number(BUFFER) is not None:
        return None
    backend = facts.value_with_source("cache_transceiver_config.backend")
    return Violation(other=f"cache_transceiver_config.backend {backend}")


@SECTION.rule(
    "error",
    "prompt-over-num-tokens",
    roles=_PREFILLS,
    field="max_num_tokens",
    why="without chunked prefill a prompt must fit one step: longer prompts are rejected",
    fix="set enable_chunked_prefill: true, or raise it to the longest prompt",
)
def prompt_over_num_tokens(facts: RoleFacts) -> Violation | None:
    """Find prompts of the load that do not fit one step."""
    isl = facts.load.isl
    if isl is None or facts.is_enabled("enable_chunked_prefill") or isl <= facts.max_num_tokens:
        return None
    return Violation(
        other=f"prompts of {isl} tokens",
        fix=f"set enable_chunked_prefill: true, or raise it to {isl}",
    )


@SECTION.rule(
    "warning",
    "prompt-limit-over-num-tokens",
    roles=_PREFILLS,
    field="max_num_tokens",
    why=(
        "without chunked prefill a prompt must fit one step: longer prompts are rejected, "
        "although the other limits allow them"
    ),
    fix="set enable_chunked_prefill: true, raise it, or lower max_seq_len",
)
def prompt_limit_over_num_tokens(facts: RoleFacts) -> Violation | None:
    """If no load was given, find prompts that the other limits accept but one step can't hold."""
    if facts.load.isl is not None or facts.is_enabled("enable_chunked_prefill"):
        return None
    longest = facts.prompt_limit if facts.is_disaggregated else facts.number("max_seq_len")
    if longest is None or longest <= facts.max_num_tokens:
        return None
    return Violation(
        other=f"prompts of up to {longest} tokens, which max_seq_len and the buffer allow"
    )


@SECTION.rule(
    "error",
    "request-over-seq-len",
    field="max_seq_len",
    why="prompt and output together exceed it: the output is truncated or the prompt rejected",
    fix="raise it to the tokens of prompt and output together",
)
def request_over_seq_len(facts: RoleFacts) -> Violation | None:
    """Find requests of the load that are longer than a sequence may be."""
    isl = facts.load.isl
    limit = facts.max_seq_len
    if isl is None or limit is None:
        return None
    answer = 1 if facts.role is Role.PREFILL else max(1, facts.load.osl or 1)
    if isl + answer <= limit:
        return None
    return Violation(
        other=f"{isl} input and {answer} output tokens", fix=f"set it to at least {isl + answer}"
    )


@SECTION.rule(
    "error",
    "seq-len-over-model",
    field="max_seq_len",
    why="the model does not support longer sequences, and TensorRT-LLM rejects them",
    fix="lower it to the model's context length, or remove it",
)
def seq_len_over_model(facts: RoleFacts) -> Violation | None:
    """Find a limit above the model's context length. A length of 0 is unknown."""
    length = facts.model.context_length if facts.model is not None else 0
    if length == 0 or (facts.number("max_seq_len") or 0) <= length:
        return None
    return Violation(
        other=f"max_position_embeddings {length} of the model", fix=f"set it to at most {length}"
    )


@SECTION.rule(
    "warning",
    "batch-over-num-tokens",
    field="max_batch_size",
    why=(
        "each request in a decode step uses one token of max_num_tokens, so a batch of this size"
        " never runs"
    ),
    fix="lower it, or raise max_num_tokens",
)
def batch_over_num_tokens(facts: RoleFacts) -> Violation | None:
    """Find a batch of more requests than one step has tokens."""
    if facts.max_batch_size <= facts.max_num_tokens:
        return None
    return Violation(other=f"max_num_tokens {facts.value_with_source('max_num_tokens')}")


@SECTION.rule(
    "note",
    "graph-over-batch",
    field=_GRAPH,
    why=(
        "CUDA graphs for batches above max_batch_size are skipped, or use memory and start-up time"
        " without effect"
    ),
    fix="lower it to max_batch_size, or raise max_batch_size",
)
def graph_over_batch(facts: RoleFacts) -> Violation | None:
    """Find CUDA graphs of batches that never run."""
    if _largest_graph(facts) <= facts.max_batch_size:
        return None
    return Violation(
        field=_graph_key(facts), other=f"max_batch_size {facts.value_with_source('max_batch_size')}"
    )


@SECTION.rule(
    "error",
    "block-size-power-of-two",
    field=BLOCK_SIZE,
    why="the block manager of TensorRT-LLM accepts powers of two only: the engine fails at start",
    fix="set it to 32, 64 or 128, on both sides",
)
def block_size_power_of_two(facts: RoleFacts) -> Violation | None:
    """Find a block size that the C++ block manager rejects (kvCacheManager.cpp)."""
    size = facts.number(BLOCK_SIZE) if BLOCK_SIZE in facts.args.leaves else None
    if size is None or size.bit_count() == 1:
        return None
    return Violation()


@SECTION.rule(
    "warning",
    "draft-tokens-over-num-tokens",
    roles=(Role.DECODE, Role.AGGREGATED),
    field="max_num_tokens",
    why=(
        "each request uses its draft tokens plus one token of max_num_tokens in a step, so a full"
        " batch never runs"
    ),
    fix="raise it to max_batch_size times the draft tokens plus one",
)
def draft_tokens_over_num_tokens(facts: RoleFacts) -> Violation | None:
    """Find steps that have too few tokens for a batch with draft tokens.

    Batches that are larger than the largest CUDA graph are not taken into account.
    """
    given = facts.section_values("speculative_config")
    counts = [given.get(key) for key in _DRAFTS]
    drafts = max((count for count in counts if isinstance(count, int)), default=0)
    batch = min(facts.max_batch_size, _largest_graph(facts) or facts.max_batch_size)
    needed = batch * (drafts + 1)
    if drafts <= 0 or needed <= facts.max_num_tokens:
        return None
    return Violation(
        other=f"{batch} requests of {drafts} draft tokens and one",
        fix=f"set it to at least {needed}",
    )


def _graph_key(facts: RoleFacts) -> str:
    return _GRAPH if facts.number(_GRAPH) else _GRAPHS


def _largest_graph(facts: RoleFacts) -> int:
    """Return the size of the largest batch with a CUDA graph; 0 if the sizes are not set."""
    if _graph_key(facts) not in facts.args.leaves:
        return 0
    sizes = facts.args.get(_GRAPHS)
    largest_size = max(sizes) if isinstance(sizes, list) and sizes else 0
    return facts.number(_GRAPH) or largest_size

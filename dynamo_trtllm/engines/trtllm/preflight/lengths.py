"""Rules about lengths and counts: prompts, sequences, steps, batches, CUDA graphs."""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import BACKEND, BUFFER, RoleFacts, prompt_limit
from dynamo_trtllm.messages import Role

_GRAPH = "cuda_graph_config.max_batch_size"
_GRAPHS = "cuda_graph_config.batch_sizes"


def _buffer_multiple(facts: RoleFacts) -> Violation | None:
    buffer, block = facts.number(BUFFER), facts.block_tokens
    if buffer is None or buffer % block == 0:
        return None
    return Violation(other=f"tokens_per_block {block}", fix=f"set it to {-(-buffer // block) * block}")


def _prompt_over_buffer(facts: RoleFacts) -> Violation | None:
    isl, buffer, block = facts.load.isl, facts.number(BUFFER), facts.block_tokens
    if not facts.is_disaggregated or isl is None or buffer is None or isl <= buffer:
        return None
    why = "with NIXL such a prompt fails"
    if facts.transceiver != "NIXL":
        why = "each such prompt allocates another buffer, until memory runs out or the two sides differ"
    return Violation(other=f"prompts of {isl} tokens", why=why, fix=f"set it to {-(-isl // block) * block}")


def _buffer_unset(facts: RoleFacts) -> Violation | None:
    if not facts.is_disaggregated or facts.transceiver is None or facts.number(BUFFER) is not None:
        return None
    return Violation(other=f"{BACKEND} {facts.shown(BACKEND)}")


def _prompt_over_step(facts: RoleFacts) -> Violation | None:
    isl = facts.load.isl
    if not _needs_prompt_in_one_step(facts) or isl is None or isl <= facts.max_num_tokens:
        return None
    return Violation(other=f"prompts of {isl} tokens", fix=f"set enable_chunked_prefill: true, or raise it to {isl}")


def _limit_over_step(facts: RoleFacts) -> Violation | None:
    """Report, without a load, prompts that the other limits accept but one step can't hold."""
    limit = prompt_limit(facts.args) if facts.is_disaggregated else facts.number("max_seq_len")
    if (
        not _needs_prompt_in_one_step(facts)
        or facts.load.isl is not None
        or limit is None
        or limit <= facts.max_num_tokens
    ):
        return None
    return Violation(other=f"prompts of up to {limit} tokens, which max_seq_len and the buffer allow")


def _needs_prompt_in_one_step(facts: RoleFacts) -> bool:
    return facts.role is not Role.DECODE and not facts.on("enable_chunked_prefill")


def _request_over_sequence(facts: RoleFacts) -> Violation | None:
    isl, longest = facts.load.isl, facts.max_seq_len
    if isl is None or longest is None:
        return None
    answer = 1 if facts.role is Role.PREFILL else max(1, facts.load.osl or 1)
    if isl + answer <= longest:
        return None
    return Violation(other=f"{isl} input and {answer} output tokens", fix=f"set it to at least {isl + answer}")


def _sequence_over_model(facts: RoleFacts) -> Violation | None:
    longest = facts.number("max_seq_len")
    context = facts.model.context_length if facts.model else 0
    if not context or longest is None or longest <= context:
        return None
    return Violation(other=f"max_position_embeddings {context} of the model", fix=f"set it to at most {context}")


def _batch_over_step(facts: RoleFacts) -> Violation | None:
    if facts.max_batch_size <= facts.max_num_tokens:
        return None
    return Violation(other=f"max_num_tokens {facts.shown('max_num_tokens')}")


def _graph_over_batch(facts: RoleFacts) -> Violation | None:
    key = _GRAPH if facts.number(_GRAPH) else _GRAPHS
    sizes = facts.args.get(_GRAPHS)
    largest = facts.number(_GRAPH) or (max(sizes) if isinstance(sizes, list) and sizes else 0)
    if key not in facts.args.leaves or largest <= facts.max_batch_size:
        return None
    return Violation(other=f"max_batch_size {facts.shown('max_batch_size')}", field=key)


RULES = (
    RoleRule(
        name="buffer-block-multiple",
        severity="error",
        field=BUFFER,
        why="otherwise an assertion of TensorRT-LLM fails and every rank exits at start",
        fix="make it a multiple of kv_cache_config.tokens_per_block",
        test=_buffer_multiple,
    ),
    RoleRule(
        name="prompt-over-buffer",
        severity="error",
        field=BUFFER,
        why="the KV of a prompt must fit the transfer buffer: with NIXL longer prompts fail, with UCX each allocates "
        "another buffer until memory runs out",
        fix="raise it to the longest prompt, rounded up to a multiple of tokens_per_block, on both sides",
        test=_prompt_over_buffer,
    ),
    RoleRule(
        name="buffer-unset",
        severity="warning",
        field=BUFFER,
        why="the release then chooses a size; prompts that are longer than it fail",
        fix="set it to the longest prompt, rounded up to a multiple of tokens_per_block, on both sides",
        test=_buffer_unset,
    ),
    RoleRule(
        name="prompt-over-num-tokens",
        severity="error",
        field="max_num_tokens",
        why="without chunked prefill a prompt must fit one step: longer prompts are rejected",
        fix="set enable_chunked_prefill: true, or raise it to the longest prompt",
        test=_prompt_over_step,
    ),
    RoleRule(
        name="prompt-limit-over-num-tokens",
        severity="warning",
        field="max_num_tokens",
        why="without chunked prefill a prompt must fit one step: longer prompts are rejected, although the other "
        "limits allow them",
        fix="set enable_chunked_prefill: true, raise it, or lower max_seq_len",
        test=_limit_over_step,
    ),
    RoleRule(
        name="request-over-seq-len",
        severity="error",
        field="max_seq_len",
        why="prompt and output together exceed it: the output is truncated or the prompt rejected",
        fix="raise it to the tokens of prompt and output together",
        test=_request_over_sequence,
    ),
    RoleRule(
        name="seq-len-over-model",
        severity="error",
        field="max_seq_len",
        why="the model does not support longer sequences, and TensorRT-LLM rejects them",
        fix="lower it to the model's context length, or remove it",
        test=_sequence_over_model,
    ),
    RoleRule(
        name="batch-over-num-tokens",
        severity="warning",
        field="max_batch_size",
        why="each request in a decode step uses one token of max_num_tokens, so a batch of this size never runs",
        fix="lower it, or raise max_num_tokens",
        test=_batch_over_step,
    ),
    RoleRule(
        name="graph-over-batch",
        severity="warning",
        field=_GRAPH,
        why="CUDA graphs for batches above max_batch_size are skipped, or use memory and start-up time without effect",
        fix="lower it to max_batch_size, or raise max_batch_size",
        test=_graph_over_batch,
    ),
)

"""Rules about the parallelism of one engine over GPUs."""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.messages import Role

_TP, _PP, _CP = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
_EP = "moe_expert_parallel_size"
_BALANCE = "attention_dp_config.enable_balance"


def _experts_divide(facts: RoleFacts) -> Violation | None:
    if facts.tensor_parallel % facts.size(_EP) == 0:
        return None
    return Violation(other=f"{_TP} {facts.shown(_TP)}")


def _moe_split(facts: RoleFacts) -> Violation | None:
    """Compare the product of the MoE sizes if both are given; otherwise TensorRT-LLM derives one."""
    tensor, expert = facts.number("moe_tensor_parallel_size"), facts.number(_EP)
    cluster = facts.size("moe_cluster_parallel_size")
    if not tensor or not expert or tensor < 1 or expert < 1 or tensor * expert * cluster == facts.tensor_parallel:
        return None
    return Violation(
        other=f"times {_EP} {expert} and clusters {cluster} is {tensor * expert * cluster}, "
        f"not {_TP} {facts.tensor_parallel}"
    )


def _heads_divide(facts: RoleFacts) -> Violation | None:
    model, ranks = facts.model, facts.tensor_parallel
    if model is None or model.num_attention_heads % ranks == 0:
        return None
    return Violation(other=f"{model.num_attention_heads} attention heads of the model")


def _kv_heads_copied(facts: RoleFacts) -> Violation | None:
    model, ranks = facts.model, facts.tensor_parallel
    if model is None or facts.on("enable_attention_dp") or ranks <= model.num_kv_heads:
        return None
    return Violation(other=f"{model.num_kv_heads} KV heads of the model")


def _no_pipeline(facts: RoleFacts) -> Violation | None:
    if facts.model is None or facts.model.model_type != "gpt_oss" or facts.size(_PP) == 1:
        return None
    return Violation(other="model_type gpt_oss", fix=f"remove it and use {_TP}")


def _pipeline_reuse(facts: RoleFacts) -> Violation | None:
    if facts.line >= (1, 1, 0) or facts.size(_PP) == 1 or not facts.on("kv_cache_config.enable_block_reuse"):
        return None
    return Violation(other=f"kv_cache_config.enable_block_reuse {facts.shown('kv_cache_config.enable_block_reuse')}")


def _experts_and_context(facts: RoleFacts) -> Violation | None:
    if facts.size(_EP) == 1 or facts.size(_CP) == 1:
        return None
    return Violation(other=f"{_CP} {facts.shown(_CP)}")


def _more_ranks_than_gpus(facts: RoleFacts) -> Violation | None:
    ranks = facts.tensor_parallel * facts.size(_PP) * facts.size(_CP)
    if facts.num_gpus is None or ranks <= facts.num_gpus:
        return None
    return Violation(other=f"{facts.num_gpus} visible GPUs for {ranks} ranks")


def _balance_without_attention_dp(facts: RoleFacts) -> Violation | None:
    if not facts.on(_BALANCE) or facts.on("enable_attention_dp"):
        return None
    return Violation(other=f"enable_attention_dp {facts.shown('enable_attention_dp')}")


def _balance_on_prefill(facts: RoleFacts) -> Violation | None:
    if facts.role is not Role.PREFILL or not facts.on(_BALANCE) or not facts.on("enable_attention_dp"):
        return None
    return Violation(other="a prefill worker")


def _attention_dp_alone(facts: RoleFacts) -> Violation | None:
    if not facts.on("enable_attention_dp") or facts.tensor_parallel > 1:
        return None
    return Violation(other=f"{_TP} {facts.shown(_TP)}")


RULES = (
    RoleRule(
        name="expert-parallel-divides",
        severity="error",
        field=_EP,
        why="experts are sharded over the tensor-parallel ranks: TensorRT-LLM rejects a size that does not divide them",
        fix=f"choose a divisor of {_TP}",
        test=_experts_divide,
    ),
    RoleRule(
        name="moe-split",
        severity="error",
        field="moe_tensor_parallel_size",
        why=f"the product of the MoE sizes must be {_TP}",
        fix="set only moe_expert_parallel_size; the other is derived",
        test=_moe_split,
    ),
    RoleRule(
        name="tensor-parallel-heads",
        severity="error",
        field=_TP,
        why="each rank needs the same number of attention heads",
        fix="choose a divisor of the model's attention heads",
        test=_heads_divide,
    ),
    RoleRule(
        name="kv-heads-copied",
        severity="note",
        field=_TP,
        why="with more ranks than KV heads, the KV of each head is stored more than once",
        fix="use fewer ranks per engine, or set enable_attention_dp: true",
        test=_kv_heads_copied,
    ),
    RoleRule(
        name="gpt-oss-pipeline",
        severity="error",
        field=_PP,
        why="TensorRT-LLM has no pipeline parallelism for gpt-oss: loading fails",
        fix=f"remove it and use {_TP}",
        test=_no_pipeline,
    ),
    RoleRule(
        name="pipeline-with-reuse",
        severity="warning",
        field=_PP,
        why="1.0 may hang with pipeline parallelism and block reuse",
        fix="set kv_cache_config.enable_block_reuse: false, or use 1.1.0 or newer",
        test=_pipeline_reuse,
    ),
    RoleRule(
        name="experts-with-context-parallel",
        severity="error",
        field=_EP,
        why="TensorRT-LLM does not implement expert and context parallelism together",
        fix="remove one of the two",
        test=_experts_and_context,
    ),
    RoleRule(
        name="parallel-over-gpus",
        severity="warning",
        field=_TP,
        why="each rank needs a GPU: the engine cannot start on this host alone",
        fix="lower the parallel sizes, make more GPUs visible, or start it on several hosts with trtllm-llmapi-launch",
        test=_more_ranks_than_gpus,
    ),
    RoleRule(
        name="attention-dp-unused",
        severity="note",
        field=_BALANCE,
        why="it has no effect without attention data parallelism",
        fix="set enable_attention_dp: true, or remove it",
        test=_balance_without_attention_dp,
    ),
    RoleRule(
        name="attention-dp-balance-prefill",
        severity="note",
        field=_BALANCE,
        why="it has no effect on a prefill worker, which has no decode steps to balance with",
        fix="remove it",
        test=_balance_on_prefill,
    ),
    RoleRule(
        name="attention-dp-alone",
        severity="note",
        field="enable_attention_dp",
        why="it has no effect with one rank",
        fix="remove it, or raise tensor_parallel_size",
        test=_attention_dp_alone,
    ),
)

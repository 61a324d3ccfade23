"""Rules about how the model is divided among ranks."""

from __future__ import annotations

import math

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.protocol.messages import Role

SECTION: RuleSection[RoleFacts] = RuleSection("Parallelism")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_MOE_TENSOR = "moe_tensor_parallel_size"
_MOE_EXPERT = "moe_expert_parallel_size"
_MOE_CLUSTER = "moe_cluster_parallel_size"
_BALANCE = "attention_dp_config.enable_balance"


@SECTION.rule(
    "error",
    "expert-parallel-divides",
    field=_MOE_EXPERT,
    why=(
        "experts are sharded over the tensor-parallel ranks: TensorRT-LLM rejects a size that does"
        " not divide the number of these ranks"
    ),
    fix="choose a divisor of tensor_parallel_size, with Helix times context_parallel_size",
)
def expert_parallel_divides(facts: RoleFacts) -> Violation | None:
    """Find an expert-parallel size that does not divide the number of ranks.

    With Helix, the ranks of context parallelism count, too, see `_expert_ranks`.
    """
    if facts.expert_ranks % facts.size(_MOE_EXPERT) == 0:
        return None
    return Violation(other=_expert_ranks(facts))


@SECTION.rule(
    "error",
    "moe-split",
    field=_MOE_TENSOR,
    why=(
        "the product of the MoE sizes must be tensor_parallel_size, with Helix times"
        " context_parallel_size"
    ),
    fix="set only moe_expert_parallel_size; the other is derived",
)
def moe_split(facts: RoleFacts) -> Violation | None:
    """Find MoE sizes that contradict each other.

    TensorRT-LLM derives a size that is unset or less than 1.
    """
    given = [facts.number(key) for key in (_MOE_TENSOR, _MOE_EXPERT)]
    if any(size is None or size < 1 for size in given):
        return None
    product = math.prod(facts.size(key) for key in (_MOE_TENSOR, _MOE_EXPERT, _MOE_CLUSTER))
    if product == facts.expert_ranks:
        return None
    return Violation(
        other=(
            f"{_expert_ranks(facts)}, because {_MOE_TENSOR}"
            f" {facts.size(_MOE_TENSOR)} times {_MOE_EXPERT} {facts.size(_MOE_EXPERT)} times"
            f" {_MOE_CLUSTER} {facts.size(_MOE_CLUSTER)} is {product}"
        )
    )


def _expert_ranks(facts: RoleFacts) -> str:
    """Return the sizes whose product is `facts.expert_ranks`, as text."""
    keys = ["tensor_parallel_size"]
    if facts.has_helix:
        keys.append("context_parallel_size")
    return " times ".join(f"{key} {facts.value_with_source(key)}" for key in keys)


@SECTION.rule(
    "error",
    "tensor-parallel-heads",
    field="tensor_parallel_size",
    why="each rank needs the same number of attention heads",
    fix="choose a divisor of the model's attention heads",
)
def tensor_parallel_heads(facts: RoleFacts) -> Violation | None:
    """Find attention heads that can't be spread evenly over the ranks.

    With attention DP each rank has all heads.
    """
    if (
        facts.model is None
        or facts.is_enabled("enable_attention_dp")
        or facts.model.num_attention_heads % facts.tensor_parallel == 0
    ):
        return None
    return Violation(other=f"{facts.model.num_attention_heads} attention heads of the model")


@SECTION.rule(
    "note",
    "kv-heads-copied",
    field="tensor_parallel_size",
    why="with more ranks than KV heads, the KV of each head is stored more than once",
    fix="use fewer ranks per engine, or set enable_attention_dp: true",
)
def kv_heads_copied(facts: RoleFacts) -> Violation | None:
    """Find KV heads that several ranks store."""
    if facts.model is None or facts.is_enabled("enable_attention_dp"):
        return None
    if facts.tensor_parallel <= facts.model.num_kv_heads:
        return None
    return Violation(other=f"{facts.model.num_kv_heads} KV heads of the model")


@SECTION.rule(
    "error",
    "gpt-oss-pipeline",
    field="pipeline_parallel_size",
    why="TensorRT-LLM has no pipeline parallelism for gpt-oss: loading fails",
    fix="remove it and use tensor_parallel_size",
)
def gpt_oss_pipeline(facts: RoleFacts) -> Violation | None:
    """Find pipeline parallelism of gpt-oss."""
    if not facts.is_gpt_oss or facts.size("pipeline_parallel_size") == 1:
        return None
    return Violation(other="model_type gpt_oss")


@SECTION.rule(
    "error",
    "experts-with-context-parallel",
    field=_MOE_EXPERT,
    why="TensorRT-LLM does not implement expert and context parallelism together",
    fix="remove one of the two",
)
def experts_with_context_parallel(facts: RoleFacts) -> Violation | None:
    """Find expert and context parallelism together, other than with Helix."""
    if facts.has_helix or facts.size(_MOE_EXPERT) == 1 or facts.size("context_parallel_size") == 1:
        return None
    return Violation(
        other=f"context_parallel_size {facts.value_with_source('context_parallel_size')}"
    )


@SECTION.rule(
    "warning",
    "parallel-over-gpus",
    field="tensor_parallel_size",
    why="each rank needs a GPU: the engine cannot start on this host alone",
    fix=(
        "lower the parallel sizes, make more GPUs visible, or start it on several hosts with"
        " trtllm-llmapi-launch"
    ),
)
def parallel_over_gpus(facts: RoleFacts) -> Violation | None:
    """Find more ranks than visible GPUs."""
    ranks = math.prod(facts.size(key) for key in _PARALLEL)
    if facts.num_gpus is None or ranks <= facts.num_gpus:
        return None
    return Violation(other=f"{facts.num_gpus} visible GPUs for {ranks} ranks")


@SECTION.rule(
    "note",
    "attention-dp-unused",
    field=_BALANCE,
    why="it has no effect without attention data parallelism",
    fix="set enable_attention_dp: true, or remove it",
)
def attention_dp_unused(facts: RoleFacts) -> Violation | None:
    """Find settings of attention DP without attention DP."""
    if not facts.is_enabled(_BALANCE) or facts.is_enabled("enable_attention_dp"):
        return None
    return Violation(other=f"enable_attention_dp {facts.value_with_source('enable_attention_dp')}")


@SECTION.rule(
    "note",
    "attention-dp-balance-prefill",
    roles=(Role.PREFILL,),
    field=_BALANCE,
    why="it has no effect on a prefill worker, which has no decode steps to balance with",
    fix="remove it",
)
def attention_dp_balance_prefill(facts: RoleFacts) -> Violation | None:
    """Find attention-DP balance on a prefill worker."""
    if not facts.is_enabled(_BALANCE) or not facts.is_enabled("enable_attention_dp"):
        return None
    return Violation(other="a prefill worker")


@SECTION.rule(
    "note",
    "attention-dp-alone",
    field="enable_attention_dp",
    why="it has no effect with one rank",
    fix="remove it, or raise tensor_parallel_size",
)
def attention_dp_alone(facts: RoleFacts) -> Violation | None:
    """Find attention DP of one rank."""
    if not facts.is_enabled("enable_attention_dp") or facts.tensor_parallel != 1:
        return None
    return Violation(
        other=f"tensor_parallel_size {facts.value_with_source('tensor_parallel_size')}"
    )

"""Rules about single values."""

from __future__ import annotations

from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts

SECTION: RuleSection[RoleFacts] = RuleSection("Values")
_ENCODERS = ("encode_only", "mm_encoder_only")
_QUEUE = "scheduler_config.waiting_queue_policy"
_QUEUE_POLICIES = ("fcfs", "priority")
_RAY = ("ray_worker_extension_cls", "ray_placement_config", "ray_worker_nsight_options")


@SECTION.rule(
    "error",
    "ray-without-ray",
    field="ray_placement_config",
    why="TensorRT-LLM rejects Ray settings unless Ray starts the ranks",
    fix="set orchestrator_type: ray, or remove the setting",
)
def ray_without_ray(facts: RoleFacts) -> Violation | None:
    """Find settings of Ray without Ray."""
    section = facts.first_section(*_RAY)
    if not section or facts.args.get("orchestrator_type") == "ray":
        return None
    orchestrator = facts.value_with_source("orchestrator_type")
    return Violation(field=section, value="set", other=f"orchestrator_type {orchestrator}")


@SECTION.rule(
    "warning",
    "dummy-weights",
    field="load_format",
    why="the weights are random, so the output is meaningless",
    fix="remove load_format, except for benchmarks",
)
def dummy_weights(facts: RoleFacts) -> Violation | None:
    """Find random weights. The value may be a member of an enumeration: LoadFormat.DUMMY."""
    _, _, name = str(facts.args.get("load_format")).rpartition(".")
    return Violation() if name.upper() == "DUMMY" else None


@SECTION.rule(
    "error",
    "encode-only",
    field="encode_only",
    why="such an engine has no language model to generate with: every request fails",
    fix="remove it; encode workers are not supported",
)
def encode_only(facts: RoleFacts) -> Violation | None:
    """Find an engine that only encodes (`LLM._preprocess` in llmapi/llm.py, main)."""
    for key in _ENCODERS:
        if facts.is_enabled(key):
            return Violation(field=key)
    return None


@SECTION.rule(
    "error",
    "waiting-queue-policy",
    since=(1, 3),
    field=_QUEUE,
    why="TensorRT-LLM does not know this policy, and rejects the arguments when it starts",
    fix="set it to fcfs or priority, in small letters",
)
def waiting_queue_policy(facts: RoleFacts) -> Violation | None:
    """Find a misspelled or shortened policy (WaitingQueuePolicy in SchedulerConfig of 1.3.0rc27).

    Any other word may be a policy of a newer candidate, so this rule does not report it.
    """
    value = facts.args.get(_QUEUE) if _QUEUE in facts.args.leaves else None
    if value is None or str(value) in _QUEUE_POLICIES:
        return None
    word = str(value).lower()
    longer = next((policy for policy in _QUEUE_POLICIES if policy.startswith(word)), None)
    meant = longer or suggest(word, _QUEUE_POLICIES)
    if meant is None:
        return None
    return Violation(other=f"did you mean {meant}?", fix=f"set it to {meant}")


@SECTION.rule(
    "warning",
    "argument-removed",
    field="sampler_type",
    why="the nearest candidate whose arguments are known has none: TensorRT-LLM may reject it",
    fix="remove it, or check that your release has it",
)
def argument_removed(facts: RoleFacts) -> list[Violation]:
    """Find arguments of earlier releases that this candidate, which was not read, may lack."""
    release = facts.args.release
    found = {key: schema.removed(release, key) for key in facts.args.leaves}
    return [
        Violation(field=key, other=f"TensorRT-LLM {release.name} has none; {having} have it")
        for key, having in found.items()
        if having
    ]

"""Rules about single values."""

from __future__ import annotations

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts

SECTION: RuleSection[RoleFacts] = RuleSection("Values")
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
    orchestrator = facts.shown("orchestrator_type")
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
    name = str(facts.args.get("load_format")).rpartition(".")[2]
    return Violation() if name.upper() == "DUMMY" else None

"""Rules about single values that make an engine useless, or are of no use here. What is refused by type, range or
release is `schema`'s business. Pure."""

from __future__ import annotations

from dynamo_trtllm.engines.rules import RoleRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts

_RAY = ("ray_worker_extension_cls", "ray_placement_config", "ray_worker_nsight_options")


def _ray_without_ray(facts: RoleFacts) -> Violation | None:
    if facts.args.get("orchestrator_type") == "ray":
        return None
    for key in _RAY:
        if facts.section(key):
            return Violation(field=key, value="set", other=f"orchestrator_type {facts.shown('orchestrator_type')}")
    return None


def _dummy_weights(facts: RoleFacts) -> Violation | None:
    return Violation() if str(facts.args.get("load_format")).rpartition(".")[2].upper() == "DUMMY" else None


RULES = (
    RoleRule(
        name="ray-without-ray",
        severity="error",
        field="ray_placement_config",
        why="TensorRT-LLM refuses settings of Ray when another launcher starts the ranks",
        cure="set orchestrator_type: ray, or leave it out",
        test=_ray_without_ray,
    ),
    RoleRule(
        name="dummy-weights",
        severity="warning",
        field="load_format",
        why="the weights are random numbers: answers have no meaning",
        cure="leave load_format out, except for measuring",
        test=_dummy_weights,
    ),
)

"""The rules about the kernels of experts: what each GPU and release can run, and what a fix
names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, trtllm_args
from dynamo_trtllm.engines.trtllm.preflight.checks import check_role
from dynamo_trtllm.protocol.messages import Role
from tests.unit.engines.trtllm.preflight_pairs import facts, gpu


def test_check_notes_the_default_moe_kernels() -> None:
    judged = facts(Role.DECODE, {"moe_config.backend": ...})
    leaves = {key: leaf for key, leaf in judged.args.leaves.items() if key != "moe_config.backend"}
    unadvised = replace(judged, args=replace(judged.args, leaves=leaves))  # type: ignore[type-var]
    (finding,) = check_role(unadvised)
    assert (finding.rule, finding.other) == ("moe-backend-unset", "gb200 (sm100)")


@pytest.mark.parametrize(
    ("release", "backend"), [("1.1.0", "TRITON"), ("1.2.1", "TRITON"), ("1.3.0rc27", "AUTO")]
)
def test_moe_rules_on_hopper_suggest_what_the_release_has(release: str, backend: str) -> None:
    for planted in ("TRTLLM", "CUTLASS"):
        judged = facts(
            Role.PREFILL,
            {"moe_config.backend": planted, "kv_cache_config.dtype": "auto"},
            release=release,
            on="h200",
        )
        (finding,) = [found for found in check_role(judged) if found.rule.startswith("moe-")]
        assert finding.fix == f"set it to {backend}"


def test_triton_rule_is_silent_without_parallel_experts() -> None:
    triton = {"moe_config.backend": "TRITON"}
    for judged in (
        facts(Role.DECODE, triton),
        facts(Role.DECODE, {**triton, "moe_expert_parallel_size": 4}, on="h200"),
        facts(Role.DECODE, {**triton, "moe_expert_parallel_size": 4}, gpu=None),
    ):
        assert "triton-expert-parallel" not in {finding.rule for finding in check_role(judged)}


def test_args_omit_experts_that_the_release_deprecates() -> None:
    def args(**values: Any) -> TrtllmArgs:
        config = WorkerConfig(model_path="m", override_engine_args=values)
        return trtllm_args(config, release_for("1.3.0rc29"), [gpu("h200")])

    assert args().get("moe_config.backend") == "AUTO"
    (note,) = args().notes
    assert note.startswith(
        "kernels profile hopper: moe_config.backend TRITON is dropped: 1.3 deprecates it"
    )
    assert args(moe_config={"backend": "TRITON"}).get("moe_config.backend") == "TRITON"


def test_check_notes_nothing_when_kernels_are_the_only_ones() -> None:
    judged = facts(Role.DECODE, {"moe_config.backend": ...}, on="rtx-pro-6000")
    # the profile's value is the release's default
    assert "moe_config.backend" not in judged.args.leaves
    assert "moe-backend-unset" not in {finding.rule for finding in check_role(judged)}

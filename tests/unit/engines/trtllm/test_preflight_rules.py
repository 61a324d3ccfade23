"""One planted error on top of a pair that is right: each rule finds its own, and the good pair
finds nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.preflight.checks import (
    PAIR_SECTIONS,
    WORKER_SECTIONS,
    check_pair,
    check_role,
)
from dynamo_trtllm.engines.trtllm.preflight.facts import Load
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.unit.engines.trtllm.planted_errors import ERRORS, PLANTED, PYTHON, V2, K, Planted, T
from tests.unit.engines.trtllm.preflight_pairs import GPT_OSS, LLAMA, facts

P = Role.PREFILL
D = Role.DECODE
A = Role.AGGREGATED
IN_OTHER_TESTS = {"transceiver-idle", "moe-backend-unset", "kv-dtype-checkpoint"}
IN_OTHER_TESTS |= {
    "cache-manager-transceiver",
    "cache-manager-v1-features",
    "cache-manager-equal",
}


def found_in(planted: Planted) -> dict[str, str]:
    """Severity of everything found, by rule."""
    prefill = facts(P, {**planted.both, **planted.prefill}, **planted.known)
    decode = facts(
        D, {**planted.both, **planted.decode}, **{**planted.known, **planted.known_decode}
    )
    findings = [*check_role(prefill), *check_role(decode), *check_pair(prefill, decode)]
    return {finding.rule: finding.severity for finding in findings}


def test_check_when_the_pair_is_right_then_nothing_is_found() -> None:
    assert found_in(Planted("", "")) == {}
    assert found_in(Planted("", "", known={"num_gpus": 8})) == {}
    assert check_role(facts(A)) == []


@each_case("release", ["1.1.0", "1.2.1", "1.3.0rc27"])
@each_case("name", ["gb200", "b200", "b300"])
def test_check_of_a_right_pair_has_no_error_or_warning(release: str, name: str) -> None:
    found = found_in(Planted("", "", known={"release": release, "on": name}))
    assert {name for name, severity in found.items() if severity != "note"} == (
        {"unfetched-kv-leaks"} if release < "1.2" else set()
    )


@each_case("planted", PLANTED)
def test_check_when_one_error_is_planted_then_its_rule_says_so(planted: Planted) -> None:
    assert found_in(planted).get(planted.rule) == planted.severity


def test_planted_when_counted_then_every_rule_has_one() -> None:
    known = [rule.name for section in (*WORKER_SECTIONS, *PAIR_SECTIONS) for rule in section.rules]
    assert set(known) == {planted.rule for planted in PLANTED} | IN_OTHER_TESTS
    assert len(known) == len(set(known))
    assert len(ERRORS) >= 25


def test_check_notes_an_idle_transceiver_when_aggregated() -> None:
    (finding,) = check_role(facts(A, {T + "backend": "UCX"}))
    assert (finding.rule, finding.severity) == ("transceiver-idle", "note")


def test_check_reports_field_values_sources_and_fix() -> None:
    prefill = facts(P)
    decode = facts(D, {K + "tokens_per_block": 64})
    (finding,) = check_pair(prefill, decode)
    assert finding.field == "kv_cache_config.tokens_per_block"
    assert finding.value == "prefill: 32 (--override-engine-args)"
    assert finding.other == "decode: 64 (--override-engine-args)"
    assert finding.why
    assert finding.fix


def test_check_names_a_release_default_as_source() -> None:
    (finding,) = check_role(facts(P, {"disable_overlap_scheduler": ...}))
    assert finding.value == "false (default of 1.2.1)"


def test_check_suggests_the_next_buffer_multiple() -> None:
    (finding,) = [
        f for f in check_role(facts(P, {T + "max_tokens_in_buffer": 9000})) if f.severity == "error"
    ]
    assert finding.fix == "set it to 9024, on both sides"


@pytest.mark.parametrize("extra", [{"a.b": "1"}, {5: "1"}], ids=["dotted", "number"])
def test_variable_of_section_with_odd_key_is_seen(extra: dict[Any, str]) -> None:
    overrides = {"TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL": "1", **extra}
    judged = facts(P, {"env_overrides": overrides}, release="1.3.0rc29")
    assert "inflight-cancel-transceiver" in {finding.rule for finding in check_role(judged)}


def test_data_parallel_attention_need_not_divide_heads() -> None:
    model = replace(LLAMA, num_attention_heads=40)
    judged = facts(A, {"tensor_parallel_size": 16, "enable_attention_dp": True}, model=model)
    assert "tensor-parallel-heads" not in {finding.rule for finding in check_role(judged)}


def test_parallelism_of_helix_divides_experts() -> None:
    helix = {
        "context_parallel_size": 2,
        "cp_config": {"cp_type": "HELIX"},
        "tensor_parallel_size": 1,
    }
    rules = {
        finding.rule for finding in check_role(facts(D, {**helix, "moe_expert_parallel_size": 2}))
    }
    assert not rules & {"expert-parallel-divides", "experts-with-context-parallel", "moe-split"}
    sizes = {**helix, "moe_expert_parallel_size": 1, "moe_tensor_parallel_size": 1}
    (finding,) = [one for one in check_role(facts(D, sizes)) if one.rule == "moe-split"]
    source = "(--override-engine-args)"
    ranks = f"tensor_parallel_size 1 {source} times context_parallel_size 2 {source}"
    assert finding.other.startswith(f"{ranks}, because ")
    (finding,) = [
        one
        for one in check_role(facts(D, {**helix, "moe_expert_parallel_size": 4}))
        if one.rule == "expert-parallel-divides"
    ]
    assert finding.other == ranks


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([128], [128, 128]),
        ([128, 11000], [128, 11000] * 18),
        ([9000], None),
    ],
)
def test_windows_when_they_mean_the_same_then_they_are_equal(
    prefill: list[int], decode: list[int] | None
) -> None:
    window = K + "max_attention_window"
    assert (
        check_pair(
            facts(P, {window: prefill}), facts(D, {window: decode or ..., "max_seq_len": 9000})
        )
        == []
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "are_equal"),
    [
        ([128], [128, 128], True),
        ([128, 512], [128, 512, 128, 512], True),
        ([128, 512], [128, 512, 512], False),
        ([128, 512], [512, 128], False),
    ],
)
def test_windows_without_a_model_are_compared_as_they_repeat(
    prefill: list[int], decode: list[int], are_equal: bool
) -> None:
    window = K + "max_attention_window"
    found = check_pair(
        facts(P, {window: prefill}, model=None), facts(D, {window: decode}, model=None)
    )
    assert ("attention-window-equal" not in {finding.rule for finding in found}) is are_equal


@pytest.mark.parametrize("drafts", ["3", [3], 3.5, None])
def test_drafts_of_wrong_type_do_not_crash(drafts: Any) -> None:
    check_role(facts(D, {"speculative_config": {"decoding_type": "MTP", "max_draft_len": drafts}}))


def test_v2_rule_treats_auto_as_unset() -> None:
    judged = facts(P, {**PYTHON, K + V2: "auto"}, release="1.3.0rc24", on="h200")
    assert "v2-without-fabric" in {finding.rule for finding in check_role(judged)}


def test_check_when_several_are_found_then_the_worst_comes_first() -> None:
    judged = facts(
        P, {"disable_overlap_scheduler": False, "load_format": "dummy", "enable_attention_dp": True}
    )
    assert [finding.severity for finding in check_role(judged)] == ["error", "warning", "note"]


@pytest.mark.parametrize("changes", [{"enable_chunked_prefill": True}, {"max_num_tokens": 8192}])
def test_prompt_rule_when_prompts_are_chunked_or_fit_then_silent(changes: dict[str, Any]) -> None:
    judged = facts(P, {"max_num_tokens": 4096, **changes})
    assert "prompt-over-num-tokens" not in {finding.rule for finding in check_role(judged)}


def test_buffer_rules_when_the_transceiver_is_python_then_silent() -> None:
    """It has no buffer of a fixed size."""
    nixl = {T + "backend": "NIXL", T + "kv_cache_bounce_size_mb": 512}
    for buffer in (9000, 4096, ...):
        changes = {**nixl, T + "max_tokens_in_buffer": buffer}
        found = [
            *check_role(facts(P, changes, release="1.3.0rc27")),
            *check_role(facts(D, changes, release="1.3.0rc27")),
        ]
        found += check_pair(
            facts(P, changes, release="1.3.0rc27"), facts(D, nixl, release="1.3.0rc27")
        )
        assert [finding.rule for finding in found] == []


def test_runtime_rule_accepts_matching_python() -> None:
    nixl = {T + "backend": "NIXL", T + "kv_cache_bounce_size_mb": 512}
    python = facts(D, {**nixl, T + "transceiver_runtime": "PYTHON"}, release="1.3.0rc27")
    assert check_pair(facts(P, nixl, release="1.3.0rc27"), python) == []


def test_prompt_rule_when_the_worker_decodes_then_silent() -> None:
    assert check_role(facts(D, {"max_num_tokens": 4096})) == []


def test_overlap_rule_when_the_release_is_1_3_then_silent() -> None:
    found = check_role(facts(P, {"disable_overlap_scheduler": False}, release="1.3.0rc27"))
    assert "overlap-on-prefill" not in {finding.rule for finding in found}


def test_timeout_rules_when_the_worker_sets_it_then_silent() -> None:
    assert not [finding for finding in check_role(facts(D)) if "timeout" in finding.rule]


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 8}])
def test_pair_may_differ_in_ranks_with_trtllm_attention(changes: dict[str, Any]) -> None:
    assert check_pair(facts(P), facts(D, changes)) == []


@pytest.mark.parametrize("given", ["", "all", "cuda_ipc,cuda_copy,sm,tcp,self", "tcp,cuda", "^ib"])
def test_ucx_rule_when_cuda_is_among_the_transports_then_silent(given: str) -> None:
    environment = {
        "UCX_TLS": given,
        "TRTLLM_DISAGG_LAYERWISE": "0",
        "UCX_CUDA_IPC_ENABLE_MNNVL": "y",
    }
    assert check_role(facts(D, environment=environment)) == []


def test_moe_rules_when_the_model_has_no_experts_then_silent() -> None:
    assert check_role(facts(D, model=LLAMA, on="h200")) == []


def test_rules_without_model_gpu_and_load_are_silent() -> None:
    judged = facts(P, model=None, gpu=None, load=Load())
    assert check_role(judged) == []


def test_model_rule_uses_the_heads_of_the_checkpoint() -> None:
    small = replace(GPT_OSS, num_attention_heads=6, num_kv_heads=2)
    rules = {finding.rule for finding in check_role(facts(D, model=small))}
    assert {"tensor-parallel-heads", "kv-heads-copied"} <= rules

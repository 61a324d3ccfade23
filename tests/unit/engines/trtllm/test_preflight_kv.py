"""Types of KV and KV cache managers: how they are resolved, and which of them can't work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.engines.external.external_transfers import kv_bytes
from dynamo_trtllm.engines.trtllm.preflight.checks import check_pair, check_role
from dynamo_trtllm.engines.trtllm.preflight.memory import memory_table
from dynamo_trtllm.protocol.messages import Role
from tests.unit.engines.trtllm.preflight_pairs import LLAMA, facts

P = Role.PREFILL
D = Role.DECODE
DTYPE = "kv_cache_config.dtype"
MANAGER = "kv_cache_config.use_kv_cache_manager_v2"
BACKEND = "cache_transceiver_config.backend"
PYTHON = {BACKEND: "NIXL", "cache_transceiver_config.transceiver_runtime": "PYTHON"}
PLAIN, FP8, NVFP4 = (replace(LLAMA, kv_quantization=kind) for kind in (None, "fp8", "nvfp4"))


def rules(role: Role, changes: dict[str, Any], **known: Any) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in check_role(facts(role, changes, **known))}


@pytest.mark.parametrize(
    ("setting", "model", "dtype"),
    [
        ("auto", PLAIN, "bfloat16"),
        ("auto", FP8, "fp8"),
        ("auto", NVFP4, "nvfp4"),
        ("fp8", PLAIN, "fp8"),
    ],
)
def test_layout_of_auto_type_follows_the_checkpoint(setting: str, model: Any, dtype: str) -> None:
    layout = facts(D, {DTYPE: setting}, model=model).layout()
    assert layout is not None
    assert layout.dtype == dtype


def test_pair_with_explicit_value_of_auto_is_equal() -> None:
    prefill = facts(P, {DTYPE: "auto"}, model=FP8)
    decode = facts(D, {DTYPE: "fp8"}, model=FP8)
    assert "kv-dtype-equal" not in {finding.rule for finding in check_pair(prefill, decode)}
    other = facts(D, {DTYPE: "fp8"}, model=PLAIN)
    assert "kv-dtype-equal" in {
        finding.rule for finding in check_pair(facts(P, {DTYPE: "auto"}, model=PLAIN), other)
    }


def test_kv_bytes_of_nvfp4_include_scales() -> None:
    sizes = []
    transfers = []
    for model in (NVFP4, FP8, PLAIN):
        worker = facts(D, {DTYPE: "auto"}, model=model)
        layout = worker.layout()
        table = memory_table(worker)
        assert layout is not None
        assert table is not None
        sizes.append(table.kv_token_bytes)
        transfers.append(kv_bytes(layout, 32))
    assert [size / sizes[1] for size in sizes] == [9 / 16, 1, 2]
    assert [size / transfers[1] for size in transfers] == [9 / 16, 1, 2]


def test_kv_type_when_the_checkpoint_has_another_then_error() -> None:
    assert rules(P, {DTYPE: "fp8"}, model=NVFP4)["kv-dtype-checkpoint"] == "error"
    for setting, model in (("auto", NVFP4), ("fp8", FP8), ("fp8", PLAIN)):
        assert "kv-dtype-checkpoint" not in rules(P, {DTYPE: setting}, model=model)


@pytest.mark.parametrize(
    ("model", "on", "found"), [(NVFP4, "h200", True), (FP8, "h200", False), (FP8, "a100", True)]
)
def test_kv_type_of_checkpoint_must_fit_the_gpu(model: Any, on: str, found: bool) -> None:
    assert ("kv-dtype-gpu" in rules(P, {DTYPE: "auto"}, model=model, on=on)) is found


@pytest.mark.parametrize(
    ("changes", "release", "rule", "severity"),
    [
        ({}, "1.3.0rc27", "cache-manager-fallback", "warning"),
        ({}, "1.4.0rc1", "cache-manager-transceiver", "error"),
        ({"max_beam_width": 2}, "1.3.0rc27", "cache-manager-v1-features", "warning"),
        (
            {"kv_connector_config.connector_module": "mine"},
            "1.3.0rc27",
            "cache-manager-v1-features",
            "warning",
        ),
        (PYTHON, "1.4.0rc1", "", ""),
    ],
)
def test_cache_manager_v2_rule_names_unsupported_features(
    changes: dict[str, Any], release: str, rule: str, severity: str
) -> None:
    found = rules(P, {MANAGER: True, **changes}, release=release)
    assert {
        name: finding for name, finding in found.items() if name.startswith("cache-manager")
    }.get(rule, "") == severity
    off = rules(P, {MANAGER: False, **changes}, release=release)
    assert not any(name.startswith("cache-manager") for name in off)


def test_cache_managers_when_the_two_sides_differ_then_warning() -> None:
    for setting, is_found in ((True, False), (False, True), ("auto", True)):
        pair = [
            facts(role, {MANAGER: value, **PYTHON}, release="1.3.0rc29")
            for role, value in ((P, True), (D, setting))
        ]
        found = {finding.rule: finding.severity for finding in check_pair(*pair)}
        assert found.get("cache-manager-equal") == ("warning" if is_found else None)

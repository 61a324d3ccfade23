"""A worker against registered instances: what must be equal, and when a difference stops the
start.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_trtllm.engines.trtllm.preflight.checks import PEER_SECTIONS, check_peers
from dynamo_trtllm.protocol.messages import Instance, KvLayout, Role
from tests.kit.cases import each_case
from tests.kit.instances import CARD, make_instance
from tests.unit.engines.trtllm.preflight_pairs import facts

LAYOUT = KvLayout(
    dtype="fp8", block_tokens=32, num_layers=36, num_kv_heads=8, head_dim=64, tensor_parallel_size=4
)
PAIRING = {"transceiver": "UCX", "release": "1.2"}


def decode_peer(number: int = 1, **changes: Any) -> Instance:
    fields = {
        "engine": "trtllm",
        "layout": LAYOUT,
        "kv_compat": PAIRING,
        "card": msgspec.structs.replace(CARD, context_length=11000),
        **changes,
    }
    return msgspec.structs.replace(make_instance(number, role=Role.DECODE), **fields)


def layout(**changes: Any) -> KvLayout:
    return msgspec.structs.replace(LAYOUT, **changes)


def rules(*peers: Instance) -> list[tuple[str, str]]:
    return [
        (found.rule, found.severity) for found in check_peers(facts(Role.PREFILL), peers, PAIRING)
    ]


def test_peers_when_all_fit_then_nothing_is_found() -> None:
    assert rules(decode_peer(), decode_peer(2)) == []


def test_peers_may_differ_in_tensor_parallelism() -> None:
    assert rules(decode_peer(layout=layout(tensor_parallel_size=8))) == []


@each_case(
    ("changes", "rule", "field", "value", "other"),
    [
        ({"engine": "torch"}, "peer-engine", "engine", "trtllm", "torch"),
        (
            {"strategy": "decode_first"},
            "peer-strategy",
            "disaggregation_strategy",
            "prefill_first",
            "decode_first",
        ),
        ({"layout": layout(dtype="bfloat16")}, "peer-layout", "layout.dtype", "fp8", "bfloat16"),
        ({"layout": layout(block_tokens=64)}, "peer-layout", "layout.block_tokens", "32", "64"),
        ({"layout": layout(num_layers=24)}, "peer-layout", "layout.num_layers", "36", "24"),
        (
            {"kv_compat": {**PAIRING, "transceiver": "NIXL"}},
            "peer-pairing",
            "transceiver",
            "UCX",
            "NIXL",
        ),
        ({"kv_compat": {"transceiver": "UCX"}}, "peer-pairing", "release", "1.2", "unset"),
        ({"card": CARD}, "peer-context", "max_seq_len", "9000 (--override-engine-args)", "128"),
    ],
)
def test_peers_when_the_only_one_differs_then_error(
    changes: dict[str, Any], rule: str, field: str, value: str, other: str
) -> None:
    (finding,) = check_peers(facts(Role.PREFILL), [decode_peer(0xAB, **changes)], PAIRING)
    assert (finding.rule, finding.severity) == (rule, "error")
    assert (finding.field, finding.value, finding.other) == (
        field,
        value,
        f"decode worker ab: {other}",
    )


def test_peers_when_another_one_fits_then_warning() -> None:
    assert rules(decode_peer(1, layout=layout(block_tokens=64)), decode_peer(2)) == [
        ("peer-layout", "warning")
    ]


def test_peers_decode_may_not_be_shorter_than_prefill() -> None:
    prefill = msgspec.structs.replace(decode_peer(1), role=Role.PREFILL)
    found = check_peers(facts(Role.DECODE, {"max_seq_len": 10000}), [prefill], PAIRING)
    assert [(finding.rule, finding.other) for finding in found] == [
        ("peer-context", "prefill worker 1: 11000")
    ]


def test_peers_of_the_same_role_are_ignored() -> None:
    assert check_peers(facts(Role.DECODE), [decode_peer(engine="torch")], PAIRING) == []
    assert check_peers(facts(Role.AGGREGATED), [decode_peer(engine="torch")], PAIRING) == []


def test_peer_rules_each_find_some_difference() -> None:
    differences = [
        {"engine": "torch"},
        {"strategy": "x"},
        {"layout": layout(num_layers=1)},
        {"kv_compat": {}},
        {"card": CARD},
    ]
    found = {rule for changes in differences for rule, _ in rules(decode_peer(**changes))}
    assert found == {rule.name for section in PEER_SECTIONS for rule in section.rules}

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.transfer_backend import (
    EQUAL_LAYOUT,
    TRANSFER_PARAMS_VERSION,
    TransferIdentity,
    check_params,
)
from dynamo_trtllm.protocol.errors import TransferExpired, TransferMismatch
from dynamo_trtllm.protocol.messages import KvLayout, KvTransferParams, token_ids

LAYOUT = KvLayout(dtype="bfloat16", block_tokens=32, num_layers=24, num_kv_heads=8, head_dim=64)
TRANSFER_PARAMS = KvTransferParams(
    version=TRANSFER_PARAMS_VERSION,
    transfer_id="t1",
    engine="torch",
    model="gpt-oss",
    layout=LAYOUT,
    prefill_instance_id=7,
    expires_at=100.0,
    prompt_tokens=5,
    first_token_ids=token_ids([1]),
    transport="tcp",
    kv_bytes=10,
    engine_state=b"",
)


IDENTITY = TransferIdentity("torch", 9, "gpt-oss", LAYOUT, kv_compat={}, transport="nixl/ucx")


def check_at(kv_params: KvTransferParams, now: float = 99.0) -> None:
    check_params(kv_params, IDENTITY, now=now)


def test_check_when_all_agree_then_accepts() -> None:
    check_at(TRANSFER_PARAMS)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", TRANSFER_PARAMS_VERSION + 1), ("engine", "trtllm"), ("model", "gpt-oss-120b")],
)
def test_check_names_the_different_field_and_values(field: str, value: Any) -> None:
    with pytest.raises(TransferMismatch, match=repr(value)) as caught:
        check_at(msgspec.structs.replace(TRANSFER_PARAMS, **{field: value}))
    assert caught.value.field == field
    assert caught.value.code == "transfer_mismatch"
    assert repr(getattr(TRANSFER_PARAMS, field)) in caught.value.message
    assert f"KV transfer t1: {field} is" in caught.value.message


@pytest.mark.parametrize("field", EQUAL_LAYOUT)
def test_check_when_a_layout_field_differs_then_names_it(field: str) -> None:
    ours = getattr(LAYOUT, field)
    theirs = ours + 1 if isinstance(ours, int) else f"not {ours}"
    layout = msgspec.structs.replace(LAYOUT, **{field: theirs})
    with pytest.raises(TransferMismatch, match=f"layout.{field} is") as caught:
        check_at(msgspec.structs.replace(TRANSFER_PARAMS, layout=layout))
    assert caught.value.field == f"layout.{field}"
    assert repr(theirs) in caught.value.message
    assert repr(ours) in caught.value.message


def test_check_accepts_another_number_of_ranks() -> None:
    check_at(
        msgspec.structs.replace(
            TRANSFER_PARAMS, layout=msgspec.structs.replace(LAYOUT, tensor_parallel_size=8)
        )
    )


@pytest.mark.parametrize(
    ("theirs", "ours"), [({"release": "1.1"}, {"release": "1.2"}), ({}, {"release": "1.2"})]
)
def test_check_names_a_different_pairing(theirs: dict[str, str], ours: dict[str, str]) -> None:
    kv_params = msgspec.structs.replace(TRANSFER_PARAMS, kv_compat=theirs)
    with pytest.raises(TransferMismatch, match=r"'1\.2'") as caught:
        check_params(kv_params, IDENTITY._replace(kv_compat=ours), now=50.0)
    assert caught.value.field == "release"


@pytest.mark.parametrize("now", [100.0, 107.5])
def test_check_when_time_is_up_then_expired(now: float) -> None:
    with pytest.raises(TransferExpired, match=f"{now - 100.0:.1f} s ago") as caught:
        check_at(TRANSFER_PARAMS, now)
    assert caught.value.code == "transfer_expired"


def test_check_reports_mismatch_before_expiry() -> None:
    with pytest.raises(TransferMismatch):
        check_at(msgspec.structs.replace(TRANSFER_PARAMS, model="other"), now=200.0)

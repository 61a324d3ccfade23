"""Where a decode worker may connect for KV, and who may read that of a prefill worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.kv_transfer.rejections import Rejection
from dynamo_trtllm.protocol.errors import TransferRejected
from dynamo_trtllm.protocol.messages import Instance, Role
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.transfer_keys import FIRST_KEY, Clock, write_keys

PREFILL = 1
OTHER_PREFILL = 4
ADDRESS = "10.0.0.1:5000"


def prefill_worker(instance_id: int, *addresses: str) -> Instance:
    instance = make_instance(instance_id, role=Role.PREFILL)
    return msgspec.structs.replace(instance, kv_addresses=addresses)


def addresses_with(*registered: Instance, **options: Any) -> PrefillAddresses:
    """Return the addresses of registered instances, which no call waits for."""
    addresses = PrefillAddresses(stay_s=60.0, wait_s=0.0, **options)
    for instance in registered:
        addresses.add(instance)
    return addresses


@pytest.mark.parametrize(
    ("prefill_id", "address", "reason"),
    [
        (PREFILL, ADDRESS, None),
        (PREFILL, "10.0.0.1:22", Rejection.WRONG_ADDRESS),
        (PREFILL, "10.0.0.2:5000", Rejection.WRONG_ADDRESS),
        (3, ADDRESS, Rejection.UNKNOWN_PREFILL_WORKER),
        (9, ADDRESS, Rejection.UNKNOWN_PREFILL_WORKER),
    ],
)
async def test_address_must_be_registered_for_the_prefill_worker(
    prefill_id: int, address: str, reason: Rejection | None
) -> None:
    counted: list[Rejection] = []
    addresses = addresses_with(prefill_worker(PREFILL, ADDRESS), make_instance(3, role=Role.DECODE))
    guard = TransferGuard(addresses=addresses, count=counted.append)
    kv_params = make_transfer_params("t-1", prefill_instance_id=prefill_id)
    if reason is None:
        await guard.check_address(kv_params, address)
    else:
        with pytest.raises(TransferRejected):
            await guard.check_address(kv_params, address)
    assert counted == ([] if reason is None else [reason])


async def test_address_when_worker_has_registered_none_then_accepted() -> None:
    guard = TransferGuard(addresses=addresses_with(prefill_worker(PREFILL)))
    await guard.check_address(make_transfer_params("t-1", prefill_instance_id=PREFILL), ADDRESS)


async def test_addresses_of_a_worker_that_left_stay_a_while() -> None:
    clock = Clock()
    addresses = addresses_with(prefill_worker(PREFILL, ADDRESS), clock=clock)
    addresses.remove(PREFILL)
    clock.now += 59.0
    assert await addresses.addresses_of(PREFILL) == (ADDRESS,)
    clock.now += 1.0
    assert await addresses.addresses_of(PREFILL) is None


async def test_addresses_when_removed_twice_then_first_time_counts() -> None:
    clock = Clock()
    addresses = addresses_with(
        prefill_worker(PREFILL, ADDRESS), prefill_worker(OTHER_PREFILL, ADDRESS), clock=clock
    )
    addresses.remove(PREFILL)
    clock.now += 1.0
    addresses.remove(OTHER_PREFILL)
    clock.now += 40.0
    addresses.remove(PREFILL)
    clock.now += 20.0
    assert await addresses.addresses_of(PREFILL) is None
    assert await addresses.addresses_of(OTHER_PREFILL) is None


async def test_addresses_when_record_comes_late_then_it_is_awaited() -> None:
    addresses = PrefillAddresses(stay_s=60.0, wait_s=60.0)
    waiting = asyncio.create_task(addresses.addresses_of(PREFILL))
    await asyncio.sleep(0)
    addresses.add(prefill_worker(PREFILL, ADDRESS))
    assert await waiting == (ADDRESS,)


@pytest.mark.parametrize("has_keys", [True, False])
def test_reader_proof_is_the_token_only_without_keys(tmp_path: Path, has_keys: bool) -> None:
    keys = TransferKeys(write_keys(tmp_path / "keys", FIRST_KEY)) if has_keys else None
    guard = TransferGuard(keys)
    token = b"t" * 32
    proof = guard.reader_proof("1-a", token)
    assert (proof == token) is not has_keys
    assert guard.is_reader_proof(proof, "1-a", token)
    assert guard.is_reader_proof(token, "1-a", token) is not has_keys
    assert not guard.is_reader_proof(b"u" * 32, "1-a", token)

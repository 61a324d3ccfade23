"""Signed KV transfer parameters: which ones a decode worker rejects, and how it counts them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.guard import Rejection, TransferGuard
from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.protocol.errors import TransferExpired, TransferRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    Role,
    Sampling,
    TokenLogprob,
    decode,
    encode,
    token_ids,
)
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.transfer_keys import FIRST_KEY, SECOND_KEY, Clock, write_keys

PREFILL = 1
DECODE = 2
REQUEST = "request-1"
# Each field of the parameters, with another value.
CHANGES: dict[str, Any] = {
    "version": 2,
    "transfer_id": "t-2",
    "engine": "torch",
    "model": "other",
    "layout": msgspec.structs.replace(make_transfer_params("t").layout, head_dim=9),
    "kv_compat": {"release": "2"},
    "prefill_instance_id": 9,
    "expires_at": time.time() + 3600.0,
    "prompt_tokens": 4,
    "first_token_ids": token_ids([11]),
    "first_logprobs": (TokenLogprob(10, -1.0),),
    "transport": "tcp",
    "kv_bytes": 8,
    "engine_state": b"another address",
}


class Side:
    """The guard of one worker, with the reasons that it has counted."""

    def __init__(self, instance_id: int, key_file: Path | None, **options: Any) -> None:
        self.counted: list[Rejection] = []
        keys = None if key_file is None else TransferKeys(key_file)
        self.guard = TransferGuard(instance_id, keys, count=self.counted.append, **options)

    def rejects(self, kv_params: KvTransferParams, request_id: str = REQUEST) -> Rejection:
        """Return the reason for which parameters are rejected."""
        with pytest.raises((TransferRejected, TransferExpired)):
            self.guard.begin_fetch(kv_params, request_id)
        (reason,) = self.counted
        return reason


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", FIRST_KEY)


@pytest.fixture
def decoding(key_file: Path) -> Side:
    return Side(DECODE, key_file)


@pytest.fixture
def signed(key_file: Path) -> KvTransferParams:
    return sign(key_file)


def sign(
    key_file: Path, *, ttl_s: float = 60.0, receivers: tuple[int, ...] = (DECODE,)
) -> KvTransferParams:
    """Return signed parameters, as a frontend passes them on."""
    kv_params = make_transfer_params("t-1", prefill_instance_id=PREFILL, ttl_s=ttl_s)
    guard = TransferGuard(PREFILL, TransferKeys(key_file))
    passed_on: KvTransferParams = decode(
        encode(guard.sign(kv_params, REQUEST, receivers)), KvTransferParams
    )
    return passed_on


def use(side: Side, kv_params: KvTransferParams, *, arrives: bool) -> None:
    """Run a fetch to its end."""
    side.guard.begin_fetch(kv_params, REQUEST)
    if arrives:
        side.guard.note_fetched(kv_params)
    side.guard.end_fetch(kv_params)


def test_signed_parameters_are_accepted_by_their_receiver(
    decoding: Side, signed: KvTransferParams
) -> None:
    use(decoding, signed, arrives=True)
    assert decoding.counted == []


def test_changes_name_every_field_of_the_parameters() -> None:
    assert set(CHANGES) | {"signature"} == set(KvTransferParams.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_parameters_when_a_field_is_changed_then_forged(
    decoding: Side, signed: KvTransferParams, field: str
) -> None:
    changed = msgspec.structs.replace(signed, **{field: CHANGES[field]})
    assert decoding.rejects(changed) is Rejection.FORGED


@pytest.mark.parametrize(
    ("field", "value"),
    [("request_id", "request-2"), ("receivers", (DECODE, 3)), ("mac", bytes(32))],
)
def test_parameters_when_their_signature_is_changed_then_forged(
    decoding: Side, signed: KvTransferParams, field: str, value: Any
) -> None:
    assert signed.signature is not None
    signature = msgspec.structs.replace(signed.signature, **{field: value})
    changed = msgspec.structs.replace(signed, signature=signature)
    assert decoding.rejects(changed, signature.request_id) is Rejection.FORGED


def test_parameters_of_another_request_are_rejected(
    decoding: Side, signed: KvTransferParams
) -> None:
    assert decoding.rejects(signed, "request-2") is Rejection.WRONG_REQUEST


def test_parameters_for_another_receiver_are_rejected(decoding: Side, key_file: Path) -> None:
    assert decoding.rejects(sign(key_file, receivers=(3,))) is Rejection.WRONG_RECEIVER


def test_parameters_when_late_then_expired(decoding: Side, key_file: Path) -> None:
    assert decoding.rejects(sign(key_file, ttl_s=-1.0)) is Rejection.EXPIRED


def test_parameters_signed_with_another_key_are_rejected(decoding: Side, tmp_path: Path) -> None:
    other = write_keys(tmp_path / "other", SECOND_KEY)
    with pytest.raises(TransferRejected, match="is signed with key"):
        decoding.guard.begin_fetch(sign(other), REQUEST)
    assert decoding.counted == [Rejection.UNKNOWN_KEY]


def test_parameters_signed_with_either_key_are_accepted(tmp_path: Path, key_file: Path) -> None:
    both = write_keys(tmp_path / "both", SECOND_KEY, FIRST_KEY)
    use(Side(DECODE, both), sign(key_file), arrives=True)
    use(Side(DECODE, both), sign(both), arrives=True)


def test_parameters_when_only_one_side_has_a_key_then_rejected(
    decoding: Side, signed: KvTransferParams
) -> None:
    assert decoding.rejects(make_transfer_params("t-1")) is Rejection.UNSIGNED
    keyless = Side(DECODE, None)
    assert keyless.rejects(signed) is Rejection.NO_KEY


def test_parameters_without_keys_pass_unchanged() -> None:
    keyless = Side(DECODE, None)
    kv_params = make_transfer_params("t-1")
    assert keyless.guard.sign(kv_params, REQUEST, ()) is kv_params
    use(keyless, kv_params, arrives=True)
    use(keyless, kv_params, arrives=True)


def test_parameters_after_their_kv_arrived_are_a_replay(
    decoding: Side, signed: KvTransferParams
) -> None:
    use(decoding, signed, arrives=True)
    assert decoding.rejects(signed) is Rejection.REPLAYED


def test_parameters_during_a_fetch_are_a_replay(decoding: Side, signed: KvTransferParams) -> None:
    decoding.guard.begin_fetch(signed, REQUEST)
    assert decoding.rejects(signed) is Rejection.REPLAYED


def test_parameters_after_a_failed_fetch_are_accepted_again(
    decoding: Side, signed: KvTransferParams
) -> None:
    use(decoding, signed, arrives=False)
    use(decoding, signed, arrives=True)
    assert decoding.counted == []


def test_fetched_transfers_are_forgotten_after_their_expiry(key_file: Path) -> None:
    clock = Clock(time.time())
    side = Side(DECODE, key_file, clock=clock)
    for number in range(3):
        kv_params = make_transfer_params(f"t-{number}", ttl_s=60.0)
        use(side, side.guard.sign(kv_params, REQUEST, (DECODE,)), arrives=True)
    clock.now += 61.0
    kv_params = make_transfer_params("t-9", ttl_s=200.0)
    use(side, side.guard.sign(kv_params, REQUEST, (DECODE,)), arrives=True)
    assert list(side.guard._fetched) == ["t-9"]


def test_signed_integers_for_floats_are_accepted(decoding: Side) -> None:
    kv_params = msgspec.structs.replace(
        make_transfer_params("t-1"),
        expires_at=int(time.time()) + 60,
        first_logprobs=(TokenLogprob(10, 0, ((11, -1),)),),
    )
    signed = decode(encode(decoding.guard.sign(kv_params, REQUEST, (DECODE,))), KvTransferParams)
    use(decoding, signed, arrives=True)


def test_prefill_when_no_receiver_is_named_then_rejected(decoding: Side) -> None:
    call = GenerateRequest(
        request_id=REQUEST,
        model="m",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=2),
        deadline=time.time() + 9,
    )
    with pytest.raises(TransferRejected, match="upgrade the frontend"):
        decoding.guard.check_prefill(call)
    decoding.guard.check_prefill(msgspec.structs.replace(call, kv_receivers=(DECODE,)))
    Side(PREFILL, None).guard.check_prefill(call)


def test_reissue_signs_for_another_receiver(key_file: Path, signed: KvTransferParams) -> None:
    reissued = TransferGuard(PREFILL, TransferKeys(key_file)).reissue(signed, (3,))
    use(Side(3, key_file), reissued, arrives=True)
    assert Side(DECODE, key_file).rejects(reissued) is Rejection.WRONG_RECEIVER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda signed: msgspec.structs.replace(signed, kv_bytes=8), Rejection.FORGED),
        (lambda signed: msgspec.structs.replace(signed, signature=None), Rejection.UNSIGNED),
        (lambda signed: signed, Rejection.UNKNOWN_HOLDER),
    ],
)
def test_reissue_when_this_worker_has_not_signed_then_rejected(
    decoding: Side,
    signed: KvTransferParams,
    change: Callable[[KvTransferParams], KvTransferParams],
    reason: Rejection,
) -> None:
    with pytest.raises(TransferRejected):
        decoding.guard.reissue(change(signed), (3,))
    assert decoding.counted == [reason]


# --- addresses ------------------------------------------------------------------------------------


def prefill_addresses(*addresses: str, **options: Any) -> PrefillAddresses:
    """Return the addresses of one registered prefill worker."""
    known = PrefillAddresses(stay_s=60.0, wait_s=0.0, **options)
    prefill = make_instance(PREFILL, role=Role.PREFILL)
    known.add(msgspec.structs.replace(prefill, kv_addresses=addresses))
    known.add(make_instance(3, role=Role.DECODE))
    return known


@pytest.mark.parametrize(
    ("holder", "address", "reason"),
    [
        (PREFILL, "10.0.0.1:5000", None),
        (PREFILL, "10.0.0.1:22", Rejection.WRONG_ADDRESS),
        (PREFILL, "10.0.0.2:5000", Rejection.WRONG_ADDRESS),
        (3, "10.0.0.1:5000", Rejection.UNKNOWN_HOLDER),
        (9, "10.0.0.1:5000", Rejection.UNKNOWN_HOLDER),
    ],
)
async def test_address_must_be_registered_for_the_holder(
    holder: int, address: str, reason: Rejection | None
) -> None:
    side = Side(DECODE, None, addresses=prefill_addresses("10.0.0.1:5000"))
    kv_params = make_transfer_params("t-1", prefill_instance_id=holder)
    if reason is None:
        await side.guard.check_address(kv_params, address)
    else:
        with pytest.raises(TransferRejected):
            await side.guard.check_address(kv_params, address)
    assert side.counted == ([] if reason is None else [reason])


async def test_address_when_holder_has_registered_none_then_accepted() -> None:
    side = Side(DECODE, None, addresses=prefill_addresses())
    await side.guard.check_address(make_transfer_params("t-1"), "10.0.0.1:5000")


async def test_addresses_of_a_worker_that_left_stay_a_while() -> None:
    clock = Clock()
    known = prefill_addresses("10.0.0.1:5000", clock=clock)
    known.remove(PREFILL)
    clock.now += 59.0
    known.remove(3)
    assert await known.addresses_of(PREFILL) == ("10.0.0.1:5000",)
    clock.now += 1.0
    known.remove(3)
    assert await known.addresses_of(PREFILL) is None


async def test_addresses_when_record_comes_late_then_it_is_awaited() -> None:
    known = PrefillAddresses(stay_s=60.0, wait_s=60.0)
    waiting = asyncio.create_task(known.addresses_of(PREFILL))
    await asyncio.sleep(0)
    prefill = make_instance(PREFILL, role=Role.PREFILL)
    known.add(msgspec.structs.replace(prefill, kv_addresses=("10.0.0.1:5000",)))
    assert await waiting == ("10.0.0.1:5000",)

"""Signed KV transfer parameters: which ones a decode worker rejects, and how it counts them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.rejections import Rejection
from dynamo_trtllm.kv_transfer.signer import TransferSigner
from dynamo_trtllm.protocol.errors import TransferExpired, TransferRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    Sampling,
    TokenLogprob,
    decode,
    encode,
    token_ids,
)
from tests.kit.instances import make_transfer_params
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
    """The signer of one worker, with the reasons that it has counted."""

    def __init__(self, instance_id: int, key_file: Path | None, **options: Any) -> None:
        self.counted: list[Rejection] = []
        keys = None if key_file is None else TransferKeys(key_file)
        self.signer = TransferSigner(instance_id, keys, count=self.counted.append, **options)

    def rejects(self, kv_params: KvTransferParams, request_id: str = REQUEST) -> Rejection:
        """Return the reason for which parameters are rejected."""
        with pytest.raises((TransferRejected, TransferExpired)):
            self.signer.admit_fetch(kv_params, request_id)
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
    signer = TransferSigner(PREFILL, TransferKeys(key_file))
    passed_on: KvTransferParams = decode(
        encode(signer.sign(kv_params, REQUEST, receivers)), KvTransferParams
    )
    return passed_on


def use(side: Side, kv_params: KvTransferParams, *, arrives: bool) -> None:
    """Run a fetch to its end."""
    fetch = side.signer.admit_fetch(kv_params, REQUEST)
    assert fetch is not None
    if arrives:
        fetch.note_arrival()
    fetch.end()


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
        decoding.signer.admit_fetch(sign(other), REQUEST)
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
    assert keyless.signer.sign(kv_params, REQUEST, ()) is kv_params
    assert keyless.signer.admit_fetch(kv_params, REQUEST) is None
    assert keyless.signer.admit_fetch(kv_params, REQUEST) is None


def test_parameters_after_their_kv_arrived_are_a_replay(
    decoding: Side, signed: KvTransferParams
) -> None:
    use(decoding, signed, arrives=True)
    assert decoding.rejects(signed) is Rejection.REPLAYED


def test_parameters_during_a_fetch_are_a_replay(decoding: Side, signed: KvTransferParams) -> None:
    decoding.signer.admit_fetch(signed, REQUEST)
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
    # The first one expires long after the others.
    for number, ttl_s in enumerate((86_400.0, 60.0, 60.0)):
        kv_params = make_transfer_params(f"t-{number}", ttl_s=ttl_s)
        use(side, side.signer.sign(kv_params, REQUEST, (DECODE,)), arrives=True)
    clock.now += 61.0
    kv_params = make_transfer_params("t-9", ttl_s=200.0)
    use(side, side.signer.sign(kv_params, REQUEST, (DECODE,)), arrives=True)
    assert side.signer._used._fetched == {"t-0", "t-9"}


def test_signed_integers_for_floats_are_accepted(decoding: Side) -> None:
    kv_params = msgspec.structs.replace(
        make_transfer_params("t-1"),
        expires_at=int(time.time()) + 60,
        first_logprobs=(TokenLogprob(10, 0, ((11, -1),)),),
    )
    signed = decode(encode(decoding.signer.sign(kv_params, REQUEST, (DECODE,))), KvTransferParams)
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
        decoding.signer.check_prefill(call)
    assert decoding.counted == [Rejection.NO_RECEIVER]
    decoding.signer.check_prefill(msgspec.structs.replace(call, kv_receivers=(DECODE,)))
    Side(PREFILL, None).signer.check_prefill(call)


def test_reissue_signs_for_another_receiver(key_file: Path, signed: KvTransferParams) -> None:
    reissued = TransferSigner(PREFILL, TransferKeys(key_file)).reissue(signed, (3,))
    use(Side(3, key_file), reissued, arrives=True)
    assert Side(DECODE, key_file).rejects(reissued) is Rejection.WRONG_RECEIVER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda signed: msgspec.structs.replace(signed, kv_bytes=8), Rejection.FORGED),
        (lambda signed: msgspec.structs.replace(signed, signature=None), Rejection.UNSIGNED),
        (lambda signed: signed, Rejection.WRONG_PREFILL_WORKER),
    ],
)
def test_reissue_when_this_worker_has_not_signed_then_rejected(
    decoding: Side,
    signed: KvTransferParams,
    change: Callable[[KvTransferParams], KvTransferParams],
    reason: Rejection,
) -> None:
    with pytest.raises(TransferRejected):
        decoding.signer.reissue(change(signed), (3,))
    assert decoding.counted == [reason]


@pytest.mark.parametrize("is_signed", [True, False])
def test_reissue_when_this_worker_has_no_keys_then_it_says_so(
    signed: KvTransferParams, is_signed: bool
) -> None:
    keyless = Side(PREFILL, None)
    kv_params = signed if is_signed else msgspec.structs.replace(signed, signature=None)
    with pytest.raises(TransferRejected, match="this worker has no keys"):
        keyless.signer.reissue(kv_params, (3,))
    assert keyless.counted == [Rejection.NO_KEY]

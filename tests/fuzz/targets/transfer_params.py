"""Fuzz KV transfer parameters: a frontend passes them on, and any client of NATS can change them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamo_trtllm.engines.trtllm import transfer_params as trtllm
from dynamo_trtllm.engines.vllm import transfer_params as vllm
from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.signer import TransferSigner
from dynamo_trtllm.kv_transfer.tcp import TcpBackend
from dynamo_trtllm.kv_transfer.transfer_backend import (
    TransferIdentity,
    check_params,
    collecting_call,
    first_deadline,
)
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    DynamoError,
    TransferExpired,
    TransferFailed,
    TransferMismatch,
    TransferRejected,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    Sampling,
    decode,
    encode,
    token_ids,
)
from tests.fuzz.target import Form, Target, check_hides
from tests.kit.instances import LAYOUT, make_transfer_params
from tests.kit.transfer_keys import FIRST_KEY, SECOND_KEY, write_keys

_PREFILL = 0xA
_DECODE = 0xD
_REQUEST = "request-1"
_NOW = 1_000.0
_VOCABULARY = 1000
_KNOWN = tuple(trtllm._SentParams.__struct_fields__)
_CALL = GenerateRequest(
    request_id="r",
    model="tiny",
    token_ids=token_ids([1, 2, 3]),
    sampling=Sampling(max_tokens=5),
    deadline=_NOW,
)
_IDENTITY = TransferIdentity("mock", _PREFILL, "tiny", LAYOUT, {}, "tcp")


@functools.cache
def _keys() -> TransferKeys:
    folder = tempfile.TemporaryDirectory(prefix="fuzz-keys-")
    _folders.append(folder)
    return TransferKeys(write_keys(Path(folder.name) / "keys", FIRST_KEY, SECOND_KEY))


_folders: list[tempfile.TemporaryDirectory[str]] = []


def _signer(instance_id: int, keys: TransferKeys | None) -> TransferSigner:
    return TransferSigner(instance_id, keys, clock=lambda: _NOW)


@functools.cache
def _signed() -> tuple[KvTransferParams, ...]:
    """Return the only parameters with valid signatures."""
    signer = _signer(_PREFILL, _keys())
    plain = msgspec.structs.replace(
        make_transfer_params("t1", prefill_instance_id=_PREFILL), expires_at=_NOW + 60
    )
    return (
        signer.sign(plain, _REQUEST, (_DECODE, 5)),
        signer.sign(msgspec.structs.replace(plain, expires_at=_NOW - 1), _REQUEST, (_DECODE,)),
        signer.sign(plain, "request-2", (7,)),
    )


def check_signed(data: bytes) -> None:
    """Admit no parameters but those that a prefill worker has signed, and each of them once."""
    try:
        kv_params = decode(data, KvTransferParams)
    except BadFrame:
        return
    signer = _signer(_DECODE, _keys())
    try:
        fetch = signer.admit_fetch(kv_params, _REQUEST)
    except (TransferRejected, TransferExpired) as exc:
        _check_text(exc)
    else:
        assert kv_params == _signed()[0], "a forged signature was admitted"
        assert fetch is not None
        fetch.note_arrival()
        fetch.end()
        _expect(TransferRejected, signer.admit_fetch, kv_params, _REQUEST)
    if kv_params.signature is not None:
        _expect(TransferRejected, _signer(_DECODE, None).admit_fetch, kv_params, _REQUEST)
    _check_reissue(kv_params)
    _check_signing(kv_params)


def _check_reissue(kv_params: KvTransferParams) -> None:
    """Sign only own parameters again."""
    try:
        _signer(_PREFILL, _keys()).reissue(kv_params, (1,))
    except (TransferRejected, TransferExpired) as exc:
        _check_text(exc)
    else:
        assert kv_params in _signed()


def _check_signing(kv_params: KvTransferParams) -> None:
    """Sign any parameters, send them and admit them: only for their receiver and request."""
    signed = _signer(_PREFILL, _keys()).sign(kv_params, _REQUEST, (_DECODE,))
    received = decode(encode(signed), KvTransferParams)
    assert encode(received) == encode(signed)
    signer = _signer(_DECODE, _keys())
    if received.expires_at <= _NOW:
        _expect(TransferExpired, signer.admit_fetch, received, _REQUEST)
        return
    assert signer.admit_fetch(received, _REQUEST) is not None
    _expect(TransferRejected, signer.admit_fetch, received, "another")
    _expect(TransferRejected, _signer(5, _keys()).admit_fetch, received, _REQUEST)


def _expect(error: type[DynamoError], call: Callable[..., object], *arguments: Any) -> None:
    try:
        call(*arguments)
    except error as exc:
        _check_text(exc)
        return
    raise AssertionError(f"{call} did not raise {error.__name__}")


def _check_text(error: DynamoError) -> None:
    for key in (FIRST_KEY, SECOND_KEY):
        check_hides(key, error.message)
    for kv_params in _signed():
        assert kv_params.signature is not None
        check_hides(kv_params.signature.mac.hex(), error.message)


def _signed_seeds() -> Iterator[bytes]:
    for kv_params in _signed():
        yield encode(kv_params)
    yield encode(make_transfer_params("t2"))


# --- the part of the engine -------------------------------------------------------------------------


def check_engine_state(data: bytes) -> None:
    """Read the state of an engine as each engine does. Its errors are those of KV transfers."""
    kv_params = msgspec.structs.replace(
        _signed()[0], engine_state=data, engine="mock", transport="tcp"
    )
    for runtime in (None, "CPP", "PYTHON"):
        try:
            fields = trtllm.unpack(
                kv_params, known=_KNOWN, logprob=None, vocab_size=_VOCABULARY, runtime=runtime
            )
        except TransferMismatch:
            continue
        assert max(fields["first_gen_tokens"]) < _VOCABULARY
        # As it was received: a further prefill worker could send it again.
        again = decode(data, trtllm._TrtllmState)
        assert encode(decode(encode(again), trtllm._TrtllmState)) == encode(again)
    try:
        fetched = vllm.unpack(kv_params)
        vllm.side_channel_of(fetched)
    except TransferMismatch:
        pass
    try:
        address = TcpBackend().address_in(data, "t1")
        assert ":" in address
    except TransferFailed:
        pass
    _check_identity(data)


def _check_identity(data: bytes) -> None:
    """Compare whole parameters with what an engine needs."""
    try:
        kv_params = decode(data, KvTransferParams)
    except BadFrame:
        return
    try:
        check_params(kv_params, _IDENTITY, now=_NOW)
    except (TransferMismatch, TransferExpired):
        return
    assert kv_params.layout.dtype == LAYOUT.dtype
    deadline = first_deadline(kv_params, _NOW, 5.0, _NOW)
    assert deadline.left_s <= 5.0
    encode(collecting_call(_CALL, kv_params, deadline=_NOW))


def _engine_states() -> Iterator[bytes]:
    yield trtllm.pack(
        {"first_gen_tokens": [5], "ctx_request_id": 7, "opaque_state": b"x"}, release="1.2.1"
    )
    yield trtllm.pack(
        {
            "first_gen_tokens": [5],
            "ctx_request_id": 7,
            "ctx_info_endpoint": "tcp://127.0.0.1:5",
            "first_gen_log_probs": [-0.5],
            "draft_tokens": [1],
            "ctx_dp_rank": 0,
        },
        release="1.3.0",
    )
    yield vllm.pack(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "e",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
        release="0.24.0",
        seed=5,
    )
    yield encode({"host": "127.0.0.1", "port": 5, "token": b"t" * 32, "sizes_bytes": [4]})
    yield encode(make_transfer_params("t2"))


TARGETS = {
    "signed-params": Target(
        summary="signatures of KV transfer parameters",
        check=check_signed,
        files=("kv_transfer/signer.py", "kv_transfer/rejections.py"),
        seeds=_signed_seeds,
        form=Form.MESSAGE_PACK,
        words=(b"ticket_id", b"holder", b"signature", b"opaque", b"pairing", b"request-1"),
    ),
    "engine-state": Target(
        summary="states of engines and offers of transfer backends in KV transfer parameters",
        check=check_engine_state,
        files=(
            "engines/trtllm/transfer_params.py",
            "engines/vllm/transfer_params.py",
            "kv_transfer/transfer_backend.py",
        ),
        seeds=_engine_states,
        form=Form.MESSAGE_PACK,
        words=(b"params", b"release", b"version", b"tcp://", b"remote_port", b"draft_tokens"),
    ),
}

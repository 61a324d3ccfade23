"""Signed KV transfers at the worker's side of the request plane, over a scripted engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.signer import TransferSigner
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    TransferExpired,
    TransferFailed,
    TransferRejected,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReissueKvParams,
    ReleaseKv,
    ReleaseOutcome,
    Role,
    Sampling,
    decode,
    token_ids,
)
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.transfer_keys import FIRST_KEY, write_keys
from tests.unit.worker.test_service import ANSWER, TransferringEngine

PREFILL = 1
DECODE = 2


class SigningService:
    """The service of a worker with a key, and what its engine and metrics saw."""

    def __init__(self, role: Role, key_file: Path, script: Sequence[Chunk | Exception]) -> None:
        self.engine = TransferringEngine()
        self.engine.script = script
        self.metrics = WorkerMetrics()
        self.admission = WorkerAdmission(max_active=1)
        instance = make_instance(PREFILL if role is Role.PREFILL else DECODE, role=role)
        signer = TransferSigner(
            instance.id, TransferKeys(key_file), count=self.metrics.transfer_rejected
        )
        self.service = WorkerService(
            self.engine, instance, self.admission, files={}, metrics=self.metrics, signer=signer
        )

    async def ask(self, request: GenerateRequest) -> list[Chunk]:
        async with aclosing(as_stream(self.service, request)) as chunks:
            return [chunk async for chunk in chunks]

    def rejections(self, reason: str) -> float:
        value: float = self.metrics.child("rejected_kv_transfers_total", reason)._value.get()
        return value


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", FIRST_KEY)


@pytest.fixture
def prefill(key_file: Path) -> SigningService:
    kv_params = make_transfer_params("t-1")
    last = Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=kv_params)
    return SigningService(Role.PREFILL, key_file, [last])


@pytest.fixture
def decoding(key_file: Path) -> SigningService:
    return SigningService(Role.DECODE, key_file, ANSWER)


def prefill_call(receivers: tuple[int, ...] = (DECODE,)) -> GenerateRequest:
    return GenerateRequest(
        request_id="r-1",
        model="tiny",
        token_ids=token_ids([5, 6]),
        sampling=Sampling(max_tokens=3),
        deadline=time.time() + 60,
        phase=Phase.PREFILL,
        kv_receivers=receivers,
    )


async def signed_params(prefill: SigningService) -> KvTransferParams:
    (last,) = await prefill.ask(prefill_call())
    assert last.kv_params is not None
    return last.kv_params


def decode_call(kv_params: KvTransferParams) -> GenerateRequest:
    return msgspec.structs.replace(prefill_call(), phase=Phase.DECODE, kv_params=kv_params)


async def test_prefill_call_ends_with_parameters_for_its_receiver(
    prefill: SigningService, decoding: SigningService
) -> None:
    kv_params = await signed_params(prefill)
    assert await decoding.ask(decode_call(kv_params)) == list(ANSWER)


async def test_prefill_call_without_receivers_is_rejected(
    prefill: SigningService,
) -> None:
    with pytest.raises(TransferRejected, match="upgrade the frontend"):
        await prefill.ask(prefill_call(receivers=()))
    assert prefill.engine.asked == 0
    assert prefill.rejections("no_receiver") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda params: msgspec.structs.replace(params, kv_bytes=1 << 40), "forged"),
        (lambda params: msgspec.structs.replace(params, signature=None), "unsigned"),
    ],
)
async def test_decode_call_when_rejected_then_it_is_only_counted(
    prefill: SigningService,
    decoding: SigningService,
    change: Callable[[KvTransferParams], KvTransferParams],
    reason: str,
) -> None:
    # With its only slot taken, the worker rejects the parameters all the same.
    decoding.admission.reserve("other", time.time() + 60)
    kv_params = change(await signed_params(prefill))
    with pytest.raises(TransferRejected):
        await decoding.ask(decode_call(kv_params))
    assert decoding.engine.asked == 0
    assert decoding.rejections(reason) == 1
    assert prefill.engine.released == []


async def test_decode_call_when_kv_has_arrived_before_then_replayed(
    prefill: SigningService, decoding: SigningService
) -> None:
    call = decode_call(await signed_params(prefill))
    await decoding.ask(call)
    with pytest.raises(TransferRejected, match="used already"):
        await decoding.ask(call)
    assert decoding.engine.asked == 1
    assert decoding.rejections("replayed") == 1


@pytest.mark.parametrize("failure", [TransferFailed("gone"), None], ids=["fetch", "admission"])
async def test_decode_call_after_a_failed_one_is_accepted(
    prefill: SigningService, decoding: SigningService, failure: DynamoError | None
) -> None:
    call = decode_call(await signed_params(prefill))
    if failure is None:
        decoding.admission.reserve("other", time.time() + 60)
    else:
        decoding.engine.script = [failure]
    with pytest.raises(DynamoError):
        await decoding.ask(call)
    decoding.admission.unreserve("other")
    decoding.engine.script = ANSWER
    assert await decoding.ask(call) == list(ANSWER)


async def test_reissue_signs_for_another_worker_while_kv_is_pending(
    prefill: SigningService, key_file: Path
) -> None:
    verb = ReissueKvParams(await signed_params(prefill), (9,))
    reissued = decode(await prefill.service.control(verb), KvTransferParams)
    TransferSigner(9, TransferKeys(key_file)).admit_fetch(reissued, "r-1")
    await prefill.service.control(ReleaseKv("t-1", ReleaseOutcome.FETCHED))
    with pytest.raises(TransferExpired, match="not pending any more"):
        await prefill.service.control(verb)
